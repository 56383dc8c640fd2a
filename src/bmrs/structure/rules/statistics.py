"""Sums, statistics and norms."""

from collections.abc import Sequence
from typing import Any

from bmrs.structure.rules.base import ONE, Step, Value, rule
from bmrs.structure.rules.pointwise import pointwise


@rule(
    *("mean", "sum", "nansum", "nanmean", "prod", "logsumexp", "count_nonzero", "any", "all"),
    *("amax", "amin", "max", "min", "aminmax", "argmax", "argmin"),
    *("var", "std", "var_mean", "std_mean", "norm", "linalg_vector_norm"),
)
def reduction(step: Step, x: Value, *args: Any, **kwargs: Any) -> Value | list[Value]:
    """Freezes what it sums over: which dimensions remain is read off the shapes where that is unambiguous."""
    if args and isinstance(args[0], Value):  # max(x, y) is pointwise
        return pointwise(step, x, *args, **kwargs)
    at = kwargs.get("dim")
    if at is None:
        positional = args[1:] if step.operation in ("linalg_vector_norm", "norm") else args
        at = next((a for a in positional if isinstance(a, list | tuple)), None)
        if at is None:
            at = next((a for a in positional if isinstance(a, int) and not isinstance(a, bool)), None)
    every = range(len(x.shape))
    where = {d % len(x.shape) for d in ((at,) if isinstance(at, int) else at or every)}
    reason = step.because(f"{step.operation} over it")
    for d in where:
        step.labels.freeze(x.dims[d], reason)
    if len(step.shape) == len(x.shape):
        dims = [ONE if d in where else x.dims[d] for d in every]
    else:
        dims = [x.dims[d] for d in every if d not in where]
    results = [step.make(dims, (x,), index=index) for index in range(len(step.outputs))]
    return results if len(results) > 1 else results[0]


@rule("layer_norm", "rms_norm", "_fused_rms_norm", "native_layer_norm")
def layer_norm(step: Step, x: Value, shape: Sequence[int], *rest: Any, **_: Any) -> Value | list[Value]:
    reason = step.because(f"{step.operation} over it")
    dims = list(x.dims)
    for back in range(1, len(shape) + 1):
        dims[-back] = step.labels.freeze(dims[-back], reason)
        for value in rest:
            if isinstance(value, Value):
                step.labels.freeze(value.dims[-back], reason)
    results = [step.make(dims, (x, *rest), index=0)]
    for index, made in enumerate(step.outputs[1:], start=1):
        results.append(step.make([*dims[: -len(shape)], *[ONE] * len(shape)][: len(made)], (x,), index=index))
    return results if len(results) > 1 else results[0]


@rule("_weight_norm", "_weight_norm_interface")
def weight_norm(step: Step, direction: Value, size: Value, dim: int = 0) -> Value | list[Value]:
    """Weights normed over all dimensions but one, which therefore stay."""
    reason = step.because("normed over it")
    dims = [
        step.labels.unify(own, size.dims[d]) if d == dim % len(direction.shape) else step.labels.freeze(own, reason)
        for d, own in enumerate(direction.dims)
    ]
    results = [step.make(dims, (direction, size), index=0)]
    for index in range(1, len(step.outputs)):
        results.append(step.make(size.dims, (direction, size), index=index))
    return results if len(results) > 1 else results[0]


@rule("batch_norm", "instance_norm", "cudnn_batch_norm", "_native_batch_norm_legit_no_training")
def batch_norm(step: Step, x: Value, *rest: Any, **_: Any) -> Value | list[Value]:
    """Per channel; statistics over everything else, which therefore stays."""
    channel = step.labels.unify_all([x.dims[1], *(v.dims[0] for v in rest if isinstance(v, Value) and v.shape)])
    reason = step.because("statistics over it")
    dims = [channel if d == 1 else step.labels.freeze(dim, reason) for d, dim in enumerate(x.dims)]
    results = [step.make(dims, (x,))]
    for index, made in enumerate(step.outputs[1:], start=1):
        results.append(step.make([channel] * len(made), (x,), index=index))
    return results if len(results) > 1 else results[0]


@rule("group_norm")
def group_norm(step: Step, x: Value, groups: int, *rest: Any, **_: Any) -> Value:
    channels = x.shape[1]
    whole, inner = step.labels.split(x.dims[1], [groups, channels // groups])
    if channels > groups:
        step.labels.freeze(inner, step.because("group_norm over it"))
    if not isinstance(whole, str):
        step.facts.groups[step.module] = whole
    for value in rest:
        if isinstance(value, Value):
            step.labels.unify(x.dims[1], value.dims[0])
    reason = step.because("group_norm over it")
    dims = [dim if d == 1 else step.labels.freeze(dim, reason) for d, dim in enumerate(x.dims)]
    return step.make(dims, (x,))
