"""Running a network on trial: on its own modules, with copies of its numbers, leaving no trace."""

import contextlib
import random
import sys
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree

from bmrs.structure.capture import arguments, forked_rng, mode, named_tensors
from bmrs.structure.listing import Structures
from bmrs.structure.standin import as_built


@contextlib.contextmanager
def sandbox(model: nn.Module, dtype: torch.dtype | None) -> Iterator[None]:
    """Whatever happens to tensors and attributes inside, the network is as it was afterwards."""
    with as_built(model):
        tensors = list({id(tensor): tensor for _, tensor in named_tensors(model)}.values())
        modules = dict.fromkeys(model.modules())
    modules |= dict.fromkeys(model.modules())  # the stand-ins too
    before = [(tensor, tensor.data, tensor.grad, tensor.requires_grad) for tensor in tensors]
    attributes = [(module, dict(module.__dict__)) for module in modules]
    caches = [(v, dict(v)) for _, values in attributes for v in values.values() if type(v) in (dict, OrderedDict)]
    default = torch.get_default_dtype()
    try:
        for tensor in tensors:
            tensor.grad = None
            # Always copies: what happens inside must not reach the real numbers.
            tensor.data = (
                tensor.data.to(dtype or tensor.dtype, copy=True) if tensor.is_floating_point() else tensor.data.clone()
            )
        if dtype is not None:
            torch.set_default_dtype(dtype)
            for module in modules:
                for name, value in list(module.__dict__.items()):
                    if type(value) is Tensor and value.is_floating_point():
                        module.__dict__[name] = value.to(dtype)
        yield
    finally:
        torch.set_default_dtype(default)
        for tensor, data, grad, requires_grad in before:
            tensor.grad = None
            tensor.data = data
            tensor.requires_grad_(requires_grad)
            tensor.grad = grad
        for module, values in attributes:
            module.__dict__.clear()
            module.__dict__.update(values)
        for cache, content in caches:
            cache.clear()
            cache.update(content)


@contextlib.contextmanager
def paused(owner: Structures) -> Iterator[None]:
    """Gates on the network stand aside."""
    before = [(follower, follower.paused) for follower in owner.followers]
    for follower in owner.followers:
        follower.paused = True
    try:
        yield
    finally:
        for follower, was in before:
            follower.paused = was


class _OnTrial(TorchFunctionMode):
    """No dropout, which draws a number per index that two networks of different width cannot share.

    And no attention over shapes that make no sense: some releases of torch end the process there.
    """

    _NAMES = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
    _SKIPPED = {getattr(F, name) for name in _NAMES} | {torch.dropout, torch.dropout_, torch.alpha_dropout}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in self._SKIPPED:
            return args[0] if args else kwargs["input"]
        if func is F.multi_head_attention_forward:  # its dropout is out of reach from here, but for its argument
            args = (*args[:10], 0.0, *args[11:]) if len(args) > 10 else args
            kwargs = {**kwargs, "dropout_p": 0.0} if "dropout_p" in kwargs else kwargs
        if func is F.scaled_dot_product_attention:
            tensors = [value for value in (*args[:3], *kwargs.values()) if isinstance(value, Tensor)]
            heads = [tensor.shape[-3] for tensor in tensors[:3] if tensor.dim() > 3]
            if any(tensor.numel() == 0 for tensor in tensors) or any(heads[0] % count for count in heads):
                raise ValueError("attention over tensors whose shapes do not fit")
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            kwargs = {**kwargs, "dropout_p": 0.0} if "dropout_p" in kwargs else kwargs
        return func(*args, **kwargs)


@contextlib.contextmanager
def _same_chance(model: nn.Module) -> Iterator[None]:
    """The same random numbers each time, whoever draws them, and nobody else's disturbed."""
    numpy = sys.modules.get("numpy")
    plain, array = random.getstate(), numpy.random.get_state() if numpy else None
    with forked_rng(model):
        torch.manual_seed(0)
        random.seed(0)
        if numpy:
            numpy.random.seed(0)
        try:
            yield
        finally:
            random.setstate(plain)
            if numpy:
                numpy.random.set_state(array)


def outputs(model: nn.Module, inputs: Any, *, training: bool) -> list[Tensor]:
    """All tensors a call returns, with the same random numbers each time."""
    args, kwargs = arguments(inputs)
    with mode(model, training), _same_chance(model), _OnTrial():
        made = model(*args, **kwargs)
    return [tensor for tensor in _pytree.tree_leaves(made) if isinstance(tensor, Tensor)]


def difference(first: Sequence[Tensor], second: Sequence[Tensor]) -> float:
    """Largest relative difference; infinite where shapes or not-a-numbers disagree."""
    if [tuple(a.shape) for a in first] != [tuple(b.shape) for b in second]:
        return float("inf")
    worst = 0.0
    for a, b in zip(first, second, strict=True):
        a, b = a.detach().double(), b.detach().double()
        good = torch.isfinite(a)
        if not torch.equal(good, torch.isfinite(b)):
            return float("inf")
        if good.any():
            a, b = a[good], b[good]
            worst = max(worst, float((a - b).abs().max() / a.abs().max().clamp_min(1e-12)))
    return worst


@torch.no_grad()
def randomise(model: nn.Module) -> None:
    """Give numbers to what starts as a constant, such as a layer scale: a test through zeros shows nothing."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.numel() > 1 and parameter.is_floating_point():
            constant = bool((parameter == parameter.flatten()[0]).all())
            if constant or float(parameter.abs().max()) < 1e-3:
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter)
                scale = 0.3 if parameter.dim() < 2 else (parameter[0].numel()) ** -0.5
                parameter.data = (parameter if constant else 0) + scale * noise


def trial_inputs(inputs: Any, dtype: torch.dtype | None, *, twice: bool) -> Any:
    """The example inputs, with numbers where they are constant, in this type, and for twice the examples."""
    leaves, spec = _pytree.tree_flatten(inputs)
    first = next((leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()), None)
    generator = torch.Generator().manual_seed(2)
    made = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            if leaf.is_floating_point():
                constant = leaf.numel() > 1 and bool((leaf == leaf.flatten()[0]).all())
                noise = torch.randn(leaf.shape, generator=generator).to(leaf)
                leaf = noise if constant else leaf
                leaf = leaf.to(dtype) if dtype is not None else leaf
            if twice and first is not None and leaf.dim() and leaf.shape[0] == first.shape[0]:
                leaf = torch.cat([leaf, leaf.flip(0) * (0.9 if leaf.is_floating_point() else 1)])
        made.append(leaf)
    return _pytree.tree_unflatten(made, spec)
