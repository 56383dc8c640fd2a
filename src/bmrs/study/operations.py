"""The operations of many networks at once, each with its own weights and examples, where the library's own are slow.

Convolutions on a GPU are kernels of their own: grouped convolutions of few channels, what stacked ones come to in the
library, are many times slower. On a processor they are slower than one convolution after the other.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from bmrs import fused


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
    numbers = x[0].numel() // x.shape[1] * max(x.shape[1], weight.shape[1]) * (len(x) // len(weight))
    if plain and bias is not None and _fast(x) and numbers < 1 << 31:  # of a member: kernels count them in 32 bits
        result: Tensor = _Conv2d.apply(x, weight, bias)
        return result
    members, outputs = weight.shape[:2]
    if not x.is_cuda:
        biases = [None] * members if bias is None else bias
        each = zip(x.reshape(members, -1, *x.shape[1:]), weight, biases, strict=True)
        return torch.cat([F.conv2d(own, w, b, stride, padding, dilation) for own, w, b in each])
    side_by_side = x.reshape(members, -1, *x.shape[1:]).transpose(0, 1).flatten(1, 2)
    flat = None if bias is None else bias.flatten()
    grouped = F.conv2d(side_by_side, weight.flatten(0, 1), flat, stride, padding, dilation, groups=members)
    split: Tensor = grouped.unflatten(1, (members, outputs))
    return split.transpose(0, 1).flatten(0, 1)


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """``x``: [members, rows, inputs]; ``weight``: [members, outputs, inputs]; ``bias``: [members, outputs]."""
    result: Tensor = _Linear.apply(x, weight, bias)
    return result


def max_pool2d(x: Tensor, size: int, *, rectified: bool = False) -> Tensor:
    """Over windows that do not overlap. ``rectified``: of relu(x), which costs nothing more here."""
    if not _fast(x):
        pooled = F.max_pool2d(x, size)
        return pooled.relu() if rectified else pooled
    result: Tensor = _MaxPool.apply(x, size, rectified)[0]
    return result


def _fast(x: Tensor) -> bool:
    return x.is_cuda and x.dtype == torch.float32 and _kernels() is not None


def _kernels() -> tuple[Any, Any] | None:
    """The modules of kernels of convolutions and of pooling."""
    found = fused.kernels("study._conv_kernels"), fused.kernels("study._pool_kernels")
    return None if None in found else found


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
    """Channels last inside and in what it returns."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        kernels = _kernels()
        assert kernels is not None
        x = x.permute(0, 2, 3, 1).contiguous()
        ctx.save_for_backward(x, weight)
        out: Tensor = kernels[0].forward(x, weight.permute(0, 3, 4, 2, 1), bias)
        return out.permute(0, 3, 1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        kernels = _kernels()
        assert kernels is not None
        x, weight = ctx.saved_tensors
        slope = grad.permute(0, 2, 3, 1).contiguous()
        by_x = None
        if ctx.needs_input_grad[0]:
            by_x = kernels[0].by_input(slope, weight.permute(0, 3, 4, 1, 2), *x.shape[1:3]).permute(0, 3, 1, 2)
        by_filters, by_bias = kernels[0].by_filters(x, slope, len(weight), weight.shape[3])
        return by_x, by_filters.permute(0, 4, 3, 1, 2).contiguous(), by_bias


class _MaxPool(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int, rectified: bool) -> tuple[Tensor, Tensor]:
        kernels = _kernels()
        assert kernels is not None
        out, which = kernels[1].forward(x, size, rectified)
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
        return kernels[1].backward(grad, which, x, ctx.size), None, None
