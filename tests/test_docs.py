"""The code of the README and the documentation runs, its commands exist, and its links lead somewhere."""

import contextlib
import io
import re
import shlex
import warnings
from pathlib import Path

import pytest
import torch

from tests import integrations  # noqa: F401  transformers cannot be imported without its stand-in

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
WITH_CODE = [page for page in PAGES if "```python" in page.read_text()]
WITH_COMMANDS = [page for page in PAGES if "```bash" in page.read_text()]
NEEDED = {"lightning": "lightning", "transformers": "transformers", "onnxruntime": "onnxruntime"}


def name(page):
    return page.relative_to(ROOT).as_posix()


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


# --- the code ---------------------------------------------------------------------------------------------------------


def product(names):
    """Two of the twenty inputs matter: most units go, and what is left still solves the task."""
    assert 2 <= names["report"].units <= 8
    assert (names["model"].eval()(names["x"]).argmax(1) == names["y"]).float().mean() > 0.9


def digits(names):
    small, whole = names["small"], names["make_model"]()
    assert (small(names["x_test"]).argmax(1) == names["y_test"]).float().mean() > 0.93
    assert 5 * sum(p.numel() for p in small.parameters()) < sum(p.numel() for p in whole.parameters())


def callbacks(names):
    """Both callbacks: the product of two inputs in Lightning, one of two words in the Trainer."""
    assert (names["network"].eval()(names["x"]).argmax(1) == names["y"]).float().mean() > 0.9
    assert names["network"][0].out_features <= 16
    labels = torch.stack([text["labels"] for text in names["texts"]])
    assert (names["model"].eval()(names["words"]).logits.argmax(1) == labels).float().mean() > 0.9
    assert names["model"].num_parameters() < 30_000  # of 35,682


CHECKS = {"README.md": product, "docs/training.md": product, "docs/start-engineers.md": digits,
          "docs/frameworks.md": callbacks}  # fmt: skip
AFTER = {"README.md": 0, "docs/training.md": 0}  # the block the check belongs to, where later ones go on


@pytest.mark.parametrize("page", WITH_CODE, ids=name)
@pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*")
@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true")
def test_code_runs(page):
    """From top to bottom, as a reader would paste it; ```text blocks are what it prints."""
    code = blocks(page, "python")
    for package, module in NEEDED.items():
        if any(f"import {package}" in block or f"from {package}" in block for block in code):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                pytest.importorskip(module)
    torch.manual_seed(0)
    names, printed = {"__name__": "__main__"}, io.StringIO()
    last = AFTER.get(name(page), len(code) - 1)
    for number, block in enumerate(code):
        with contextlib.redirect_stdout(printed):
            exec(compile(block, f"{name(page)}, block {number}", "exec"), names)
        if number == last and name(page) in CHECKS:
            CHECKS[name(page)](names)
    for text in blocks(page, "text"):
        assert text in printed.getvalue()


def test_there_is_code_to_check():
    assert set(CHECKS) <= set(map(name, WITH_CODE))
    assert any(blocks(page, "text") for page in WITH_CODE)


def test_code_for_several_processes_is_python():
    """What a page cannot run by itself is marked ```py."""
    for page in PAGES:
        for block in blocks(page, "py"):
            compile(block, name(page), "exec")


# --- commands ---------------------------------------------------------------------------------------------------------


def commands(page):
    for block in blocks(page, "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
                words.pop(0)
            if words:
                yield words


def parsed(words):
    """A bmrs command with its options, as the command line reads it; nothing is run."""
    typer = pytest.importorskip("typer")
    from bmrs.cli import app

    command, context, words = typer.main.get_command(app), None, list(words)
    while hasattr(command, "commands"):
        context = type(command).context_class(command, info_name="bmrs", parent=context)
        assert "".join(words[:1]) in command.commands, f"no command '{' '.join(words)}'"
        command = command.commands[words.pop(0)]
    return command.make_context(command.name, words, parent=context)


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=name)
def test_commands_exist(page):
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for words in commands(page):
        program = words[0].rpartition("/")[2]
        if program == "bmrs":
            parsed(words[1:])
        elif program == "make":
            assert set(words[1:]) <= set(targets), words
        elif program in ("python", "torchrun"):
            scripts = [word for word in words if word.endswith(".py")]
            scripts += [words[words.index("-m") + 1].replace(".", "/") + ".py"] if "-m" in words else []
            assert all((ROOT / script).is_file() for script in scripts), words
        elif program == "pip":
            extras = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
            for wanted in re.findall(r"\[([\w,]+)\]", " ".join(words)):
                assert set(wanted.split(",")) <= set(extras), words


def test_a_command_that_does_not_exist_is_noticed():
    parsed(["study", "table1", "--seeds", "3"])
    with pytest.raises(AssertionError, match="no command"):
        parsed(["studdy", "table1"])
    with pytest.raises(Exception, match="--seds"):
        parsed(["study", "table1", "--seds", "3"])


def test_the_readme_begins_with_two_commands():
    targets = re.findall(r"^make (\w+)", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert targets == ["demo", "test"]
    makefile = (ROOT / "Makefile").read_text()
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)
    assert "make test" in (ROOT / ".ci" / "run").read_text()


# --- links ------------------------------------------------------------------------------------------------------------


def anchors(page):
    """Of the headings, as code hosts and the site make them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S), re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading).strip().replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r"^\[[^\]]+\]: (\S+)$", text, re.MULTILINE):
        if not re.match(r"https?:", target):
            path, _, anchor = target.partition("#")
            found = (page.parent / path).resolve() if path else page
            assert found.exists(), target
            if anchor and found.suffix == ".md":
                assert anchor in anchors(found), target
