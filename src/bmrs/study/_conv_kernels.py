"""Triton kernels of stacked convolutions: products of patches that are never laid out, only read where they lie.

Images and slopes have channels last, [members · examples, H, W, C]; filters are square, the stride is 1, nothing is
padded. One filter of few channels leaves most of a GPU's matrix unit idle, so a patch here is what several output
pixels side by side look at, K = size · (pixels + size - 1) · C numbers in the order row, column, channel, and the
filters are spread: each pixel has them at its own place, zero elsewhere, [members, pixels · O, K]. Products are in
TF32, which is what the library's own do on these networks.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

# How much a program takes at a time where there are few filters and where there are many: patches, outputs, numbers of
# a patch; and its warps and stages. Filters have two warps: with four the compiler takes Hopper's instructions, which
# want what is summed over side by side in memory, and turns every tile around before it.
_TILES = {
    "forward": ((128, 64, 32, 4, 3), (64, 128, 32, 4, 3)),
    "by_filters": ((32, 64, 64, 2, 3), (32, 128, 64, 2, 3)),
    "by_input": ((128, 64, 32, 4, 3), (64, 128, 32, 4, 3)),
}
_SHARES = 1024  # programs that keep a GPU busy
# Numbers that change as networks shrink: the compiler must not make kernels of its own for some of them.
_SIZES = [
    "rows", "each", "inner", "wide", "outputs", "line", "height", "width", "channels", "shares", "tiles", "out_h",
    "out_w",
]  # fmt: skip


def forward(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """[images, out_h, out_w, O]. ``weight``: [members, size, size, C, O]; ``bias``: [members, O]."""
    images, height, width, channels = x.shape
    members, size, _, _, outputs = weight.shape
    out_h, out_w = height - size + 1, width - size + 1
    rows_each, most, part, warps, stages = _TILES["forward"][outputs > 16]
    pixels = _side_by_side(out_w, channels, outputs, most)
    filters = _spread(weight, pixels)
    wide, inner = filters.shape[1:]
    out = torch.empty(images, out_h, out_w, outputs, device=x.device, dtype=x.dtype)
    rows = images // members * out_h * (out_w // pixels)
    block, fours = _block(wide, most), _in_fours(pixels * channels, (size - 1) * channels, width * channels)
    _forward[(triton.cdiv(rows, rows_each), triton.cdiv(wide, block), members)](
        x, filters, bias, out, rows, inner, wide, outputs, (pixels + size - 1) * channels, height, width, channels,
        AREA=out_h * (out_w // pixels), ACROSS=out_w // pixels, PIXELS=pixels, ROWS=rows_each, INNER=part, WIDE=block,
        FOURS_IN=fours, FOURS_OUT=_in_fours(wide), num_warps=warps, num_stages=_stages(fours, stages),
    )  # fmt: skip
    return out


def by_filters(x: Tensor, slope: Tensor, members: int, size: int) -> tuple[Tensor, Tensor]:
    """The gradients of filters, [members, size, size, C, O], and bias, [members, O], from the slope at the output."""
    images, height, width, channels = x.shape
    _, out_h, out_w, outputs = slope.shape
    rows_each, most, part, warps, stages = _TILES["by_filters"][outputs > 16]
    pixels = _side_by_side(out_w, channels, outputs, most)
    line, wide = (pixels + size - 1) * channels, pixels * outputs
    inner, rows = size * line, images // members * out_h * (out_w // pixels)
    tall, block = _block(inner, part), _block(wide, most)
    tiles, tiles_wide = triton.cdiv(inner, tall), triton.cdiv(wide, block)
    shares = max(1, min(triton.cdiv(rows, 8 * rows_each), _SHARES // (members * tiles * tiles_wide)))
    each = triton.cdiv(triton.cdiv(rows, shares), rows_each) * rows_each
    parts = torch.empty(members, shares, inner, wide, device=x.device, dtype=x.dtype)
    biases = torch.empty(members, shares, wide, device=x.device, dtype=x.dtype)
    fours = _in_fours(pixels * channels, (size - 1) * channels, width * channels)
    _by_filters[(tiles * tiles_wide, shares, members)](
        x, slope, parts, biases, rows, each, inner, wide, line, height, width, channels, shares, tiles,
        AREA=out_h * (out_w // pixels), ACROSS=out_w // pixels, PIXELS=pixels, ROWS=rows_each, INNER=tall, WIDE=block,
        FOURS_IN=fours, FOURS_OUT=_in_fours(wide), num_warps=warps, num_stages=_stages(fours, stages),
    )  # fmt: skip
    whole = _places(parts, size, pixels, channels, outputs).sum((1, 5))
    return whole, biases.view(members, shares * pixels, outputs).sum(1)


def by_input(slope: Tensor, weight: Tensor, height: int, width: int) -> Tensor:
    """The gradient of the images. ``weight``: [members, size, size, O, C]."""
    images, out_h, out_w, outputs = slope.shape
    members, size, _, _, channels = weight.shape
    rows_each, most, part, warps, stages = _TILES["by_input"][channels > 16]
    pixels = _side_by_side(width, outputs, channels, most)
    filters = _spread(weight.flip(1, 2), pixels)
    wide, inner = filters.shape[1:]
    out = torch.empty(images, height, width, channels, device=slope.device, dtype=slope.dtype)
    rows = images // members * height * (width // pixels)
    block, fours = _block(wide, most), _in_fours(outputs)
    _by_input[(triton.cdiv(rows, rows_each), triton.cdiv(wide, block), members)](
        slope, filters, out, rows, inner, wide, outputs, (pixels + size - 1) * outputs, out_h, out_w,
        SIZE=size, AREA=height * (width // pixels), ACROSS=width // pixels, PIXELS=pixels, ROWS=rows_each, INNER=part,
        WIDE=block, FOURS_IN=fours, FOURS_OUT=_in_fours(wide), num_warps=warps, num_stages=_stages(fours, stages),
    )  # fmt: skip
    return out


def _in_fours(*numbers: int) -> bool:
    """Whether four numbers can be read or written at once, which the compiler cannot see."""
    return all(number % 4 == 0 for number in numbers)


def _stages(fours: bool, stages: int) -> int:
    """Loads of four numbers go ahead of the products; for single ones that does not pay."""
    return stages if fours else 1


def _block(number: int, most: int) -> int:
    return max(16, min(most, triton.next_power_of_2(number)))


def _side_by_side(width: int, channels: int, outputs: int, most: int) -> int:
    """How many pixels of a row a product takes at once: many, and such that patches begin at a multiple of four."""
    fit = [pixels for pixels in range(1, width + 1) if width % pixels == 0 and pixels * outputs <= most] or [1]
    return max([pixels for pixels in fit if _in_fours(pixels * channels)] or fit)


def _spread(weight: Tensor, pixels: int) -> Tensor:
    """[members, pixels · O, size · (pixels + size - 1) · C]."""
    members, size, _, channels, outputs = weight.shape
    filters = weight.new_zeros(members, 1, pixels * outputs, size * (pixels + size - 1) * channels)
    _places(filters.mT, size, pixels, channels, outputs).copy_(weight[:, None, :, :, :, None])
    return filters[:, 0]


def _places(filters: Tensor, size: int, pixels: int, channels: int, outputs: int) -> Tensor:
    """Where the filters of each pixel lie in spread ones, [members, shares, K, pixels · O].

    The view returned is [members, shares, row, column, C, pixel, O].
    """
    members, shares = filters.shape[:2]
    of_member, of_share, of_number, of_output = filters.stride()
    of_column = channels * of_number
    return filters.as_strided(
        (members, shares, size, size, channels, pixels, outputs),
        (of_member, of_share, (pixels + size - 1) * of_column, of_column, of_number, of_column + outputs * of_output,
         of_output),
    )  # fmt: skip


@triton.jit
def _fours(number, known: tl.constexpr):
    """The number, as one the compiler knows to be a multiple of four."""
    return number // 4 * 4 if known else number


@triton.jit
def _starts(r, height, width, channels, AREA: tl.constexpr, ACROSS: tl.constexpr, PIXELS: tl.constexpr,
            FOURS: tl.constexpr):  # fmt: skip
    """Where patches begin."""
    image, place = r // AREA, r % AREA
    start = ((image * height + place // ACROSS) * width + place % ACROSS * PIXELS) * channels
    return tl.multiple_of(start, 4) if FOURS else start


@triton.jit
def _shifts(k, line, across, FOURS: tl.constexpr):
    """Where the numbers of a patch lie after its beginning."""
    shift = k // line * across + k % line
    return tl.max_contiguous(tl.multiple_of(shift, 4), 4) if FOURS else shift


@triton.jit(do_not_specialize=_SIZES)
def _forward(
    x, filters, bias, out, rows, inner, wide, outputs, line, height, width, channels,
    AREA: tl.constexpr, ACROSS: tl.constexpr, PIXELS: tl.constexpr, ROWS: tl.constexpr, INNER: tl.constexpr,
    WIDE: tl.constexpr, FOURS_IN: tl.constexpr, FOURS_OUT: tl.constexpr,
):  # fmt: skip
    inner, line, wide = _fours(inner, FOURS_IN), _fours(line, FOURS_IN), _fours(wide, FOURS_OUT)
    member = tl.program_id(2).to(tl.int64)
    across = _fours(width * channels, FOURS_IN)
    x += member * (rows // AREA) * height * across
    filters += member * inner * wide
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    o = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    start = _starts(r, height, width, channels, AREA, ACROSS, PIXELS, FOURS_IN)
    total = tl.zeros((ROWS, WIDE), tl.float32)
    for first in range(0, inner, INNER):
        k = first + tl.arange(0, INNER)
        shift = _shifts(k, line, across, FOURS_IN)
        patch = tl.load(x + (start[:, None] + shift[None, :]), (r < rows)[:, None] & (k < inner)[None, :], 0.0)
        here = (o < wide)[:, None] & (k < inner)[None, :]
        weight = tl.load(filters + (o[:, None] * inner + k[None, :]), here, 0.0)
        total = tl.dot(patch, weight.T, total, input_precision="tf32")
    total += tl.load(bias + member * outputs + o % outputs, o < wide, 0.0)[None, :]
    to = r[:, None] * wide + o[None, :]
    tl.store(out + member * rows * wide + to, total, (r < rows)[:, None] & (o < wide)[None, :])


@triton.jit(do_not_specialize=_SIZES)
def _by_filters(
    x, slope, parts, biases, rows, each, inner, wide, line, height, width, channels, shares, tiles,
    AREA: tl.constexpr, ACROSS: tl.constexpr, PIXELS: tl.constexpr, ROWS: tl.constexpr, INNER: tl.constexpr,
    WIDE: tl.constexpr, FOURS_IN: tl.constexpr, FOURS_OUT: tl.constexpr,
):  # fmt: skip
    inner, line, wide = _fours(inner, FOURS_IN), _fours(line, FOURS_IN), _fours(wide, FOURS_OUT)
    member, share = tl.program_id(2).to(tl.int64), tl.program_id(1)
    across = _fours(width * channels, FOURS_IN)
    x += member * (rows // AREA) * height * across
    slope += member * rows * wide
    tile = tl.program_id(0) % tiles
    k = tile * INNER + tl.arange(0, INNER)
    o = tl.program_id(0) // tiles * WIDE + tl.arange(0, WIDE)
    shift = _shifts(k, line, across, FOURS_IN)
    total = tl.zeros((INNER, WIDE), tl.float32)
    bias = tl.zeros((WIDE,), tl.float32)
    for first in range(share * each, tl.minimum(share * each + each, rows), ROWS):
        r = first + tl.arange(0, ROWS)
        start = _starts(r, height, width, channels, AREA, ACROSS, PIXELS, FOURS_IN)
        patch = tl.load(x + (start[None, :] + shift[:, None]), (r < rows)[None, :] & (k < inner)[:, None], 0.0)
        here = (r < rows)[:, None] & (o < wide)[None, :]
        grad = tl.load(slope + (r[:, None] * wide + o[None, :]), here, 0.0)
        total = tl.dot(patch, grad, total, input_precision="tf32")
        bias += tl.sum(grad, 0)
    part = member * shares + share
    to = k[:, None] * wide + o[None, :]
    tl.store(parts + part * inner * wide + to, total, (k < inner)[:, None] & (o < wide)[None, :])
    tl.store(biases + part * wide + o, bias, (o < wide) & (tile == 0))


@triton.jit(do_not_specialize=_SIZES)
def _by_input(
    slope, filters, out, rows, inner, wide, outputs, line, out_h, out_w,
    SIZE: tl.constexpr, AREA: tl.constexpr, ACROSS: tl.constexpr, PIXELS: tl.constexpr, ROWS: tl.constexpr,
    INNER: tl.constexpr, WIDE: tl.constexpr, FOURS_IN: tl.constexpr, FOURS_OUT: tl.constexpr,
):  # fmt: skip
    inner, line, wide = _fours(inner, FOURS_IN), _fours(line, FOURS_IN), _fours(wide, FOURS_OUT)
    outputs = _fours(outputs, FOURS_IN)
    member = tl.program_id(2).to(tl.int64)
    slope += member * (rows // AREA) * out_h * out_w * outputs
    filters += member * inner * wide
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    o = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    image, place = r // AREA, r % AREA
    # The output pixels whose patches hold these: a window that begins above and to the left, maybe outside.
    above, left = place // ACROSS - (SIZE - 1), (place % ACROSS * PIXELS - (SIZE - 1)) * outputs
    total = tl.zeros((ROWS, WIDE), tl.float32)
    for first in range(0, inner, INNER):
        k = first + tl.arange(0, INNER)
        row, along = above[:, None] + (k // line)[None, :], left[:, None] + (k % line)[None, :]
        inside = (row >= 0) & (row < out_h) & (along >= 0) & (along < out_w * outputs)
        source = (image[:, None] * out_h + row) * (out_w * outputs) + along
        grad = tl.load(slope + source, inside & (r < rows)[:, None] & (k < inner)[None, :], 0.0)
        here = (o < wide)[:, None] & (k < inner)[None, :]
        weight = tl.load(filters + (o[:, None] * inner + k[None, :]), here, 0.0)
        total = tl.dot(grad, weight.T, total, input_precision="tf32")
    to = r[:, None] * wide + o[None, :]
    tl.store(out + member * rows * wide + to, total, (r < rows)[:, None] & (o < wide)[None, :])
