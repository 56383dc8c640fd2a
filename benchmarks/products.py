"""What one gate costs a GPU and the processor that tells it what to do: x·θ and the gradients of both, by our kernels
and by plain torch. From which size on the kernels are worth it (``scaling.FEW``), and how large a tile should be.

    python -m benchmarks.products                # needs a GPU; writes results/products.json and .md
    python -m benchmarks.products --tiles        # other tiles too, to choose from
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bmrs import _scale_kernels, scaling
from bmrs.study.provenance import provenance

SHAPES = (  # of ResNet-50's filters, of a ViT's tokens, of LeNet-5's
    (32, 64, 56, 56), (32, 256, 56, 56), (32, 128, 28, 28), (32, 256, 14, 14), (32, 512, 7, 7), (32, 2048, 7, 7),
    (128, 64, 56, 56), (128, 256, 56, 56), (128, 512, 28, 28), (128, 256, 14, 14), (32, 197, 768), (32, 197, 3072),
    (32, 6, 28, 28), (32, 100),
)  # fmt: skip
KINDS = ((torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True))  # and whether channels lie last
NUMBERS, PROGRAMS = (512, 1024, 2048, 4096), (1 << 10, 1 << 12, 1 << 14)
REPEATS = 20


def job(shape: tuple[int, ...], kind: torch.dtype, last: bool) -> tuple[Callable[[], None], int]:
    """A product and the way back through it; and the bytes that it must move."""
    layout = torch.channels_last if last else torch.contiguous_format
    x = torch.randn(shape, device="cuda", dtype=kind).contiguous(memory_format=layout).requires_grad_()
    dim = len(shape) - 1 if len(shape) == 3 else 1
    theta = torch.rand(shape[0], shape[dim], device="cuda", requires_grad=True)
    slope = torch.randn_like(x)

    def run() -> None:
        torch.autograd.grad(scaling.scale(x, theta, dim), (x, theta), slope)

    return run, 5 * x.numel() * x.element_size()


def microseconds(run: Callable[[], None]) -> tuple[float, float]:
    """Of the GPU, several in a recorded graph; and of the processor that starts it."""
    aside = torch.cuda.Stream()
    with torch.cuda.stream(aside):
        for _ in range(3):
            run()
        torch.cuda.synchronize()
        issue = []
        for _ in range(5):
            begun = time.perf_counter()
            for _ in range(REPEATS):
                run()
            issue.append((time.perf_counter() - begun) / REPEATS)
            torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=aside):
        for _ in range(REPEATS):
            run()
    first, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(7):
        first.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * first.elapsed_time(end) / REPEATS)
    return statistics.median(times), 1e6 * statistics.median(issue)


def measure(shape: tuple[int, ...], kind: torch.dtype, last: bool, bandwidth: float, tiles: bool) -> dict[str, Any]:
    chosen, found = scaling._kernels, {}
    run, moved = job(shape, kind, last)
    try:
        scaling._kernels = lambda *_: None
        found["plain"] = microseconds(run)
        scaling._kernels = lambda *_: _scale_kernels
        found["ours"] = microseconds(run)
        own = _scale_kernels.NUMBERS, _scale_kernels.PROGRAMS
        for pair in [(n, p) for n in NUMBERS for p in PROGRAMS] if tiles else []:
            _scale_kernels.NUMBERS, _scale_kernels.PROGRAMS = pair
            _scale_kernels._tiles.cache_clear()
            found[f"{pair[0]} in {pair[1]}"] = microseconds(run)
        _scale_kernels.NUMBERS, _scale_kernels.PROGRAMS = own
        _scale_kernels._tiles.cache_clear()
    finally:
        scaling._kernels = chosen
    return {
        "shape": list(shape), "kind": str(kind).removeprefix("torch."), "channels_last": last,
        "floor_us": 1e6 * moved / bandwidth, "gpu_us": {name: gpu for name, (gpu, _) in found.items()},
        "processor_us": {name: own for name, (_, own) in found.items()},
    }  # fmt: skip


def bandwidth() -> float:
    """Bytes a second that a copy moves."""
    source = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)

    def run() -> None:
        target.copy_(source)

    return 2 * source.numel() / (1e-6 * microseconds(run)[0])


def markdown(found: dict[str, Any]) -> str:
    made = found["provenance"]
    lines = [
        f"# What one gate costs: {made['machine']}", "",
        "Microseconds of x·θ with the gradients of both, in a recorded graph, and of the processor that starts it; and",
        f"what its bytes take at the least, at {found['bandwidth'] / 1e9:,.0f} GB/s.", "",
        "| shape | of | GPU, plain | GPU, ours | floor | processor, plain | processor, ours |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]  # fmt: skip
    for row in found["rows"]:
        gpu, own = row["gpu_us"], row["processor_us"]
        kind = row["kind"] + (", channels last" if row["channels_last"] else "")
        lines.append(
            f"| {' × '.join(map(str, row['shape']))} | {kind} | {gpu['plain']:.1f} | **{gpu['ours']:.1f}** | "
            f"{row['floor_us']:.1f} | {own['plain']:.0f} | {own['ours']:.0f} |"
        )
    others = [name for name in found["rows"][0]["gpu_us"] if " in " in name]
    if others:
        lines += ["", "GPU, by numbers of a tile and programs at most:", "", f"| shape | of | {' | '.join(others)} |",
                  "|---|---|" + "---:|" * len(others)]  # fmt: skip
        for row in found["rows"]:
            kind = row["kind"] + (", channels last" if row["channels_last"] else "")
            times = " | ".join(f"{row['gpu_us'][name]:.1f}" for name in others)
            lines.append(f"| {' × '.join(map(str, row['shape']))} | {kind} | {times} |")
    return "\n".join([*lines, "", f"`{made['command']}`, {made['date']}, commit {made['commit']}, torch "
                      f"{made['versions']['torch']}.", ""])  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiles", action="store_true", help="other tiles too")
    parser.add_argument("--out", type=Path, default=Path("results/products"), help="without ending")
    options = parser.parse_args()
    found: dict[str, Any] = {"provenance": provenance(device="cuda"), "bandwidth": bandwidth(), "rows": []}
    for kind, last in KINDS:
        for shape in SHAPES:
            if not last or len(shape) == 4:
                found["rows"].append(measure(shape, kind, last, found["bandwidth"], options.tiles))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    options.out.with_suffix(".md").write_text(markdown(found))
    print(markdown(found))


if __name__ == "__main__":
    main()
