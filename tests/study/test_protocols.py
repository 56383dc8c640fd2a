"""The protocols on networks small enough to train in a second."""

import io
import itertools
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import scipy.stats
import torch

from bmrs.study.post_training import post_training, spearman
from bmrs.study.protocols import Member, Stage, continuous, objective
from bmrs.study.settings import Setting

SMALL = Setting("made", "mlp", "digits", 32, 1e-2, (14, 10), epochs=26, fine_tune=2)
HASTY = replace(SMALL, learning_rate=3e-2, epochs=9)  # learns badly, but units go
METHODS = ("none", "l2", "mean", "bmrs_n", "bmrs_u8")
FRACTIONS = (0.25, 0.5, 0.75, 1.0)
AFTER = ("l2", "mean", "snr", "bmrs_n", "bmrs_u4", "gradient")


def while_training(setting, **more):
    return continuous(setting, METHODS, (0, 4), **more)


def after_training(setting, **more):
    return post_training(replace(setting, fine_tune=1), AFTER, (0, 4), fractions=FRACTIONS, together=13, **more)


@pytest.fixture(scope="module")
def pruned():
    return while_training(SMALL)


@pytest.fixture(scope="module")
def curves():
    return after_training(SMALL)


def without_time(found):
    return {**found, "setting": {name: value for name, value in found["setting"].items() if name != "seconds"}}


class TestWhileTraining:
    def test_every_method_and_seed_once(self, pruned):
        assert [(run["method"], run["seed"]) for run in pruned["runs"]] == list(itertools.product(METHODS, (0, 4)))

    def test_it_learns_and_prunes(self, pruned):
        for run in pruned["runs"]:
            assert run["validation"] > (0.85 if run["method"] != "l2" else 0.05), run["method"]
            assert (run["compression"]["actual"] > 0) == (run["method"] != "none")

    def test_numbers_of_a_run_agree(self, pruned):
        whole = pruned["setting"]["parameters"]
        for run in pruned["runs"]:
            first, second = run["units"].values()
            assert run["parameters"] == 1024 * first + first + first * second + second + 10 * second + 10
            assert run["compression"]["actual"] == pytest.approx(1 - run["parameters"] / whole)
            assert run["multiply_adds"] == 1024 * first + first * second + 10 * second
            assert run["emptied"] == [name for name, units in run["units"].items() if not units]

    def test_units_only_go_and_the_structure_is_fixed_in_the_end(self, pruned):
        for run in pruned["runs"]:
            units = [past["units"] for past in run["history"]]
            assert units == sorted(units, reverse=True)
            if run["method"] in ("none", "l2"):
                assert not units
            else:
                assert len(units) == SMALL.epochs
                assert units[-1] == sum(run["units"].values())
                assert run["history"][-1]["published"] == pytest.approx(run["compression"]["published"])

    def test_l2_removes_as_many_units_as_bmrs_n(self, pruned):
        units = {(run["method"], run["seed"]): sum(run["units"].values()) for run in pruned["runs"]}
        assert all(units["l2", seed] == units["bmrs_n", seed] for seed in (0, 4))

    def test_l2_removes_the_shortest_rows_of_a_network_trained_whole_with_gates(self, pruned):
        (run,) = [run for run in pruned["runs"] if (run["method"], run["seed"]) == ("l2", 4)]
        stage = Stage(SMALL, "cpu", None)
        again = stage.ensemble([Member("l2", seed) for seed in (0, 4)], noisy=True)  # both, for the same rounding
        for epoch in range(1, SMALL.epochs + 1):
            again.train_epoch(stage.order([0, 4], epoch))
        assert bool((again.gates.mu != 0).any())
        rows = {name: again.stack.tensor(f"{name}.weight")[1, :units].norm(dim=1)
                for name, units in pruned["setting"]["layers"].items()}  # fmt: skip
        shortest = torch.cat(list(rows.values())).sort(descending=True).values[sum(run["units"].values()) - 1]
        assert {name: int((norms >= shortest).sum()) for name, norms in rows.items()} == run["units"]

    def test_l2_needs_bmrs_n(self):
        with pytest.raises(ValueError, match="add bmrs_n to the methods"):
            continuous(SMALL, ("l2",), (0,))

    def test_other_methods_and_prices_beside_make_no_difference(self, pruned):
        alone = continuous(SMALL, ("bmrs_n",), (4,), prices=(("layer", 1.0), ("uniform", 0.1)))["runs"]
        (same,) = [run for run in alone if run["price"] == "layer"]
        (other,) = [run for run in alone if run["price"] == "uniform"]
        (before,) = [run for run in pruned["runs"] if (run["method"], run["seed"]) == ("bmrs_n", 4)]
        assert same["units"] == before["units"]
        assert same["accuracy"] == pytest.approx(before["accuracy"], abs=0.01)
        assert other["history"] != same["history"]

    def test_layers_can_be_spared(self):
        """A price so high that nothing is worth it."""
        rash, high = replace(SMALL, learning_rate=0.3, epochs=2), (("uniform", 1e4),)
        emptied = continuous(rash, ("bmrs_n",), (0,), prices=high)["runs"][0]
        spared = continuous(rash, ("bmrs_n",), (0,), prices=high, spare=True)["runs"][0]
        assert emptied["emptied"]
        assert set(spared["units"].values()) == {1}


class TestAfterTraining:
    def test_every_method_and_seed_once(self, curves):
        assert [(run["method"], run["seed"]) for run in curves["runs"]] == list(itertools.product(AFTER, (0, 4)))

    def test_curves_fall_to_chance(self, curves):
        for run in curves["runs"]:
            assert run["whole"] > 0.8
            if run["accuracy"][-1] is not None:
                assert run["accuracy"][-1] < 0.2
                assert run["compression"]["actual"][-1] > 0.99

    def test_compression_grows_with_the_fraction(self, curves):
        for run in curves["runs"]:
            for counted in run["compression"].values():
                there = [value for value in counted if value is not None]
                assert there == sorted(there)
                assert len(set(there)) == len(there)

    def test_a_bmrs_stops_at_its_boundary(self, curves):
        for run in curves["runs"]:
            stop = run["boundary"]
            if run["method"] in ("l2", "gradient"):
                assert stop is None
                assert None not in run["accuracy"]
            elif run["method"].startswith("bmrs"):
                assert 0.05 < stop["fraction"] < 0.95
                said = [fraction for fraction, a in zip(FRACTIONS, run["accuracy"], strict=True) if a is not None]
                assert said == [fraction for fraction in FRACTIONS if fraction <= stop["fraction"]]
                assert stop["accuracy"] > 0.7

    def test_the_same_units_give_the_same_network(self, curves):
        last = {(run["seed"], run["accuracy"][-1]) for run in curves["runs"] if run["accuracy"][-1] is not None}
        assert len(last) == 2  # whatever removes everything, once for each seed
        assert len({(run["seed"], run["whole"]) for run in curves["runs"]}) == 2

    def test_posteriors_are_those_of_the_rankings(self, curves):
        for found, correlation in zip(curves["posteriors"], curves["correlations"], strict=True):
            assert len(found["layer"]) == len(found["mu"]) == len(found["delta_f"]["bmrs_u8"]) == 24
            snr, bmrs_n = (correlation["methods"].index(method) for method in ("snr", "bmrs_n"))
            wanted = scipy.stats.spearmanr(found["snr"], [-value for value in found["delta_f"]["bmrs_n"]]).statistic
            assert correlation["spearman"][snr][bmrs_n] == pytest.approx(wanted, abs=1e-3)

    def test_spearman(self):
        scores = torch.randint(0, 6, (4, 50)).double()  # with ties
        scores[0] = torch.randn(50)  # and without
        torch.testing.assert_close(spearman(scores), torch.tensor(scipy.stats.spearmanr(scores.T).statistic))
        scores[1, 7] = math.inf
        assert bool(spearman(scores).isfinite().all())


@pytest.mark.parametrize("protocol", [while_training, after_training])
def test_stopped_anywhere_it_goes_on_the_same(protocol):
    totals = []
    whole = protocol(HASTY, progress=lambda done, total: totals.append(total))
    if protocol is while_training:
        assert any(run["history"] and run["history"][-1]["units"] < 20 for run in whole["runs"])
    for stop in random.Random(6).sample(range(1, totals[-1]), 2):
        saved = io.BytesIO()

        def keep(state, stop=stop, saved=saved):
            if state["done"] == stop:
                torch.save(state, saved)
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            protocol(HASTY, checkpoint=keep)
        saved.seek(0)
        told = []
        state = torch.load(saved, weights_only=True)
        again = protocol(HASTY, resume=state, progress=lambda done, _, told=told: told.append(done))
        assert told[0] == stop + 1
        assert without_time(again) == without_time(whole)


class TestObjective:
    def test_learning_pays(self):
        measure = objective(replace(SMALL, epochs=4), device="cpu", data_dir=None)
        good = measure({"layers": 1, "width": 20, "batch": 32, "learning_rate": 1e-2})
        assert good > 0.85
        assert measure({"layers": 1, "width": 20, "batch": 32, "learning_rate": 1e-7}) < 0.4
        assert measure({"layers": 1, "width": 20, "batch": 32, "learning_rate": 1e-2}) == good

    def test_a_stage_of_another_network_has_its_structures(self):
        stage = Stage(SMALL, "cpu", None)
        other = stage.of(replace(SMALL, widths=(5, 6, 7)))
        assert [s.units for s in stage.structures] == [14, 10]
        assert [s.units for s in other.structures] == [5, 6, 7]
        assert other.x is stage.x


def table1(folder):
    arguments = ["study", "table1", "--settings", "mlp-digits", "--methods", "none,bmrs_n", "--seeds", "2"]
    arguments += ["--epochs", "8", "--fine-tune", "2", "--out", str(folder)]
    command = [sys.executable, "-c", "from bmrs.cli import main; main()", *arguments]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def test_a_killed_study_resumes(tmp_path):
    """SIGKILL in the middle of training; the numbers are those of an undisturbed one."""
    assert table1(tmp_path / "whole").wait(300) == 0
    victim = table1(tmp_path / "killed")
    state = tmp_path / "killed" / "parts" / "mlp-digits.checkpoint.pt"
    while not state.exists():
        assert victim.poll() is None
        time.sleep(0.01)
    os.kill(victim.pid, signal.SIGKILL)
    victim.wait()
    assert not (tmp_path / "killed" / "table1.json").exists()
    assert table1(tmp_path / "killed").wait(300) == 0
    killed, whole = (json.loads((tmp_path / name / "table1.json").read_text()) for name in ("killed", "whole"))
    assert killed["runs"] == whole["runs"]
