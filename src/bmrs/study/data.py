"""Data sets as tensors, split by seed."""

import os
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from bmrs.study import files


@dataclass(frozen=True)
class _Look:
    """What a data set's images look like to a network: (x / ``scale`` resized to ``size`` − ``mean``) / ``sd``."""

    classes: int
    size: int
    scale: float
    mean: tuple[float, ...]
    sd: tuple[float, ...] = (1.0,)


_LOOKS = {
    "digits": _Look(10, 32, 16, (0.5,)),
    "mnist": _Look(10, 32, 255, (127 / 255,)),
    "fashion-mnist": _Look(10, 32, 255, (127 / 255,)),
    "cifar10": _Look(10, 32, 255, (0.5,), (0.5,)),
    "tiny-imagenet": _Look(200, 64, 255, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
}
NAMES = tuple(_LOOKS)


@dataclass(frozen=True)
class Part:
    """Images and labels of one part of a data set."""

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return len(self.y)

    def to(self, device: torch.device | str) -> "Part":
        return Part(self.x.to(device), self.y.to(device))


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


@dataclass(frozen=True)
class Images:
    """A data set as its files hold it: not split, and of bytes (digits: floats from 0 to 16) until prepared.

    Many networks that differ in their split can share one, and index it by what :meth:`split` gives each.
    """

    name: str
    classes: int
    train: Part
    test: Part
    size: int

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Of an image once prepared."""
        return (self.train.x.shape[1], self.size, self.size)

    def prepare(self, x: Tensor) -> Tensor:
        """Images as a network takes them: resized, normalised, float32; on the device they are on."""
        look = _LOOKS[self.name]
        x = x.to(torch.float32, copy=True).div_(look.scale)
        if x.shape[-2:] != (self.size, self.size):
            x = F.interpolate(x, size=(self.size, self.size), mode="bilinear", antialias=True)
        mean, sd = (torch.tensor(value, device=x.device)[:, None, None] for value in (look.mean, look.sd))
        return x.sub_(mean).div_(sd)

    def split(self, seed: int) -> tuple[Tensor, Tensor]:
        """Indices into ``train``: those to train on and those to validate on."""
        return split(len(self.train), seed)

    def to(self, device: torch.device | str) -> "Images":
        return replace(self, train=self.train.to(device), test=self.test.to(device))


def split(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """The numbers below n, shuffled by seed: four fifths to train on, one fifth to validate on."""
    if n < 5:
        raise ValueError(f"n must be at least 5 images, to keep a fifth for validation; got {n}.")
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    return order[n // 5 :], order[: n // 5]


def images(
    name: str,
    data_dir: str | os.PathLike[str] | None = None,
    *,
    size: int | None = None,
    download: bool = True,
) -> Images:
    """The data set of that name, whole.

    ``data_dir``: where its official files lie or are downloaded to; without it, the environment variable BMRS_DATA or
    the user's cache folder. ``size``: height and width of the prepared images, 32 (TinyImageNet: 64) if not given.
    """
    if name not in NAMES:
        raise ValueError(f"unknown data set '{name}': choose one of {', '.join(NAMES)}.")
    if size is not None and size < 1:
        raise ValueError(f"size must be 1 pixel or more; got {size}.")
    look = _LOOKS[name]
    train, test = _digits() if name == "digits" else files.read(name, data_dir, download)
    return Images(name, look.classes, Part(*train), Part(*test), size or look.size)


def load(
    name: str,
    seed: int = 0,
    *,
    data_dir: str | os.PathLike[str] | None = None,
    size: int | None = None,
    download: bool = True,
) -> DataSet:
    """The data set of that name, prepared: the official test set, the rest split 80/20 by seed.

    The other arguments are those of :func:`images`.
    """
    whole = images(name, data_dir, size=size, download=download)
    train, validation = (Part(whole.prepare(whole.train.x[index]), whole.train.y[index]) for index in whole.split(seed))
    return DataSet(name, whole.classes, train, validation, Part(whole.prepare(whole.test.x), whole.test.y))


def _digits() -> files.Pair:
    """scikit-learn's 1,797 handwritten digits, 8×8."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    x, y = torch.tensor(bunch.images, dtype=torch.float32)[:, None], torch.tensor(bunch.target, dtype=torch.long)
    # The set has no official test part: every fifth image, by a shuffle that never changes.
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    test, train = order[: len(y) // 5], order[len(y) // 5 :]
    return (x[train], y[train]), (x[test], y[test])
