"""Residual branches whose last layer can lose outputs by itself: the narrow result is put back at its indices.

A branch is added to a stream that stays whole, so its last layer cannot simply get narrower. But a gate on that layer's
output silences an index exactly, and then the layer need not compute it: its rows go, and a hook puts what is left at
its place among zeros. This is where the paper puts its gates in ResNet (the last batch norm) and ViT (the projections).
"""

from collections import Counter
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from bmrs.structure.capture import Captured, module_of

INDICES = "bmrs_indices"
_WIDEN = "bmrs_widen"
# From the sum back to the layer that feeds it: what comes in between does not matter, since the hook is before it.
PASSED = {"dropout", "mul", "div", "permute", "transpose", "view", "reshape", "contiguous", "clone", "to", "roll",
           "slice", "unsqueeze", "squeeze", "flatten"}  # fmt: skip


@dataclass(frozen=True)
class Branch:
    """The last layer of a branch: module ``path``, whose output has its units along ``dim``."""

    path: str
    dim: int
    rows: tuple[tuple[str, int], ...]  # parameter dimensions that hold one row per unit
    scale: tuple[tuple[str, int], ...]  # those of them that scale the output: a gate can be multiplied into them


def find_branches(model: nn.Module, captured: Captured) -> list[Branch]:
    calls = Counter(module_of(node) for node in captured.graph.nodes if operation_of(node) in _LAYERS)
    found: dict[str, Branch] = {}
    for node in captured.graph.nodes:
        if operation_of(node) == "add" and len(node.all_input_nodes) == 2:
            for operand in node.all_input_nodes:
                if shape_of(operand) == shape_of(node):
                    branch = _branch(model, operand, calls)
                    if branch is not None:
                        found[branch.path] = branch
    return list(found.values())


_LAYERS = {"linear", "addmm", "conv1d", "conv2d", "conv3d", "batch_norm"}


def operation_of(node: torch.fx.Node) -> str:
    schema = getattr(node.target, "_schema", None)
    return schema.name.split("::")[-1].rstrip("_") if schema is not None else ""


def shape_of(node: torch.fx.Node) -> Any:
    value = node.meta.get("val")
    return tuple(value.shape) if isinstance(value, Tensor) else None


def _branch(model: nn.Module, node: torch.fx.Node, calls: Counter[str]) -> Branch | None:
    while operation_of(node) in PASSED and len(node.users) == 1:
        node = max(node.all_input_nodes, key=lambda one: prod(shape_of(one) or ()))  # not the scale it is multiplied by
    operation, path = operation_of(node), module_of(node)
    if operation not in _LAYERS or len(node.users) != 1 or calls[path] != 1:
        return None
    module = model.get_submodule(path)
    rows: list[tuple[str, int]] = []
    if operation == "batch_norm":
        if not isinstance(module, nn.modules.batchnorm._BatchNorm) or not module.affine:
            return None
        below = node.all_input_nodes[0]
        layer = model.get_submodule(module_of(below))
        plain = isinstance(layer, nn.modules.conv._ConvNd) and layer.groups == 1 and not layer.transposed
        if not plain or operation_of(below) not in _LAYERS or len(below.users) != 1 or calls[module_of(below)] != 1:
            return None
        rows = [(f"{module_of(below)}.{name}", 0) for name, _ in layer.named_parameters(recurse=False)]
        scale = [(f"{path}.weight", 0), (f"{path}.bias", 0)]
        rows += [*scale, *((f"{path}.{name}", 0) for name, b in module.named_buffers(recurse=False) if b.dim())]
        return Branch(path, 1, tuple(rows), tuple(scale))
    if type(module).__name__ == "Conv1D" and hasattr(module, "nf"):
        scale = [(f"{path}.weight", 1), (f"{path}.bias", 0)]
        return Branch(path, -1, tuple(scale), tuple(scale))
    if type(module) is nn.Linear or (isinstance(module, nn.modules.conv._ConvNd) and module.groups == 1):
        if getattr(module, "transposed", False):
            return None
        scale = [(f"{path}.{name}", 0) for name, _ in module.named_parameters(recurse=False)]
        return Branch(path, -1 if isinstance(module, nn.Linear) else 1, tuple(scale), tuple(scale))
    return None


class Widen:
    """Puts a layer's narrow output at its indices in a tensor of zeros."""

    def __init__(self, dim: int, size: int) -> None:
        self.dim, self.size = dim, size

    def __repr__(self) -> str:
        return f"Widen(dim={self.dim}, size={self.size})"

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        """As a forward hook."""
        shape = list(output.shape)
        shape[self.dim] = self.size
        if _channels_last(output):  # and so is the result: what comes next works best on it
            zeros = torch.empty(
                shape, dtype=output.dtype, device=output.device, memory_format=torch.channels_last
            ).zero_()
        else:
            zeros = output.new_zeros(shape)
        return zeros.index_copy_(self.dim, getattr(module, INDICES), output)


def _channels_last(x: Tensor) -> bool:
    return x.dim() == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)


def widen(module: nn.Module, dim: int, size: int, indices: list[int]) -> None:
    """From now on the module's output has ``size`` indices along ``dim``, and its own are these."""
    device = next(module.parameters()).device
    module.register_buffer(INDICES, torch.tensor(indices, dtype=torch.long, device=device), persistent=False)
    hook = module.__dict__.get(_WIDEN)
    if hook is None:
        hook = module.__dict__[_WIDEN] = Widen(dim, size)
        module.register_forward_hook(hook.after)
    hook.size = size


def unwiden(module: nn.Module) -> None:
    """The module's output is what it computes again."""
    hook = module.__dict__.pop(_WIDEN, None)
    if hook is not None:
        for key in [key for key, value in module._forward_hooks.items() if getattr(value, "__self__", None) is hook]:
            del module._forward_hooks[key]
        delattr(module, INDICES)
