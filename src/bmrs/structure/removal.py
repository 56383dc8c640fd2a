"""Slicing tensors in place, and bringing a network to what a record says."""

import copy
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from bmrs import parallel
from bmrs.structure.branches import unwiden, widen
from bmrs.structure.capture import canonical_names, named_tensors
from bmrs.structure.mend import correct_sizes, own_sizes, set_integer, sync_builtin
from bmrs.structure.record import RECORD, Removed, removed
from bmrs.structure.standin import put_back, stand_in

Keep = Mapping[str, Mapping[int, list[int]]]
"""Tensor name → dimension → indices that stay."""


def resize(model: nn.Module, keep: Keep, optimizers: Iterable[torch.optim.Optimizer] = ()) -> None:
    """Slice parameters, buffers, gradients and optimizer state; every tensor object stays the same."""
    tensors = dict(named_tensors(model))
    states = [optimizer.state for optimizer in optimizers]
    for name, dims in keep.items():
        tensor = tensors[name]
        before = tensor.shape
        for state in states:
            if not all(dims.values()):  # of a tensor that is gone there is nothing to keep
                state.pop(tensor, None)
            for key, value in list(state.get(tensor, {}).items()):
                if isinstance(value, Tensor) and value.dim() == len(before):
                    state[tensor][key] = _sliced(value, {d: k for d, k in dims.items() if value.shape[d] == before[d]})
        _put(tensor, _sliced(tensor.data, dims), None if tensor.grad is None else _sliced(tensor.grad, dims))


def _put(tensor: Tensor, data: Tensor, grad: Tensor | None) -> None:
    tensor.grad = None
    if isinstance(tensor, nn.Parameter) and tensor.is_floating_point():
        # Another type in between makes autograd forget the old shape, should a graph of it still be alive.
        other = torch.float16 if tensor.dtype != torch.float16 else torch.float32
        tensor.data = torch.empty(0, dtype=other, device=tensor.device)
    tensor.data = data
    tensor.grad = grad if data.numel() else None


def _sliced(tensor: Tensor, dims: Mapping[int, list[int]]) -> Tensor:
    if dims and hasattr(tensor, "full_tensor"):  # an optimizer's, in shards: whole for the moment, one after the other
        return parallel.placed_as(_sliced(parallel.whole(tensor), dims), tensor)
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
    put_back(model)
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
    stand_in(model, now.silenced)
    model.__dict__[RECORD] = now
    drop_caches(model)


def become(model: nn.Module, now: Removed, optimizers: Iterable[torch.optim.Optimizer] = ()) -> None:
    """Bring a network from its present record to any other: what comes back is zero until it is filled in."""
    optimizers = list(optimizers)
    if not removed(model).within(now):
        _grow(model, optimizers)
    apply(model, copy.deepcopy(now), optimizers)


def _grow(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Back to the original's shapes, with zeros where units were removed."""
    before = removed(model)
    put_back(model)
    tensors = dict(named_tensors(model))
    for name, dims in before.kept.items():
        tensor, shape = tensors[name], before.shapes[name]
        for state in (optimizer.state for optimizer in optimizers):
            for key, value in list(state.get(tensor, {}).items()):
                if isinstance(value, Tensor) and value.dim() == len(shape):
                    own = {d: kept for d, kept in dims.items() if value.shape[d] == len(kept)}
                    state[tensor][key] = _spread(value, shape, own)
        _put(tensor, _spread(tensor.data, shape, dims), None)
    for path, integers in before.originals.items():
        for attribute, value in integers.items():
            set_integer(model.get_submodule(path), attribute, value)
    for path in {name.rpartition(".")[0] for name in _all_names(model, before.kept)}:
        sync_builtin(model.get_submodule(path), None)
    for path in before.corrections:
        own_sizes(model.get_submodule(path))
    for path in before.widened:
        unwiden(model.get_submodule(path))
    model.__dict__.pop(RECORD, None)


def _spread(tensor: Tensor, shape: list[int], dims: Mapping[int, list[int]]) -> Tensor:
    if dims and hasattr(tensor, "full_tensor"):
        return parallel.placed_as(_spread(parallel.whole(tensor), shape, dims), tensor)
    for dim, kept in dims.items():
        size = [shape[dim] if d == dim else length for d, length in enumerate(tensor.shape)]
        index = torch.tensor(kept, dtype=torch.long, device=tensor.device)
        tensor = tensor.new_zeros(size).index_copy(dim, index, tensor)
    return tensor


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
