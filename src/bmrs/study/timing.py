"""What gates cost and what removal gains: a pass of a setting's network without gates, with them, and when smaller.

The three stand side by side in one process and take turns, so that whatever else the machine does meets all of them.
The gates are those a user gets from :class:`bmrs.Pruner`, not the study's stacks.
"""

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bmrs
from bmrs.study import published
from bmrs.study.counting import Counting
from bmrs.study.settings import Setting

BATCH = 32  # as in the paper
MODES = ("train_forward", "inference", "train_step")
BUDGET = 3000.0  # milliseconds for all rounds of a setting
ROUNDS = (5, 25)  # at least and at most, whatever the budget
TURN, PASSES = 8.0, 10  # milliseconds one turn is to last, and the most passes it is made of
WARM = 5  # passes that count for nothing: the first ones load kernels and take memory
_MIB = 2**20


def measure(
    setting: Setting,
    *,
    device: str = "cpu",
    data_dir: Path | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Milliseconds and memory of every method and mode: the median over rounds, with its 10th and 90th percentile.

    Methods: the network without gates ("none"), with them ("gated"), and after some units are gone ("removed"). Modes:
    a forward pass in training mode, one in evaluation without gradients, and a whole training step. The images are
    random, which makes no difference to the time, so ``data_dir`` is not read. ``progress``: rounds done and in all.
    """
    begun, place = time.perf_counter(), torch.device(device)
    with _alone(place):
        chance = torch.Generator().manual_seed(0)
        shape = (3 if setting.data == "cifar10" else 1, 32, 32)
        x = torch.randn(BATCH, *shape, generator=chance).to(place)
        y = torch.randint(10, (BATCH,), generator=chance).to(place)
        plain, gated, smaller = (setting.build(shape, 10, 0) for _ in range(3))
        structures = bmrs.structures(smaller, x[:2].cpu())
        counting = Counting(smaller, list(structures), x[:2].cpu())
        gone, share, why = shares(setting, counting)
        bmrs.remove(
            smaller, {s: torch.randperm(s.units, generator=chance)[: gone[s.name]].tolist() for s in structures}
        )
        variants = [Variant(plain, x, y, setting), Variant(gated, x, y, setting), Variant(smaller, x, y, setting)]
        # As in the study: the published price, the gates as fast as the weights.
        bmrs.Pruner(gated, x[:2], variants[1].optimizer, price="layer", phi_lr=1.0, seed=0)
        runs, rounds = compared(setting.key, dict(zip(("none", "gated", "removed"), variants, strict=True)), progress)
    return {
        "setting": {
            **setting.entry(counting, time.perf_counter() - begun, len(variants)),
            "rounds": rounds,
            **({"threads": 1} if place.type == "cpu" else {}),
            "removed": {
                "why": why,
                "share": share,
                "units": {name: own.stop - own.start - gone[name] for name, own in counting.layers.items()},
                "parameters": bmrs.cost.parameters(smaller),
                "multiply_adds": bmrs.cost.multiply_adds(smaller, x[:1]),
            },
        },
        "runs": runs,
    }


def compared(
    key: str, variants: Mapping[str, "Variant"], progress: Callable[[int, int], None]
) -> tuple[list[dict[str, Any]], int]:
    """One run for each variant and mode of a setting, measured in turns, and in how many rounds."""
    named = [(method, variant, mode) for mode in MODES for method, variant in variants.items()]
    turns = [variant.turn(mode) for _, variant, mode in named]
    place = named[0][1].x.device
    for turn in turns:
        turn.warm()
    memory = [turn.peak_mib(place) for turn in turns]
    times = race(turns, place, progress)
    runs = [
        {
            "setting": key,
            "method": method,
            "batch": len(variant.x),
            "mode": mode,
            "ms": round(statistics.median(own), 5),
            "ms_spread": [round(end, 5) for end in spread(own)],
            "memory_mib": None if mib is None else round(mib, 3),
        }
        for (method, variant, mode), own, mib in zip(named, times, memory, strict=True)
    ]
    return runs, len(times[0])


def shares(setting: Any, counting: Counting, as_printed: bool = True) -> tuple[dict[str, int], float, str]:
    """How many units of each structure go, what share of them that is, and why that many.

    The paper prints no units, but the parameters BMRS_N removes: here the share of units, alike in all structures, that
    comes closest to it by the same counting. A structure keeps one unit at least. ``as_printed=False``: with gates at
    other places than the paper's, to which its counting does not apply.
    """
    printed = None if not as_printed else published.result(setting.network, setting.data, "bmrs_n")
    tried = [0.5] if printed is None else [n / 1000 for n in range(1000)]
    sizes = {name: own.stop - own.start for name, own in counting.layers.items()}
    gone = [{name: min(round(share * units), units - 1) for name, units in sizes.items()} for share in tried]
    if printed is None:
        return gone[0], tried[0], "half of the units"
    alive = torch.ones(len(tried), counting.units, dtype=torch.bool)
    for row, numbers in zip(alive, gone, strict=True):
        for name, own in counting.layers.items():
            row[own.start : own.start + numbers[name]] = False
    compression = counting.left(alive)["published"]
    best = int((compression - printed.compression.mean / 100.0).abs().argmin())
    return gone[best], tried[best], f"{printed.compression.mean:g} % by the paper's counting, as its BMRS_N"


class Variant:
    """A network with its optimizer, and what is done with it in each mode."""

    def __init__(self, network: nn.Module, x: Tensor, y: Tensor, setting: Setting) -> None:
        self.network, self.x, self.y = network.to(x.device), x, y
        self.optimizer: torch.optim.Optimizer = torch.optim.Adam(network.parameters(), lr=setting.learning_rate)

    def turn(self, mode: str) -> "Turn":
        run = {"train_forward": self.forward, "inference": self.inference, "train_step": self.step}[mode]
        return Turn(lambda: self.prepare(mode), run)

    def prepare(self, mode: str) -> None:
        self.optimizer.zero_grad()
        self.network.train(mode != "inference")

    def forward(self) -> None:
        self.network(self.x)

    @torch.no_grad()
    def inference(self) -> None:
        self.network(self.x)

    def step(self) -> None:
        self.optimizer.zero_grad()
        F.cross_entropy(self.network(self.x), self.y).backward()
        self.optimizer.step()


@dataclass(frozen=True)
class Turn:
    """What is timed, and what comes before it untimed."""

    prepare: Callable[[], None]
    run: Callable[[], None]

    def warm(self, passes: int = WARM) -> None:
        self.prepare()
        for _ in range(passes):
            self.run()

    def milliseconds(self, passes: int, device: torch.device) -> float:
        """Of one pass, in a row of several: on a GPU nobody waits for each."""
        self.warm(1)  # the caches are as the last one's turn left them
        if device.type == "cuda":
            torch.cuda.synchronize()
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            for _ in range(passes):
                self.run()
            last.record()
            last.synchronize()
            return float(first.elapsed_time(last)) / passes
        begun = time.perf_counter()
        for _ in range(passes):
            self.run()
        return 1e3 * (time.perf_counter() - begun) / passes

    def peak_mib(self, device: torch.device) -> float | None:
        """The most memory a pass takes beyond what was taken before it; None where nothing tells."""
        if device.type != "cuda":
            return None
        self.prepare()
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()["requested_bytes.all.current"]  # without what is left of cached blocks
        torch.cuda.reset_peak_memory_stats()
        self.run()
        torch.cuda.synchronize()
        return float(torch.cuda.memory_stats()["requested_bytes.all.peak"] - before) / _MIB


def race(
    turns: Sequence[Turn], device: torch.device, progress: Callable[[int, int], None] = lambda done, total: None
) -> list[list[float]]:
    """Milliseconds of a pass of each, one number per round; in a round everyone has a turn."""
    first = [turn.milliseconds(1, device) for turn in turns]
    passes = [max(1, min(PASSES, int(TURN / max(ms, 1e-3)))) for ms in first]
    one = sum((number + 1) * ms for number, ms in zip(passes, first, strict=True))
    rounds = max(ROUNDS[0], min(ROUNDS[1], int(BUDGET / max(one, 1e-3))))
    times: list[list[float]] = [[] for _ in turns]
    for done in range(1, rounds + 1):
        for turn, number, taken in zip(turns, passes, times, strict=True):
            taken.append(turn.milliseconds(number, device))
        progress(done, rounds)
    return times


def spread(values: Sequence[float]) -> tuple[float, float]:
    """10th and 90th percentile.

    >>> spread([float(n) for n in range(11)])
    (1.0, 9.0)
    """
    tenths = statistics.quantiles(values, n=10, method="inclusive")
    return tenths[0], tenths[-1]


@contextlib.contextmanager
def _alone(device: torch.device) -> Iterator[None]:
    """The device as the current one; on a processor one thread, since several measure how long they wait for another
    when others work there too.
    """
    threads = torch.get_num_threads()
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        try:
            if device.type == "cpu":
                torch.set_num_threads(1)
            yield
        finally:
            torch.set_num_threads(threads)
