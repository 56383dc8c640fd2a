"""Triton kernels around stacked convolutions: patches laid out as rows of a matrix, and their gradients put back.

The products themselves are the library's. Rows are padded to a multiple of four numbers, which its tensor cores need.
Filters are square, the stride is 1, nothing is padded; images have channels first or last, whatever their strides say.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


def patches(x: Tensor, size: int, row: int) -> Tensor:
    """[images · out_h · out_w, row]: each pixel's patch, ordered by filter row, filter column, channel, then zeros."""
    images, channels, height, width = x.shape
    out_h, out_w = height - size + 1, width - size + 1
    number = images * out_h * out_w
    out = torch.empty(number, row, device=x.device, dtype=x.dtype)
    block_k = min(32, triton.next_power_of_2(row))
    block_r = 2048 // block_k
    _patches[(triton.cdiv(number, block_r), triton.cdiv(row, block_k))](
        x, out, number, channels, channels * size * size, row, *x.stride(),
        SIZE=size, OUT_W=out_w, AREA=out_h * out_w, ROWS=block_r, INNER=block_k, num_warps=4,
    )  # fmt: skip
    return out


def gather(rows: Tensor, shape: torch.Size, size: int) -> Tensor:
    """What :func:`patches` does backwards: every pixel's sum over the patches it is in, channels last."""
    images, channels, height, width = shape
    out = torch.empty(shape, device=rows.device, dtype=rows.dtype, memory_format=torch.channels_last)
    block_c = triton.next_power_of_2(channels)
    block_p = max(1, 1024 // block_c)
    _gather[(triton.cdiv(images * height * width, block_p),)](
        rows, out, images * height * width, channels, rows.shape[1],
        SIZE=size, HEIGHT=height, WIDTH=width, PIXELS=block_p, CHANNELS=block_c, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _patches(
    x, out, number, channels, inner, row, by_image, by_channel, by_row, by_column,
    SIZE: tl.constexpr, OUT_W: tl.constexpr, AREA: tl.constexpr, ROWS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    k = tl.program_id(1) * INNER + tl.arange(0, INNER)
    image, place = r // AREA, r % AREA
    tap, channel = k // channels, k % channels
    start = image.to(tl.int64) * by_image + place // OUT_W * by_row + place % OUT_W * by_column
    shift = tap // SIZE * by_row + tap % SIZE * by_column + channel * by_channel
    here = (r < number)[:, None]
    value = tl.load(x + start[:, None] + shift[None, :], here & (k < inner)[None, :], 0.0)
    tl.store(out + r.to(tl.int64)[:, None] * row + k[None, :], value, here & (k < row)[None, :])


@triton.jit
def _gather(
    rows, out, number, channels, row,
    SIZE: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, PIXELS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    p = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    c = tl.arange(0, CHANNELS)
    image, place = p // (HEIGHT * WIDTH), p % (HEIGHT * WIDTH)
    i, j = place // WIDTH, place % WIDTH
    some = (p < number)[:, None] & (c < channels)[None, :]
    out_h: tl.constexpr = HEIGHT - SIZE + 1
    out_w: tl.constexpr = WIDTH - SIZE + 1
    total = tl.zeros((PIXELS, CHANNELS), tl.float32)
    for tap in tl.static_range(SIZE * SIZE):
        above, left = i - tap // SIZE, j - tap % SIZE
        inside = (above >= 0) & (above < out_h) & (left >= 0) & (left < out_w)
        source = (image.to(tl.int64) * (out_h * out_w) + above * out_w + left) * row + tap * channels
        total += tl.load(rows + source[:, None] + c[None, :], some & inside[:, None], 0.0)
    tl.store(out + p.to(tl.int64)[:, None] * channels + c[None, :], total, some)
