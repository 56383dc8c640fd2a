"""Every command on the page about the command line runs, in its order, with fewer epochs."""

import re
import shlex
from pathlib import Path

from bmrs.study import timing
from tests.commands.made import run

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"


def test_every_command_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(timing, "BUDGET", 100.0)
    text = PAGE.read_text()
    for name, code in re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        (tmp_path / name).write_text(code)
    lines = "".join(re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL)).splitlines()
    commands = [shlex.split(line, comments=True) for line in lines if line.startswith("bmrs ")]
    told = [words for words in commands if words[1] in ("inspect", "train", "prune", "bench")]
    assert {words[1] for words in told} == {"inspect", "train", "prune", "bench"}
    for words in told:
        shorter = ("--epochs", "2", "--fine-tune", "1") if words[1] == "train" else ()
        result = run(*words[1:], *shorter)
        assert result.exit_code == 0, (words, result.output)
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"first", "mine", "half", "less", "tuned"}
