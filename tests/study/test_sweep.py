import itertools
import math
import os
import random
import signal
import subprocess
import sys
import textwrap

import pytest

from bmrs.study.store import Store
from bmrs.study.sweep import Choice, LogRange, search, space, sweep, sweep_settings

SPACE = {"batch": Choice((16, 32, 64, 128)), "learning_rate": LogRange(1e-4, 0.1)}


def peak(parameters):
    """Best at a learning rate of 0.01 and the largest batch."""
    return parameters["batch"] / 1280 - abs(math.log10(parameters["learning_rate"]) + 2)


def points(found):
    return [(trial["parameters"], trial["value"], trial["state"], trial["error"]) for trial in found["trials"]]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return sweep(peak, SPACE, 14, 7, tmp_path_factory.mktemp("sweep"))


class TestSpace:
    def test_is_the_papers(self):
        mlp = space("mlp")
        assert mlp["layers"].options == (1, 3, 5, 7, 9)
        assert mlp["width"].options == (10, 30, 50, 100, 150)
        assert mlp["batch"].options == (16, 32, 64, 128)
        assert (mlp["learning_rate"].low, mlp["learning_rate"].high) == (1e-4, 0.1)
        assert list(space("lenet5")) == ["batch", "learning_rate"]

    def test_an_unknown_network(self):
        with pytest.raises(ValueError, match="unknown network 'vit': choose one of mlp, lenet5"):
            space("vit")


class TestSweep:
    def test_stays_inside_and_finds_the_peak(self, undisturbed):
        rates = [trial["parameters"]["learning_rate"] for trial in undisturbed["trials"]]
        assert len(rates) == len(set(rates)) == 14
        assert all(1e-4 <= rate <= 0.1 for rate in rates)
        best = undisturbed["best"]
        assert best["value"] == max(trial["value"] for trial in undisturbed["trials"])
        assert abs(math.log10(best["parameters"]["learning_rate"]) + 2) < 0.3
        assert best["value"] == pytest.approx(peak(best["parameters"]))

    def test_in_two_goes_it_is_the_same(self, undisturbed, tmp_path):
        asked = []
        assert len(sweep(peak, SPACE, 6, 7, tmp_path)["trials"]) == 6
        told = []
        found = sweep(
            lambda p: asked.append(p) or peak(p), SPACE, 14, 7, tmp_path, lambda trial, done: told.append(trial)
        )
        assert points(found) == points(undisturbed)
        assert len(asked) == 8
        assert [trial["number"] for trial in told] == list(range(6, 14))
        assert sweep(pytest.fail, SPACE, 14, 7, tmp_path)["best"] == found["best"]  # nothing left to do

    def test_a_trial_cut_off_by_a_kill_is_done_again(self, undisturbed, tmp_path):
        code = """
            import os, pathlib, signal, sys
            from bmrs.study.sweep import sweep
            from tests.study.test_sweep import SPACE, peak
            count = 0
            def killed(parameters):
                global count
                count += 1
                if count == 4:
                    os.kill(os.getpid(), signal.SIGKILL)
                return peak(parameters)
            sweep(killed, SPACE, 14, 7, pathlib.Path(sys.argv[1]))
        """
        killed = subprocess.run([sys.executable, "-c", textwrap.dedent(code), str(tmp_path)], cwd=os.getcwd())
        assert killed.returncode == -signal.SIGKILL
        asked = []
        found = sweep(lambda p: asked.append(p) or peak(p), SPACE, 14, 7, tmp_path)
        assert len(asked) == 11
        assert points(found) == points(undisturbed)

    def test_failures_are_recorded_and_skipped(self, tmp_path):
        def fragile(parameters):
            if parameters["batch"] == 16:
                raise RuntimeError("out of memory")
            return math.nan if parameters["batch"] == 32 else peak(parameters)

        found = sweep(fragile, SPACE, 12, 1, tmp_path)
        assert len(found["trials"]) == 12
        by_batch = {batch: [t for t in found["trials"] if t["parameters"]["batch"] == batch] for batch in (16, 32, 64)}
        assert all(by_batch.values())
        assert {(t["state"], t["error"], t["value"]) for t in by_batch[16]} == {
            ("failed", "RuntimeError: out of memory", None)
        }
        assert {(t["state"], t["error"]) for t in by_batch[32]} == {("failed", "the objective is nan")}
        assert {t["state"] for t in by_batch[64]} == {"done"}
        assert found["best"]["state"] == "done"

    def test_nothing_but_failures(self, tmp_path):
        found = sweep(lambda parameters: math.inf, SPACE, 2, 0, tmp_path)
        assert found["best"] is None

    def test_ctrl_c_is_no_failure(self, tmp_path):
        def stopped(parameters):
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            sweep(stopped, SPACE, 2, 0, tmp_path)
        assert [trial["state"] for trial in sweep(peak, SPACE, 2, 0, tmp_path)["trials"]] == ["done", "done"]

    def test_another_search_in_the_same_folder(self, tmp_path):
        sweep(peak, SPACE, 1, 0, tmp_path)
        with pytest.raises(ValueError, match="another seed: choose another --out"):
            sweep(peak, SPACE, 1, 1, tmp_path)
        with pytest.raises(ValueError, match="another space"):
            sweep(lambda p: 0.0, {"batch": SPACE["batch"]}, 1, 0, tmp_path)

    def test_no_trials(self, tmp_path):
        with pytest.raises(ValueError, match="trials must be 1 or more"):
            sweep(peak, SPACE, 0, 0, tmp_path)


class TestInAnyOrder:
    @staticmethod
    def shuffled(seed, stop=math.inf):
        """Outcomes of whatever waits, in an order of chance."""

        def evaluate(proposals):
            chance, waiting, count = random.Random(seed), [], 0
            for proposal in itertools.chain(proposals, itertools.repeat(None)):
                if proposal is not None and (waiting.append(proposal) or chance.random() < 0.7):
                    continue
                if not waiting or count == stop:
                    return
                count += 1
                own = waiting.pop(chance.randrange(len(waiting)))
                yield own, {"value": peak(own.parameters), "error": None, "seconds": 1.0}

        return evaluate

    @pytest.fixture(scope="class")
    @classmethod
    def one_order(cls, tmp_path_factory):
        return search(cls.shuffled(0), SPACE, 16, 7, tmp_path_factory.mktemp("order"), ahead=3)

    def test_the_order_of_outcomes_changes_nothing(self, one_order, tmp_path):
        told = []
        other = search(
            self.shuffled(1), SPACE, 16, 7, tmp_path, lambda trial, done: told.append((trial, done)), ahead=3
        )
        assert points(other) == points(one_order)
        assert sorted(trial["number"] for trial, _ in told) == [done - 1 for _, done in told] == list(range(16))

    def test_nor_do_two_goes(self, one_order, tmp_path):
        assert len(search(self.shuffled(1), SPACE, 12, 7, tmp_path, ahead=3)["trials"]) == 12
        assert points(search(self.shuffled(5), SPACE, 16, 7, tmp_path, ahead=3)) == points(one_order)

    @pytest.mark.parametrize("stop", [1, 11])
    def test_nor_does_an_interruption(self, one_order, tmp_path, stop):
        search(self.shuffled(2, stop), SPACE, 16, 7, tmp_path, ahead=3)
        tried = []
        again = self.shuffled(3)

        def counted(proposals):
            for proposal, outcome in again(proposals):
                tried.append(proposal.number)
                yield proposal, outcome

        assert points(search(counted, SPACE, 16, 7, tmp_path, ahead=3)) == points(one_order)
        assert len(tried) == len(set(tried)) == 16 - stop  # what was known was not tried again

    def test_nothing_ahead_is_one_after_the_other(self, undisturbed, tmp_path):
        assert points(search(self.shuffled(4), SPACE, 14, 7, tmp_path)) == points(undisturbed)

    def test_what_is_missing_ends_the_search(self, tmp_path):
        def missing(parameters):
            raise OSError("mnist is missing")

        with pytest.raises(OSError, match="mnist is missing"):
            sweep(missing, SPACE, 3, 7, tmp_path)


def test_several_settings_as_one_result(tmp_path):
    class Setting:
        key, network = "lenet5-digits", "lenet5"

    class Screen:
        said = []  # noqa: RUF012

        def begin(self, key, networks):
            self.said.append(("begin", key))

        def progress(self, key, done, total):
            self.said.append((done, total))

        def end(self, key, seconds):
            self.said.append(("end", key))

    with Store(tmp_path, {}) as store:
        content = sweep_settings([Setting], lambda setting, **place: peak, 3, 0, store, "cpu", Screen())
    assert Screen.said == [("begin", Setting.key), (1, 3), (2, 3), (3, 3), ("end", Setting.key)]
    assert [run["setting"] for run in content["runs"]] == [Setting.key] * 3
    best = content["settings"][Setting.key]["best"]
    assert best["value"] == max(run["value"] for run in content["runs"])
    assert content["energy"]["how"] in ("measured", "estimated")
    assert content["provenance"]["trials"] == 3
