"""What TensorBoard and W&B are told is what the reports say."""

import builtins
import math
import statistics

import pytest
import torch

import bmrs
from bmrs.integrations.trackers import log_pruning, tracker, what_is_known
from tests.integrations.toy import EPOCHS, OPTIONS, RATE, X, network, train_by_hand
from tests.integrations.written import (
    board,
    board_histograms,
    board_text,
    offline,  # noqa: F401  a fixture
    wandb_records,
    wandb_rows,
)

LAYER = "0"  # the one structure of the network
TENSORBOARD = "tensorboard"


def pruned(where, histograms=False):
    """A training of ten epochs that logs each; what was to be logged, by step, and the means of the gates."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    pruner = bmrs.Pruner(model, X[:4], optimizer, **OPTIONS)
    logged, means = {}, {}

    class Logging:
        def prune(self):
            report = pruner.prune()
            logged[len(logged)] = report, float(pruner.kl().detach())
            means[len(means)] = pruner.bank.mean().tolist()
            log_pruning(where, pruner, report, len(logged) - 1, histograms=histograms)

    train_by_hand(model, Logging(), optimizer, EPOCHS)
    assert len({report.units for report, _ in logged.values()}) > 2
    return logged, means


def matches(found, logged):
    """Whether series, name → step → number, are what the reports say."""
    for name, of in {
        "bmrs/units": lambda report: report.units,
        "bmrs/parameters": lambda report: report.parameters,
        "bmrs/removed": lambda report: report.removed,
        f"units/{LAYER}": lambda report: report.structures[0].left,
        f"delta_f_min/{LAYER}": lambda report: report.structures[0].delta_f_kept[0],
        f"delta_f_max/{LAYER}": lambda report: report.structures[0].delta_f_kept[1],
    }.items():
        assert found[name] == pytest.approx({step: of(report) for step, (report, _) in logged.items()}, rel=1e-6), name
    assert found["bmrs/kl"] == pytest.approx({step: kl for step, (_, kl) in logged.items()}, rel=1e-6)


def test_what_is_known_of_a_structure_is_what_its_scores_say():
    model = network()
    pruner = bmrs.Pruner(model, X[:4], torch.optim.AdamW(model.parameters(), lr=RATE), **OPTIONS)
    with torch.no_grad():
        pruner.bank.mu.copy_(torch.linspace(-19, -1, 24))
        pruner.bank.log_sigma.copy_(torch.linspace(3, -3, 24))
    report = pruner.prune()
    assert 0 < report.removed < 24
    known = what_is_known(pruner, report)
    delta_f = sorted(-worth for worth in pruner.scores()[LAYER].tolist())  # BMRS_N's worth is -ΔF
    assert known[f"delta_f_min/{LAYER}"] == pytest.approx(delta_f[0], rel=1e-6)
    assert known[f"delta_f_max/{LAYER}"] == pytest.approx(delta_f[-1], rel=1e-6)
    assert known[f"delta_f_median/{LAYER}"] == pytest.approx(statistics.median_low(delta_f), rel=1e-6)
    assert known["bmrs/units"] == len(delta_f) == model[0].out_features
    own = [p for name, p in model.named_parameters() if "bmrs" not in name]
    assert known["bmrs/parameters"] == sum(p.numel() for p in own)


def test_tensorboard_is_told_what_the_reports_say(tmp_path):
    pytest.importorskip(TENSORBOARD)
    with tracker(TENSORBOARD, tmp_path, {"lr": 0.02, "price": "uniform"}) as where:
        where.log({"loss": 0.5, "not a number": math.nan}, step=7)
        logged, means = pruned(where, histograms=True)
    found = board(tmp_path)
    assert found["loss"] == {7: 0.5}
    assert math.isnan(found["not a number"][7])
    matches(found, logged)
    histograms = board_histograms(tmp_path)[f"theta/{LAYER}"]
    assert set(histograms) == set(means)
    for step, (number, total, low, high) in histograms.items():
        assert (number, total) == (len(means[step]), pytest.approx(sum(means[step]), rel=1e-5))
        assert (low, high) == pytest.approx((min(means[step]), max(means[step])), rel=1e-5)
    text = board_text(tmp_path, "config")
    assert "| lr | 0.02 |" in text
    assert "| price | uniform |" in text


def test_wandb_and_tensorboard_at_once_are_told_the_same(tmp_path, offline):  # noqa: F811
    pytest.importorskip(TENSORBOARD)
    wandb = pytest.importorskip("wandb")
    with tracker([TENSORBOARD, "wandb"], tmp_path, {"lr": 0.02}) as where:
        where.log({"loss": 0.5}, step=7)
        logged, means = pruned(where, histograms=True)
        where.log({"loss": 0.25}, step=3)  # late, as after a resumption
    assert wandb.run is None
    rows = wandb_rows(tmp_path)
    assert [(row["step"], row["loss"]) for row in rows if "loss" in row] == [(7, 0.5), (3, 0.25)]
    names = {name for row in rows for name in row}
    series = {name: {row["step"]: row[name] for row in rows if name in row} for name in names}
    matches(series, logged)
    matches(board(tmp_path), logged)
    histograms = series[f"theta/{LAYER}"]
    assert {step: sum(one["values"]) for step, one in histograms.items()} == {n: len(m) for n, m in means.items()}
    assert histograms[0]["bins"][0] == pytest.approx(min(means[0]))
    records = wandb_records(tmp_path)
    configured = {one.key: one.value_json for record in records for one in record.run.config.update}
    assert configured["lr"] == "0.02"
    assert any(record.metric.glob_name == "*" and record.metric.step_metric == "step" for record in records)


def test_a_run_of_ones_own_is_used_and_left_open(tmp_path, offline):  # noqa: F811
    wandb = pytest.importorskip("wandb")
    own = wandb.init(dir=tmp_path, config={"mine": 1})
    with tracker("wandb", tmp_path / "unused", {"lr": 0.02}) as where:
        where.log({"loss": 0.5}, step=1)
    assert wandb.run is own
    own.finish()
    assert not (tmp_path / "unused").exists()
    assert [row["loss"] for row in wandb_rows(tmp_path)] == [0.5]
    assert dict(own.config) == {"mine": 1, "lr": 0.02}


def test_who_is_not_logged_in_is_told_what_to_do(tmp_path, offline, monkeypatch):  # noqa: F811
    pytest.importorskip(TENSORBOARD)
    wandb = pytest.importorskip("wandb")

    def refuse(**_):
        raise wandb.errors.UsageError("No API key configured.")

    monkeypatch.setattr(wandb, "init", refuse)
    with pytest.raises(ValueError, match=r"\(UsageError: No API key configured\.\): log in .*=offline"):
        tracker([TENSORBOARD, "wandb"], tmp_path)


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_missing_package_is_said(name, monkeypatch, tmp_path):
    def without(wanted, *rest):
        if wanted == "wandb" or "tensorboard" in wanted:
            raise ModuleNotFoundError(f"No module named '{name}'", name=name)
        return found(wanted, *rest)

    found = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=rf"tracking needs '{name}': install it with  pip install 'bmrs\[track\]'"):
        tracker(name, tmp_path)


@pytest.mark.parametrize(
    ("name", "message"),
    [("tensorbord", "unknown tracker 'tensorbord': choose from tensorboard, wandb"), ([], "name holds no tracker")],
)
def test_an_unknown_one_is_refused(name, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        tracker(name, tmp_path)


def test_after_finish_there_is_nothing_to_ask(tmp_path):
    pytest.importorskip(TENSORBOARD)
    model = network()
    pruner = bmrs.Pruner(model, X[:4], torch.optim.AdamW(model.parameters(), lr=RATE), **OPTIONS)
    report = pruner.prune(fraction=0.5)
    pruner.finish()
    with tracker(TENSORBOARD, tmp_path) as where, pytest.raises(ValueError, match=r"before pruner\.finish"):
        log_pruning(where, pruner, report, 0)
