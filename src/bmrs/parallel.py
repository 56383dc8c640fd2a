"""Several processes: all remove the same units, and DistributedDataParallel learns of the smaller shapes."""

from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel


def world_size() -> int:
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def active_wrapper() -> DistributedDataParallel | None:
    """The wrapper whose forward pass is running."""
    return getattr(DistributedDataParallel, "_active_ddp_module", None)


def agreed(decision: Tensor, model: nn.Module) -> Tensor:
    """The decision of process 0, on every process; an error on all of them where their parameters differ."""
    if world_size() == 1:
        return decision
    with torch.no_grad():
        sums = torch.stack([p.double().sum().to(decision.device) for p in model.parameters()])
        # As bits, so that NaN equals NaN.
        bits = torch.nan_to_num(sums, nan=torch.pi).view(torch.int64)
        lowest, highest = bits.clone(), bits.clone()
    distributed.all_reduce(lowest, distributed.ReduceOp.MIN)
    distributed.all_reduce(highest, distributed.ReduceOp.MAX)
    if not torch.equal(lowest, highest):
        differing = int((lowest != highest).sum())
        raise RuntimeError(
            f"{differing} parameters differ between processes, which would remove different units: train through "
            f"DistributedDataParallel, from the same start, and wrap the model after the Pruner is made."
        )
    shared = decision.to(torch.uint8)
    distributed.broadcast(shared, 0)
    return shared.bool()


def shared_number(number: int, device: torch.device) -> int:
    """Process 0's."""
    if world_size() == 1:
        return number
    tensor = torch.tensor(number, device=device)
    distributed.broadcast(tensor, 0)
    return int(tensor)


def rewrap(wrapper: DistributedDataParallel) -> None:
    """Make a wrapper anew in place: its buckets have the sizes of the parameters it was made with."""
    whole = wrapper.bucket_bytes_cap_default
    arguments: dict[str, Any] = {
        "device_ids": wrapper.device_ids,
        "output_device": wrapper.output_device,
        "dim": wrapper.dim,
        "process_group": wrapper.process_group,
        "bucket_cap_mb": None if whole else wrapper.bucket_bytes_cap / 2**20,
        "find_unused_parameters": wrapper.find_unused_parameters,
        "gradient_as_bucket_view": wrapper.gradient_as_bucket_view,
        "static_graph": wrapper.static_graph,
        "mixed_precision": wrapper.mixed_precision,
        "init_sync": False,
    }
    # Newer releases of torch have more.
    newer = "forward_sync_buffers" if hasattr(wrapper, "forward_sync_buffers") else "broadcast_buffers"
    for name in (newer, "batched_grad_copy", "skip_all_reduce_unused_params"):
        if getattr(wrapper, name, None) is not None:
            arguments[name] = getattr(wrapper, name)
    if getattr(wrapper, "bucket_bytes_cap_list", None):
        arguments["bucket_cap_mb_list"] = [size / 2**20 for size in wrapper.bucket_bytes_cap_list]
    training, communication = wrapper.training, list(wrapper._comm_hooks)
    hooks = {name: value for name, value in vars(wrapper).items() if "_hooks" in name and isinstance(value, dict)}
    wrapper._remove_autograd_hooks()
    wrapper.__init__(wrapper.module, **arguments)  # type: ignore[misc]
    vars(wrapper).update(hooks)
    for hook, state in communication:
        wrapper.register_comm_hook(state, hook)
    wrapper.training = training
