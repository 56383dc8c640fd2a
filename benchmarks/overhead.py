"""What training with gates costs: a whole training step with Adam beside that of the same network without gates.

    python -m benchmarks.overhead                      # on this processor: results/overhead_cpu.json and .md
    python -m benchmarks.overhead --device cuda        # on a GPU: results/overhead_cuda.json and .md

All networks of a row live in one process and take turns, one round after the other; a ratio is the median of the
rounds' ratios. Beside it stands the floor: the bytes and kernels that gates need at the least, times what this device
needs for one, measured in the same process.
"""

import argparse
import contextlib
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import benchmarks.architectures  # noqa: F401  makes transformers importable beside a torchvision without its kernels
import bmrs
from benchmarks.overhead_rows import ByHand, Row, gated, rows
from benchmarks.overhead_tables import markdown
from bmrs import fused, native
from bmrs.gates import OutputGate, WeightGate
from bmrs.study.provenance import provenance

WARM = 5
GIB, GB = 2**30, 1e9
FRACTION = 0.4  # of all units, removed to see what is gained


class Job:
    """A network with its optimizer, and one training step of it."""

    def __init__(self, row: Row, device: torch.device, noise: str | None) -> None:
        """``noise``: "example", "batch", "by hand" for gates in the network's own code, None for no gates."""
        torch.manual_seed(0)
        self.row, self.device, self.noise = row, device, noise
        self.others = _allocated(device)
        layout = torch.channels_last if row.last else torch.contiguous_format
        network = ByHand() if noise == "by hand" else row.build()
        self.network = network.to(device, memory_format=layout)
        self.x = torch.randn(row.batch, *row.image, device=device)
        self.x = self.x.to(memory_format=layout) if row.last else self.x
        self.y = torch.randint(10, (row.batch,), device=device)
        self.pruner: bmrs.Pruner | None = None
        self.seconds: dict[str, float] = {}
        options = {"fused": True, "capturable": True} if row.mode == "graph" else {}
        trained = self.network.groups() if isinstance(self.network, ByHand) else self.network.parameters()
        self.optimizer = torch.optim.Adam(trained, lr=1e-5, **options)
        if noise in ("example", "batch"):
            with self._timed("discovery"):
                structures = gated(row, self.network, self.x)
            with self._timed("proof and gates"):
                self.pruner = bmrs.Pruner(
                    self.network, self.x[:2], self.optimizer, structures=structures, noise=noise, seed=0
                )
        self.called: Callable[[Tensor], Tensor] = self.network
        if row.mode == "compile":
            self.called = torch.compile(self.network)
        self.step: Callable[[], None] = self._step
        begun = time.perf_counter()
        if row.mode == "graph":
            self.step = self._recorded()
        else:
            for _ in range(WARM):
                self._step()
        self.seconds["first steps"] = time.perf_counter() - begun
        self.memory = self._peak()

    @contextlib.contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        begun = time.perf_counter()
        yield
        _wait(self.device)
        self.seconds[name] = time.perf_counter() - begun

    def _step(self) -> None:
        self.optimizer.zero_grad()
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.row.half):
            loss = F.cross_entropy(self.called(self.x), self.y)
        loss.backward()
        if isinstance(self.network, ByHand):
            self.network.add_kl()
        self.optimizer.step()

    def _recorded(self) -> Callable[[], None]:
        """All steps on one stream, those before it too: what sums gradients stays on the stream that it was made on."""
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(WARM):
                self._step()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        self.optimizer.zero_grad()
        with torch.cuda.graph(graph, stream=aside):
            self._step()
        return graph.replay

    def _peak(self) -> float | None:
        """GB that a training of this network alone takes."""
        if self.device.type != "cuda" or self.row.mode == "graph":
            return None
        self.optimizer.zero_grad()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        self.step()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - self.others) / GB

    @torch.no_grad()
    def infer(self) -> None:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.row.half):
            self.network(self.x)

    def milliseconds(self, run: Callable[[], None], passes: int) -> float:
        run()
        _wait(self.device)
        begun = time.perf_counter()
        for _ in range(passes):
            run()
        _wait(self.device)
        return 1e3 * (time.perf_counter() - begun) / passes


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _allocated(device: torch.device) -> int:
    gc.collect()
    return torch.cuda.memory_allocated() if device.type == "cuda" else 0


def race(jobs: list[Job], what: str, budget: float) -> dict[str, Any]:
    """Milliseconds of each job in turn, and each one's ratio to the first."""
    runs = [getattr(job, what) for job in jobs]
    first = [job.milliseconds(run, 2) for job, run in zip(jobs, runs, strict=True)]
    passes = [max(1, min(50, round(30.0 / ms))) for ms in first]
    rounds = max(5, min(40, int(1e3 * budget / sum((n + 1) * ms for n, ms in zip(passes, first, strict=True)))))
    times: list[list[float]] = [[] for _ in jobs]
    for turn in range(rounds):
        for place in range(len(jobs)):  # who is first changes
            own = (place + turn) % len(jobs)
            times[own].append(jobs[own].milliseconds(runs[own], passes[own]))
    ratios = [[mine / plain for mine, plain in zip(own, times[0], strict=True)] for own in times]
    return {
        "rounds": rounds,
        "ms": {str(job.noise): statistics.median(own) for job, own in zip(jobs, times, strict=True)},
        "ratio": {str(job.noise): statistics.median(own) for job, own in zip(jobs, ratios, strict=True)},
        "ratio_quartiles": {
            str(job.noise): statistics.quantiles(own, n=4)[::2] for job, own in zip(jobs, ratios, strict=True)
        },
    }


# --- the floor --------------------------------------------------------------------------------------------------------


def device_constants(device: torch.device) -> dict[str, float]:
    """Bytes a second that a copy moves, and microseconds of a kernel that has nothing to do, eager and in a graph."""
    source = torch.empty((1 << 28) // 4 if device.type == "cuda" else 1 << 24, device=device)
    target = torch.empty_like(source)
    small = torch.zeros(32, device=device)

    def seconds(run: Callable[[], Any], times: int) -> float:
        found = []
        for _ in range(7):
            _wait(device)
            begun = time.perf_counter()
            for _ in range(times):
                run()
            _wait(device)
            found.append((time.perf_counter() - begun) / times)
        return min(found)

    made = {
        "bandwidth": 2 * source.numel() * 4 / seconds(lambda: target.copy_(source), 20),
        "eager_kernel_us": 1e6 * seconds(lambda: small.add_(1.0), 500),
    }
    if device.type == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(200):
                small.add_(1.0)
        made["graph_kernel_us"] = 1e6 * seconds(graph.replay, 20) / 200
    return made


def floor(job: Job, constants: dict[str, float], plain_ms: float) -> dict[str, float]:
    """What gates need at the least, as code that leaves the network's own operations as they are."""
    assert job.pruner is not None
    bank, row = job.pruner.bank, job.row
    inputs = [gate for gate in bank._consumers if not isinstance(gate, WeightGate)]
    weights = [gate for gate in bank._consumers if isinstance(gate, WeightGate)]
    sizes: list[int] = []
    hooks = []
    for module in dict.fromkeys(gate.module for gate in inputs):
        after = any(isinstance(gate, OutputGate) for gate in inputs if gate.module is module)

        def note(module: nn.Module, args: tuple[Any, ...], output: Tensor, after: bool = after) -> None:
            tensor = output if after else args[0]
            sizes.append(tensor.numel() * tensor.element_size())

        hooks.append(module.register_forward_hook(note))
    job.infer()
    for hook in hooks:
        hook.remove()
    units, drawn = bank.mu.numel(), row.batch if job.noise == "example" else 1
    # Forward: read, write. Backward: read what came in and what comes back, write what goes on. A compiler can do all
    # of it while the neighbours read and write the same, except for reading once more what came in.
    passes = 1 if row.mode == "compile" else 5
    moved = passes * sum(sizes) + 5 * sum(gate.weight.numel() * 4 for gate in weights)
    moved += 4 * units * (drawn * (3 + 1 + 1 + 3) + 2 * 12)  # θ and its derivatives, there and back; φ and its Adam
    kernels = (0 if row.mode == "compile" else 2 * (len(sizes) + len(weights))) + 8
    each = constants.get("graph_kernel_us", 0.0)
    if row.mode == "eager" and row.small:
        each = constants["eager_kernel_us"]
    extra = 1e3 * moved / constants["bandwidth"] + 1e-3 * kernels * each
    return {"bytes": moved, "kernels": kernels, "ms": extra, "ratio": 1.0 + extra / plain_ms}


# --- one row ----------------------------------------------------------------------------------------------------------


def measure(row: Row, device: torch.device, constants: dict[str, float], budget: float) -> dict[str, Any]:
    torch.compiler.reset()
    jobs = [Job(row, device, noise) for noise in (None, "example", "batch")]
    by_hand = [Job(row, device, "by hand")] if row.name == "mlp" else []
    step = race([*jobs, *by_hand], "step", budget)
    found: dict[str, Any] = {
        "row": row.name, "mode": row.mode, "batch": row.batch, "image": row.image, "bf16": row.half,
        "channels_last": row.last, "places": row.places, "target": row.target, "memory_target_gb": row.memory,
        "units": jobs[1].pruner.bank.mu.numel() if jobs[1].pruner else 0, "step": step,
        "memory_gb": {str(job.noise): job.memory for job in jobs},
        "floor": {str(job.noise): floor(job, constants, step["ms"]["None"]) for job in jobs[1:]},
    }  # fmt: skip
    if row.mode == "eager":
        for job in jobs:
            job.network.eval()
        found["inference"] = race(jobs[:2], "infer", budget / 4)
        smaller = jobs[1]
        assert smaller.pruner is not None
        with smaller.pruner.folded():
            found["inference_folded"] = race(jobs[:2], "infer", budget / 4)
        smaller.network.train()
        smaller.step()  # gates that were never drawn are not pruned
        with smaller._timed("prune()"):
            smaller.pruner.prune(fraction=FRACTION, undoable=False)
        with smaller._timed("finish()"):
            smaller.pruner.finish()
        smaller.network.eval()
        found["inference_removed"] = race([jobs[0], smaller], "infer", budget / 4)
        found["removed_fraction"] = FRACTION
    found["seconds"] = {str(job.noise): job.seconds for job in jobs}
    return found


def sweep(device: torch.device) -> list[dict[str, float]]:
    """Draw, its gradient and the KL's, over units and over examples."""
    most = 1 << (29 if device.type == "cuda" else 24)
    points = [(10**power, 1) for power in range(3, 8)] + [(10**power, 32) for power in range(3, 8)]
    points += [(10_000, 2**power) for power in range(0, 13, 2)]
    found = []
    for units, examples in points:
        if units * examples > most:
            continue
        bank = bmrs.NoiseBank({"layer": units}, seed=0).to(device)
        with torch.no_grad():
            bank.mu.uniform_(-2.0, 0.2)
            bank.log_sigma.uniform_(-5.0, 3.0)
        slope = torch.randn(examples, units, device=device)

        def run(bank: bmrs.NoiseBank = bank, slope: Tensor = slope) -> None:
            bank.mu.grad = bank.log_sigma.grad = None
            bank.draw(len(slope)).backward(slope)
            bmrs.draws.kl_gradient(bank.mu, bank.log_sigma, bank.alive)

        run()
        times = []
        for _ in range(5):
            _wait(device)
            begun = time.perf_counter()
            run()
            _wait(device)
            times.append(time.perf_counter() - begun)
        ms = 1e3 * statistics.median(times)
        found.append({"units": units, "examples": examples, "ms": ms, "ns_each": 1e6 * ms / units / examples})
        del bank, slope
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rows", nargs="*", help="numbers of rows, from 0; all unless given")
    parser.add_argument("--budget", type=float, default=20.0, help="seconds of measuring for each row")
    parser.add_argument("--no-sweep", action="store_true")
    parser.add_argument("--out", type=Path, help="without ending; results/overhead_DEVICE unless given")
    options = parser.parse_args()
    device = torch.device(options.device)
    out = options.out or Path(f"results/overhead_{device.type}")
    torch.set_float32_matmul_precision("high")  # TF32, on a GPU
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    made = provenance(
        device=options.device, threads=torch.get_num_threads(), compiled_c=native.available(),
        fused=fused.wanted(), budget_seconds=options.budget,
    )  # fmt: skip
    constants = device_constants(device)
    found: dict[str, Any] = {"provenance": made, "constants": constants, "rows": [], "sweep": []}
    wanted = [row for n, row in enumerate(rows(device)) if not options.rows or str(n) in options.rows]
    out.parent.mkdir(parents=True, exist_ok=True)
    for row in wanted:
        try:
            found["rows"].append(measure(row, device, constants, options.budget))
            print(json.dumps(found["rows"][-1]["step"]["ratio"]), row.name, row.mode, flush=True)
        except Exception as problem:  # the other rows count all the same
            found["rows"].append({"row": row.name, "mode": row.mode, "problem": f"{type(problem).__name__}: {problem}"})
            print(row.name, row.mode, found["rows"][-1]["problem"], flush=True)
        _save(found, out)
        if device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
    if not options.no_sweep:
        found["sweep"] = sweep(device)
        _save(found, out)
    print(markdown(found))


def _save(found: dict[str, Any], out: Path) -> None:
    out.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    out.with_suffix(".md").write_text(markdown(found))


if __name__ == "__main__":
    main()
