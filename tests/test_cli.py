import json
import re
import subprocess
import sys
import warnings

import pytest
import torch
from typer.main import get_command
from typer.testing import CliRunner

import bmrs
from bmrs.cli import app
from bmrs.study import networks
from bmrs.study.provenance import provenance

SHORT = ["demo", "--network", "mlp", "--epochs", "12", "--fine-tune", "2", "--phi-rate", "30"]


def run(*arguments):
    # Wide, so that no sentence is wrapped.
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "160", "NO_COLOR": "1"})


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    return run(*SHORT, "--out", str(folder)), folder


class TestDemo:
    def test_shows_progress_and_ends_with_a_table(self, finished):
        result, _ = finished
        assert result.exit_code == 0, result.output
        assert re.search(r"2/3  pruning\s+epoch\s+12/12  validation \d+\.\d%  fc1 \d+  fc2 \d+", result.output)
        for row in ("test accuracy", "parameters", "multiply-adds per image", "an epoch of training"):
            assert row in result.output
        assert re.search(r"An epoch of pruning got \d+\.\d times faster as the network shrank\.", result.output)

    def test_leaves_a_network_that_can_be_loaded(self, finished):
        _, folder = finished
        content = json.loads((folder / "result.json").read_text())
        small = bmrs.load(networks.mlp(32 * 32, 10), folder / "small.safetensors")
        assert bmrs.cost.parameters(small) == content["after"]["parameters"]
        images = torch.randn(3, 1, 32, 32)
        program = torch.export.load(folder / "small.pt2").module()
        torch.testing.assert_close(program(images), small.eval()(images), rtol=0, atol=1e-5)

    def test_writes_a_picture_and_its_numbers(self, finished):
        _, folder = finished
        assert (folder / "posteriors.png").read_bytes().startswith(b"\x89PNG")
        content = json.loads((folder / "result.json").read_text())
        assert content["after"]["parameters"] < 0.8 * content["before"]["parameters"]
        assert content["after"]["accuracy"] > 0.85
        made = content["provenance"]
        assert made["recipe"]["epochs"] == 12
        assert made["versions"]["bmrs"] == bmrs.__version__
        assert {"command", "date", "machine", "commit", "seeds", "device"} <= made.keys()

    def test_writes_a_page_with_its_gates(self, finished, tmp_path):
        result, folder = finished
        page = (folder / "report.html").read_text()
        assert f"All of it as a page: {folder / 'report.html'}" in result.output
        assert "Gates and evidence" in page
        assert "How it shrank" in page
        again = run("report", str(folder / "result.json"), "--out", str(tmp_path / "again.html"))
        assert again.exit_code == 0, again.output
        assert again.output.strip() == str(tmp_path / "again.html")
        assert (tmp_path / "again.html").read_text() == page

    def test_the_same_seed_gives_the_same_result(self, finished, tmp_path):
        _, folder = finished
        assert run(*SHORT, "--out", str(tmp_path)).exit_code == 0
        first, second = (json.loads((f / "result.json").read_text()) for f in (folder, tmp_path))
        assert first["units"] == second["units"]
        for what in ("accuracy", "parameters", "multiply_adds"):
            assert first["after"][what] == second["after"][what]


def test_a_run_too_short_to_prune_says_so(tmp_path):
    result = run("demo", "--network", "mlp", "--epochs", "1", "--fine-tune", "0", "--out", str(tmp_path))
    assert result.exit_code == 0
    assert "No unit was removed: gates need time to forget." in result.output


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--data", "imagenet"], "unknown data set 'imagenet': choose one of digits, mnist,"),
        (["--network", "vgg"], "unknown network 'vgg': choose one of lenet5, mlp."),
        (["--criterion", "luck"], "unknown criterion 'luck': choose one of bmrs_n, bmrs_u, snr, mean."),
        (["--price", "free"], "unknown price 'free': choose one of layer, uniform, params, macs, time, elbo."),
        (["--strength", "-1"], "strength must be"),
        (["--epochs", "0"], "epochs must be above 0; got 0."),
        (["--fine-tune", "-1"], "fine_tune must be 0 epochs or more; got -1."),
    ],
)
def test_bad_input_gives_one_sentence(arguments, sentence, tmp_path):
    result = run("demo", *arguments, "--out", str(tmp_path / "out"))
    assert result.exit_code == 2
    assert sentence in result.output
    assert "Traceback" not in result.output
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_made_is_refused_before_training(tmp_path):
    (tmp_path / "file").write_text("in the way")
    result = run(*SHORT, "--out", str(tmp_path / "file" / "out"))
    assert result.exit_code == 2
    assert "--out names a folder that cannot be made" in result.output
    assert "epoch" not in result.output


def test_the_demo_says_what_it_would_do_and_does_nothing(tmp_path):
    result = run(*SHORT, "--out", str(tmp_path / "out"), "--dry-run", "--json")
    about = json.loads(result.stdout)
    assert (about["network"], about["epochs"], about["examples"]) == ("mlp", 12, 1151)
    assert "Nothing was done" in run(*SHORT, "--out", str(tmp_path / "out"), "--dry-run").output
    assert list(tmp_path.iterdir()) == []


COMMANDS = {name: command for name, command in get_command(app).commands.items() if name != "study"}


def options(command):
    return {option.opts[0]: option for option in command.params if option.opts[0].startswith("--")}


class TestAllCommands:
    def test_they_are_there(self):
        assert set(COMMANDS) == {"demo", "inspect", "train", "prune", "bench", "report"}

    @pytest.mark.parametrize("name", COMMANDS)
    def test_each_has_an_example_and_speaks_json(self, name):
        assert f"Example:  [bold]bmrs {name} " in COMMANDS[name].help
        assert "--json" in options(COMMANDS[name])

    def test_what_writes_can_say_what_it_would_do(self):
        for name in ("demo", "train", "prune"):
            assert {"--dry-run", "--out"} <= options(COMMANDS[name]).keys()

    def test_the_same_name_means_the_same(self):
        study = get_command(app).commands["study"].commands["table1"]
        types = {}
        for name, command in (*COMMANDS.items(), ("study", study)):
            for option, found in options(command).items():
                if (name, option) != ("bench", "--batch"):  # several sizes at a time
                    types.setdefault(option, {}).setdefault(str(found.bare_type), []).append(name)
        mixed = {option: kinds for option, kinds in types.items() if len(kinds) > 1}
        # The study takes counts with a lower bound, where recipes say themselves what is wrong.
        assert set(mixed) <= {"--epochs", "--fine-tune"}

    @pytest.mark.parametrize("name", ["inspect", "train", "prune", "bench"])
    def test_the_network_is_the_argument(self, name):
        assert next(p for p in COMMANDS[name].params if not p.opts[0].startswith("--")).name == "model"

    def test_exit_codes_are_documented(self):
        text = " ".join(run("--help").output.split())
        assert "Exit codes: 0 done; 1 failed while running; 2 bad input, nothing was done; 130 interrupted." in text

    @pytest.mark.parametrize(
        ("problem", "code", "sentence"),
        [
            (KeyboardInterrupt(), 130, "bmrs: stopped."),
            (RuntimeError("it broke."), 1, "bmrs: it broke."),
            (torch.OutOfMemoryError("CUDA"), 1, "the GPU's memory is too small"),
            (MemoryError(), 1, "the memory is too small"),
            (OSError(28, "No space left on device"), 1, "No space left on device"),
            (ValueError("that was wrong."), 2, "bmrs: that was wrong."),
            (ImportError("no", name="onnxscript"), 2, "this needs 'onnxscript': install it"),
        ],
        ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
    )
    def test_what_goes_wrong_has_its_code(self, problem, code, sentence, monkeypatch):
        def fails(*_):
            raise problem

        monkeypatch.setattr(bmrs, "structures", fails)
        result = run("inspect", "torch.nn:Identity", "--input", "1x2")
        assert result.exit_code == code
        assert sentence in result.stderr
        assert "Traceback" not in result.output

    def test_warnings_are_sentences_too(self, monkeypatch):
        def warns(*_):
            warnings.warn("something is odd.", stacklevel=1)
            raise ValueError("and wrong.")

        monkeypatch.setattr(bmrs, "structures", warns)
        result = run("inspect", "torch.nn:Identity", "--input", "1x2")
        assert result.stderr == "bmrs: something is odd.\nbmrs: and wrong.\n"


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("bmrs tr", "train"),
        ("bmrs train --criterion b", "bmrs_n bmrs_u"),
        ("bmrs train net.py:make --data f", "fashion-mnist"),
        ("bmrs train --optimizer adamw --precision b", "bf16"),
        ("bmrs prune net.py:make --criterion l", "l2"),
        ("bmrs demo --price ", "layer uniform params macs time elbo"),
        ("bmrs bench --device c", "cpu cuda"),
    ],
)
def test_a_shell_completes_values(typed, completed):
    words = {"COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split(" ")) - 1)}
    result = CliRunner().invoke(app, [], prog_name="bmrs", env={"_BMRS_COMPLETE": "complete_bash", **words})
    assert result.output.split() == completed.split()


def test_help_explains_itself():
    result = run("demo", "--help")
    assert result.exit_code == 0
    for option in ("--data", "--network", "--criterion", "--price", "--epochs", "--seed", "--out"):
        assert option in result.output
    assert "No threshold is tuned" in " ".join(result.output.split())


def test_version():
    assert run("--version").output == f"bmrs {bmrs.__version__}\n"
    module = subprocess.run([sys.executable, "-m", "bmrs", "--version"], capture_output=True, text=True, check=True)
    assert module.stdout == f"bmrs {bmrs.__version__}\n"


@pytest.mark.parametrize(
    ("called", "command"),
    [("/usr/bin/bmrs", "bmrs demo --seed 3"), ("/lib/bmrs/__main__.py", "python -m bmrs demo --seed 3")],
)
def test_provenance_says_how_it_was_called(called, command, monkeypatch):
    monkeypatch.setattr(sys, "argv", [called, "demo", "--seed", "3"])
    assert provenance()["command"] == command


@pytest.mark.parametrize("name", ["matplotlib", "sklearn"])
def test_a_missing_extra_is_named_before_training(name, monkeypatch, tmp_path):
    for module in [m for m in sys.modules if m.split(".")[0] == name or m.startswith("bmrs.study")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, None)
    result = run(*SHORT, "--out", str(tmp_path / "out"))
    assert result.exit_code == 2
    assert f"the demo needs '{name}" in result.output
    assert "pip install 'bmrs[demo]'" in result.output


def test_the_library_needs_torch_alone():
    """Importing bmrs loads none of the extras, and the command line says what is missing."""
    script = (
        "import sys\n"
        "for name in ('typer', 'rich', 'matplotlib', 'sklearn', 'scipy'): sys.modules[name] = None\n"
        "import time, torch\n"
        "begun = time.process_time()\n"
        "import bmrs\n"
        "assert time.process_time() - begun < 0.3\n"  # beside torch's own second
        "bmrs.BMRS_N().scores(bmrs.Units(bmrs.TruncatedLogNormal(torch.zeros(1), torch.zeros(1))))\n"
        "import bmrs.cli\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.returncode == 1
    assert result.stderr.strip().endswith("pip install 'bmrs[demo]'")
    assert "Traceback" not in result.stderr


NETWORK = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(20, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)
        self.out = nn.Linear(8, 3)

    def forward(self, tokens, scale):
        return self.out(self.layer(self.words(tokens)).mean(1)) * scale


def plain():
    return nn.Sequential(nn.Linear(4, 2))


def failing():
    return 1 / 0


class Judging(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Linear(4, 2)

    def forward(self, x):
        return self.one(x) if x.sum() > 0 else x


def judging():
    return Judging()


number = 3
"""


class TestInspect:
    @pytest.fixture
    def file(self, tmp_path):
        (tmp_path / "net.py").write_text(NETWORK)
        return str(tmp_path / "net.py")

    def inputs(self):
        return ("--integer-input", "tokens=2x5", "--integers", "20", "--input", "scale=2x1")

    def test_lists_structures_and_why_others_stay(self, file):
        result = run("inspect", f"{file}:Net", *self.inputs())
        assert result.exit_code == 0, result.output
        assert re.search(r"layer.self_attn heads\s+│ head\s+│\s+2 │\s+140 │", result.output)
        assert re.search(r"layer.linear1\s+│ neuron\s+│\s+12 │\s+17 │", result.output)
        assert result.output.count("exact") == 2
        assert "layer_norm over it" in result.output

    def test_speaks_json(self, file):
        result = run("inspect", f"{file}:Net", *self.inputs(), "--json", "--no-verify")
        content = json.loads(result.output)
        assert [s["kind"] for s in content["structures"]] == ["head", "neuron"]
        assert content["structures"][0]["status"] == "not verified yet"
        assert 0 < content["share"] < 1

    def test_says_when_there_is_nothing(self, file):
        assert "nothing can be removed" in run("inspect", f"{file}:plain", "--input", "2x4").output

    @pytest.mark.parametrize(
        ("arguments", "sentence"),
        [
            (("net.py",), "model must read my.module:make_model"),
            (("nowhere.py:Net", "--input", "1"), "there is no Python file nowhere.py"),
            (("no.such.module:Net", "--input", "1"), "'no.such.module' cannot be imported"),
            (("{}:Other", "--input", "1"), "has no 'Other'"),
            (("{}:number", "--input", "1"), "is neither a network nor something that makes one"),
            (("{}:Net",), "--input must give the shape of at least one input"),
            (("{}:Net", "--input", "2xa"), "--input must read as 1x3x224x224"),
            (("{}:Net", "--input", "2x5", "--input", "a=2"), "by position for all inputs, or by name for all"),
            (("{}:plain", "--input", "2x5"), "example_inputs do not fit the model"),
            (("{}:failing", "--input", "2x5"), "failed when it was called (ZeroDivisionError: division by zero at"),
            (("{}:judging", "--input", "2x4"), "the model cannot be captured by torch.export"),
        ],
    )
    def test_bad_input_gives_one_sentence(self, file, arguments, sentence):
        result = run("inspect", *(argument.format(file) for argument in arguments))
        assert result.exit_code == 2
        assert sentence in result.output
        assert "Traceback" not in result.output


def test_a_report_of_what_is_no_result_is_refused_in_one_sentence(tmp_path):
    (tmp_path / "x.json").write_text("{}")
    for arguments, sentence in (
        ([str(tmp_path / "none.json")], "does not exist: name the JSON file a run has written."),
        ([str(tmp_path / "x.json")], "is not a result: its 'kind' must be one of"),
    ):
        result = run("report", *arguments, "--out", str(tmp_path / "page.html"))
        assert result.exit_code == 2
        assert sentence in result.output
    assert not (tmp_path / "page.html").exists()
