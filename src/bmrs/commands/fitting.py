"""Whether network, data and loss fit each other: asked before anything is trained."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree
from torch.utils.data import TensorDataset

from bmrs.commands import losses
from bmrs.commands.data import Batches, applied, moved
from bmrs.inspection import where_in


def first_batch(part: str, batches: Batches, device: torch.device) -> tuple[Any, Any] | None:
    """Of the data's part, on a device; None where this process has none."""
    try:
        x, y = next(batches.of_epoch(0))
    except StopIteration:
        return None
    except ValueError:
        raise
    except Exception as problem:
        raise ValueError(
            f"--data fails when the first batch of its {part} part is read{where_in(problem)}: mend it first."
        ) from problem
    return moved(x, device), moved(y, device)


@torch.no_grad()
def check(network: nn.Module, loss: losses.Loss, part: str, data: Any, x: Any, y: Any) -> None:
    """Refuse what cannot work: ``x`` and ``y`` are a batch of the part, ``data`` all of it."""
    network.eval()
    try:
        output = applied(network, x)
    except Exception as problem:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in _tensors(x))
        raise ValueError(
            f"the network does not take the data's {part} inputs, of shape {shapes}, and fails on them"
            f"{where_in(problem)}: change one of them."
        ) from problem
    whole = data.tensors if isinstance(data, TensorDataset) else ()
    labels = loss.metric == "accuracy" and isinstance(y, Tensor) and not y.is_floating_point()
    if labels and losses.logits(output).dim() > 1:
        losses.check_classes(output, whole[1] if len(whole) == 2 else y, part)
    try:
        loss.function(output, y)
    except ValueError:
        raise
    except Exception as problem:
        raise ValueError(
            f"--loss {loss.name} does not take the network's outputs and the data's targets{where_in(problem)}: change "
            f"one of them."
        ) from problem
    if spoilt := not_finite([whole or (x, y)]):
        raise ValueError(f"--data: {spoilt} of the {part} part: leave these examples out, or mend them.")


def not_finite(batches: Iterable[Any]) -> str:
    """What is wrong with the numbers in (x, y), in words; empty if they are all finite."""
    for pair in batches:
        for what, value in zip(("inputs", "targets"), pair, strict=False):
            for tensor in _tensors(value):
                if tensor.is_floating_point() and not tensor.isfinite().all():
                    bad = int((~tensor.isfinite()).reshape(len(tensor), -1).any(1).sum()) if tensor.dim() else 1
                    return f"NaN or infinite numbers in the {what} of {bad} examples"
    return ""


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in _pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
