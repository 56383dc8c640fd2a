"""Triton kernels of stacked convolutions: products of patches that are never laid out, only read where they lie.

Images and slopes have channels last, [members · examples, H, W, C]; filters are square, the stride is 1, nothing is
padded. One filter of few channels leaves most of a GPU's matrix unit idle, so a patch here is what several output
pixels side by side look at, K = size · (pixels + size - 1) · C numbers in the order row, column, channel, and the
filters are spread: each pixel has them at its own place, zero elsewhere, [members, K, pixels · O]. Products are in
TF32, which is what the library's own do on these networks.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS, _INNER, _WIDE = 128, 32, 64  # patches, numbers of a patch, and outputs at a time
# Of the gradient of filters: numbers of a patch, and patches and outputs for few filters and for many.
_TALL, _FEW, _MANY = 64, (32, 64), (64, 128)
_SHARES = 1024  # programs that keep a GPU busy
_HOW = {"num_warps": 4, "num_stages": 1}


def forward(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """[images, out_h, out_w, O]. ``weight``: [members, size, size, C, O]; ``bias``: [members, O]."""
    images, height, width, channels = x.shape
    members, size, _, _, outputs = weight.shape
    out_h, out_w = height - size + 1, width - size + 1
    pixels = _side_by_side(out_w, outputs)
    filters = _spread(weight, pixels)
    inner, wide = filters.shape[1:]
    out = torch.empty(images, out_h, out_w, outputs, device=x.device, dtype=x.dtype)
    rows = images // members * out_h * (out_w // pixels)
    block = _block(wide)
    _forward[(triton.cdiv(rows, _ROWS), triton.cdiv(wide, block), members)](
        x, filters, bias, out, rows, inner, wide, outputs, (pixels + size - 1) * channels, height, width, channels,
        AREA=out_h * (out_w // pixels), ACROSS=out_w // pixels, PIXELS=pixels, ROWS=_ROWS, INNER=_INNER, WIDE=block,
        **_HOW,
    )  # fmt: skip
    return out


def by_filters(x: Tensor, slope: Tensor, members: int, size: int) -> tuple[Tensor, Tensor]:
    """The gradients of filters, [members, size, size, C, O], and bias, [members, O], from the slope at the output."""
    images, height, width, channels = x.shape
    _, out_h, out_w, outputs = slope.shape
    rows_each, most = _FEW if outputs <= 16 else _MANY
    pixels = _side_by_side(out_w, outputs, most)
    line, wide = (pixels + size - 1) * channels, pixels * outputs
    inner, rows = size * line, images // members * out_h * (out_w // pixels)
    block_k, block = min(_TALL, _block(inner)), _block(wide, most)
    tiles, tiles_wide = triton.cdiv(inner, block_k), triton.cdiv(wide, block)
    shares = max(1, min(triton.cdiv(rows, 8 * rows_each), _SHARES // (members * tiles * tiles_wide)))
    each = triton.cdiv(triton.cdiv(rows, shares), rows_each) * rows_each
    parts = torch.empty(members, shares, inner, wide, device=x.device, dtype=x.dtype)
    biases = torch.empty(members, shares, wide, device=x.device, dtype=x.dtype)
    _by_filters[(tiles * tiles_wide, shares, members)](
        x, slope, parts, biases, rows, each, inner, wide, line, height, width, channels, shares, tiles,
        AREA=out_h * (out_w // pixels), ACROSS=out_w // pixels, PIXELS=pixels, ROWS=rows_each, INNER=block_k,
        WIDE=block, **_HOW,
    )  # fmt: skip
    whole = _places(parts, size, pixels, channels, outputs).sum((1, 5))
    return whole, biases.view(members, shares * pixels, outputs).sum(1)


def by_input(slope: Tensor, weight: Tensor, height: int, width: int) -> Tensor:
    """The gradient of the images. ``weight``: [members, size, size, O, C]."""
    images, out_h, out_w, outputs = slope.shape
    members, size, _, _, channels = weight.shape
    pixels = _side_by_side(width, channels)
    filters = _spread(weight.flip(1, 2), pixels)
    inner, wide = filters.shape[1:]
    out = torch.empty(images, height, width, channels, device=slope.device, dtype=slope.dtype)
    rows = images // members * height * (width // pixels)
    block = _block(wide)
    _by_input[(triton.cdiv(rows, _ROWS), triton.cdiv(wide, block), members)](
        slope, filters, out, rows, inner, wide, outputs, (pixels + size - 1) * outputs, out_h, out_w,
        SIZE=size, AREA=height * (width // pixels), ACROSS=width // pixels, PIXELS=pixels, ROWS=_ROWS, INNER=_INNER,
        WIDE=block, **_HOW,
    )  # fmt: skip
    return out


def _block(number: int, most: int = _WIDE) -> int:
    return max(16, min(most, triton.next_power_of_2(number)))


def _side_by_side(width: int, outputs: int, most: int = _WIDE) -> int:
    """How many pixels of a row a product takes at once."""
    fit = [pixels for pixels in range(1, width + 1) if width % pixels == 0 and pixels * outputs <= most]
    return max(fit, default=1)


def _spread(weight: Tensor, pixels: int) -> Tensor:
    """[members, size · (pixels + size - 1) · C, pixels · O]."""
    members, size, _, channels, outputs = weight.shape
    filters = weight.new_zeros(members, 1, size * (pixels + size - 1) * channels, pixels * outputs)
    _places(filters, size, pixels, channels, outputs).copy_(weight[:, None, :, :, :, None])
    return filters[:, 0]


def _places(filters: Tensor, size: int, pixels: int, channels: int, outputs: int) -> Tensor:
    """Where the filters of each pixel lie in spread ones: [members, shares, row, column, C, pixel, O], a view."""
    members, shares, inner, wide = filters.shape
    by_column = channels * wide
    return filters.as_strided(
        (members, shares, size, size, channels, pixels, outputs),
        (shares * inner * wide, inner * wide, (pixels + size - 1) * by_column, by_column, wide, by_column + outputs, 1),
    )


@triton.jit
def _starts(r, examples_before, height, width, channels, AREA: tl.constexpr, ACROSS: tl.constexpr,
            PIXELS: tl.constexpr):  # fmt: skip
    """Where patches begin."""
    image, place = examples_before + r // AREA, r % AREA
    return ((image * height + place // ACROSS) * width + place % ACROSS * PIXELS) * channels


@triton.jit
def _forward(
    x, filters, bias, out, rows, inner, wide, outputs, line, height, width, channels,
    AREA: tl.constexpr, ACROSS: tl.constexpr, PIXELS: tl.constexpr, ROWS: tl.constexpr, INNER: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    member = tl.program_id(2).to(tl.int64)
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    o = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    start = _starts(r, member * (rows // AREA), height, width, channels, AREA, ACROSS, PIXELS)
    total = tl.zeros((ROWS, WIDE), tl.float32)
    for first in range(0, inner, INNER):
        k = first + tl.arange(0, INNER)
        shift = k // line * (width * channels) + k % line
        patch = tl.load(x + start[:, None] + shift[None, :], (r < rows)[:, None] & (k < inner)[None, :], 0.0)
        here = (k < inner)[:, None] & (o < wide)[None, :]
        weight = tl.load(filters + (member * inner + k[:, None]) * wide + o[None, :], here, 0.0)
        total = tl.dot(patch, weight, total, input_precision="tf32")
    total += tl.load(bias + member * outputs + o % outputs, o < wide, 0.0)[None, :]
    to = (member * rows + r[:, None]) * wide + o[None, :]
    tl.store(out + to, total, (r < rows)[:, None] & (o < wide)[None, :])


@triton.jit
def _by_filters(
    x, slope, parts, biases, rows, each, inner, wide, line, height, width, channels, shares, tiles,
    AREA: tl.constexpr, ACROSS: tl.constexpr, PIXELS: tl.constexpr, ROWS: tl.constexpr, INNER: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    member, share = tl.program_id(2).to(tl.int64), tl.program_id(1)
    tile = tl.program_id(0) % tiles
    k = tile * INNER + tl.arange(0, INNER)
    o = tl.program_id(0) // tiles * WIDE + tl.arange(0, WIDE)
    shift = k // line * (width * channels) + k % line
    total = tl.zeros((INNER, WIDE), tl.float32)
    bias = tl.zeros((WIDE,), tl.float32)
    for first in range(share * each, tl.minimum(share * each + each, rows), ROWS):
        r = first + tl.arange(0, ROWS)
        start = _starts(r, member * (rows // AREA), height, width, channels, AREA, ACROSS, PIXELS)
        patch = tl.load(x + start[None, :] + shift[:, None], (r < rows)[None, :] & (k < inner)[:, None], 0.0)
        here = (r < rows)[:, None] & (o < wide)[None, :]
        grad = tl.load(slope + (member * rows + r[:, None]) * wide + o[None, :], here, 0.0)
        total = tl.dot(patch, grad, total, input_precision="tf32")
        bias += tl.sum(grad, 0)
    to = ((member * shares + share) * inner + k[:, None]) * wide + o[None, :]
    tl.store(parts + to, total, (k < inner)[:, None] & (o < wide)[None, :])
    tl.store(biases + (member * shares + share) * wide + o, bias, (o < wide) & (tile == 0))


@triton.jit
def _by_input(
    slope, filters, out, rows, inner, wide, outputs, line, out_h, out_w,
    SIZE: tl.constexpr, AREA: tl.constexpr, ACROSS: tl.constexpr, PIXELS: tl.constexpr, ROWS: tl.constexpr,
    INNER: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    member = tl.program_id(2).to(tl.int64)
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    o = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    image, place = member * (rows // AREA) + r // AREA, r % AREA
    # The output pixels whose patches hold these: a window that begins above and to the left, maybe outside.
    above, left = place // ACROSS - (SIZE - 1), (place % ACROSS * PIXELS - (SIZE - 1)) * outputs
    total = tl.zeros((ROWS, WIDE), tl.float32)
    for first in range(0, inner, INNER):
        k = first + tl.arange(0, INNER)
        row, along = above[:, None] + (k // line)[None, :], left[:, None] + (k % line)[None, :]
        inside = (row >= 0) & (row < out_h) & (along >= 0) & (along < out_w * outputs)
        source = (image[:, None] * out_h + row) * (out_w * outputs) + along
        grad = tl.load(slope + source, inside & (r < rows)[:, None] & (k < inner)[None, :], 0.0)
        here = (k < inner)[:, None] & (o < wide)[None, :]
        weight = tl.load(filters + (member * inner + k[:, None]) * wide + o[None, :], here, 0.0)
        total = tl.dot(grad, weight, total, input_precision="tf32")
    to = (member * rows + r[:, None]) * wide + o[None, :]
    tl.store(out + to, total, (r < rows)[:, None] & (o < wide)[None, :])
