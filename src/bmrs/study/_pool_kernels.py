"""Triton kernels of max pooling over windows that do not overlap: one pass forwards, one backwards."""

import torch
import triton
import triton.language as tl
from torch import Tensor

# Numbers that change as networks shrink: the compiler must not make kernels of its own for some of them.
_SIZES = ["number", "channels", "by_image", "by_channel", "by_row", "by_column"]


def forward(x: Tensor, size: int, rectified: bool) -> tuple[Tensor, Tensor]:
    """The maxima, and which number of its window each is; ``rectified``: 0 and -1 where none is positive."""
    images, channels, height, width = x.shape
    shape = (images, channels, height // size, width // size)
    how = torch.channels_last if _last(x) else torch.contiguous_format
    out = torch.empty(shape, device=x.device, dtype=x.dtype, memory_format=how)
    which = torch.empty(shape, device=x.device, dtype=torch.int8, memory_format=how)
    _forward[(triton.cdiv(out.numel(), 1024),)](
        x, out, which, out.numel(), channels, shape[2], shape[3], *x.stride(),
        SIZE=size, LAST=_last(x), RECTIFIED=rectified, BLOCK=1024,
    )  # fmt: skip
    return out, which


def backward(grad: Tensor, which: Tensor, x: Tensor, size: int) -> Tensor:
    whole = x.shape[2] % size == 0 and x.shape[3] % size == 0
    out = torch.empty_like(x) if whole else torch.zeros_like(x)
    last = _last(x)
    grad = grad.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
    _backward[(triton.cdiv(grad.numel(), 1024),)](
        grad, which, out, grad.numel(), x.shape[1], *grad.shape[2:], *out.stride(), SIZE=size, LAST=last, BLOCK=1024
    )
    return out


def _last(x: Tensor) -> bool:
    return x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()


@triton.jit
def _places(n, channels, out_h, out_w, LAST: tl.constexpr):
    """Image, channel, row and column of numbers as they lie in memory."""
    if LAST:
        c, rest = n % channels, n // channels
        j, rest = rest % out_w, rest // out_w
        return rest // out_h, c, rest % out_h, j
    else:
        j, rest = n % out_w, n // out_w
        i, rest = rest % out_h, rest // out_h
        return rest // channels, rest % channels, i, j


@triton.jit(do_not_specialize=_SIZES)
def _forward(
    x, out, which, number, channels, out_h, out_w, by_image, by_channel, by_row, by_column,
    SIZE: tl.constexpr, LAST: tl.constexpr, RECTIFIED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = n < number
    image, c, i, j = _places(n, channels, out_h, out_w, LAST)
    start = image.to(tl.int64) * by_image + c * by_channel + i * SIZE * by_row + j * SIZE * by_column
    best = tl.load(x + start, here, 0.0)
    at = tl.zeros((BLOCK,), tl.int32)
    for tap in tl.static_range(1, SIZE * SIZE):
        value = tl.load(x + start + tap // SIZE * by_row + tap % SIZE * by_column, here, 0.0)
        more = (value > best) | (value != value)
        best, at = tl.where(more, value, best), tl.where(more, tap, at)
    if RECTIFIED:
        flat = best <= 0.0
        best, at = tl.where(flat, 0.0, best), tl.where(flat, -1, at)
    tl.store(out + n, best, here)
    tl.store(which + n, at.to(tl.int8), here)


@triton.jit(do_not_specialize=_SIZES)
def _backward(
    grad, which, out, number, channels, out_h, out_w, by_image, by_channel, by_row, by_column,
    SIZE: tl.constexpr, LAST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = n < number
    image, c, i, j = _places(n, channels, out_h, out_w, LAST)
    start = image.to(tl.int64) * by_image + c * by_channel + i * SIZE * by_row + j * SIZE * by_column
    slope, at = tl.load(grad + n, here, 0.0), tl.load(which + n, here, 0).to(tl.int32)
    for tap in tl.static_range(SIZE * SIZE):
        tl.store(out + start + tap // SIZE * by_row + tap % SIZE * by_column, tl.where(at == tap, slope, 0.0), here)
