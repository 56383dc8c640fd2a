"""Argument checks. Each failure is one sentence that names the argument and says what to do."""

import math
from numbers import Real

import torch
from torch import Tensor, nn


def number(value: object, name: str, low: float, high: float, what: str) -> float:
    """A real number in [low, high], or a sentence saying what the argument is for."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, {what}; got {type(value).__name__}.")
    value = float(value)
    if not (low <= value <= high and math.isfinite(value)):
        if math.isfinite(high):
            span = f"in [{low:g}, {high:g}]"
        else:
            span = "finite" if low == -math.inf else f"a finite number of at least {low:g}"
        raise ValueError(f"{name} must be {span}, {what}; got {value:g}.")
    return value


def whole(value: object, name: str, low: float, what: str) -> int:
    """A whole number of at least ``low``, however it is written."""
    found = number(value, name, low, math.inf, what)
    if found != int(found):
        raise ValueError(f"{name} must be a whole number, {what}; got {found:g}: round it.")
    return int(value)  # type: ignore[call-overload, no-any-return]  # a large one does not fit a float


def floating(tensor: object, name: str) -> Tensor:
    """A floating-point tensor."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a tensor; got {type(tensor).__name__}.")
    if not tensor.is_floating_point():
        raise TypeError(f"{name} must be a floating-point tensor; got {tensor.dtype}: convert it with {name}.float().")
    return tensor


def finite(tensor: Tensor, name: str) -> None:
    """No NaN, no infinity. Waits for the device, so it stays out of training steps."""
    bad = int((~torch.isfinite(tensor)).sum())
    if bad:
        raise ValueError(
            f"{name} must be finite, but {bad} of its {tensor.numel()} values are NaN or infinite: "
            f"reset those units or train them with a lower learning rate."
        )


def same_shape(first: Tensor, first_name: str, second: Tensor, second_name: str) -> None:
    if first.shape != second.shape:
        raise ValueError(
            f"{first_name} and {second_name} must have the same shape, one entry per unit; "
            f"got {tuple(first.shape)} and {tuple(second.shape)}."
        )


def in_one_piece(model: nn.Module, name: str, remedy: str) -> None:
    """That no process holds but a share of the model's parameters, as under FSDP or tensor parallelism."""
    if in_shards(model):
        raise ValueError(f"{name} is in shards, of which each process holds its own: {remedy}.")


def in_shards(model: nn.Module) -> bool:
    """Whether the model's parameters are parted among processes. Parted ones are whole for a while under FSDP."""
    kinds = {kind.__name__ for module in model.modules() for kind in type(module).__mro__}
    parted = any(hasattr(parameter, "full_tensor") for parameter in model.parameters())
    return parted or not kinds.isdisjoint({"FSDPModule", "FullyShardedDataParallel"})
