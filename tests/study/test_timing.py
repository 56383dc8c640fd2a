"""One short measurement of a real setting, and the clock by itself, on made-up passes."""

import types

import numpy as np
import pytest
import torch
from torch import nn

import bmrs
from bmrs import report
from bmrs.report.tables import MODES, STATES
from bmrs.study import published, tables, timing
from bmrs.study.counting import Counting
from bmrs.study.settings import PAPER, SETTINGS
from bmrs.study.timing import Turn, Variant
from tests.study import made_results

CPU = torch.device("cpu")
GPU = types.SimpleNamespace(type="cuda")  # whose functions are replaced
KEY = "mlp-digits"


@pytest.fixture(scope="module")
def measured():
    """What was found, and what it was made of: the variants, all times, and what was told on the way."""
    seen = types.SimpleNamespace(variants=[], biases=[], progress=[], threads=set())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "ROUNDS", (4, 4))
        patch.setattr(timing, "TURN", 1.0)
        race, plain = timing.race, Variant.__init__

        def made(self, network, *rest):
            plain(self, network, *rest)
            seen.variants.append(self)
            seen.biases.append(network.fc1.bias.tolist())

        def timed(turns, device, progress):
            seen.threads.add(torch.get_num_threads())
            seen.times = race(turns, device, progress)
            return seen.times

        patch.setattr(Variant, "__init__", made)
        patch.setattr(timing, "race", timed)
        seen.random, seen.threads_before = torch.get_rng_state(), torch.get_num_threads()
        seen.found = timing.measure(
            SETTINGS[KEY], device="cpu", data_dir=None, progress=lambda *told: seen.progress.append(told)
        )
        seen.random_after, seen.threads_after = torch.get_rng_state(), torch.get_num_threads()
    return seen


@pytest.fixture
def content(measured):
    made = made_results.timing((KEY,))
    return {**made, "settings": {KEY: measured.found["setting"]}, "runs": measured.found["runs"]}


class TestMeasure:
    def test_format(self, measured):
        made = made_results.timing((KEY,))
        entry, runs = measured.found["setting"], measured.found["runs"]
        assert entry.keys() >= made["settings"][KEY].keys()
        assert (entry["network"], entry["data"], entry["networks"]) == ("mlp", "digits", 3)
        assert entry["layers"] == {"fc1": 50, "fc2": 50}
        assert entry["parameters"] == 1025 * 50 + 51 * 50 + 51 * 10
        assert {(run["method"], run["mode"]) for run in runs} == {(r["method"], r["mode"]) for r in made["runs"]}
        assert len(runs) == 9
        for run in runs:
            assert run.keys() == made["runs"][0].keys()
            assert (run["setting"], run["batch"], run["memory_mib"]) == (KEY, 32, None)
            assert 0 < run["ms_spread"][0] <= run["ms"] <= run["ms_spread"][1]

    def test_medians_and_percentiles_of_all_rounds(self, measured):
        runs = measured.found["runs"]
        assert [len(own) for own in measured.times] == [4] * 9
        for run, own in zip(runs, measured.times, strict=True):
            assert run["ms"] == pytest.approx(np.median(own), abs=1e-5)
            assert run["ms_spread"] == pytest.approx(np.percentile(own, [10, 90]), abs=1e-5)
        assert measured.progress == [(done, 4) for done in range(1, 5)]

    def test_the_gates_are_on_and_learn(self, measured):
        plain, gated, smaller = measured.variants
        bank = gated.network.bmrs_noise
        assert sum(bank.sizes.values()) == 100
        assert bank.steps >= 4  # the Pruner saw the optimizer step, and added the KL
        assert float(bank.mu.detach().abs().max()) > 0
        assert not any(hasattr(other.network, "bmrs_noise") for other in (plain, smaller))

    def test_half_the_units_are_gone(self, measured):
        plain, _, smaller = measured.variants
        removed = measured.found["setting"]["removed"]
        assert removed["units"] == {"fc1": 25, "fc2": 25}
        assert smaller.network.fc2.weight.shape == (25, 25)
        assert bmrs.cost.parameters(smaller.network) == removed["parameters"] == 1025 * 25 + 26 * 25 + 26 * 10
        assert bmrs.cost.parameters(plain.network) == measured.found["setting"]["parameters"]
        assert removed["why"] == "half of the units"
        whole, _, left = measured.biases
        kept = [whole.index(value) for value in left]  # the weights are those of the whole network
        assert kept == sorted(kept)
        assert kept not in (list(range(25)), list(range(25, 50)))  # random ones

    def test_leaves_the_process_as_it_was(self, measured):
        assert measured.threads == {1}
        assert measured.threads_after == measured.threads_before
        assert torch.equal(measured.random, measured.random_after)

    def test_table(self, content, measured):
        made = tables.timing_table(content).markdown.replace("\u00a0", " ")
        run = next(r for r in measured.found["runs"] if (r["method"], r["mode"]) == ("gated", "train_step"))
        assert f"{run['ms']:.{3 if run['ms'] < 1 else 2}f} [" in made
        assert "MLP, digits 26,535 of 54,310 (half of the units)" in made
        assert "one thread" in made
        assert "MiB" not in made  # nothing tells the memory
        content["runs"][0]["memory_mib"] = 1.5
        made = tables.timing_table(content).markdown
        assert "Memory for a batch of 32, MiB" in made
        assert "beyond what was taken before" in made

    def test_report(self, content, measured, tmp_path):
        page = report.write([content], tmp_path / "report.html").read_text(encoding="utf-8")
        for words in (*(MODES[mode] for mode in timing.MODES), *(STATES[m] for m in ("none", "gated", "removed"))):
            assert words in page
        for run in measured.found["runs"]:
            assert "{:.3g} to {:.3g} ms".format(*run["ms_spread"]) in page


def test_table_says_the_papers_ratios():
    made = tables.timing_table(made_results.timing(("mlp-mnist", "lenet5-mnist"))).markdown
    assert "forward pass of training takes 1.20 times as long as without gates (the paper: 4.93 to 8.31)" in made
    assert "inference takes 1.20 times as long as without gates (the paper: 1.36 to 1.56)" in made
    assert "whole training step takes 1.20 times as long as without gates. " in made  # which the paper did not time


@pytest.fixture(scope="module")
def counting():
    network, x = PAPER["mlp-fashion-mnist"].build((1, 32, 32), 10, 0), torch.zeros(2, 1, 32, 32)
    return Counting(network, list(bmrs.structures(network, x)), x)


class TestShares:
    def test_as_published(self, counting):
        gone, share, why = timing.shares(PAPER["mlp-fashion-mnist"], counting)
        a, b = 150 - gone["fc1"], 150 - gone["fc2"]
        assert a == b == 150 - round(150 * share)

        def by_the_papers_counting(a, b):
            zeros = (1024 * 150 + 150 * 150 + 150 * 10) - (1024 * a + a * b + b * 10)
            return (zeros + 2 * (300 - a - b)) / (177_910 + 2 * 300)

        distance = [abs(by_the_papers_counting(n, n) - 0.932) for n in (a - 1, a, a + 1)]
        assert distance[1] == min(distance) < 0.004
        assert "93.2 %" in why

    def test_one_unit_stays(self, counting, monkeypatch):
        monkeypatch.setattr(published, "result", lambda *_: published.Result(published.Printed(100.0, 0.0), None))
        assert timing.shares(PAPER["mlp-fashion-mnist"], counting)[0] == {"fc1": 149, "fc2": 149}


class Spy(nn.Linear):
    """Notes in what state it was called."""

    def __init__(self):
        super().__init__(6, 10)
        self.states = []

    def forward(self, x):
        self.states.append((self.training, torch.is_grad_enabled(), self.weight.grad is None))
        return super().forward(x)


@pytest.mark.parametrize(
    ("mode", "state", "changes"),
    [
        ("train_forward", (True, True, True), False),
        ("inference", (False, False, True), False),
        ("train_step", (True, True, True), True),
    ],
)
def test_modes(mode, state, changes):
    network = Spy()
    before = network.weight.detach().clone()
    variant = Variant(network, torch.randn(32, 6), torch.randint(10, (32,)), SETTINGS[KEY])
    variant.step()  # so that there are gradients to clear
    stepped = network.weight.detach().clone()
    assert not torch.equal(stepped, before)
    turn = variant.turn(mode)
    turn.prepare()
    turn.run()
    assert network.states[1:] == [state]
    assert torch.equal(network.weight, stepped) != changes


class TestClock:
    @pytest.fixture
    def clock(self, monkeypatch):
        """Stands still but for :meth:`job`."""
        now = [5.0]
        monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
        order = []

        def job(name, ms):
            """``ms``: of each pass, by how many came before it."""
            passes = []

            def run():
                now[0] += 1e-3 * ms(len(passes))
                passes.append(name)
                order.append(name)

            return Turn(lambda: order.append(f"{name} prepared"), run), passes

        return types.SimpleNamespace(job=job, order=order)

    def test_one_pass_of_several(self, clock):
        turn, passes = clock.job("a", lambda n: 100.0 if n == 0 else n)
        assert turn.milliseconds(4, CPU) == pytest.approx((1 + 2 + 3 + 4) / 4)  # the first one only warms
        assert len(passes) == 5
        assert clock.order[0] == "a prepared"

    def test_everyone_has_a_turn_in_a_round(self, clock):
        (a, passes_a), (b, passes_b), (c, passes_c) = (
            clock.job(*job) for job in (("a", lambda n: 2.0), ("b", lambda n: 500.0), ("c", lambda n: 0.001))
        )
        told = []
        times = timing.race([a, b, c], CPU, lambda *done: told.append(done))
        assert told == [(n, 5) for n in range(1, 6)]  # half a second each: as few rounds as there may be
        for own, ms in zip(times, (2.0, 500.0, 0.001), strict=True):
            assert own == pytest.approx([ms] * 5)
        # at first two passes to know how many, then in each round one to warm and as many as make 8 ms, or ten
        assert (len(passes_a), len(passes_b), len(passes_c)) == (2 + 5 * 5, 2 + 5 * 2, 2 + 5 * 11)
        turns = [name[0] for name in clock.order if "prepared" in name]
        assert turns == ["a", "b", "c"] * 6

    def test_rounds_that_fit_the_budget(self, clock):
        many = timing.race([clock.job("a", lambda n: 1.0)[0]], CPU)
        assert len(many[0]) == 25
        assert len(timing.race([clock.job("a", lambda n: 100.0)[0]], CPU)[0]) == 15  # of two passes, 3 s in all

    def test_a_slower_round_shows(self, clock):
        turn, _ = clock.job("a", lambda n: 30.0 if n < 6 else 60.0)
        own = timing.race([turn], CPU)[0]
        assert own[:2] == pytest.approx([30.0, 30.0])
        assert own[2:] == pytest.approx([60.0] * (len(own) - 2))

    def test_a_gpu_tells_by_events(self, clock, monkeypatch):
        turn, passes = clock.job("a", lambda n: 1.0)

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing
                self.at, self.over = None, False

            def record(self):
                self.at = len(passes)

            def synchronize(self):
                self.over = True

            def elapsed_time(self, last):
                assert last.over
                return 7.0 * (last.at - self.at)

        waits = []
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append(len(passes)))
        assert turn.milliseconds(4, GPU) == 7.0
        assert waits == [1]  # what warmed is over when the clock begins

    def test_memory_beyond_what_was_there(self, monkeypatch):
        taken = types.SimpleNamespace(now=900 * 2**20, peak=2000 * 2**20)

        def prepare():
            taken.now = 700 * 2**20  # gradients go before anything is read

        def run():
            taken.peak = max(taken.peak, taken.now + 12 * 2**20)

        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        names = ("requested_bytes.all.current", "requested_bytes.all.peak")
        monkeypatch.setattr(torch.cuda, "memory_stats", lambda: dict(zip(names, (taken.now, taken.peak), strict=True)))
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: setattr(taken, "peak", taken.now))
        assert Turn(prepare, run).peak_mib(GPU) == 12.0
        assert Turn(prepare, run).peak_mib(CPU) is None


def test_an_error_does_not_leave_one_thread(monkeypatch):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        monkeypatch.setattr(timing.bmrs, "structures", lambda *_: 1 / (torch.get_num_threads() - 1))
        with pytest.raises(ZeroDivisionError):
            timing.measure(SETTINGS[KEY])
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
