"""``--data``: what a network is trained on, from a name, a function, a folder of images or a file of tensors."""

from collections.abc import Iterator, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset, TensorDataset

from bmrs.inspection import called, named
from bmrs.structure.capture import arguments
from bmrs.study import data as sets

_TENSORS = ("x_train", "y_train", "x_test", "y_test")


@dataclass(frozen=True)
class Data:
    """Parts of (x, y) pairs: datasets, or data loaders of the user's own. ``held_out``: by name, "test" last."""

    name: str
    train: Any
    held_out: dict[str, Any]

    @property
    def examples(self) -> int:
        return len(_dataset(self.train))


def find(text: str, *, seed: int, data_dir: Path | None = None, size: int | None = None, download: bool = True) -> Data:
    """The data ``--data`` names. ``size``: of images in a folder; ``download``: what a named set lacks."""
    if text in sets.NAMES:
        whole = sets.load(text, seed, data_dir=data_dir, download=download)
        parts = {"validation": whole.validation, "test": whole.test}
        return Data(text, _pairs(whole.train), {name: _pairs(part) for name, part in parts.items()})
    path = Path(text)
    if path.is_dir():
        return _folder(path, size)
    if path.suffix in (".npz", ".safetensors"):
        return _file(path)
    if path.suffix in (".pt", ".pth", ".pkl"):
        raise ValueError(f"--data: {path} may hold pickled code: save its tensors as .npz or .safetensors.")
    if ":" in text:
        return _made(text)
    raise ValueError(
        f"--data: '{text}' is no data set ({', '.join(sets.NAMES)}), no folder, no .npz or .safetensors file that is "
        f"there, and no module:function: give one of these."
    )


def _pairs(part: sets.Part) -> Dataset[Any]:
    return TensorDataset(part.x, part.y)


def _made(target: str) -> Data:
    function = named(target, "data")
    parts = called(function, target) if callable(function) else function
    if not isinstance(parts, tuple | list) or len(parts) not in (2, 3):
        raise ValueError(f"--data: '{target}' must return (train, validation) or (train, validation, test).")
    for part in parts:
        if isinstance(part, IterableDataset) or not isinstance(_dataset(part), Sized):
            raise ValueError(f"--data: '{target}' must return datasets with a length, or data loaders of them.")
        if not isinstance(part, DataLoader) and not hasattr(part, "__getitem__"):
            raise ValueError(f"--data: '{target}' returned a {type(part).__name__}, no dataset and no data loader.")
        if len(_dataset(part)) == 0:
            raise ValueError(f"--data: '{target}' returned a part without examples: check where it looks for them.")
    return Data(target, parts[0], dict(zip(("validation", "test"), parts[1:], strict=False)))


def _folder(path: Path, size: int | None) -> Data:
    from bmrs.commands.images import ImageFolder

    train = ImageFolder(path / "train", size=size)
    held_out = {}
    for name, folders in (("validation", ("val", "validation", "valid")), ("test", ("test",))):
        there = next((path / folder for folder in folders if (path / folder).is_dir()), None)
        if there is not None:
            held_out[name] = ImageFolder(there, like=train)
    if not held_out:
        raise ValueError(f"--data: {path} needs a folder val or test beside train, of the same classes.")
    return Data(path.name or str(path), train, held_out)


def _file(path: Path) -> Data:
    if not path.is_file():
        raise ValueError(f"--data: there is no file {path}: check the path.")
    try:
        found = _read(path)
    # What is damaged shows as almost any error: of zip, of numpy, of safetensors.
    except Exception as problem:
        reason = str(problem).splitlines()[0][:120].rstrip(". ") if str(problem) else type(problem).__name__
        raise ValueError(
            f"--data: {path} cannot be read ({reason}): give arrays saved by numpy.savez or safetensors, no objects."
        ) from problem
    missing = [name for name in _TENSORS if name not in found]
    if missing:
        raise ValueError(f"--data: {path} lacks {', '.join(missing)}: it must hold {', '.join(_TENSORS)}.")
    parts = {}
    for part in ("train", "test"):
        x, y = _input(found[f"x_{part}"], f"x_{part}", path), _target(found[f"y_{part}"])
        if len(x) != len(y) or not len(x):
            raise ValueError(
                f"--data: x_{part} and y_{part} of {path} must have as many entries, at least one; they have {len(x)} "
                f"and {len(y)}."
            )
        parts[part] = TensorDataset(x, y)
    return Data(path.name, parts["train"], {"test": parts["test"]})


def _read(path: Path) -> dict[str, Tensor]:
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    import numpy as np

    with open(path, "rb") as file, np.load(file, allow_pickle=False) as arrays:
        return {name: torch.from_numpy(np.ascontiguousarray(arrays[name])) for name in _TENSORS if name in arrays}


def _input(x: Tensor, name: str, path: Path) -> Tensor:
    """Numbers as float32; whole numbers, which are tokens, as int64."""
    if x.dtype == torch.uint8:
        raise ValueError(
            f"--data: {name} of {path} holds bytes: save images as float32, divided by 255 and normalised as the "
            f"network expects them, or tokens as int64."
        )
    return x.float() if x.is_floating_point() else x.long()


def _target(y: Tensor) -> Tensor:
    return y.float() if y.is_floating_point() else y.long()


def _dataset(part: Any) -> Any:
    return part.dataset if isinstance(part, DataLoader) else part


# --- batches ----------------------------------------------------------------------------------------------------------


class Batches:
    """The batches of one part for one process, in an order that seed and epoch alone decide.

    >>> part = TensorDataset(torch.arange(6.0)[:, None], torch.zeros(6))
    >>> batches = Batches(part, 2, seed=0, shuffle=True)
    >>> order = torch.randperm(6, generator=torch.Generator().manual_seed(0 + 3))
    >>> torch.equal(torch.cat([x for x, y in batches.of_epoch(3)]).flatten().long(), order)
    True
    """

    def __init__(
        self, part: Any, batch: int, *, seed: int, shuffle: bool, workers: int = 0, rank: int = 0, world: int = 1
    ) -> None:
        self.seed, self.sampler = seed, None
        self.shared = world > 1  # each process has its share, rather than all there is
        if isinstance(part, DataLoader) and (world == 1 or not shuffle or isinstance(part.sampler, DistributedSampler)):
            self.loader, self.shared = part, isinstance(part.sampler, DistributedSampler)
            self.sampler = part.sampler if isinstance(part.sampler, DistributedSampler) else None
            return
        # Workers begin anew every epoch, with random numbers that its seed decides.
        options: dict[str, Any] = {"num_workers": workers}
        if isinstance(part, DataLoader):
            if part.batch_size is None or type(part.batch_sampler) is not BatchSampler:
                raise ValueError("--data: a data loader with a batch sampler of its own cannot be shared between "
                                 "processes: return a dataset.")  # fmt: skip
            batch, options = part.batch_size, {
                "num_workers": part.num_workers, "collate_fn": part.collate_fn, "worker_init_fn": part.worker_init_fn,
            }  # fmt: skip
            part = part.dataset
        if shuffle:
            self.sampler = DistributedSampler(part, world, rank, shuffle=True, seed=seed)
        # Everything is tested once, by whichever process: no example is added to make the shares alike.
        own: Any = self.sampler if self.sampler is not None else range(rank, len(part), world)
        single = shuffle and batch > 1 and len(own) % batch == 1  # which batch norm cannot be trained with
        if isinstance(part, TensorDataset):  # a batch in one piece, rather than example by example
            self.loader = DataLoader(part, sampler=BatchSampler(own, batch, drop_last=single), batch_size=None)
        else:
            self.loader = DataLoader(part, batch, sampler=own, drop_last=single, **options)

    def __len__(self) -> int:
        return len(self.loader)

    def of_epoch(self, epoch: int) -> Iterator[tuple[Any, Any]]:
        if self.sampler is not None:
            self.sampler.set_epoch(epoch)
        if isinstance(self.loader.generator, torch.Generator):
            self.loader.generator.manual_seed(self.seed + epoch)  # else going on after a stop would go on otherwise
        for pair in self.loader:
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                raise ValueError("--data must give pairs (x, y): inputs and targets.")
            yield pair[0], pair[1]


def moved(value: Any, device: torch.device) -> Any:
    """Tensors, however nested, on a device."""
    return _pytree.tree_map(
        lambda leaf: leaf.to(device, non_blocking=True) if isinstance(leaf, Tensor) else leaf, value
    )


def some(value: Any, number: int) -> Any:
    """The first examples of a batch."""
    return _pytree.tree_map(lambda leaf: leaf[:number] if isinstance(leaf, Tensor) and leaf.dim() else leaf, value)


def applied(network: nn.Module, x: Any) -> Any:
    """The network on a batch: a tensor, a tuple (positional) or a mapping (keyword)."""
    args, kwargs = arguments(x)
    return network(*args, **kwargs)
