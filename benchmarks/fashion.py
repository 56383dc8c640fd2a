"""LeNet-5 on full Fashion-MNIST: pruned while it trains, against the same network left whole and trained alike.

python -m benchmarks.fashion --data DIR      # DIR holds the four official *-ubyte.gz files
                                             # writes results/fashion.json and results/fashion.md
"""

import argparse
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import bmrs
from bmrs.study import files, networks
from bmrs.study.data import DataSet, Part
from bmrs.study.provenance import provenance
from bmrs.study.training import accuracy, batches


@dataclass(frozen=True)
class Settings:
    """``epochs`` in all; the last ``fine_tune`` of them train the plain, smaller network."""

    epochs: int = 20
    fine_tune: int = 4
    batch: int = 64
    learning_rate: float = 1.4e-3
    phi_lr: float = 3.0
    warmup: int = 5  # epochs over which the KL grows to its full weight
    seed: int = 0


def load(folder: Path) -> DataSet:
    parts = []
    for x, y in files.idx_set(folder):
        x = F.interpolate((x.float() - 127) / 255, size=(32, 32), mode="bilinear", antialias=True)
        parts.append(Part(x, y))
    return DataSet("fashion-mnist", 10, parts[0], parts[1], parts[1])


def build(settings: Settings) -> nn.Sequential:
    torch.manual_seed(settings.seed)
    return networks.lenet5(1, 10)


def train(
    network: nn.Module, data: DataSet, settings: Settings, price: str | None, strength: float
) -> tuple[nn.Module, list[dict]]:
    """``price``: None trains the whole network."""
    optimizer = torch.optim.Adam(network.parameters(), lr=settings.learning_rate)
    pruner = None
    if price is not None:
        pruner = bmrs.Pruner(
            network,
            data.train.x[:2],
            optimizer,
            price=price,
            strength=strength,
            phi_lr=settings.phi_lr,
            warmup=settings.warmup * -(-len(data.train) // settings.batch),
        )
    shuffle = torch.Generator().manual_seed(settings.seed)
    epochs = []
    for epoch in range(1, settings.epochs + 1):
        if pruner is not None and epoch == settings.epochs - settings.fine_tune + 1:
            network = pruner.finish()
        start = time.perf_counter()
        network.train()
        for x, y in batches(data.train, settings.batch, shuffle):
            optimizer.zero_grad()
            F.cross_entropy(network(x), y).backward()
            optimizer.step()
        seconds = time.perf_counter() - start
        if pruner is not None and not pruner.finished:
            pruner.prune()
        epochs.append(
            {"epoch": epoch, "seconds": seconds, "test": accuracy(network, data.test), "widths": widths(network)}
        )
        print(price, strength, epochs[-1], flush=True)
    return network, epochs


def widths(network: nn.Module) -> list[int]:
    layers = [m for m in network.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    return [layer.weight.shape[0] for layer in layers[:-1]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--prices", nargs="+", default=["none", "uniform=0.3", "params=0.2"],
                        help="price=strength; none: the whole network")  # fmt: skip
    parser.add_argument("--epochs", type=int, default=Settings.epochs)
    parser.add_argument("--phi-lr", type=float, default=Settings.phi_lr)
    parser.add_argument("--warmup", type=int, default=Settings.warmup)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("results"))
    options = parser.parse_args()
    settings = Settings(epochs=options.epochs, phi_lr=options.phi_lr, warmup=options.warmup, seed=options.seed)
    data = load(options.data)
    runs = []
    for choice in options.prices:
        price, _, strength = choice.partition("=")
        network = build(settings)
        whole = bmrs.cost.parameters(network)
        network, epochs = train(network, data, settings, None if price == "none" else price, float(strength or 0))
        runs.append(
            {
                "price": price,
                "strength": float(strength or 0),
                "accuracy": accuracy(network, data.test),
                "parameters": bmrs.cost.parameters(network),
                "removed": 1 - bmrs.cost.parameters(network) / whole,
                "multiply_adds": bmrs.cost.multiply_adds(network, data.test.x[:1]),
                "epochs": epochs,
            }
        )
        made = provenance(seeds=1, device="cpu", threads=torch.get_num_threads(), settings=asdict(settings))
        (options.out / "fashion.json").write_text(json.dumps({"runs": runs, "provenance": made}, indent=2) + "\n")
        (options.out / "fashion.md").write_text(markdown(runs, made))
    print(markdown(runs, made))


def markdown(runs: list[dict], made: dict) -> str:
    whole = runs[0]
    rows = [
        f"| {run['price']} | {run['strength']:g} | {run['accuracy']:.2%} | "
        f"{100 * (run['accuracy'] - whole['accuracy']):+.2f} | {run['parameters']:,} | {run['removed']:.1%} | "
        f"{1 - run['multiply_adds'] / whole['multiply_adds']:.1%} | "
        f"{'-'.join(str(width) for width in run['epochs'][-1]['widths'])} |"
        for run in runs
    ]
    settings = made["settings"]
    return "\n".join(
        [
            f"# LeNet-5 on full Fashion-MNIST, {settings['epochs']} epochs, 1 seed",
            "",
            "Trained on all 60,000 images, tested on the official 10,000 after the last epoch. Parameters are those of",
            "the physically reduced network against the whole one's.",
            "",
            "| price | strength | test accuracy | points | parameters | removed | multiply-adds removed | widths |",
            "|---|---:|---:|---:|---:|---:|---:|---|",
            *rows,
            "",
            f"Settings {settings}.",
            f"`{made['command']}`, {made['machine']}, {made['threads']} threads, {made['date']},",
            f"commit {made['commit']}, versions {made['versions']}.",
            "",
        ]
    )


if __name__ == "__main__":
    main()
