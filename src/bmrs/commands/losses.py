"""``--loss``: what is minimised, and the number by which a network is judged."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bmrs.commands.options import LOSSES
from bmrs.inspection import named


@dataclass(frozen=True)
class Loss:
    """``function(output, target)`` is a mean over examples. ``metric``: what is shown, "accuracy" or "loss"."""

    name: str
    function: Callable[[Any, Any], Tensor]
    metric: str

    def shown(self, value: float | None) -> str:
        """
        >>> Loss("mse", F.mse_loss, "loss").shown(0.01234), Loss("", F.cross_entropy, "accuracy").shown(0.9731)
        ('0.01234', '97.3%')
        """
        if value is None:
            return "–"
        return f"{value:.1%}" if self.metric == "accuracy" else f"{value:.4g}"

    def sums(self, output: Any, target: Any) -> Tensor:
        """Of one batch: the metric's sum and the number it is the mean of."""
        if self.metric == "accuracy":
            scores = logits(output)
            right = (scores.argmax(1) == target) & ~scores.isnan().any(1)  # of which argmax names one
            return torch.stack([right.sum().double(), torch.tensor(float(right.numel()), device=right.device).double()])
        rows = float(len(target)) if isinstance(target, Tensor) and target.dim() else 1.0
        mean = self.function(output, target).double()
        return torch.stack([mean * rows, torch.full_like(mean, rows)])


def find(name: str) -> Loss:
    """cross_entropy, mse, or a function (output, target) of the user's own."""
    if name == "cross_entropy":
        return Loss(name, _cross_entropy, "accuracy")
    if name == "mse":
        return Loss(name, _mse, "loss")
    if ":" not in name:
        raise ValueError(f"unknown loss '{name}': choose one of {', '.join(LOSSES)}, or give module:function.")
    function = named(name, "loss")
    if not callable(function):
        raise ValueError(f"--loss: '{name}' is no function of (output, target): name one.")

    def own(output: Any, target: Any) -> Tensor:
        value = function(output, target)
        if not isinstance(value, Tensor) or value.dim():
            raise ValueError(f"--loss: '{name}' must return a single number, the mean over the examples.")
        return value

    return Loss(name, own, "loss")


def logits(output: Any) -> Tensor:
    """A network's output, or the part of it that libraries call so."""
    found = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if not isinstance(found, Tensor):
        raise ValueError(
            f"the network returns a {type(output).__name__}, and not a tensor: give a --loss of yours, "
            f"module:function, that takes it."
        )
    return found


def _cross_entropy(output: Any, target: Tensor) -> Tensor:
    found = logits(output)
    if found.dim() < 2 or target.is_floating_point():
        raise ValueError(
            f"cross entropy needs outputs (examples, classes) and whole numbers as targets, but they are "
            f"{tuple(found.shape)} and {target.dtype}: give --loss mse for regression."
        )
    return F.cross_entropy(found, target)


def _mse(output: Any, target: Tensor) -> Tensor:
    found = logits(output)
    if found.shape == (*target.shape, 1):
        target = target[..., None]
    if found.shape != target.shape:
        raise ValueError(
            f"the network's outputs have shape {tuple(found.shape)}, the targets {tuple(target.shape)}: make them "
            f"alike."
        )
    return F.mse_loss(found, target.to(found.dtype))


def check_classes(output: Any, target: Any, part: str) -> None:
    """That every label has an output: a GPU would end the program without saying why."""
    found = logits(output)
    low, high = int(target.min()), int(target.max())
    if low < 0 or high >= found.shape[1]:
        raise ValueError(
            f"{part} labels reach from {low} to {high}, but the network has {found.shape[1]} outputs, for labels from "
            f"0 to {found.shape[1] - 1}: give it one for every class."
        )
