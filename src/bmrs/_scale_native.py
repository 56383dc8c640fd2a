"""Compiled code of gates on a processor: x·θ, and from what comes back the gradients of both, each number read once.

As in :mod:`bmrs._scale_kernels`, ``x`` lies as [examples, before, units, after], where "before" or "after" is 1.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch
from torch import Tensor

from bmrs import native

_SHARE = 1 << 18  # numbers a thread must have to be worth waking


def forward(x: Tensor, theta: Tensor, before: int, units: int, after: int) -> Tensor:
    out, theta = torch.empty_like(x), _in_rows(theta)
    code = native.product(x.dtype)
    stride = theta.stride(0) if len(theta) > 1 else 0

    def part(first: int, rows: int) -> None:
        at, at_theta = _from(first, x, out), theta.data_ptr() + first * stride * theta.element_size()
        code(rows, before, units, after, stride, at[0], at_theta, at[1])

    _share(part, len(x), x.numel())
    return out


def backward(grad: Tensor, x: Tensor, theta: Tensor, before: int, units: int, after: int) -> tuple[Tensor, Tensor]:
    """The gradients of x and of θ."""
    to_x, theta = torch.empty_like(grad), _in_rows(theta)
    to_theta = torch.empty(len(x), units)
    code = native.gradients(x.dtype)

    def part(first: int, rows: int) -> None:
        at = _from(first, grad, x, theta, to_x, to_theta)
        code(rows, before, units, after, theta.stride(0), *at)

    _share(part, len(x), x.numel())
    return to_x, to_theta


def _in_rows(theta: Tensor) -> Tensor:
    return theta if theta.stride(1) == 1 else theta.contiguous()


def _from(row: int, *tensors: Tensor) -> list[int]:
    """Where this row of each begins."""
    return [tensor.data_ptr() + row * tensor.stride(0) * tensor.element_size() for tensor in tensors]


def _share(part: Callable[[int, int], None], rows: int, numbers: int) -> None:
    """All rows, by as many threads as torch itself would use."""
    threads = min(torch.get_num_threads(), rows, max(1, numbers // _SHARE))
    if threads == 1:
        part(0, rows)
        return
    each = -(-rows // threads)
    others = [_pool().submit(part, first, min(each, rows - first)) for first in range(each, rows, each)]
    part(0, each)
    for other in others:
        other.result()


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="bmrs")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)  # a child has none of its parent's threads
