"""Slicing tensors in place, and the record of what was removed."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from bmrs.structure.branches import widen
from bmrs.structure.capture import canonical_names, named_tensors
from bmrs.structure.mend import Correction, correct_sizes, set_integer, sync_builtin

RECORD = "bmrs_removed"  # the attribute of a network that says what was removed
GATES = "bmrs_noise"  # the submodule that holds its gates
Keep = Mapping[str, Mapping[int, list[int]]]
"""Tensor name → dimension → indices that stay."""


@dataclass
class Removed:
    """What was removed from a network, in terms of the original: enough to shrink a fresh copy of it."""

    shapes: dict[str, list[int]] = field(default_factory=dict)  # the original ones, of tensors that shrank
    kept: dict[str, dict[int, list[int]]] = field(default_factory=dict)
    groups: dict[str, int] = field(default_factory=dict)  # module → groups left
    integers: dict[str, dict[str, Any]] = field(default_factory=dict)  # module → attribute → value
    corrections: dict[str, list[Correction]] = field(default_factory=dict)  # module → sizes its code asks for
    widened: dict[str, tuple[int, int, list[int]]] = field(default_factory=dict)  # branch → dimension, size, indices

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Removed":
        kept = {name: {int(d): list(k) for d, k in dims.items()} for name, dims in content["kept"].items()}
        corrections = {path: [Correction(**c) for c in cs] for path, cs in content["corrections"].items()}
        return cls(
            {name: list(shape) for name, shape in content["shapes"].items()},
            kept,
            dict(content["groups"]),
            {path: dict(values) for path, values in content["integers"].items()},
            corrections,
            {path: (dim, size, list(indices)) for path, (dim, size, indices) in content["widened"].items()},
        )


def removed(model: nn.Module) -> Removed:
    """The record a network carries; an empty one for a network that is whole."""
    return model.__dict__.get(RECORD) or Removed()


def resize(model: nn.Module, keep: Keep, optimizers: Iterable[torch.optim.Optimizer] = ()) -> None:
    """Slice parameters, buffers, gradients and optimizer state; every tensor object stays the same."""
    tensors = dict(named_tensors(model))
    states = [optimizer.state for optimizer in optimizers]
    for name, dims in keep.items():
        tensor = tensors[name]
        before = tensor.shape
        grad, tensor.grad = tensor.grad, None
        for state in states:
            for key, value in list(state.get(tensor, {}).items()):
                if isinstance(value, Tensor) and value.dim() == len(before):
                    state[tensor][key] = _sliced(value, {d: k for d, k in dims.items() if value.shape[d] == before[d]})
        small = _sliced(tensor.data, dims)
        if isinstance(tensor, nn.Parameter) and tensor.is_floating_point():
            # Another type in between makes autograd forget the old shape, should a graph of it still be alive.
            tensor.data = torch.empty(0, dtype=torch.float16 if tensor.dtype != torch.float16 else torch.float32,
                                      device=tensor.device)  # fmt: skip
        tensor.data = small
        if grad is not None:
            tensor.grad = _sliced(grad, dims)


def _sliced(tensor: Tensor, dims: Mapping[int, list[int]]) -> Tensor:
    channels_last = _memory_format(tensor)
    for dim, kept in dims.items():
        tensor = tensor.index_select(dim, torch.tensor(kept, dtype=torch.long, device=tensor.device))
    return tensor.contiguous(memory_format=channels_last) if dims else tensor


def _memory_format(tensor: Tensor) -> torch.memory_format:
    if tensor.is_contiguous():
        return torch.contiguous_format
    for dims, memory_format in ((4, torch.channels_last), (5, torch.channels_last_3d)):
        if tensor.dim() == dims and tensor.is_contiguous(memory_format=memory_format):
            return memory_format
    return torch.contiguous_format


def apply(model: nn.Module, now: Removed, optimizers: Iterable[torch.optim.Optimizer] = ()) -> None:
    """Bring a network from its present record to this one, which must remove more."""
    before = removed(model)
    keep: dict[str, dict[int, list[int]]] = {}
    for name, dims in now.kept.items():
        for dim, kept in dims.items():
            present = before.kept.get(name, {}).get(dim, list(range(now.shapes[name][dim])))
            if present != kept:
                at = {index: place for place, index in enumerate(present)}
                keep.setdefault(name, {})[dim] = [at[index] for index in kept]
    resize(model, keep, optimizers)
    owners = {name.rpartition(".")[0] for name in _all_names(model, keep)} | set(now.groups)
    for path in owners:
        sync_builtin(model.get_submodule(path), now.groups.get(path))
    for path, integers in now.integers.items():
        for attribute, value in integers.items():
            set_integer(model.get_submodule(path), attribute, value)
    for path, corrections in now.corrections.items():
        correct_sizes(model, path, tuple(corrections))
    for path, (dim, size, indices) in now.widened.items():
        widen(model.get_submodule(path), dim, size, indices)
    model.__dict__[RECORD] = now
    drop_caches(model)


def drop_caches(model: nn.Module) -> None:
    """Modules that keep tensors derived from their parameters in evaluation drop them when training begins."""
    before = [(module, module.training) for module in model.modules()]
    model.train()
    model.eval()
    for module, training in before:
        module.training = training


def _all_names(model: nn.Module, keep: Keep) -> list[str]:
    """Also the other names of tied tensors: their modules' integers change too."""
    return [name for name, first in canonical_names(model).items() if first in keep]
