"""The code of the README and the documentation runs, and its links lead somewhere."""

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
WITH_CODE = [page for page in PAGES if "```python" in page.read_text()]


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.name)
def test_code_runs(page):
    """From top to bottom, as a reader would paste it."""
    torch.manual_seed(0)
    names = {}
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        exec(compile(block, page.name, "exec"), names)
        if "report" in names:
            # Two of the twenty inputs matter: most units go, and what is left still solves the task.
            assert 2 <= names.pop("report").units <= 8
            model = names["model"].eval()
            assert (model(names["x"]).argmax(1) == names["y"]).float().mean() > 0.9


def test_there_is_code():
    assert len(WITH_CODE) >= 2


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


def test_the_commands_are_the_makefile_s():
    targets = re.findall(r"^make (\w+)", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert targets == ["demo", "test"]
    makefile = (ROOT / "Makefile").read_text()
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)
    assert "make test" in (ROOT / ".ci" / "run").read_text()
