"""A task that a few neurons learn in seconds: which two of four heaps of points are alike."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

RATE = 2e-2
OPTIONS = {"phi_lr": 5, "strength": 0.1, "seed": 1}  # what goes in ten epochs of sixteen steps, and not all of it
EPOCHS = 10


def points(number=512):
    generator = torch.Generator().manual_seed(0)
    heap = torch.randint(0, 2, (number, 2), generator=generator) * 2 - 1
    x = 0.3 * torch.randn(number, 8, generator=generator)
    x[:, :2] += heap
    return x, (heap[:, 0] * heap[:, 1] > 0).long()


X, Y = points()


def network(hidden=24):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, hidden), nn.ReLU(), nn.Linear(hidden, 2))


def loader(batch=32):
    return DataLoader(TensorDataset(X, Y), batch)


@torch.no_grad()
def accuracy(model):
    model.eval()
    return float((model(X).argmax(1) == Y).double().mean())


def train_by_hand(model, pruner, optimizer, epochs, *, batch=32, accumulate=1, clip=None, scheduler=None):
    """The plain loop that a framework's must equal."""
    for _ in range(epochs):
        model.train()
        for number, (x, y) in enumerate(zip(X.split(batch), Y.split(batch), strict=True)):
            (F.cross_entropy(model(x), y) / accumulate).backward()
            if (number + 1) % accumulate == 0:
                if clip is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                optimizer.zero_grad()
                if scheduler is not None:
                    scheduler.step()
        pruner.prune()


def same(first, second):
    """Whether two state dicts are the same to the last bit."""
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
