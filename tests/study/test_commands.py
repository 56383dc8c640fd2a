"""The commands on a made-up study; run as a script, this file is that study in a process of its own."""

import json
import os
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from bmrs.study import commands
from bmrs.study.commands import JOBS, app
from bmrs.study.screen import Screen

DIGITS = "mlp-digits,lenet5-digits"
EPOCHS = 12
calls: list[tuple[str, str, int]] = []  # protocol, setting, epoch it began at
asked: list[tuple] = []  # methods and prices of the last training


def _runs(setting, value, **more):
    return {"setting": setting.key, **more, "accuracy": value, "compression": {"published": 0.5, "actual": 0.25}}


def _epochs(protocol, setting, seeds, checkpoint, resume, progress):
    """Training: a number per seed that every epoch changes, random numbers included."""
    done = resume["done"] if resume else 0
    weights = resume["weights"] if resume else torch.zeros(len(seeds), dtype=torch.float64)
    calls.append((protocol, setting.key, done))
    for epoch in range(done + 1, setting.epochs + 1):
        shuffle = torch.Generator().manual_seed(epoch)
        weights = 0.9 * weights + torch.rand(len(seeds), generator=shuffle, dtype=torch.float64)
        progress(epoch, setting.epochs)
        checkpoint({"done": epoch, "weights": weights, "rng": shuffle.get_state()})
        time.sleep(float(os.environ.get("FAKE_PAUSE", "0")))
    return (weights / 20).tolist()


def _entry(setting, networks):
    return {"network": setting.network, "data": setting.data, "layers": {"fc2": 9, "fc10": 5}, "networks": networks,
            "epochs": setting.epochs, "fine_tune": setting.fine_tune, "seconds": 1e9}  # fmt: skip


def continuous(setting, methods, seeds, *, prices, device, data_dir, checkpoint, resume, progress):
    asked[:] = [(methods, prices)]
    values = _epochs("continuous", setting, seeds, checkpoint, resume, progress)
    runs = [
        {**_runs(setting, value, method=method, seed=seed, price=price, strength=strength), "validation": float("nan"),
         "parameters": 10, "multiply_adds": 20, "units": {}, "history": [], "emptied": []}
        for method in methods for price, strength in prices for seed, value in zip(seeds, values, strict=True)
    ]  # fmt: skip
    return {"setting": _entry(setting, len(runs)), "runs": runs}


def post_training(setting, methods, seeds, *, fractions, device, data_dir, checkpoint, resume, progress):
    values = _epochs("post-training", setting, seeds, checkpoint, resume, progress)
    stop = {"fraction": 0.5, "published": 0.5, "actual": 0.25, "accuracy": 0.9}
    return {
        "setting": _entry(setting, len(seeds)),
        "runs": [
            {"setting": setting.key, "method": m, "seed": s, "fractions": fractions, "whole": v,
             "boundary": None if m in ("l2", "gradient") else stop}
            for m in methods for s, v in zip(seeds, values, strict=True)
        ],
        "correlations": [
            {"setting": setting.key, "seed": s, "methods": ["snr", "bmrs_n"], "spearman": [[1, 0.5], [0.5, 1]]}
            for s in seeds
        ],
        "posteriors": [{"setting": setting.key, "seed": s, "mean": [0.01, 0.5, 0.9, 0.05]} for s in seeds],
    }  # fmt: skip


def measure(setting, *, device, data_dir, progress):
    calls.append(("timing", setting.key, 0))
    run = {"setting": setting.key, "method": "gated", "batch": 32, "mode": "inference", "ms": 0.3, "memory_mib": None}
    return {"setting": _entry(setting, 1), "runs": [run]}


def objective(setting, *, device, data_dir):
    return lambda parameters: 1 - parameters["learning_rate"]


def _table(content):
    return types.SimpleNamespace(markdown=f"{len(content['runs'])} runs", latex=r"\begin{tabular}")


def _save(figure, path):
    for suffix in (".pdf", ".png"):
        path.with_suffix(suffix).write_text(figure)
    return [path.with_suffix(".pdf"), path.with_suffix(".png")]


def _report(contents, path):
    path.write_text(" ".join(content["name"] for content in contents))
    return path


def install(put):
    """Put made-up modules where the commands look for the real ones."""
    figures = {job.figure: lambda content: content["kind"] for job in JOBS.values() if job.figure}
    fakes = {
        "study.protocols": {"continuous": continuous, "objective": objective},
        "study.post_training": {"post_training": post_training},
        "study.timing": {"measure": measure},
        "study.tables": dict.fromkeys(("table1", "prices_table", "timing_table"), _table),
        "study.plots": {**figures, "save": _save},
        "report": {"write": _report},
    }
    for name, content in fakes.items():
        put(f"bmrs.{name}", types.SimpleNamespace(**content))


@pytest.fixture(autouse=True)
def fakes(monkeypatch, tmp_path):
    install(lambda name, module: monkeypatch.setitem(sys.modules, name, module))
    monkeypatch.chdir(tmp_path)
    calls.clear()


def run(*arguments, code=0):
    result = CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "160", "NO_COLOR": "1"})
    assert result.exit_code == code, result.output
    return result


def table1(*more, code=0, out="here"):
    return run("table1", "--settings", DIGITS, "--seeds", 3, "--epochs", EPOCHS, "--out", out, *more, code=code)


def content(path):
    """A result without what differs between any two runs."""
    read = json.loads(Path(path).read_text(encoding="utf-8"), parse_constant=pytest.fail)
    for entry in read["settings"].values():
        entry.pop("seconds")
    return {name: read[name] for name in ("name", "kind", "settings", "runs")}


class TestResult:
    def test_files(self):
        result = table1()
        assert {path.name for path in Path("here").iterdir()} == {
            "parts", "table1.json", "table1.md", "table1.tex", "report.html",
        }  # fmt: skip
        read = json.loads(Path("here/table1.json").read_text())
        assert read["kind"] == "continuous"
        assert len(read["runs"]) == 2 * 7 * 3
        assert read["runs"][0]["validation"] is None  # not finite
        assert list(read["settings"]) == ["mlp-digits", "lenet5-digits"]
        entry = read["settings"]["mlp-digits"]
        assert entry["epochs"] == EPOCHS
        assert list(entry["layers"]) == ["fc2", "fc10"]
        assert 0 < entry["seconds"] < 60  # our own clock, not the protocol's
        assert read["energy"]["how"] in ("measured", "estimated")
        assert {"command", "date", "commit", "machine"} <= read["provenance"].keys()
        assert set(read["provenance"]["parts"]) == set(read["settings"])
        assert Path("here/table1.md").read_text() == "42 runs"
        for path in ("here/table1.json", "here/table1.tex", "here/report.html"):
            assert path in result.stdout
        assert "bmrs_u4" in result.stdout

    def test_json(self):
        result = table1("--json")
        answer = json.loads(result.stdout)
        assert answer["result"] == "here/table1.json"
        assert "here/report.html" in answer["files"]
        read = json.loads(Path("here/table1.json").read_text())
        own = [r["accuracy"] for r in read["runs"] if (r["setting"], r["method"]) == ("mlp-digits", "snr")]
        row = next(r for r in answer["headline"] if (r["setting"], r["method"]) == ("mlp-digits", "snr"))
        assert row["accuracy"] == round(100 * sum(own) / 3, 2)
        assert (row["published"], row["actual"], row["seeds"]) == (50.0, 25.0, 3)
        assert "mlp-digits" in result.stderr  # progress is still told

    def test_given_again_nothing_is_computed(self):
        table1()
        first = content("here/table1.json")
        calls.clear()
        assert "done before" in table1().stdout
        assert calls == []
        assert content("here/table1.json") == first

    def test_prices(self):
        run("prices", "--settings", "mlp-digits", "--seeds", 1, "--epochs", 1)
        read = content("runs/study/prices/prices.json")
        assert {run["method"] for run in read["runs"]} == {"none", "bmrs_n"}
        assert {(r["price"], r["strength"]) for r in read["runs"]} >= {("layer", 1.0), ("uniform", 1.0), ("elbo", 1.0)}
        assert Path("runs/study/prices/prices.pdf").exists()

    def test_figure4_goes_over_p1(self):
        run("figure4", "--settings", "mlp-digits", "--seeds", 1, "--epochs", 1)
        methods = {r["method"] for r in content("runs/study/figure4/figure4.json")["runs"]}
        assert {"none", "bmrs_u2", "bmrs_u4", "bmrs_u8"} <= methods


class TestSharedComputation:
    def test_figures_after_the_first_cost_nothing(self):
        options = ("--settings", "mlp-digits", "--seeds", 2, "--epochs", 2)
        run("figure2", *options)
        assert calls == [("post-training", "mlp-digits", 0)]
        for name in ("figure1", "figure3", "appendix"):
            run(name, *options)
        assert len(calls) == 1
        folder = Path("runs/study/post-training")
        kinds = {
            name: content(folder / f"{name}.json")["kind"] for name in ("figure1", "figure2", "figure3", "appendix")
        }
        assert kinds == {"figure1": "posteriors", "figure2": "post-training", "figure3": "correlations",
                         "appendix": "post-training"}  # fmt: skip
        methods = {n: {r["method"] for r in content(folder / f"{n}.json")["runs"]} for n in ("figure2", "appendix")}
        assert methods["appendix"] - methods["figure2"] == {"gradient"}
        runs = content(folder / "figure2.json")["runs"]
        assert runs[0]["fractions"][:2] == [0.01, 0.02]
        assert len(runs[0]["fractions"]) == 100
        assert content(folder / "figure2.json")["settings"]["mlp-digits"]["fine_tune"] == 1
        assert set((folder / "report.html").read_text().split()) == {"figure1", "figure2", "figure3", "appendix"}

    def test_all(self):
        result = run("all", "--settings", "mlp-digits", "--seeds", 1, "--epochs", 1, "--out", "o", "--json")
        answer = json.loads(result.stdout)
        assert [part["name"] for part in answer["parts"]] == list(JOBS)
        assert Path("o/report.html").read_text().split() == list(JOBS)
        assert [protocol for protocol, *_ in calls] == ["continuous"] * 2 + ["post-training", "continuous", "timing"]
        for part in answer["parts"]:
            assert all(Path(path).exists() for path in part["files"]), part
        calls.clear()
        run("all", "--settings", "mlp-digits", "--seeds", 1, "--epochs", 1, "--out", "o", "--restart")
        assert len(calls) == 5  # the shared one is begun anew once, not four times


class TestShared:
    def test_a_network_is_trained_once(self):
        table1(out="study/table1")
        calls.clear()
        common = ("--settings", "mlp-digits", "--seeds", 3, "--epochs", EPOCHS, "--out")
        run("prices", *common, "study/prices")
        assert asked == [(("bmrs_n",), (("uniform", 1.0), ("params", 0.5), ("elbo", 1.0)))]
        read = json.loads(Path("study/prices/prices.json").read_text())
        found = [(r["method"], r["price"], r["seed"]) for r in read["runs"]]
        assert len(found) == len(set(found)) == 3 * 5
        assert read["provenance"]["reused"] == ["table1"]
        calls.clear()
        run("prices", *common, "study/prices", "--restart")
        assert asked == [(("none", "bmrs_n"), (("layer", 1.0), ("uniform", 1.0), ("params", 0.5), ("elbo", 1.0)))]

    def test_nothing_to_train(self):
        table1(out="study/table1")
        calls.clear()
        options = ("--settings", "lenet5-digits", "--seeds", 2, "--epochs", EPOCHS, "--methods", "none,bmrs_u8,bmrs_u4")
        run("figure4", *options, "--out", "study/figure4")
        assert calls == []
        assert len(json.loads(Path("study/figure4/figure4.json").read_text())["runs"]) == 6

    def test_another_folder_of_the_same_command_is_trained_anew(self):
        table1(out="one")
        calls.clear()
        table1(out="other")
        assert len(calls) == 2


class TestStopped:
    def test_ctrl_c(self, monkeypatch):
        table1(out="whole")
        real = time.sleep
        # Shells start what runs in the background with the signal ignored.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        monkeypatch.setattr(time, "sleep", lambda _: signal.raise_signal(signal.SIGINT) if len(calls) == 4 else real(0))
        try:
            result = table1(code=130)  # in the second setting
        finally:
            signal.signal(signal.SIGINT, before)
        assert "goes on where it stopped" in result.stderr
        assert len(result.stderr.strip().splitlines()) == 1
        assert not Path("here/table1.json").exists()
        monkeypatch.setattr(time, "sleep", real)
        calls.clear()
        table1()
        assert calls == [("continuous", "lenet5-digits", 1)]
        assert content("here/table1.json") == content("whole/table1.json")

    def test_kill_and_a_second_process(self, monkeypatch):
        options = ["table1", "--settings", DIGITS, "--seeds", "3", "--epochs", str(EPOCHS), "--out", "here"]
        worker = subprocess.Popen(
            [sys.executable, __file__, *options],
            env={**os.environ, "FAKE_PAUSE": "0.1"}, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            waited = time.monotonic() + 60
            while not Path("here/parts/lenet5-digits.checkpoint.pt").exists():
                assert worker.poll() is None
                assert time.monotonic() < waited
                time.sleep(0.01)
            busy = table1(code=2)
            assert f"another process ({worker.pid} on " in busy.stderr
        finally:
            worker.kill()
            worker.wait()
        spent = torch.load("here/parts/lenet5-digits.checkpoint.pt", weights_only=True)["seconds"]
        calls.clear()
        table1()
        [(_, setting, epoch)] = calls
        assert setting == "lenet5-digits"
        assert 0 < epoch < EPOCHS
        table1(out="whole")
        assert content("here/table1.json") == content("whole/table1.json")
        took = json.loads(Path("here/table1.json").read_text())["settings"]
        assert took["mlp-digits"]["seconds"] > 0.1 * EPOCHS  # of the killed process
        assert took["lenet5-digits"]["seconds"] > spent

    def test_a_corrupt_part_is_noted_and_done_anew(self):
        table1()
        whole = content("here/table1.json")
        Path("here/parts/mlp-digits.part.json").write_text("{")
        calls.clear()
        assert "bmrs: " in table1().stderr
        assert calls == [("continuous", "mlp-digits", 0)]
        assert content("here/table1.json") == whole


class TestRefusals:
    @pytest.mark.parametrize(
        ("options", "sentence"),
        [
            (["table1", "--settings", "mlp-mnist,vit"], "--settings: unknown setting 'vit': choose from mlp-mnist,"),
            (["table1", "--methods", "magic"], "--methods: unknown method 'magic': choose from none, l2,"),
            (["table1", "--methods", "gradient"], "--methods: unknown method 'gradient'"),
            (["figure2", "--methods", "none"], "--methods: unknown method 'none'"),
            (["table1", "--device", "abacus"], "--device: unknown device 'abacus'"),
        ],
    )
    def test_one_sentence_and_nothing_done(self, tmp_path, options, sentence):
        result = run(*options, code=2)
        assert result.stderr.startswith(f"bmrs: {sentence}")
        assert len(result.stderr.strip().splitlines()) == 1
        assert not list(tmp_path.iterdir())

    def test_results_of_another_kind(self):
        table1()
        refused = table1("--methods", "none,snr", code=2)
        assert "methods" in refused.stderr
        assert "--restart" in refused.stderr
        table1("--methods", "none,snr", "--restart")
        assert len(content("here/table1.json")["runs"]) == 2 * 2 * 3

    def test_other_epochs_are_done_anew(self):
        table1()
        calls.clear()
        assert "done anew" in table1("--epochs", 2).stderr
        assert [epoch for *_, epoch in calls] == [0, 0]
        assert content("here/table1.json")["settings"]["mlp-digits"]["epochs"] == 2

    def test_errors_of_the_work(self, monkeypatch):
        monkeypatch.setattr(sys.modules["bmrs.study.timing"], "measure", _raises(OSError("mnist is missing: get it.")))
        assert run("timing", "--settings", "mlp-digits", code=2).stderr == "bmrs: mnist is missing: get it.\n"
        monkeypatch.setitem(sys.modules, "bmrs.study.timing", None)
        assert "pip install 'bmrs[study]'" in run("timing", "--settings", "mlp-digits", code=2).stderr

    def test_too_little_memory(self, monkeypatch):
        monkeypatch.setattr(sys.modules["bmrs.study.timing"], "measure", _raises(torch.OutOfMemoryError("CUDA")))
        assert "fewer --seeds" in run("timing", "--settings", "mlp-digits", code=1).stderr

    def test_a_disk_that_is_full(self, monkeypatch, tmp_path):
        monkeypatch.setattr(
            sys.modules["bmrs.study.timing"], "measure", _raises(OSError(28, "No space left on device"))
        )
        said = run("timing", "--settings", "mlp-digits", code=1).stderr
        assert said.startswith(
            "bmrs: the study failed ([Errno 28] No space left on device): make room or choose another"
        )
        (tmp_path / "file").touch()
        refused = run("timing", "--settings", "mlp-digits", "--out", tmp_path / "file" / "out", code=2)
        assert "--out names a folder that cannot be made" in refused.stderr

    def test_no_gpu(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        assert "there is no GPU" in run("table1", "--device", "cuda", code=2).stderr


class TestEngine:
    def test_seeds_in_several_tasks_are_one_result(self):
        table1(out="whole")
        table1("--seeds-per-task", 2, "--settings", "mlp-digits", out="split")
        read = json.loads(Path("split/table1.json").read_text())
        keys = [(r["method"], r["seed"]) for r in read["runs"]]
        whole = [r for r in json.loads(Path("whole/table1.json").read_text())["runs"] if r["setting"] == "mlp-digits"]
        assert keys == [(r["method"], r["seed"]) for r in whole]
        assert read["settings"]["mlp-digits"]["networks"] == 7 * 3
        assert read["provenance"]["seeds_per_task"] == 2
        assert calls[-2:] == [("continuous", "mlp-digits", 0)] * 2
        assert [path.name for path in Path("split/parts").glob("mlp*")] == ["mlp-digits.part.json"]
        refused = table1("--seeds-per-task", 1, "--settings", "mlp-digits", out="split", code=2)
        assert "seeds_per_task 2 there, 1 now" in refused.stderr

    def test_figures_of_several_tasks(self):
        run("figure3", "--settings", "mlp-digits", "--seeds", 3, "--epochs", 1, "--seeds-per-task", 1, "--out", "o")
        assert [r["seed"] for r in json.loads(Path("o/figure3.json").read_text())["runs"]] == [0, 1, 2]

    def test_a_task_that_was_done_is_not_done_again(self, monkeypatch):
        protocols = sys.modules["bmrs.study.protocols"]
        monkeypatch.setattr(protocols, "continuous", lambda setting, methods, seeds, **rest: (
            continuous(setting, methods, seeds, **rest) if 2 not in seeds else pytest.fail("stopped")
        ))  # fmt: skip
        with pytest.raises(BaseException, match="stopped"):
            CliRunner().invoke(app, [
                "table1", "--settings", "mlp-digits", "--seeds", "3", "--epochs", str(EPOCHS), "--out", "here",
                "--seeds-per-task", "2",
            ], catch_exceptions=False)  # fmt: skip
        options = ("--seeds-per-task", 2, "--settings", "mlp-digits")
        tasks = json.loads(table1(*options, "--dry-run", "--json").stdout)["tasks"]
        assert [(task["name"], task["state"]) for task in tasks] == [
            ("mlp-digits.seeds0-1", "done"), ("mlp-digits.seeds2-2", "to do"),
        ]  # fmt: skip
        monkeypatch.setattr(protocols, "continuous", continuous)
        calls.clear()
        table1(*options)
        assert len(calls) == 1
        assert len(content("here/table1.json")["runs"]) == 7 * 3

    @pytest.mark.parametrize(
        ("options", "sentence"),
        [
            (["--engine", "abacus"], "--engine: unknown engine 'abacus': choose from local, ray."),
            (["--workers", "33"], "--workers: this process computes 32 tasks at once at most, got 33."),
            (["--address", "auto"], "--address says something about a Ray cluster: add --engine ray."),
        ],
    )
    def test_refused(self, tmp_path, options, sentence):
        for name in ("table1", "all", "sweep"):
            assert run(name, *options, code=2).stderr == f"bmrs: {sentence}\n"
        assert not list(tmp_path.iterdir())

    def test_addresses_of_clients(self):
        pytest.importorskip("ray")
        refused = run("table1", "--engine", "ray", "--address", "ray://10.0.0.1:10001", "--dry-run", code=2)
        assert "on a machine of the cluster" in refused.stderr

    def test_the_tasks_of_a_cluster(self):
        pytest.importorskip("ray")
        options = ("--engine", "ray", "--workers", 3, "--seeds-per-task", 2, "--dry-run")
        shown = table1(*options).stdout
        assert "a Ray cluster on this machine, 3 at once" in shown
        assert [line.split()[1] for line in shown.splitlines() if ".seeds" in line] == [
            "mlp-digits.seeds0-1", "mlp-digits.seeds2-2", "lenet5-digits.seeds0-1", "lenet5-digits.seeds2-2",
        ]  # fmt: skip
        elsewhere = json.loads(table1("--engine", "ray", "--address", "auto", "--dry-run", "--json").stdout)
        assert elsewhere["device"] == "auto"  # what it is there is not known before

    def test_without_ray(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "ray", None)
        monkeypatch.delitem(sys.modules, "bmrs.study.engine_ray", raising=False)
        assert "pip install 'bmrs[ray]'" in run("table1", "--engine", "ray", code=2).stderr


class TestDryRun:
    def test_says_what_would_be_done_and_does_nothing(self, tmp_path):
        result = run("table1", "--dry-run")
        assert "runs/study/table1" in result.stdout
        assert [line.split()[1::2][:4] for line in result.stdout.splitlines() if "lenet5-cifar10" in line] == [
            ["lenet5-cifar10", "70", "50", "10"]
        ]
        assert "Nothing was done" in result.stdout
        assert not list(tmp_path.iterdir())
        assert calls == []

    def test_as_json_with_what_is_there(self):
        table1()
        settings = json.loads(table1("--dry-run", "--json").stdout)["settings"]
        assert settings["mlp-digits"] == {"networks": 21, "epochs": EPOCHS, "fine_tune": 5, "state": "done"}
        Path("here/parts/mlp-digits.part.json").unlink()
        Path("here/parts/mlp-digits.checkpoint.pt").touch()
        assert json.loads(table1("--dry-run", "--json").stdout)["settings"]["mlp-digits"]["state"] == "begun"

    @pytest.mark.parametrize("name", [*JOBS, "all", "sweep"])
    def test_every_command_has_it(self, tmp_path, name):
        run(name, "--dry-run")
        assert not list(tmp_path.iterdir())


def test_networks_without_gates_are_counted_once_for_all_prices():
    plan = commands.settle(JOBS["prices"], settings="mlp-digits", seeds=3)
    assert plan.networks() == 3 * (1 + len(plan.prices))


def test_sweep():
    options = ("sweep", "--settings", "lenet5-digits", "--trials", 3, "--json")
    answer = json.loads(run(*options).stdout)
    read = json.loads(Path(answer["result"]).read_text())
    assert [trial["number"] for trial in read["runs"]] == [0, 1, 2]
    assert answer["headline"][0]["validation"] == max(trial["value"] for trial in read["runs"])
    more = json.loads(Path(json.loads(run(*options, "--trials", 5).stdout)["result"]).read_text())
    assert [t["parameters"] for t in more["runs"][:3]] == [t["parameters"] for t in read["runs"]]
    run(*options, "--seed", 1, code=2)
    assert json.loads(run(*options, "--seed", 1, "--restart").stdout)["headline"] != answer["headline"]


class TestScreen:
    def test_one_line_per_setting(self, monkeypatch):
        now = [100.0]
        monkeypatch.setattr(time, "monotonic", lambda: now[0])
        screen = Screen(Console(force_terminal=True, width=120), ["a", "b", "c"])
        screen.end("a", 75.0)
        screen.begin("b", 70)
        screen.progress("b", 20, 60)  # went on from the twentieth
        now[0] += 30.0
        screen.progress("b", 30, 60)
        console = Console(width=120, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
        console.print(screen.render())
        console.file.close()
        lines = console.export_text().splitlines()
        assert "1 min 15 s" in lines[0]
        assert "30/60 epochs" in lines[1]
        assert "70 networks" in lines[1]
        assert "1 min 30 s left" in lines[1]  # ten epochs took 30 s, thirty are left
        assert lines[2].strip() == "c"

    @pytest.mark.parametrize("width", [80, 120])
    def test_several_tasks_at_once(self, monkeypatch, width):
        now = [100.0]
        monkeypatch.setattr(time, "monotonic", lambda: now[0])
        screen = Screen(Console(force_terminal=True, width=width), ["lenet5-fashion-mnist", "b"])
        screen.expect("lenet5-fashion-mnist", 4)
        for name in ("seeds0-1", "seeds2-3"):
            screen.begin("lenet5-fashion-mnist", 14, name)
            screen.progress("lenet5-fashion-mnist", 0, 60, name)
        screen.begin("b", 70, "b")
        now[0] += 60.0
        screen.progress("lenet5-fashion-mnist", 30, 60, "seeds0-1")
        screen.progress("lenet5-fashion-mnist", 20, 60, "seeds2-3")
        screen.status("Ray: 3 tasks on 2 machines, 2 waiting")
        assert self.shown(screen, width) == [
            "lenet5-fashion-mnist 50/240 epochs 2 of 4 running 3 min 48 s left",  # 190 more, 50 a minute
            "b preparing 70 networks",
            "Ray: 3 tasks on 2 machines, 2 waiting",
        ]
        screen.ended_task("lenet5-fashion-mnist", "seeds0-1")
        screen.ended_task("lenet5-fashion-mnist", "seeds2-3", done=False)
        assert "80/240 epochs 0 of 4 running" in self.shown(screen, width)[0]
        now[0] += 60.0
        screen.begin("lenet5-fashion-mnist", 14, "seeds2-3")  # again, from where it was
        screen.progress("lenet5-fashion-mnist", 10, 60, "seeds2-3")
        now[0] += 10.0
        screen.progress("lenet5-fashion-mnist", 20, 60, "seeds2-3")
        assert "80/240 epochs 1 of 4 running 2 min 40 s left" in self.shown(screen, width)[0]

    @staticmethod
    def shown(screen, width):
        """The lines, without bars."""
        console = Console(width=width, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
        console.print(screen)
        console.file.close()
        return [" ".join(line.replace("━", "").replace("╸", "").replace("╺", "").split())
                for line in console.export_text().splitlines()]  # fmt: skip

    def test_plain_lines_now_and_then(self, monkeypatch, capsys):
        now = [0.0]
        monkeypatch.setattr(time, "monotonic", lambda: now[0])
        with Screen(Console(), ["a"], every=30.0) as screen:
            screen.begin("a", 70)
            for epoch in range(1, 61):
                now[0] += 2.0
                screen.progress("a", epoch, 60)
            screen.end("a", 120.0)
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == 2 + 4
        assert lines[1] == "a: 15 of 60 epochs, 1 min 30 s left"


def _raises(error):
    def raising(*_, **__):
        raise error

    return raising


if __name__ == "__main__":
    install(sys.modules.__setitem__)
    app()
