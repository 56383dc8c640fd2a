"""Several processes: all remove the same units, and DistributedDataParallel learns of the smaller shapes.

Also what is done with one distributed tensor, of which each process holds its share: see :mod:`bmrs.sharded`.
"""

import gc
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

_BLOCK = 1 << 22  # numbers at a time, where many are added up
_FACTOR = 0x5851F42D4C957F2D
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def wrappers(model: nn.Module) -> list[DistributedDataParallel]:
    """Every wrapper around a network, whoever made it and whenever; an error for one that cannot be made anew.

    torch keeps no list of them, and those who make them late or hold them elsewhere are many.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        return []
    kinds = _kinds(DistributedDataParallel)
    found = [one for one in gc.get_objects() if type(one) in kinds]
    around = [one for one in found if _usable(one) and any(part is model for part in one.modules())]
    for one in around:
        reason = _fixed(one)
        if reason:
            raise ValueError(f"DistributedDataParallel cannot be used here with {reason}: make it without.")
    return around


def agreed(decision: Tensor, model: nn.Module) -> Tensor:
    """The decision of process 0, on every process; an error on all of them where their parameters differ."""
    group = _group(model)
    if _size(group) == 1:
        return decision
    prints = _fingerprints(model, decision.device)
    digest = torch.tensor([len(prints), _mixed(number for one in prints.values() for number in one)])
    lowest, highest = digest.to(decision.device), digest.to(decision.device, copy=True)
    distributed.all_reduce(lowest, distributed.ReduceOp.MIN, group)
    distributed.all_reduce(highest, distributed.ReduceOp.MAX, group)
    if not torch.equal(lowest, highest):
        everyones: list[Any] = [None] * _size(group)
        distributed.all_gather_object(everyones, prints, group)
        every = dict.fromkeys(name for one in everyones for name in one)
        differing = [name for name in every if any(one.get(name) != prints.get(name) for one in everyones)]
        raise RuntimeError(
            f"{len(differing)} of {len(every)} parameters differ between processes, '{differing[0]}' first, so nothing "
            f"is removed: train through DistributedDataParallel, from the same start."
        )
    shared = decision.to(torch.uint8)
    distributed.broadcast(shared, group=group, group_src=0)
    return shared.bool()


def shared_number(number: int, model: nn.Module, device: torch.device) -> int:
    """Process 0's, of 64 bits."""
    group = _group(model)
    if _size(group) == 1:
        return number
    tensor = torch.tensor(_signed(number), device=device)
    distributed.broadcast(tensor, group=group, group_src=0)
    return int(tensor)


def everyones(parameter: Tensor) -> Tensor:
    """An ordinary tensor with the numbers of a parameter that every process has the whole of.

    As under DistributedDataParallel, the gradient a process computes becomes the mean of all of theirs.
    """
    if not hasattr(parameter, "full_tensor"):
        return parameter
    local: Tensor = parameter.to_local()  # type: ignore[attr-defined]
    if local.requires_grad:
        local.register_hook(_mean)
    return local


def _mean(gradient: Tensor) -> Tensor:
    total = gradient / distributed.get_world_size()
    distributed.all_reduce(total)
    return total


def whole(tensor: Tensor) -> Tensor:
    """All of a distributed tensor; on every process, all of which must ask for it."""
    if not hasattr(tensor, "full_tensor"):
        return tensor
    full: Tensor = tensor.to(tensor.device_mesh.device_type).full_tensor()  # type: ignore[attr-defined]
    return full


def placed_as(tensor: Tensor, like: Tensor) -> Tensor:
    """Of a tensor that every process has, or that is parted in another way: its share, as ``like`` is parted."""
    from torch.distributed.tensor import DTensor, Replicate

    if not isinstance(like, DTensor):
        return whole(tensor)
    mesh = like.device_mesh
    if not isinstance(tensor, DTensor):
        tensor = DTensor.from_local(tensor.to(mesh.device_type), mesh, [Replicate()] * mesh.ndim, run_check=False)
    parted: Tensor = tensor.redistribute(mesh, like.placements).to(like.device)
    return parted


def rewrap(model: nn.Module) -> None:
    """Make the wrappers around a network anew, in place: they took stock of its parameters when they were made."""
    for wrapper in wrappers(model):
        _remake(wrapper)


def _remake(wrapper: DistributedDataParallel) -> None:
    arguments: dict[str, Any] = {
        "device_ids": wrapper.device_ids,
        "output_device": wrapper.output_device,
        "dim": wrapper.dim,
        "process_group": wrapper.process_group,
        "bucket_cap_mb": None if wrapper.bucket_bytes_cap_default else wrapper.bucket_bytes_cap / 2**20,
        "find_unused_parameters": wrapper.find_unused_parameters,
        "gradient_as_bucket_view": wrapper.gradient_as_bucket_view,
        "static_graph": wrapper.static_graph,
        "init_sync": False,
    }
    # Newer releases of torch have more.
    newer = "forward_sync_buffers" if hasattr(wrapper, "forward_sync_buffers") else "broadcast_buffers"
    for name in (newer, "batched_grad_copy", "skip_all_reduce_unused_params"):
        if getattr(wrapper, name, None) is not None:
            arguments[name] = getattr(wrapper, name)
    if getattr(wrapper, "bucket_bytes_cap_list", None):
        arguments["bucket_cap_mb_list"] = [size / 2**20 for size in wrapper.bucket_bytes_cap_list]
    communication = list(wrapper._comm_hooks)
    built_in = str(wrapper._get_ddp_logging_data().get("comm_hook", "")).partition("BuiltinCommHookType.")[2]
    # What nn.Module sets up (hooks, training), and what is set from outside.
    kept = {name: vars(wrapper)[name] for name in vars(nn.Module())}
    for name in ("require_backward_grad_sync", "require_forward_param_sync", "_ddp_sink_clone"):
        kept[name] = getattr(wrapper, name)
    wrapper._remove_autograd_hooks()
    for handle in wrapper._accum_grad_hooks:
        handle.remove()
    DistributedDataParallel.__init__(wrapper, wrapper.module, **arguments)
    vars(wrapper).update(kept)
    for hook, state in communication:
        _forget_buckets(state)
        wrapper.register_comm_hook(state, hook)
    if built_in:
        wrapper._register_builtin_comm_hook(getattr(distributed.BuiltinCommHookType, built_in))  # type: ignore[attr-defined]


def _forget_buckets(state: Any) -> None:
    """PowerSGD keeps tensors for each bucket, whose sizes settle in the first two passes."""
    for memory in ("error_dict", "p_memory_dict", "q_memory_dict"):
        getattr(state, memory, {}).clear()
    if hasattr(state, "start_powerSGD_iter"):
        state.iter = max(0, min(state.iter, state.start_powerSGD_iter - 2))


def _fixed(wrapper: DistributedDataParallel) -> str:
    """What keeps a wrapper from being made anew; empty if nothing."""
    if wrapper.mixed_precision is not None:
        return "mixed_precision (torch.autocast can be)"
    if wrapper._delay_all_reduce_params:
        return "delay_all_reduce_named_params"
    if any(hasattr(parameter, "_in_backward_optimizers") for parameter in wrapper.module.parameters()):
        return "optimizers that step during the backward pass"
    return ""


def _kinds(kind: type) -> set[type]:
    """A class and all those made of it."""
    derived: list[type] = type.__subclasses__(kind)
    return {kind}.union(*(_kinds(one) for one in derived))


def _usable(wrapper: DistributedDataParallel) -> bool:
    """Made without an error, and in a group that still exists."""
    if "_lazy_init_ran" not in vars(wrapper):
        return False
    try:
        return bool(distributed.get_process_group_ranks(wrapper.process_group))
    except (KeyError, ValueError):
        return False


def _group(model: nn.Module) -> distributed.ProcessGroup | None:
    """The processes that train this network: its wrapper's, or all there are; None: this one alone."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return None
    found = wrappers(model)
    return found[0].process_group if found else distributed.group.WORLD


def _size(group: distributed.ProcessGroup | None) -> int:
    return 1 if group is None else distributed.get_world_size(group)


@torch.no_grad()
def _fingerprints(model: nn.Module, device: torch.device) -> dict[str, tuple[int, ...]]:
    """Each parameter's shape, and a checksum of all its bits and where they are."""
    parameters = dict(model.named_parameters())
    sums = torch.stack([_checksum(parameter).to(device) for parameter in parameters.values()]).tolist()
    return {name: (*p.shape, total) for (name, p), total in zip(parameters.items(), sums, strict=True)}


def _checksum(tensor: Tensor) -> Tensor:
    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).contiguous().flatten()
    bits = flat.view(_INTEGERS[flat.itemsize])
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for start in range(0, len(bits), _BLOCK):
        block = bits[start : start + _BLOCK].to(torch.int64)
        place = torch.arange(start, start + len(block), device=block.device)
        total += (block * (place * _FACTOR | 1)).sum()  # whole numbers wrap around: no rounding, whatever the order
    return total


def _mixed(numbers: Iterable[int]) -> int:
    total = 0
    for number in numbers:
        total = total * _FACTOR + number
    return _signed(total)


def _signed(number: int) -> int:
    """The 64-bit whole number with the same lowest bits."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)
