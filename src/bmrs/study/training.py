"""Training one network, with gates or without."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bmrs
from bmrs.study.data import DataSet, Part


@dataclass(frozen=True)
class Recipe:
    """How to train."""

    epochs: int = 40
    fine_tune: int = 10  # epochs of training what is left, at half the learning rate
    batch: int = 32
    learning_rate: float = 3e-3
    phi_rate: float = 10.0  # learning rate of the gates, times that of the weights
    price: str = "uniform"
    strength: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 1 << 63:
            raise ValueError(f"seed must be a whole number from 0 to 2^63 - 1; got {self.seed}.")


class GateLog:
    """The last known scores of every unit there was, kept when it is removed."""

    def __init__(self, pruner: bmrs.Pruner) -> None:
        self.layers = dict(pruner.bank.layers)
        self.mean, self.snr, self.delta_f = bmrs.evidence.scores(pruner.bank.posterior())
        self.removed_at = torch.zeros(len(self.mean), dtype=torch.long, device=self.mean.device)  # 0: still there

    def note(self, pruner: bmrs.Pruner) -> None:
        """The scores of the units that are there now."""
        there = self._there(pruner)
        for old, new in zip((self.mean, self.snr, self.delta_f), bmrs.evidence.scores(pruner.bank.posterior()),
                            strict=True):  # fmt: skip
            old[there] = new

    def note_removed(self, pruner: bmrs.Pruner, epoch: int) -> None:
        """Units that are no longer there and were, went in this epoch."""
        gone = torch.ones_like(self.removed_at, dtype=torch.bool)
        gone[self._there(pruner)] = False
        self.removed_at[gone & (self.removed_at == 0)] = epoch

    def to_json(self, tolerance: float | None = None) -> dict[str, Any]:
        """Unit by unit, as the report reads it; None where a score is no finite number."""
        finite = {
            name: [value if math.isfinite(value) else None for value in values.tolist()]
            for name, values in (("mean", self.mean), ("snr", self.snr), ("delta_f", self.delta_f))
        }
        layer = [name for name, own in self.layers.items() for _ in range(own.stop - own.start)]
        known = {} if tolerance is None else {"tolerance": tolerance}
        return {"layer": layer, **finite, "removed_at": self.removed_at.tolist(), **known}

    def _there(self, pruner: bmrs.Pruner) -> list[int]:
        return [
            self.layers[s.name].start + unit
            for s in pruner.structures.everything
            if s.name in self.layers
            for unit in s.kept
        ]  # fmt: skip


@dataclass
class Progress:
    """What there is to see after an epoch."""

    epoch: int
    epochs: int
    accuracy: float  # on the validation part
    seconds: float  # that training took, without validation and pruning
    units_left: dict[str, int] = field(default_factory=dict)


def train(
    network: nn.Module,
    data: DataSet,
    recipe: Recipe,
    on_epoch: Callable[[Progress], None] = lambda progress: None,
) -> None:
    """Without gates: Adam, no schedule."""
    optimizer = torch.optim.Adam(network.parameters(), lr=recipe.learning_rate)
    shuffle = torch.Generator().manual_seed(recipe.seed)
    for epoch in range(1, recipe.epochs + 1):
        seconds = _epoch(network, optimizer, data.train, recipe.batch, shuffle)
        on_epoch(Progress(epoch, recipe.epochs, accuracy(network, data.validation), seconds))


def train_pruning(
    network: nn.Module,
    data: DataSet,
    recipe: Recipe,
    criterion: bmrs.Criterion,
    on_epoch: Callable[[Progress], None] = lambda progress: None,
) -> GateLog:
    """With gates, removing after every epoch what the criterion says; the network is plain and smaller in the end."""
    optimizer = torch.optim.Adam(network.parameters(), lr=recipe.learning_rate)
    pruner = bmrs.Pruner(
        network,
        data.train.x[:2],
        optimizer,
        num_examples=len(data.train),
        criterion=criterion,
        price=recipe.price,
        strength=recipe.strength,
        phi_lr=recipe.phi_rate,
        seed=recipe.seed,
    )
    shuffle = torch.Generator().manual_seed(recipe.seed)
    log = GateLog(pruner)
    for epoch in range(1, recipe.epochs + 1):
        seconds = _epoch(network, optimizer, data.train, recipe.batch, shuffle)
        log.note(pruner)
        left = {row.name: row.left for row in pruner.prune().structures}
        log.note_removed(pruner, epoch)
        on_epoch(Progress(epoch, recipe.epochs, accuracy(network, data.validation), seconds, left))
    pruner.finish()
    return log


def _epoch(
    network: nn.Module, optimizer: torch.optim.Optimizer, part: Part, batch: int, shuffle: torch.Generator
) -> float:
    """One pass over the data; returns the seconds it took."""
    start = time.perf_counter()
    network.train()
    for x, y in batches(part, batch, shuffle):
        optimizer.zero_grad()
        F.cross_entropy(network(x), y).backward()
        optimizer.step()
    return time.perf_counter() - start


def batches(part: Part, size: int, shuffle: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    for index in torch.randperm(len(part), generator=shuffle).split(size):
        index = index.to(part.x.device)
        yield part.x[index], part.y[index]


@torch.no_grad()
def accuracy(network: nn.Module, part: Part, batch: int = 512) -> float:
    training = network.training
    network.eval()
    right = 0
    for x, y in zip(part.x.split(batch), part.y.split(batch), strict=True):
        right += int((network(x).argmax(1) == y).sum())
    network.train(training)
    return right / len(part)
