"""Every command of the pages about one's own network runs, in its order, with fewer epochs."""

import re
import shlex
from pathlib import Path

import pytest

from bmrs.study import timing
from tests.commands.made import run

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("page", "folders"), [("docs/cli.md", {"first", "mine", "half", "less", "tuned"}), ("README.md", {"mine"})]
)
def test_every_command_runs(page, folders, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(timing, "BUDGET", 100.0)
    text = (ROOT / page).read_text()
    for name, code in re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        (tmp_path / name).write_text(code)
    blocks = "".join(re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    lines = blocks.replace("\\\n", " ").splitlines()
    commands = [shlex.split(line, comments=True) for line in lines if line.startswith("bmrs ")]
    told = [words for words in commands if words[1] in ("inspect", "train", "prune", "bench")]
    assert {"inspect", "train", "bench"} <= {words[1] for words in told}
    for words in told:
        alone = "--epochs" in words
        shorter = {"train": ("--epochs", "0" if alone else "2", "--fine-tune", "1")}.get(words[1], ())
        result = run(*words[1:], *shorter)
        assert result.exit_code == 0, (words, result.output)
    assert {path.name for path in (tmp_path / "runs").iterdir()} == folders
