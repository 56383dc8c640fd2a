"""What a gate does to a tensor: x·θ, with θ per example and unit.

The two gradients are one kernel, Triton's on a GPU and compiled C on a processor, which reads what came in and what
comes back once. Elsewhere, and for the small, plain torch computes the same.
"""

import math
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from bmrs import _scale_native, fused, native

# Numbers, below which starting a kernel of ours costs the processor more than it saves the GPU: plain torch goes over
# the tensor more often, in 16 bits makes float32 of it first, and behind a batch norm keeps it. What each takes is
# measured by benchmarks/products.
FEW = {torch.float32: 1 << 23, torch.bfloat16: 1 << 22, torch.float16: 1 << 22}
_FEWER_BEHIND = 4  # times
FEW_HERE = {torch.float32: 1 << 18, torch.bfloat16: 1 << 15}  # or than it saves the processor itself


def scale(x: Tensor, theta: Tensor, dim: int, each: int = 1, norm: nn.Module | None = None) -> Tensor:
    """x times θ, in the precision of ``x``. ``theta``: [examples or 1, units]; examples are dimension 0 of ``x``, and
    unit n has the ``each`` indices from n·each on along ``dim``. ``norm``: the module that has just computed ``x``; if
    it is a batch norm, ``x`` need not be kept.

    >>> scale(torch.ones(2, 6), torch.tensor([[1.0, 2.0, 3.0]]), dim=1, each=2)
    tensor([[1., 1., 2., 2., 3., 3.],
            [1., 1., 2., 2., 3., 3.]])
    """
    dim %= x.dim()
    kernels = _kernels(x, theta, norm is not None and isinstance(norm, nn.modules.batchnorm._BatchNorm))
    if kernels is not None:
        laid = _laid_out(x, dim, each)
        if laid is not None:
            result: Tensor = _Scale.apply(x, theta, kernels, *laid, *(_behind(norm, x) if x.is_cuda else ()))
            return result
    if each == 1 and theta.shape == x.shape:  # a view less to go back through
        result = x * theta
        return result.to(x.dtype)
    shape = [1] * (x.dim() + (each > 1))
    shape[0] = len(theta)
    shape[dim] = theta.shape[1]  # the last word, where a tensor of one example has units along dimension 0
    if each == 1:
        product: Tensor = x * theta.reshape(shape)
        return product.to(x.dtype)
    product = x.unflatten(dim, (theta.shape[1], each)) * theta.reshape(shape)
    return product.to(x.dtype).flatten(dim, dim + 1)


def _kernels(x: Tensor, theta: Tensor, behind: bool) -> Any:
    """Whose kernels are to do it; None: plain torch. ``behind``: a batch norm."""
    if theta.dtype != torch.float32 or not x.numel() or torch.compiler.is_compiling():
        return None
    learns = theta.requires_grad and torch.is_grad_enabled()
    if x.is_cuda:
        # A graph that is being recorded starts kernels for nothing later on.
        few = FEW.get(x.dtype, 0) // (_FEWER_BEHIND if behind else 1)
        worth = x.numel() >= few or torch.cuda.is_current_stream_capturing()
        fits = len(theta) == len(x) and x.dtype != torch.float64 and x.numel() < 1 << 31
        return fused.kernels("_scale_kernels") if learns and worth and fits else None
    if x.device.type != "cpu" or not type(x) is type(theta) is Tensor or x.numel() < FEW_HERE.get(x.dtype, math.inf):
        return None
    # Without gradients torch is as fast, but for what it first makes float32 of.
    fits = len(theta) == len(x) if learns else x.dtype == torch.bfloat16 and not torch.is_grad_enabled()
    return _scale_native if fits and native.available() else None


def _laid_out(x: Tensor, dim: int, each: int) -> tuple[int, int, int] | None:
    """How ``x`` lies in memory without gaps, [examples, before, units, after]: the last three sizes. None: otherwise.

    One of "before" and "after" must be 1: pixels lie behind the channels, or in front of them in channels-last.
    """
    units = x.shape[dim] // each
    if x.is_contiguous():
        before, after = prod(x.shape[1:dim]), each * prod(x.shape[dim + 1 :])
    elif dim == 1 and each == 1 and x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last):
        before, after = x.shape[2] * x.shape[3], 1
    else:
        return None
    return (before, units, after) if dim and (before == 1 or after == 1) else None


def _behind(norm: nn.Module | None, x: Tensor) -> tuple[Tensor, ...]:
    """What a batch norm in training mode computed ``x`` from, and keeps: input, mean, 1/sd, weight and bias.

    The gates' gradient can then be made of its input, and nobody needs to keep ``x``.
    """
    step: Any = x.grad_fn
    if not isinstance(norm, nn.modules.batchnorm._BatchNorm) or not norm.affine or step is None:
        return ()
    if step.name() not in ("CudnnBatchNormBackward0", "NativeBatchNormBackward0") or not step._saved_training:
        return ()
    kept = (step._saved_input, step._saved_result1, step._saved_result2, norm.weight, norm.bias)
    alike = kept[0].stride() == x.stride() and all(own.dtype == torch.float32 for own in kept[1:])
    return tuple(own.detach() for own in kept) if alike else ()


class _Scale(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, theta: Tensor, kernels: Any, before: int, units: int, after: int, *behind: Tensor
    ) -> Tensor:
        """``behind``: see :func:`_behind`."""
        ctx.save_for_backward(theta, *(behind or (x,)))
        ctx.kernels, ctx.sizes, ctx.stride = kernels, (before, units, after), x.stride()
        product: Tensor = kernels.forward(x, theta, before, units, after)
        return product

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        theta, x, *behind = ctx.saved_tensors
        if grad.stride() != ctx.stride:  # so that both can be read as they lie
            grad = torch.empty_strided(grad.shape, ctx.stride, dtype=grad.dtype, device=grad.device).copy_(grad)
        to_x, to_theta = ctx.kernels.backward(grad, x, theta, *ctx.sizes, *behind)
        return to_x, to_theta, *(None for _ in range(4 + (len(behind) + 1 if behind else 0)))
