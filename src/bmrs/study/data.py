"""Data sets as tensors, split by seed."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

NAMES = ("digits",)


@dataclass(frozen=True)
class Part:
    """Images and labels of one part of a data set."""

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return len(self.y)


@dataclass(frozen=True)
class DataSet:
    name: str
    classes: int
    train: Part
    validation: Part
    test: Part

    @property
    def input_shape(self) -> tuple[int, ...]:
        return tuple(self.train.x.shape[1:])


def load(name: str, seed: int = 0) -> DataSet:
    """The data set of that name: a fixed test set, the rest split 80/20 into training and validation by seed."""
    if name not in NAMES:
        raise ValueError(f"unknown data set '{name}': choose one of {', '.join(NAMES)}.")
    x, y = _digits()
    # The set has no official test part: every fifth image, by a shuffle that never changes.
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    test, rest = order[: len(y) // 5], order[len(y) // 5 :]
    rest = rest[torch.randperm(len(rest), generator=torch.Generator().manual_seed(seed))]
    validation, train = rest[: len(rest) // 5], rest[len(rest) // 5 :]
    parts = (Part(x[index], y[index]) for index in (train, validation, test))
    return DataSet(name, 10, *parts)


def _digits() -> tuple[Tensor, Tensor]:
    """scikit-learn's 1,797 handwritten digits, 8×8 resized to 32×32, centred at zero."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    x = torch.tensor(bunch.images, dtype=torch.float32)[:, None] / 16.0
    x = F.interpolate(x, size=(32, 32), mode="bilinear", antialias=True)
    return x - 0.5, torch.tensor(bunch.target, dtype=torch.long)
