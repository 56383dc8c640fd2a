"""Times and memory of a setting, on a GPU. Skipped where there is none."""

import pytest
import torch

from bmrs.study import timing
from bmrs.study.settings import PAPER
from bmrs.study.timing import Turn

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS"),  # torch's own, at the first product of a thread
]
GPU = torch.device("cuda")


@pytest.mark.parametrize("key", ["mlp-fashion-mnist", "lenet5-cifar10"])
def test_setting(key):
    found = timing.measure(PAPER[key], device="cuda")
    runs = {(run["method"], run["mode"]): run for run in found["runs"]}
    assert len(runs) == 9
    assert all(run["ms"] > 0 for run in runs.values())
    assert all(run["memory_mib"] > 0 for run in runs.values())
    for method in ("none", "gated", "removed"):
        assert runs[method, "train_step"]["ms"] > runs[method, "train_forward"]["ms"]
    assert runs["gated", "train_forward"]["memory_mib"] > runs["none", "train_forward"]["memory_mib"]
    assert "threads" not in found["setting"]


def test_the_clock_sees_what_the_gpu_does():
    x = torch.randn(8192, 8192, device="cuda")

    def products(number):
        def run():
            for _ in range(number):
                torch.mm(x, x)

        return Turn(lambda: None, run)

    one, four = (products(number).milliseconds(3, GPU) for number in (1, 4))
    assert 2.5 < four / one < 6


def test_memory_beyond_what_was_there():
    kept = torch.empty(2**20, device="cuda")

    def run():
        a = torch.empty(3 * 2**18, device="cuda")
        torch.empty_like(a)

    assert Turn(lambda: None, run).peak_mib(GPU) == 6.0
    assert kept.numel() == 2**20
