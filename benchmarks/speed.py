"""What removal is worth on a real network: ResNet-50 with ImageNet weights, before and after.

    python -m benchmarks.speed --weights PATH/resnet-50-imagenet      # writes results/speed.json and results/speed.md

The folder is one that ``transformers`` loads (config.json, model.safetensors). In every structure the filters with the
smallest weights go. Both networks run in turn on the same images, in one process; the medians are compared with the
ratio of multiply-adds. This is about speed: nothing is fine-tuned.
"""

import argparse
import copy
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import benchmarks.architectures  # noqa: F401  makes transformers importable beside a torchvision without its kernels
import bmrs
from bmrs.study.provenance import provenance


def load(folder: Path) -> nn.Module:
    from transformers import ResNetForImageClassification

    return ResNetForImageClassification.from_pretrained(folder).eval()


def smallest(structure: bmrs.Structure, model: nn.Module, fraction: float) -> list[int]:
    """The units whose producing weights have the smallest norm."""
    tensors = dict(model.named_parameters())
    norms = torch.zeros(structure.units)
    for name, dim in structure.places:
        if (name, dim) not in structure.consumers and name in tensors and tensors[name].dim() > 1:
            rows = tensors[name].detach().cpu().movedim(dim, 0).flatten(1).square().sum(1)
            norms += torch.stack([rows[indices].sum() for indices in structure.indices((name, dim))])
    return norms.argsort()[: round(fraction * structure.units)].tolist()


@torch.inference_mode()
def race(first: nn.Module, second: nn.Module, x: torch.Tensor, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds of each, run in turn."""
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(rounds + 1):
        for model, taken in zip((first, second), times, strict=True):
            _wait(x)
            start = time.perf_counter()
            model(x)
            _wait(x)
            if turn:  # the first round warms up
                taken.append(time.perf_counter() - start)
    return times


def _wait(x: torch.Tensor) -> None:
    if x.is_cuda:
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--fractions", type=float, nargs="+", default=[0.25, 0.4, 0.5])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--channels-last", action="store_true", help="both networks and the images in channels-last")
    parser.add_argument("--out", type=Path, default=Path("results/speed"))
    options = parser.parse_args()
    layout = torch.channels_last if options.channels_last else torch.contiguous_format
    whole = load(options.weights).to(options.device, memory_format=layout)
    one = torch.randn(1, 3, options.size, options.size, device=options.device)
    rows: list[dict[str, Any]] = []
    for fraction in options.fractions:
        small = copy.deepcopy(whole)
        structures = bmrs.structures(small, one)
        bmrs.remove(small, {structure: smallest(structure, small, fraction) for structure in structures})
        work = [bmrs.cost.multiply_adds(model, one) for model in (whole, small)]
        size = [bmrs.cost.parameters(model) for model in (whole, small)]
        for batch in options.batches:
            x = torch.randn(batch, 3, options.size, options.size, device=options.device).to(memory_format=layout)
            full, less = race(whole, small, x, options.rounds)
            rows.append(
                {
                    "fraction": fraction,
                    "batch": batch,
                    "parameters": size,
                    "multiply_adds": work,
                    "multiply_adds_ratio": work[0] / work[1],
                    "seconds": [statistics.median(full), statistics.median(less)],
                    "speed_up": statistics.median(full) / statistics.median(less),
                    "speed_up_of_each_round": [a / b for a, b in zip(full, less, strict=True)],
                }
            )
            print(json.dumps(rows[-1])[:260], flush=True)
    made = provenance(seeds=1, device=options.device, threads=torch.get_num_threads(), size=options.size)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.with_suffix(".json").write_text(json.dumps({"rows": rows, "provenance": made}, indent=1) + "\n")
    options.out.with_suffix(".md").write_text(markdown(rows, made))
    print(markdown(rows, made))


def markdown(rows: list[dict[str, Any]], made: dict[str, Any]) -> str:
    lines = [
        f"# ResNet-50 with ImageNet weights, {made['size']}×{made['size']}, on {made['device']}: what removal is worth",
        "",
        "| removed of every structure | batch | parameters | multiply-adds | fewer by | faster by | min to max |",
        "|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        rounds = row["speed_up_of_each_round"]
        lines.append(
            f"| {row['fraction']:.0%} | {row['batch']} | {row['parameters'][1] / 1e6:.1f} M of "
            f"{row['parameters'][0] / 1e6:.1f} M | {row['multiply_adds'][1] / 1e9:.2f} G of "
            f"{row['multiply_adds'][0] / 1e9:.2f} G | {row['multiply_adds_ratio']:.2f}× | {row['speed_up']:.2f}× | "
            f"{min(rounds):.2f}× to {max(rounds):.2f}× |"
        )
    return "\n".join(
        [
            *lines,
            "",
            f"`{made['command']}`, {made['machine']}, {made['threads']} thread(s), {made['date']},",
            f"commit {made['commit']}, torch {made['versions']['torch']}. Median of the rounds, both in turn.",
            "",
        ]
    )


if __name__ == "__main__":
    main()
