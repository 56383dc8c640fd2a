"""Integers a module has written down: attributes set anew, and sizes corrected while its own code runs.

Slicing the tensors is enough for most modules, whose code reads shapes off its inputs. Others hold a width in an
attribute (``num_heads``), which can be set. A few compute it in ``forward`` from something that did not shrink,
such as ``x.reshape(B, N, C)`` with C the width of the input: their code runs as it is, and the sizes it asks for
are corrected on the way (:class:`Reshaping`).
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from bmrs.structure.multihead import MultiheadForward


@dataclass(frozen=True)
class Correction:
    """Where a request of this kind with ``count`` numbers says ``old`` at ``position``, ``new`` is meant.

    ``dims``: of the tensor it is asked of; 0 for any.
    """

    kind: str
    count: int
    position: int
    old: int
    new: int
    sure: bool
    dims: int = 0


class Reshaping(TorchFunctionMode):
    """Corrects sizes that no longer fit the tensor they are asked of; leaves alone what fits."""

    def __init__(self, corrections: tuple[Correction, ...]) -> None:
        super().__init__()
        self.corrections = corrections

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        kind = _KINDS.get(func)
        if kind is None:
            return func(*args, **kwargs)
        x, args = (args[0], args[1:]) if args else (kwargs["input"], ())
        kwargs = {name: value for name, value in kwargs.items() if name != "input"}
        args, kwargs = _MENDED[kind](self.corrections, x, args, kwargs)
        return func(x, *args, **kwargs)


_KINDS = {
    torch.Tensor.view: "view",
    torch.Tensor.reshape: "view",
    torch.reshape: "view",
    torch.Tensor.expand: "expand",
    torch.Tensor.unflatten: "unflatten",
    torch.unflatten: "unflatten",
    torch.Tensor.split: "split",
    torch.split: "split",
    torch.Tensor.split_with_sizes: "split",
}


def form(kind: str, sizes: Sequence[int]) -> str:
    """Requests that leave another number open are of another form."""
    return f"{kind}, {list(sizes).index(-1)} open" if -1 in sizes else kind


def split_form(dim: int, dims: int) -> str:
    """Splits along another dimension are of another form."""
    return f"split along {dim if dim < 0 else dim - dims}"


def _corrected(
    kind: str, sizes: list[int], total: int, dims: int, corrections: tuple[Correction, ...]
) -> list[int] | None:
    """The sizes whose product is the total; None if those asked for will do or nothing fits."""
    own = [c for c in corrections if c.kind == form(kind, sizes) and c.count == len(sizes) and c.dims in (0, dims)]
    if -1 in sizes:
        return _corrected_open(sizes, total, own)
    if prod(sizes) == total:
        return None
    # Each size as it is, or corrected at a cost: dearly where it is a multiple of the one known, which happens where
    # examples are merged into it.
    choices: list[dict[int, int]] = [{size: 0} for size in sizes]
    for c in own:
        size = sizes[c.position]
        if size * c.new % c.old == 0:
            choices[c.position].setdefault(size * c.new // c.old, 1 if size == c.old else len(sizes))
    fitting = [choice for choice in product(*choices) if prod(choice) == total]
    cost = [sum(costs[size] for size, costs in zip(choice, choices, strict=True)) for choice in fitting]
    best = [choice for choice, its in zip(fitting, cost, strict=True) if its == min(cost)]
    return list(best[0]) if len(best) == 1 else None


def _corrected_open(sizes: list[int], total: int, own: list[Correction]) -> list[int] | None:
    """Beside a -1 several numbers may fit. What such a request always means is corrected; else only one may fit."""
    changed, sure = list(sizes), True
    for c in own:
        if sizes[c.position] == c.old:
            changed[c.position] = c.new
            sure &= c.sure
    if changed == sizes:
        return None
    if not sure:
        fits = [total % -prod(choice) == 0 for choice in (sizes, changed)]
        if all(fits):
            raise RuntimeError(f"it is not clear what {tuple(sizes)} means for the smaller network.")
        return changed if fits[1] else None
    return changed


def _sizes(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[int] | None:
    """The sizes a call asks for: one by one, or as a sequence; None if they are given in another way."""
    sizes = list(args) or [kwargs.get("shape", kwargs.get("size"))]
    if len(sizes) == 1 and isinstance(sizes[0], list | tuple):
        sizes = list(sizes[0])
    return sizes if sizes and all(isinstance(size, int | torch.SymInt) for size in sizes) else None


def _view(corrections: tuple[Correction, ...], x: Tensor, args: Any, kwargs: Any) -> tuple[Any, Any]:
    sizes = _sizes(args, kwargs)
    changed = None if sizes is None else _corrected("view", sizes, x.numel(), x.dim(), corrections)
    return (args, kwargs) if changed is None else ((tuple(changed),), {})


def _unflatten(corrections: tuple[Correction, ...], x: Tensor, args: Any, kwargs: Any) -> tuple[Any, Any]:
    dim = args[0] if args else kwargs["dim"]
    sizes = args[1] if len(args) > 1 else kwargs["sizes"]
    changed = _corrected("unflatten", list(sizes), x.shape[dim], x.dim(), corrections)
    return (args, kwargs) if changed is None else ((dim, tuple(changed)), {})


def _expand(corrections: tuple[Correction, ...], x: Tensor, args: Any, kwargs: Any) -> tuple[Any, Any]:
    sizes = _sizes(args, kwargs)
    if sizes is None:
        return args, kwargs
    changed = list(sizes)
    for c in corrections:
        if c.kind == "expand" and c.count == len(sizes) and sizes[c.position] == c.old:
            own = len(x.shape) - len(sizes) + c.position
            if own >= 0 and x.shape[own] == c.new:
                changed[c.position] = c.new
    return (args, kwargs) if changed == sizes else ((tuple(changed),), {})


def _split(corrections: tuple[Correction, ...], x: Tensor, args: Any, kwargs: Any) -> tuple[Any, Any]:
    sizes = (
        args[0] if args else kwargs.get("split_size_or_sections", kwargs.get("split_size", kwargs.get("split_sizes")))
    )
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    several = isinstance(sizes, list | tuple)
    asked = list(sizes) if several else [sizes]
    if several and sum(asked) == x.shape[dim]:
        return args, kwargs
    own = [c for c in corrections if c.kind == split_form(dim, x.dim()) and c.count == len(asked)]
    own = [c for c in own if asked[c.position] == c.old]
    choices = [[size] for size in asked]
    for c in own:
        choices[c.position] = [*choices[c.position], c.new]
    if several:
        fitting = {choice for choice in product(*choices) if sum(choice) == x.shape[dim]}
    else:  # equal parts: of a dimension that is always the one known, they have its present size
        sure = all(c.sure for c in own)
        fitting = {(size,) for size in (choices[0][1:] if sure else choices[0]) if x.shape[dim] % size == 0}
    if len(fitting) > 1:
        raise RuntimeError(f"it is not clear what a split into parts of {sizes} means for the smaller network.")
    if not own or not fitting:
        return args, kwargs
    (changed,) = fitting
    return (list(changed) if several else changed[0], dim), {}


_MENDED = {"view": _view, "unflatten": _unflatten, "expand": _expand, "split": _split}


class MendedForward:
    """A module's own ``forward``, run with corrected sizes. Lives in the instance: the class stays as it is."""

    def __init__(self, module: nn.Module, corrections: tuple[Correction, ...]) -> None:
        self.module, self.corrections = module, corrections

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with Reshaping(self.corrections):
            return type(self.module).forward(self.module, *args, **kwargs)

    __code__ = __call__.__code__  # torch.export looks for it on the forward of the model it is given


def correct_sizes(model: nn.Module, path: str, corrections: tuple[Correction, ...]) -> None:
    """From now on the module at ``path`` runs with these corrections."""
    module = model.get_submodule(path)
    if isinstance(module, nn.MultiheadAttention):
        module.__dict__["forward"] = MultiheadForward(module)
        no_fast_path_around(model, path)
    else:
        module.__dict__["forward"] = MendedForward(module, corrections)


def own_sizes(module: nn.Module) -> None:
    """The module runs its own code again, as it is."""
    if isinstance(module.__dict__.get("forward"), MendedForward | MultiheadForward):
        del module.__dict__["forward"]


def no_fast_path_around(model: nn.Module, path: str) -> None:
    """Transformer layers around an attention may call a fused kernel that knows only the original shape."""
    parts = path.split(".")
    for end in range(len(parts)):
        around = model.get_submodule(".".join(parts[:end]))
        if isinstance(around, nn.TransformerEncoderLayer):
            around.activation_relu_or_gelu = 0
        elif isinstance(around, nn.TransformerEncoder):
            around.enable_nested_tensor = around.use_nested_tensor = False


def integers_of(module: nn.Module) -> dict[str, Any]:
    """Integers, and sequences of integers, in a module's attributes and in its configuration (``config.num_heads``)."""
    found = {}
    holders = [("", module.__dict__)]
    if hasattr(module.__dict__.get("config"), "__dict__"):
        holders.append(("config.", vars(module.__dict__["config"])))
    for prefix, attributes in holders:
        for name, value in attributes.items():
            several = isinstance(value, list | tuple) and type(value) in (list, tuple) and value
            parts = value if several else [value]
            if all(isinstance(one, int) and not isinstance(one, bool) for one in parts) and not name.startswith("_"):
                found[prefix + name] = value
    return found


def set_integer(module: nn.Module, attribute: str, value: Any) -> None:
    """Configurations are shared between layers: the module gets a copy of its own."""
    holder, _, name = attribute.rpartition(".")
    if not holder:
        setattr(module, name, value)
        return
    own = copy.copy(getattr(module, holder))
    setattr(own, name, value)
    setattr(module, holder, own)


def sync_builtin(module: nn.Module, groups: int | None) -> None:
    """The integers of torch's own layers, read off their tensors. ``groups``: how many are left, where it has any."""
    weight = getattr(module, "weight", None)
    if isinstance(module, nn.modules.conv._ConvNd) and weight is not None:
        if groups is not None and module.groups > 1:
            module.groups = groups
        first, second = weight.shape[0], weight.shape[1] * module.groups
        module.in_channels, module.out_channels = (first, second) if module.transposed else (second, first)
    elif isinstance(module, nn.Linear):
        module.out_features, module.in_features = module.weight.shape
    elif isinstance(module, nn.modules.batchnorm._NormBase):
        tensor = weight if weight is not None else module.running_mean
        if tensor is not None:
            module.num_features = len(tensor)
    elif isinstance(module, nn.GroupNorm):
        if groups is not None:
            module.num_groups = groups
        if weight is not None:
            module.num_channels = len(weight)
    elif isinstance(module, nn.Embedding):
        module.num_embeddings, module.embedding_dim = module.weight.shape
    elif isinstance(module, nn.PReLU):
        module.num_parameters = len(module.weight)
    elif type(module).__name__ == "Conv1D" and hasattr(module, "nf") and weight is not None:
        module.nf = weight.shape[1]  # Hugging Face's linear layer with a transposed weight
        if hasattr(module, "nx"):
            module.nx = weight.shape[0]


_SYNCED = (nn.modules.conv._ConvNd, nn.Linear, nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.Embedding, nn.PReLU)


def is_builtin(module: nn.Module) -> bool:
    """Whether :func:`sync_builtin` knows all its integers."""
    return isinstance(module, _SYNCED)
