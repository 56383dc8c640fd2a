"""Large networks on a GPU: captured steps train as eager ones do, and a command ends with what it promises."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from bmrs.study.commands import app
from bmrs.study.large import protocol
from bmrs.study.large.recipe import SETTINGS, Recipe
from tests.study.large.made import write_cifar, write_resnet

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS"),  # torch's own, at the first product of a thread
    pytest.mark.filterwarnings("ignore:Please use the new API settings"),  # one of two ways to say TF32, both right
]
RESNET = SETTINGS["resnet50-cifar10"]
QUICK = {"resolution": 32, "epochs": 3, "fine_tune": 1, "batch": 8, "phi_lr": 800.0, "log_sigma": -2.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("large")
    write_cifar(made)
    write_resnet(made / "resnet")
    return made


def trained(folder, method, epochs=2, **more):
    lines = []
    recipe = Recipe(**{**QUICK, "weights": str(folder / "resnet"), **more})
    run = protocol.Run(RESNET, recipe, method, 0, device="cuda", data_dir=folder, tell=lines.append)
    with protocol.precise(recipe):
        for _ in range(epochs):
            run.epoch()
    return run, lines


def test_captured_steps_train_as_eager_ones(folder):
    eager, captured = (trained(folder, "none", step=how, augment="shift")[0] for how in ("eager", "graph"))
    assert captured.step.how == "graph"
    assert captured.step._graph is not None
    state = captured.network.state_dict()
    before = protocol.networks.build(RESNET, 10, Recipe(weights=str(folder / "resnet"), resolution=32), 0).state_dict()
    for name, value in eager.network.state_dict().items():
        if value.is_floating_point():  # Adam turns rounding into steps where a gradient is next to nothing
            apart = (state[name] - value).norm()
            assert apart <= 0.1 * (value - before[name].to(value)).norm() + 1e-6, name


def test_captured_gates_are_drawn_anew_or_steps_are_eager(folder):
    """Either every replay has gates of its own, or the run says that it gave up and goes on one by one."""
    run, lines = trained(folder, "bmrs_n", step="graph", prune_every=3, epochs=2)
    if run.step.how == "eager":
        assert any("steps run one by one" in line for line in lines)
    else:
        run.network.train()
        feed, seen = run.feed.epoch(0, 1), []
        for n in range(3):
            run.step(*feed.batch(n, 8))
            seen.append(int(run.pruner.bank.draws))  # of whose number gates are a function
        assert seen == [seen[0], seen[0] + 1, seen[0] + 2]
    before = run.history[-1]["units"]
    run.epoch()
    assert run.history[-1]["units"] < before


def test_a_command_in_bf16(folder, tmp_path):
    options = ["--settings", "resnet50-cifar10", "--methods", "none,bmrs_n", "--seeds", "1", "--data-dir", folder,
               "--weights", folder / "resnet", "--resolution", 32, "--epochs", 3, "--fine-tune", 1, "--batch", 8,
               "--phi-lr", 800, "--log-sigma=-2", "--precision", "bf16", "--channels-last", "--measure", "eager,graph",
               "--out", tmp_path]  # fmt: skip
    result = CliRunner().invoke(app, ["table2", *map(str, options)])
    assert result.exit_code == 0, result.output
    runs = json.loads((Path(tmp_path) / "table2.json").read_text())["runs"]
    measured = {(r["network"], r["how"], r["device"], r["batch"]) for r in runs[1]["physical"]["runs"]}
    assert measured >= {
        (n, how, "cuda", b) for n in ("whole", "pruned") for how in ("eager", "graph") for b in (1, 256)
    }
    assert all(r["memory_mib"] is not None for r in runs[1]["physical"]["runs"] if r["device"] == "cuda")
    assert runs[1]["physical"]["precision"] == {"cuda": "bf16", "cpu": "fp32"}
