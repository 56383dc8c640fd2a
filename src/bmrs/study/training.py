"""Training one network, with gates or without."""

from collections.abc import Callable, Iterator, Mapping
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


@dataclass
class GateLog:
    """The last known scores of every unit, kept when it is removed."""

    mean: Tensor
    snr: Tensor
    delta_f: Tensor
    removed_at: Tensor  # epoch of removal; 0: still there


@dataclass
class Progress:
    """What there is to see after an epoch."""

    epoch: int
    epochs: int
    accuracy: float  # on the validation part
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
        network.train()
        for x, y in batches(data.train, recipe.batch, shuffle):
            optimizer.zero_grad()
            F.cross_entropy(network(x), y).backward()
            optimizer.step()
        on_epoch(Progress(epoch, recipe.epochs, accuracy(network, data.validation)))


def train_pruning(
    network: nn.Module,
    bank: bmrs.NoiseBank,
    data: DataSet,
    recipe: Recipe,
    criterion: bmrs.Criterion,
    on_epoch: Callable[[Progress], None] = lambda progress: None,
) -> GateLog:
    """With the bank's gates, removing after every epoch what the criterion says."""
    gates = [bank.mu, bank.log_sigma]
    weights = [p for p in network.parameters() if all(p is not gate for gate in gates)]
    groups: list[dict[str, Any]] = [
        {"params": weights},
        {"params": gates, "lr": recipe.learning_rate * recipe.phi_rate},
    ]
    optimizer = torch.optim.Adam(groups, lr=recipe.learning_rate)
    prices = gate_prices(bank.sizes, recipe, len(data.train)).to(bank.mu.device)
    shuffle = torch.Generator().manual_seed(recipe.seed)
    log = GateLog(*bmrs.evidence.scores(bank.posterior()), torch.zeros_like(bank.alive, dtype=torch.long))
    for epoch in range(1, recipe.epochs + 1):
        network.train()
        for x, y in batches(data.train, recipe.batch, shuffle):
            optimizer.zero_grad()
            (F.cross_entropy(network(x), y) + bank.kl(prices)).backward()
            optimizer.step()
        _prune(bank, criterion, epoch, log)
        on_epoch(Progress(epoch, recipe.epochs, accuracy(network, data.validation), bank.units_left()))
    return log


def gate_prices(sizes: Mapping[str, int], recipe: Recipe, num_examples: int) -> Tensor:
    return bmrs.price.prices(recipe.price, list(sizes.values()), strength=recipe.strength, num_examples=num_examples)


def _prune(bank: bmrs.NoiseBank, criterion: bmrs.Criterion, epoch: int, log: GateLog) -> None:
    """Close the gates the criterion rejects and note what they were like."""
    scores = bmrs.evidence.scores(bank.posterior())
    for old, new in zip((log.mean, log.snr, log.delta_f), scores, strict=True):
        old[bank.alive] = new[bank.alive]
    log.removed_at[bmrs.prune(bank, criterion)] = epoch


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
