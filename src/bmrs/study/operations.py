"""The operations of many networks at once, each with its own weights and examples, where the library's own are slow.

Convolutions on a GPU are matrix products of patches: grouped convolutions of few channels, what stacked ones come to in
the library, are several times slower. Elsewhere a grouped convolution does.
"""

from functools import cache
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

_ENOUGH = 512  # matrix products at a time that keep a GPU busy


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: tuple[int, ...] = (1, 1),
    padding: tuple[int, ...] | str = (0, 0),
    dilation: tuple[int, ...] = (1, 1),
) -> Tensor:
    """``x``: [members · examples, C, H, W]; ``weight``: [members, O, C, k, k]; ``bias``: [members, O]."""
    square = weight.shape[3] == weight.shape[4]
    plain = square and stride == (1, 1) and dilation == (1, 1) and padding in ((0, 0), "valid")
    if plain and bias is not None and _fast(x):
        result: Tensor = _Conv2d.apply(x, weight, bias)
        return result
    members, outputs = weight.shape[:2]
    side_by_side = x.reshape(members, -1, *x.shape[1:]).transpose(0, 1).flatten(1, 2)
    flat = None if bias is None else bias.flatten()
    grouped = F.conv2d(side_by_side, weight.flatten(0, 1), flat, stride, padding, dilation, groups=members)
    split: Tensor = grouped.unflatten(1, (members, outputs))
    return split.transpose(0, 1).flatten(0, 1)


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """``x``: [members, rows, inputs]; ``weight``: [members, outputs, inputs]; ``bias``: [members, outputs]."""
    result: Tensor = _Linear.apply(x, weight, bias)
    return result


def max_pool2d(x: Tensor, size: int) -> Tensor:
    """Over windows that do not overlap."""
    if not _fast(x):
        return F.max_pool2d(x, size)
    result: Tensor = _MaxPool.apply(x, size)[0]
    return result


def _fast(x: Tensor) -> bool:
    return x.is_cuda and x.dtype == torch.float32 and _kernels() is not None


@cache
def _kernels() -> tuple[ModuleType, ModuleType] | None:
    """The modules of kernels; None where Triton is not installed."""
    try:
        from bmrs.study import _conv_kernels, _pool_kernels
    except ImportError:
        return None
    return _conv_kernels, _pool_kernels


class _Linear(Function):
    """As autograd's, except that the weight's gradient is made in the weight's own layout and not copied into it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.baddbmm(bias[:, None], x, weight.mT)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        by_x = torch.bmm(grad, weight) if ctx.needs_input_grad[0] else None
        return by_x, torch.bmm(grad.mT, x), grad.sum(1)


class _Conv2d(Function):
    """Patches, [members, examples · pixels, k · k · C], times filters; channels last in the output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        kernels = _kernels()
        assert kernels is not None
        members, outputs, _, size, _ = weight.shape
        filters = _filters(weight)
        if x.shape[1] > 1:  # what a patch takes from a row of pixels then lies side by side
            x = x.contiguous(memory_format=torch.channels_last)
        rows = kernels[0].patches(x, size, filters.shape[2]).view(members, -1, filters.shape[2])
        ctx.save_for_backward(rows, filters)
        ctx.of_x, ctx.of_weight = x.shape, weight.shape
        out = torch.baddbmm(bias[:, None], rows, filters.mT)
        out_h, out_w = x.shape[2] - size + 1, x.shape[3] - size + 1
        return out.view(x.shape[0], out_h, out_w, outputs).permute(0, 3, 1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        kernels = _kernels()
        assert kernels is not None
        rows, filters = ctx.saved_tensors
        members, outputs, inputs, size, _ = ctx.of_weight
        slope = grad.permute(0, 2, 3, 1).reshape(members, -1, outputs)
        by_x = None
        if ctx.needs_input_grad[0]:
            by_x = kernels[0].gather(torch.bmm(slope, filters).flatten(0, 1), ctx.of_x, size)
        # The sum runs over many rows: in shares, so that there is work for everyone.
        shares = next(s for s in range(max(1, _ENOUGH // members), 0, -1) if slope.shape[1] % s == 0)
        parts = torch.bmm(
            slope.view(members * shares, -1, outputs).mT, rows.view(members * shares, -1, rows.shape[2])
        ).view(members, shares, outputs, -1)
        by_filters = parts.sum(1) if shares > 1 else parts[:, 0]
        by_weight = by_filters[..., : size * size * inputs].view(members, outputs, size, size, inputs)
        return by_x, by_weight.permute(0, 1, 4, 2, 3).contiguous(), slope.sum(1)


def _filters(weight: Tensor) -> Tensor:
    """[members, O, k · k · C], in the order of patches, padded to a multiple of four."""
    flat = weight.permute(0, 1, 3, 4, 2).flatten(2)
    return F.pad(flat, (0, -flat.shape[2] % 4))


class _MaxPool(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int) -> tuple[Tensor, Tensor]:
        kernels = _kernels()
        assert kernels is not None
        out, which = kernels[1].forward(x, size)
        ctx.mark_non_differentiable(which)
        ctx.save_for_backward(which, x)
        ctx.size = size
        return out, which

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        kernels = _kernels()
        assert kernels is not None
        which, x = ctx.saved_tensors
        return kernels[1].backward(grad, which, x, ctx.size), None
