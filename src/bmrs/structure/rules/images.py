"""Pooling, resizing, and channels traded for positions."""

from collections.abc import Sequence
from math import prod
from typing import Any

from bmrs.structure.rules.base import Step, Value, rule
from bmrs.structure.rules.rearrange import frozen_at

_WINDOWS = ("max_pool", "avg_pool", "adaptive_avg_pool", "adaptive_max_pool", "_adaptive_avg_pool")
_SIZES = ("nearest1d", "nearest2d", "nearest3d", "linear1d", "bilinear2d", "trilinear3d", "bicubic2d")


@rule(
    *(f"{kind}{n}d" for kind in _WINDOWS for n in (1, 2, 3)),
    *(f"upsample_{kind}" for kind in _SIZES),
    *("max_pool2d_with_indices", "max_pool3d_with_indices", "lp_pool2d", "grid_sampler", "grid_sampler_2d"),
    *("_upsample_nearest_exact2d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"),
)
def spatial(step: Step, x: Value, *rest: Any, **_: Any) -> Value | list[Value]:
    """Works within each channel; positions mix."""
    for grid in rest:
        if isinstance(grid, Value):
            for dim in grid.dims:
                step.labels.freeze(dim, step.because(step.operation))
    count = 3 if "3d" in step.operation else 1 if "1d" in step.operation else 2
    frozen = frozen_at(step, x, range(-count, 0), step.operation)
    results = [step.make(frozen.dims, (x,), index=index) for index in range(len(step.outputs))]
    return results if len(results) > 1 else results[0]


@rule("pixel_shuffle")
def pixel_shuffle(step: Step, x: Value, factor: int) -> Value:
    channel, inner = step.labels.split(x.dims[-3], [x.shape[-3] // factor**2, factor**2])
    reason = step.labels.freeze(inner, step.because("pixel_shuffle"))
    return step.make([*x.dims[:-3], channel, reason, reason], (x,))


@rule("pixel_unshuffle")
def pixel_unshuffle(step: Step, x: Value, factor: int) -> Value:
    reason = step.because("pixel_unshuffle")
    kept = frozen_at(step, x, (-2, -1), "pixel_unshuffle")
    channel = step.labels.merge([x.dims[-3], reason], [x.shape[-3], factor**2])
    return step.make([*kept.dims[:-3], channel, *kept.dims[-2:]], (x,))


@rule("channel_shuffle", "native_channel_shuffle")
def channel_shuffle(step: Step, x: Value, groups: int) -> Value:
    sizes = [groups, x.shape[1] // groups]
    outer, inner = step.labels.split(x.dims[1], sizes)
    return step.make([x.dims[0], step.labels.merge([inner, outer], sizes[::-1]), *x.dims[2:]], (x,))


@rule("im2col")
def im2col(step: Step, x: Value, kernel: Sequence[int], *_: Any) -> Value:
    kept = frozen_at(step, x, (-2, -1), "patches are taken")
    reason = step.because("patches are taken")
    return step.make(
        [*kept.dims[:-3], step.labels.merge([x.dims[-3], reason], [x.shape[-3], prod(kernel)]), reason], (x,)
    )


@rule("col2im")
def col2im(step: Step, x: Value, size: Any, kernel: Sequence[int], *_: Any) -> Value:
    channel, inner = step.labels.split(x.dims[-2], [x.shape[-2] // prod(kernel), prod(kernel)])
    reason = step.labels.freeze(inner, step.because("patches are added up"))
    step.labels.freeze(x.dims[-1], reason)
    return step.make([*x.dims[:-2], channel, reason, reason], (x,))
