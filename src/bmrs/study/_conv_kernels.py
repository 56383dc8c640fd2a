"""Triton kernels of stacked convolutions: products of patches that are never laid out, only read where they lie.

Images and slopes have channels last, [members · examples, H, W, C]; filters are square, the stride is 1, nothing is
padded. A patch is a row of K = size · size · C numbers, in the order filter row, filter column, channel. Products are
in TF32, which is what the library's own do on these networks.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS, _INNER = 64, 32  # pixels, and numbers of a patch, at a time
_SHARES = 1024  # programs that keep a GPU busy


def forward(x: Tensor, filters: Tensor, bias: Tensor, size: int) -> Tensor:
    """[images, out_h, out_w, O]. ``filters``: [members, K, O]; ``bias``: [members, O]."""
    images, height, width, channels = x.shape
    members, inner, outputs = filters.shape
    out_h, out_w = height - size + 1, width - size + 1
    out = torch.empty(images, out_h, out_w, outputs, device=x.device, dtype=x.dtype)
    rows = images // members * out_h * out_w
    block_o = _block(outputs)
    _forward[(triton.cdiv(rows, _ROWS), triton.cdiv(outputs, block_o), members)](
        x, filters, bias, out, rows, inner, outputs, size * channels, height, width, channels,
        AREA=out_h * out_w, OUT_W=out_w, ROWS=_ROWS, INNER=_INNER, OUTPUTS=block_o, num_warps=4,
    )  # fmt: skip
    return out


def by_filters(x: Tensor, slope: Tensor, members: int, size: int) -> tuple[Tensor, Tensor]:
    """The gradients of filters, [members, K, O], and bias, [members, O], from the slope at the output."""
    images, height, width, channels = x.shape
    _, out_h, out_w, outputs = slope.shape
    inner, rows = size * size * channels, images // members * out_h * out_w
    block_k, block_o = min(64, _block(inner)), _block(outputs)
    tiles = triton.cdiv(inner, block_k)
    shares = max(1, min(triton.cdiv(rows, 4 * _ROWS), _SHARES // (members * tiles)))
    each = triton.cdiv(triton.cdiv(rows, shares), _ROWS) * _ROWS
    parts = torch.empty(members, shares, inner, outputs, device=x.device, dtype=x.dtype)
    biases = torch.empty(members, shares, outputs, device=x.device, dtype=x.dtype)
    _by_filters[(tiles * triton.cdiv(outputs, block_o), shares, members)](
        x, slope, parts, biases, rows, each, inner, outputs, size * channels, height, width, channels, shares, tiles,
        AREA=out_h * out_w, OUT_W=out_w, ROWS=_ROWS, INNER=block_k, OUTPUTS=block_o, num_warps=4,
    )  # fmt: skip
    return parts.sum(1), biases.sum(1)


def by_input(slope: Tensor, filters: Tensor, height: int, width: int, size: int) -> Tensor:
    """The gradient of the images. ``filters``: [members, size · size · O, C], in the order row, column, output."""
    images, out_h, out_w, outputs = slope.shape
    members, inner, channels = filters.shape
    out = torch.empty(images, height, width, channels, device=slope.device, dtype=slope.dtype)
    rows = images // members * height * width
    block_c = _block(channels)
    _by_input[(triton.cdiv(rows, _ROWS), triton.cdiv(channels, block_c), members)](
        slope, filters, out, rows, inner, channels, outputs, out_h, out_w,
        SIZE=size, AREA=height * width, WIDTH=width, ROWS=_ROWS, INNER=_INNER, CHANNELS=block_c, num_warps=4,
    )  # fmt: skip
    return out


def _block(number: int) -> int:
    return max(16, min(64, triton.next_power_of_2(number)))


@triton.jit
def _starts(r, examples_before, height, width, channels, AREA: tl.constexpr, OUT_W: tl.constexpr):
    """Where the patches of output pixels begin."""
    image, place = examples_before + r // AREA, r % AREA
    return ((image * height + place // OUT_W) * width + place % OUT_W) * channels


@triton.jit
def _forward(
    x, filters, bias, out, rows, inner, outputs, line, height, width, channels,
    AREA: tl.constexpr, OUT_W: tl.constexpr, ROWS: tl.constexpr, INNER: tl.constexpr, OUTPUTS: tl.constexpr,
):  # fmt: skip
    member = tl.program_id(2).to(tl.int64)
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    o = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    start = _starts(r, member * (rows // AREA), height, width, channels, AREA, OUT_W)
    total = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for first in range(0, inner, INNER):
        k = first + tl.arange(0, INNER)
        shift = k // line * (width * channels) + k % line
        patch = tl.load(x + start[:, None] + shift[None, :], (r < rows)[:, None] & (k < inner)[None, :], 0.0)
        here = (k < inner)[:, None] & (o < outputs)[None, :]
        weight = tl.load(filters + (member * inner + k[:, None]) * outputs + o[None, :], here, 0.0)
        total = tl.dot(patch, weight, total, input_precision="tf32")
    total += tl.load(bias + member * outputs + o, o < outputs, 0.0)[None, :]
    to = (member * rows + r[:, None]) * outputs + o[None, :]
    tl.store(out + to, total, (r < rows)[:, None] & (o < outputs)[None, :])


@triton.jit
def _by_filters(
    x, slope, parts, biases, rows, each, inner, outputs, line, height, width, channels, shares, tiles,
    AREA: tl.constexpr, OUT_W: tl.constexpr, ROWS: tl.constexpr, INNER: tl.constexpr, OUTPUTS: tl.constexpr,
):  # fmt: skip
    member, share = tl.program_id(2).to(tl.int64), tl.program_id(1)
    tile = tl.program_id(0) % tiles
    k = tile * INNER + tl.arange(0, INNER)
    o = tl.program_id(0) // tiles * OUTPUTS + tl.arange(0, OUTPUTS)
    shift = k // line * (width * channels) + k % line
    total = tl.zeros((INNER, OUTPUTS), tl.float32)
    bias = tl.zeros((OUTPUTS,), tl.float32)
    for first in range(share * each, tl.minimum(share * each + each, rows), ROWS):
        r = first + tl.arange(0, ROWS)
        start = _starts(r, member * (rows // AREA), height, width, channels, AREA, OUT_W)
        patch = tl.load(x + start[None, :] + shift[:, None], (r < rows)[None, :] & (k < inner)[:, None], 0.0)
        here = (r < rows)[:, None] & (o < outputs)[None, :]
        grad = tl.load(slope + (member * rows + r[:, None]) * outputs + o[None, :], here, 0.0)
        total = tl.dot(patch, grad, total, input_precision="tf32")
        bias += tl.sum(grad, 0)
    to = ((member * shares + share) * inner + k[:, None]) * outputs + o[None, :]
    tl.store(parts + to, total, (k < inner)[:, None] & (o < outputs)[None, :])
    tl.store(biases + (member * shares + share) * outputs + o, bias, (o < outputs) & (tile == 0))


@triton.jit
def _by_input(
    slope, filters, out, rows, inner, channels, outputs, out_h, out_w,
    SIZE: tl.constexpr, AREA: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, INNER: tl.constexpr,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    member = tl.program_id(2).to(tl.int64)
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    image, i, j = member * (rows // AREA) + r // AREA, r % AREA // WIDTH, r % AREA % WIDTH
    total = tl.zeros((ROWS, CHANNELS), tl.float32)
    for first in range(0, inner, INNER):
        k = first + tl.arange(0, INNER)
        tap, o = k // outputs, k % outputs
        # The output pixels whose patches have this pixel at this tap.
        above, left = i[:, None] - (tap // SIZE)[None, :], j[:, None] - (tap % SIZE)[None, :]
        inside = (above >= 0) & (above < out_h) & (left >= 0) & (left < out_w)
        source = ((image[:, None] * out_h + above) * out_w + left) * outputs + o[None, :]
        grad = tl.load(slope + source, inside & (r < rows)[:, None] & (k < inner)[None, :], 0.0)
        here = (k < inner)[:, None] & (c < channels)[None, :]
        weight = tl.load(filters + (member * inner + k[:, None]) * channels + c[None, :], here, 0.0)
        total = tl.dot(grad, weight, total, input_precision="tf32")
    to = (member * rows + r[:, None]) * channels + c[None, :]
    tl.store(out + to, total, (r < rows)[:, None] & (c < channels)[None, :])
