"""How fast the study trains: a step of all networks of a setting as one stack, beside one network alone.

python -m benchmarks.ensemble --device cuda              # writes results/ensemble.json and .md; images are random
"""

import argparse
import json
import math
import time
from pathlib import Path

import torch

import bmrs
from bmrs.study.ensemble import Ensemble
from bmrs.study.provenance import provenance
from bmrs.study.settings import PAPER, Setting


def ensemble(setting: Setting, members: int, device: str, *, noisy: bool) -> Ensemble:
    shape = (3 if setting.data == "cifar10" else 1, 32, 32)
    x, y = torch.randn(4096, *shape, device=device), torch.randint(10, (4096,), device=device)
    network = setting.build(shape, 10, 0)
    structures = list(bmrs.structures(network, x[:2].cpu()))
    prices = torch.full((members, sum(s.units for s in structures)), 1e-3) if noisy else None
    networks = [setting.build(shape, 10, seed) for seed in range(members)]
    made = Ensemble(networks, x, y, batch=setting.batch, learning_rate=setting.learning_rate, structures=structures,
                    seeds=range(members), prices=prices)  # fmt: skip
    made.close_ranks(gain=math.inf)
    return made


def step_ms(job: Ensemble, steps: int) -> float:
    order = torch.randint(4096, (job.members, job.batch * steps))
    job.train_epoch(order)
    _wait(job)
    start = time.perf_counter()
    job.train_epoch(order)
    _wait(job)
    return 1e3 * (time.perf_counter() - start) / steps


def _wait(job: Ensemble) -> None:
    if job.x.is_cuda:
        torch.cuda.synchronize()


def profile(job: Ensemble) -> list[tuple[str, float, int]]:
    """The costliest kernels of a step: name, microseconds a step, launches a step."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    job.at.zero_()
    with profiler(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(5):
            job._graph.replay()
        torch.cuda.synchronize()
    rows = [(e.key, e.self_device_time_total / 5, e.count // 5) for e in found.key_averages()]
    return sorted(rows, key=lambda row: -row[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--members", type=int, default=50)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--settings", nargs="+", default=list(PAPER))
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("results"))
    options = parser.parse_args()
    rows = []
    for key in options.settings:
        setting = PAPER[key]
        images = 40_000 if setting.data == "cifar10" else 48_000
        row = {"setting": key}
        for name, members, noisy in (("stack", options.members, True), ("plain stack", options.members, False),
                                     ("alone", 1, True)):  # fmt: skip
            begun = time.perf_counter()
            job = ensemble(setting, members, options.device, noisy=noisy)
            row[name] = step_ms(job, options.steps)
            row[f"{name}, seconds to start"] = time.perf_counter() - begun
            if options.profile and name == "stack":
                for kernel, micros, launches in profile(job)[:14]:
                    print(f"    {micros:8.1f} µs {launches:4d} × {kernel[:90]}")
        row["minutes for 60 epochs"] = row["stack"] * images / setting.batch * 60 / 60e3
        rows.append(row)
        print(json.dumps(row), flush=True)
    made = provenance(device=options.device, members=options.members)
    (options.out / "ensemble.json").write_text(json.dumps({"rows": rows, "provenance": made}, indent=2) + "\n")


if __name__ == "__main__":
    main()
