"""``bmrs study table2`` and ``timing --large`` end to end, on small networks and made images."""

import json
import re
import sys
import types
from pathlib import Path

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import bmrs
from bmrs.study import timing
from bmrs.study.commands import app
from bmrs.study.large import measuring, networks, protocol
from bmrs.study.large.deadline import Deadline
from bmrs.study.large.recipe import SETTINGS, Recipe
from tests.study.large.made import write_cifar, write_resnet, write_vit

QUICK = ("--resolution", 32, "--epochs", 3, "--fine-tune", 1, "--batch", 16, "--phi-lr", 800, "--log-sigma=-2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("large")
    write_cifar(made)
    write_resnet(made / "resnet")
    write_vit(made / "vit")
    return made


@pytest.fixture(autouse=True)
def quick(monkeypatch, tmp_path):
    """Two rounds of small batches, and no mean colour of the machine in them."""
    monkeypatch.setattr(timing, "ROUNDS", (2, 2))
    monkeypatch.setattr(timing, "TURN", 1.0)
    monkeypatch.setattr(measuring, "BATCHES", (1, 4))
    monkeypatch.setattr(measuring.measure, "__kwdefaults__", {**measuring.measure.__kwdefaults__, "batches": (1, 4)})
    monkeypatch.chdir(tmp_path)


def run(*arguments, code=0):
    result = CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "120", "NO_COLOR": "1"})
    assert result.exit_code == code, result.output
    return result


def table2(folder, *more, methods="none,bmrs_n", settings="resnet50-cifar10", code=0, **options):
    return run(
        "table2", "--settings", settings, "--methods", methods, "--seeds", 1, "--data-dir", folder, "--weights",
        folder / "resnet", "--vit-weights", folder / "vit", *QUICK, "--out", "here", "--measure", "eager", *more,
        code=code, **options,
    )  # fmt: skip


def read(name="here/table2.json"):
    return json.loads(Path(name).read_text(encoding="utf-8"), parse_constant=pytest.fail)


def test_pieces_come_together(folder):
    """One method after the other in a folder: a table of all, and networks that load and measure again."""
    described = json.loads(table2(folder, "--dry-run", "--json").stdout)
    assert [task["state"] for task in described["tasks"]] == ["to do", "to do"]
    table2(folder, methods="none")
    assert [r["method"] for r in read()["runs"]] == ["none"]
    answer = json.loads(table2(folder, "--json", methods="bmrs_n").stdout)
    assert answer["finished"]
    assert {Path(f).name for f in answer["files"]} == {
        "table2.json", "table2.md", "table2.tex", "table2.pdf", "table2.png", "report.html",
    }  # fmt: skip
    content = read()
    assert [r["method"] for r in content["runs"]] == ["none", "bmrs_n"]
    entry, pruned = content["settings"]["resnet50-cifar10"], content["runs"][1]
    assert entry["networks"] == 2
    assert content["provenance"]["commit"]
    assert content["energy"]["how"] in ("measured", "estimated", "unavailable")
    measured = pruned["physical"]["runs"]
    assert {(r["network"], r["how"], r["device"], r["batch"]) for r in measured} == {
        (network, "eager", "cpu", batch) for network in ("whole", "pruned") for batch in (1, 4)
    }
    text = Path("here/table2.md").read_text().replace("\u00a0", " ")
    assert "87.10 ± 1.55" in text  # BMRS_N, as published
    assert "not as in the paper: resolution 32 instead of 224; epochs 3 instead of 100" in text
    assert "processor, eager, batch 4" in text
    page = Path("here/report.html").read_text()
    assert "eager, processor, batch 4" in page
    # The file is the network: it loads on one that is built anew, as another measurement does.
    recipe = Recipe(weights=str(folder / "resnet"), resolution=32)
    small = networks.build(SETTINGS["resnet50-cifar10"], 10, recipe, 0, filled=False)
    bmrs.load(small, Path("here/networks") / pruned["file"])
    assert bmrs.cost.parameters(small) == pruned["parameters"]
    table2(folder, "--measure-only", "--measure", "eager,onnxruntime,graph", methods="bmrs_n")
    again = read()["runs"][1]["physical"]
    assert {row["how"] for row in again["runs"]} >= {"eager"}
    table2(folder, "--measure-only", "--measure", "graph", methods="bmrs_n")
    assert read()["runs"][1]["physical"]["runs"] == again["runs"]  # what was measured in other ways stays
    assert {"how": "graph", "device": "cpu", "why": "only a GPU has CUDA graphs"} in again["skipped"]
    assert read()["runs"][1]["accuracy"] == pruned["accuracy"]
    # Nothing is trained twice, and nothing else gets into the folder.
    said = table2(folder, "--epochs", 4, code=2).output
    assert "resnet50 epochs 3 there, 4 now" in re.sub(r"\s+", " ", said)


def test_the_time_is_up_and_it_goes_on(folder, monkeypatch):
    whole = table2(folder, methods="bmrs_n") and read()["runs"][0]
    epoch = protocol.Run.epoch
    left = types.SimpleNamespace(value=2)

    def counted(self):
        epoch(self)
        left.value -= 1

    monkeypatch.setattr(protocol.Run, "epoch", counted)
    monkeypatch.setattr(Deadline, "left", lambda self: 1000.0 if left.value > 0 else -1.0)
    said = table2(folder, "--restart", "--time-limit", 500, "--json", methods="bmrs_n")
    assert "The time is up" in said.stderr
    assert json.loads(said.stdout) == {"name": "table2", "finished": False, "files": []}
    left.value = 100
    table2(folder, "--time-limit", 500, methods="bmrs_n")
    again = read()["runs"][0]
    assert left.value == 98  # the two epochs that were left
    same = ("accuracy", "validation", "units", "parameters", "compression", "finish")
    assert {name: again[name] for name in same} == {name: whole[name] for name in same}


def test_l2_removes_as_many_units_as_bmrs_n(folder):
    said = table2(folder, methods="l2", code=2).output
    assert "add bmrs_n to the methods" in re.sub(r"\s+", " ", said)
    table2(folder, "--measure", "none", methods="l2,bmrs_n")
    by = {r["method"]: r for r in read()["runs"]}
    units = sum(read()["settings"]["resnet50-cifar10"]["layers"].values())
    assert by["l2"]["removed_units"] == pytest.approx(by["bmrs_n"]["removed_units"], abs=9 / units)  # layers keep one
    assert by["l2"]["physical"] is None


def test_tiny_imagenet_s_standard_layout(folder, tmp_path):
    """Also a greyscale image; a ViT from scratch, and our own gates."""
    root = tmp_path / "data" / "tiny-imagenet-200"
    names = ["n01", "n02", "n03"]
    (root / "val" / "images").mkdir(parents=True)
    (root / "wnids.txt").write_text("\n".join(names))
    lines = []
    for k, name in enumerate(names):
        (root / "train" / name / "images").mkdir(parents=True)
        for n in range(12):
            mode, colour = ("L", 70 * k) if n == 0 else ("RGB", (70 * k, 20 * n, 100))
            Image.new(mode, (64, 64), colour).save(root / "train" / name / "images" / f"{name}_{n}.JPEG")
        Image.new("RGB", (64, 64), (70 * k, 9, 100)).save(root / "val" / "images" / f"val_{k}.JPEG")
        lines.append(f"val_{k}.JPEG\t{name}\t0\t0\t62\t62")
    (root / "val" / "val_annotations.txt").write_text("\n".join(lines))
    both = "resnet50-tiny-imagenet,vit-tiny-imagenet"
    run(
        "table2", "--settings", both, "--methods", "bmrs_n", "--seeds", 1, "--data-dir", tmp_path / "data", "--weights",
        folder / "resnet", "--vit-weights", folder / "vit", *QUICK, "--gates", "all", "--price", "macs", "--out",
        "here", "--measure", "none", "--name", "small",
    )  # fmt: skip
    content = read("here/small.json")
    assert [r["setting"] for r in content["runs"]] == both.split(",")
    assert all(entry["train_images"] == 36 for entry in content["settings"].values())
    assert all(run["compression"]["published"] is None for run in content["runs"])
    kinds = content["settings"]["vit-tiny-imagenet"]["layers"]
    assert any("heads" in name for name in kinds)
    assert "gates on inner channels" in Path("here/small.md").read_text()


def test_errors_are_one_sentence(folder):
    for more, said in (
        (("--precision", "fp8"), "--precision: unknown choice 'fp8'"),
        (("--weights", "nowhere/at/all"), "--weights, or train from --scratch"),
        (("--measure", "eager,tpu"), "--measure: 'tpu' is unknown"),
        (("--step", "graph"), "only a GPU has CUDA graphs"),
        (("--measure-only",), "there is nothing to show yet"),
        (("--name", "a/b"), "--name must be letters"),
    ):
        result = table2(folder, *more, code=0 if more == ("--measure-only",) else 2)
        assert said in re.sub(r"\s+", " ", result.output)
        assert "Traceback" not in result.output
    assert "--methods: 'bmsr' is unknown" in re.sub(r"\s+", " ", table2(folder, methods="bmsr", code=2).output)
    assert "--settings: 'resnet' is unknown" in re.sub(r"\s+", " ", table2(folder, settings="resnet", code=2).output)


def test_memory_that_is_too_small_is_said(folder, monkeypatch):
    def full(self):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(protocol.Run, "epoch", full)
    assert "give a smaller --batch or --resolution" in re.sub(r"\s+", " ", table2(folder, code=2).output)


def test_timing_large(folder):
    options = ("--large", "--settings", "resnet50-cifar10,vit-cifar10", "--weights", folder / "resnet",
               "--vit-weights", folder / "vit", "--resolution", 32, "--batch", 8, "--out", "times")  # fmt: skip
    described = json.loads(run("timing", *options, "--dry-run", "--json").stdout)
    assert [task["setting"] for task in described["tasks"]] == ["resnet50-cifar10", "vit-cifar10"]
    run("timing", *options)
    content = read("times/timing_large.json")
    assert {(r["setting"], r["method"], r["mode"]) for r in content["runs"]} == {
        (setting, method, mode)
        for setting in ("resnet50-cifar10", "vit-cifar10")
        for method in ("none", "gated", "removed")
        for mode in ("train_forward", "inference", "train_step")
    }
    entry = content["settings"]["resnet50-cifar10"]
    step = next(r for r in content["runs"] if (r["method"], r["mode"]) == ("gated", "train_step"))
    assert entry["seconds_per_epoch"]["gated"] == pytest.approx(5_000 * step["ms"] / 1e3, abs=0.01)
    assert 0 < entry["removed"]["parameters"] < entry["parameters"]
    text = Path("times/timing_large.md").read_text().replace("\u00a0", " ")
    assert "329.84" in text  # BMRS_N, as published
    assert "An epoch" in text
    before = Path("times/timing_large.json").stat().st_mtime_ns, content["runs"]
    run("timing", *options)
    assert read("times/timing_large.json")["runs"] == before[1]  # measured once
    assert "leave out --engine" in re.sub(r"\s+", " ", run("timing", *options, "--engine", "ray", code=2).output)


def test_no_onnxruntime_is_said(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    find = measuring.importlib.util.find_spec
    monkeypatch.setattr(measuring.importlib.util, "find_spec", lambda n: None if n == "onnxruntime" else find(n))
    table2(folder, "--measure", "onnxruntime", methods="bmrs_n")
    (why,) = read()["runs"][0]["physical"]["skipped"]
    assert why == {"how": "onnxruntime", "device": "cpu", "why": "onnxruntime is not installed"}
    assert "Not measured: onnxruntime on the processor (onnxruntime is not installed)" in (
        Path("here/table2.md").read_text()
    )  # fmt: skip
