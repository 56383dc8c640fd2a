"""Triton kernels of gates: x·θ, and from what comes back the gradients of both, each number read once.

``x`` lies as [examples, before, units, after], where "before" or "after" is 1: a tile is taken of the units and of the
other one that is not.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

NUMBERS = 2048  # of a tile
PROGRAMS = 1 << 10  # enough for any GPU to be busy


def forward(x: Tensor, theta: Tensor, before: int, units: int, after: int) -> Tensor:
    out = torch.empty_like(x)
    theta = theta.contiguous() if theta.stride(1) != 1 else theta
    grid, shape = _tiles(len(x), before, units, after)
    _forward[grid](x, theta, out, theta.stride(0), before * after, units, grid[2], LAST=before > 1, **shape)
    return out


def backward(
    grad: Tensor, x: Tensor, theta: Tensor, before: int, units: int, after: int, *norm: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of x and of θ. ``norm``: mean, 1/sd, weight and bias of a batch norm that comes first."""
    to_x = torch.empty_like(grad)
    theta = theta.contiguous() if theta.stride(1) != 1 else theta
    grid, shape = _tiles(len(x), before, units, after)
    # Each share of the sum by itself, and no two in one place: the result is the same every time.
    shares = torch.empty(grid[2], len(x), units, device=x.device)
    _backward[grid](
        grad, x, theta, to_x, shares, *(norm or (x, x, x, x)), theta.stride(0), before * after, units, grid[2],
        NORM=bool(norm), LAST=before > 1, **shape,
    )  # fmt: skip
    return to_x, shares[0] if grid[2] == 1 else shares.sum(0)


@lru_cache(1 << 12)  # a step asks for the same again and again
def _tiles(examples: int, before: int, units: int, after: int) -> tuple[tuple[int, int, int], dict[str, int]]:
    """A program for each example, block of units, and share of what is beside them; and the size of a tile."""
    beside = before * after
    if before > 1 or beside == 1:  # units lie side by side in memory
        block = min(128, triton.next_power_of_2(units))
        wide = min(max(1, NUMBERS // block), triton.next_power_of_2(beside))
    else:
        wide = min(1024, triton.next_power_of_2(beside))
        block = min(max(1, NUMBERS // wide), triton.next_power_of_2(units))
    blocks = triton.cdiv(units, block)
    shares = min(triton.cdiv(beside, wide), max(1, PROGRAMS // (examples * blocks)))
    return (examples, blocks, shares), {"UNITS": block, "BESIDE": wide, "num_warps": 4 if block * wide >= 512 else 1}


@triton.jit
def _at(example, column, side, units, beside, LAST: tl.constexpr):
    """Where the numbers of a tile are, [units, beside]."""
    if LAST:
        return example * units * beside + side[None, :] * units + column[:, None]
    return example * units * beside + column[:, None] * beside + side[None, :]


@triton.jit(do_not_specialize=["stride", "shares"])
def _forward(
    x, theta, out, stride, beside, units, shares, LAST: tl.constexpr, UNITS: tl.constexpr, BESIDE: tl.constexpr
):
    example = tl.program_id(0)
    column = tl.program_id(1) * UNITS + tl.arange(0, UNITS)
    factor = tl.load(theta + example * stride + column, column < units, 0.0)
    for start in range(tl.program_id(2) * BESIDE, beside, shares * BESIDE):
        side = start + tl.arange(0, BESIDE)
        mask = (column < units)[:, None] & (side < beside)[None, :]
        at = _at(example, column, side, units, beside, LAST)
        value = tl.load(x + at, mask, 0.0).to(tl.float32) * factor[:, None]
        tl.store(out + at, value.to(out.dtype.element_ty), mask)


@triton.jit(do_not_specialize=["stride", "shares"])
def _backward(
    grad, x, theta, to_x, to_theta, means, inverses, weights, biases, stride, beside, units, shares,
    NORM: tl.constexpr, LAST: tl.constexpr, UNITS: tl.constexpr, BESIDE: tl.constexpr,
):  # fmt: skip
    example = tl.program_id(0)
    column = tl.program_id(1) * UNITS + tl.arange(0, UNITS)
    factor = tl.load(theta + example * stride + column, column < units, 0.0)
    total = tl.zeros((UNITS, BESIDE), tl.float32)
    if NORM:
        some = column < units
        steepness = tl.load(inverses + column, some, 0.0) * tl.load(weights + column, some, 0.0)
        offset = tl.load(biases + column, some, 0.0) - tl.load(means + column, some, 0.0) * steepness
    for start in range(tl.program_id(2) * BESIDE, beside, shares * BESIDE):
        side = start + tl.arange(0, BESIDE)
        mask = (column < units)[:, None] & (side < beside)[None, :]
        at = _at(example, column, side, units, beside, LAST)
        slope = tl.load(grad + at, mask, 0.0).to(tl.float32)
        value = tl.load(x + at, mask, 0.0).to(tl.float32)
        if NORM:
            value = value * steepness[:, None] + offset[:, None]
        total += slope * value
        tl.store(to_x + at, (slope * factor[:, None]).to(to_x.dtype.element_ty), mask)
    place = (tl.program_id(2) * tl.num_programs(0) + example) * units + column
    tl.store(to_theta + place, tl.sum(total, 1), column < units)
