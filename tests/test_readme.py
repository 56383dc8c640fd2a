"""The code of the README and the documentation runs, and its links lead somewhere."""

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = [
    pytest.param(block, id=f"{page.name}-{number}")
    for page in PAGES
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL), start=1)
]


@pytest.mark.parametrize("block", BLOCKS)
def test_code_runs(block):
    torch.manual_seed(0)
    names = {}
    exec(compile(block, "README", "exec"), names)
    if "bank" in names:
        # Two of the twenty inputs matter: most units go, and what is left still solves the task.
        assert 2 <= sum(names["bank"].units_left().values()) <= 32
        model = names["model"].eval()
        assert (model(names["x"]).argmax(1) == names["y"]).float().mean() > 0.9


def test_there_is_code():
    assert len(BLOCKS) >= 2


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
