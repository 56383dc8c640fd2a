"""The same numbers in another shape, parts of them, or several together."""

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

from bmrs.structure.dims import Dim
from bmrs.structure.rules.base import ONE, Place, Step, Value, freeze_all, rule


@rule(
    "view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as", "reshape_as", "ravel"
)
def view(step: Step, x: Value, *_: Any, **__: Any) -> Value:
    """Merge and split over the common refinement of the two shapes."""
    dims: list[Dim] = [ONE] * len(step.shape)
    origin: list[frozenset[Place]] = [frozenset()] * len(step.shape)
    for before, after in _refinement(x.shape, step.shape):
        sizes_before, sizes_after = [x.shape[d] for d in before], [step.shape[d] for d in after]
        merged = step.labels.merge([x.dims[d] for d in before], sizes_before)
        for d, dim in zip(after, step.labels.split(merged, sizes_after), strict=True):
            dims[d] = dim
            if x.origin:
                origin[d] = frozenset[Place]().union(*(x.origin[b] for b in before))
    return step.make(dims, (x,), tuple(origin) if x.origin else None)


def _refinement(before: tuple[int, ...], after: tuple[int, ...]) -> list[tuple[list[int], list[int]]]:
    """Which dimensions before become which after; those of size 1 take no part."""
    left = [d for d, size in enumerate(before) if size != 1]
    right = [d for d, size in enumerate(after) if size != 1]
    groups = []
    while left and right:
        a, b = [left.pop(0)], [right.pop(0)]
        while (sizes := (prod(before[d] for d in a), prod(after[d] for d in b)))[0] != sizes[1]:
            if sizes[0] < sizes[1]:
                a.append(left.pop(0))
            else:
                b.append(right.pop(0))
        groups.append((a, b))
    return groups


def _permuted(step: Step, x: Value, order: Sequence[int]) -> Value:
    origin = tuple(x.origin[d] for d in order) if x.origin else None
    return step.make([x.dims[d] for d in order], (x,), origin)


@rule("permute")
def permute(step: Step, x: Value, dims: Sequence[int]) -> Value:
    return _permuted(step, x, [d % len(x.shape) for d in dims])


@rule("transpose", "swapaxes", "swapdims")
def transpose(step: Step, x: Value, first: int, second: int) -> Value:
    order = list(range(len(x.shape)))
    if order:
        order[first], order[second] = order[second], order[first]
    return _permuted(step, x, order)


@rule("t", "numpy_T", "mT", "adjoint")
def transposed(step: Step, x: Value) -> Value:
    return transpose(step, x, -2, -1) if len(x.shape) > 1 else x


@rule("movedim", "moveaxis")
def movedim(step: Step, x: Value, source: Any, destination: Any) -> Value:
    sources = [d % len(x.shape) for d in (source if isinstance(source, list | tuple) else [source])]
    goals = [d % len(x.shape) for d in (destination if isinstance(destination, list | tuple) else [destination])]
    rest = [d for d in range(len(x.shape)) if d not in sources]
    at = dict(zip(goals, sources, strict=True))
    return _permuted(step, x, [at[d] if d in at else rest.pop(0) for d in range(len(x.shape))])


@rule("expand", "expand_as", "broadcast_to")
def expand(step: Step, x: Value, *_: Any, **__: Any) -> Value:
    """A new axis repeats the same numbers, so each of its indices could go by itself."""
    offset = len(step.shape) - len(x.shape)
    dims: list[Dim] = []
    for d, size in enumerate(step.shape):
        same = d >= offset and x.shape[d - offset] == size
        dims.append(x.dims[d - offset] if same else step.labels.fresh(size))
    return step.make(dims, (x,))


@rule("repeat", "tile")
def repeat(step: Step, x: Value, *_: Any) -> Value:
    offset = len(step.shape) - len(x.shape)
    dims: list[Dim] = []
    for d, size in enumerate(step.shape):
        old, dim = (x.shape[d - offset], x.dims[d - offset]) if d >= offset else (1, ONE)
        times = size // old
        if times == 1:
            dims.append(dim)
        else:
            dims.append(step.labels.merge([step.labels.fresh(times), dim], [times, old]))
    return step.make(dims, (x,))


@rule("repeat_interleave")
def repeat_interleave(step: Step, x: Value, repeats: Any, dim: int | None = None, **_: Any) -> Value:
    if not isinstance(repeats, int) or dim is None:
        return freeze_all(step, (x, repeats), step.because("repeat_interleave"))[0]
    dims = list(x.dims)
    dims[dim] = step.labels.merge([dims[dim], step.labels.fresh(repeats)], [x.shape[dim], repeats])
    return step.make(dims, (x,))


def _part(step: Step, x: Value, dim: int, start: int, stop: int, index: int = 0) -> Value:
    dims = list(x.dims)
    labels = dims[dim]
    if not isinstance(labels, str):
        dims[dim] = labels[start:stop]
    return step.make(dims, (x,), x.origin, index)


@rule("slice")
def slice_(
    step: Step, x: Value, dim: int = 0, start: Any = None, end: Any = None, step_: int = 1, **kwargs: Any
) -> Value:
    if kwargs.get("step", step_) != 1:
        dims = list(x.dims)
        dims[dim] = step.labels.freeze(dims[dim], step.because("every other index is taken"))
        return step.make(dims, (x,), x.origin)
    size = x.shape[dim]
    first, last, _ = slice(start, end).indices(size)
    return _part(step, x, dim, first, last)


@rule("narrow")
def narrow(step: Step, x: Value, dim: int, start: int, length: int) -> Value:
    return slice_(step, x, dim, start, start + length)


@rule("split", "split_with_sizes", "chunk", "unsafe_chunk", "unsafe_split", "unsafe_split_with_sizes", "tensor_split")
def split(step: Step, x: Value, sections: Any, dim: int = 0) -> list[Value]:
    sizes = [shape[dim] for shape in step.outputs]
    if len(sizes) > 1 and len(set(sizes)) == 1 and not isinstance(sections, list | tuple):
        # Equal parts stay equal: what goes from one goes from all.
        outer, inner = step.labels.split(x.dims[dim], [len(sizes), sizes[0]])
        step.labels.freeze(outer, step.because("the parts of an equal split"))
        dims = list(x.dims)
        dims[dim] = inner
        return [step.make(dims, (x,), x.origin, index) for index in range(len(sizes))]
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    parts = zip(starts, sizes, strict=True)
    return [_part(step, x, dim, start, start + size, index) for index, (start, size) in enumerate(parts)]


@rule("glu")
def glu(step: Step, x: Value, dim: int = -1) -> Value:
    dims = list(x.dims)
    outer, dims[dim] = step.labels.split(dims[dim], [2, x.shape[dim] // 2])
    step.labels.freeze(outer, step.because("the two halves of a gated unit"))
    return step.make(dims, (x,))


@rule("cat", "concat", "concatenate")
def cat(step: Step, tensors: list[Value], dim: int = 0) -> Value:
    tensors = [tensor for tensor in tensors if prod(tensor.shape)] or tensors
    dims: list[Dim] = []
    for d in range(len(step.shape)):
        met = [tensor.dims[d] for tensor in tensors]
        if d != dim % len(step.shape):
            dims.append(step.labels.unify_all(met))
        elif all(isinstance(m, str) for m in met):
            dims.append(met[0])
        else:
            dims.append(tuple(x for tensor in tensors for x in _as_labels(step, tensor.dims[d], tensor.shape[d])))
    origins = [tensor.origin for tensor in tensors]
    origin = None
    if all(o is not None for o in origins):
        origin = tuple(frozenset[Place]().union(*(o[d] for o in origins if o)) for d in range(len(step.shape)))
    return step.make(dims, tensors, origin)


def _as_labels(step: Step, dim: Dim, size: int) -> tuple[int, ...]:
    """Labels also for a dimension that stays, to stand beside others."""
    if not isinstance(dim, str):
        return dim
    labels = step.labels.fresh(size)
    step.labels.freeze(labels, dim)
    return labels


@rule("stack")
def stack(step: Step, tensors: list[Value], dim: int = 0) -> Value:
    dims: list[Dim] = [step.labels.unify_all([t.dims[d] for t in tensors]) for d in range(len(tensors[0].shape))]
    dims.insert(dim % len(step.shape), "stacked")
    return step.make(dims, tensors)


@rule("select")
def select(step: Step, x: Value, dim: int, index: Any) -> Value:
    dims = list(x.dims)
    step.labels.freeze(dims.pop(dim), step.because("one index is taken by its number"))
    origin = None
    if x.origin:
        origin = tuple(o for d, o in enumerate(x.origin) if d != dim % len(x.shape))
    return step.make(dims, (x,), origin)


@rule("unbind")
def unbind(step: Step, x: Value, dim: int = 0) -> list[Value]:
    one = select(step, x, dim, 0)
    return [Value(shape, one.dims, one.constant, one.origin) for shape in step.outputs]


@rule(
    "index_select",
    "gather",
    "take_along_dim",
    "cumsum",
    "cumprod",
    "softmax",
    "_softmax",
    "log_softmax",
    "logcumsumexp",
)
def along(step: Step, x: Value, dim: int, *rest: Any, **_: Any) -> Value:
    """Mixes or picks along one dimension; the others keep their indices."""
    dims = list(x.dims)
    dims[dim] = step.labels.freeze(dims[dim], step.because(f"{step.operation} along it"))
    others = [value for value in rest if isinstance(value, Value) and len(value.shape) == len(dims)]
    for value in others:  # gather: an index for every place
        for d, (own, met) in enumerate(zip(dims, value.dims, strict=True)):
            if value.shape[d] == x.shape[d]:
                dims[d] = step.labels.unify(own, met)
            else:
                dims[d] = step.labels.freeze(own, step.because(f"{step.operation} of a part"))
    return step.make(dims, (x, *others))


@rule("sort", "topk", "kthvalue", "median", "mode")
def ranked(step: Step, x: Value, *args: Any, dim: int = -1, **_: Any) -> list[Value]:
    integers = [argument for argument in args if isinstance(argument, int) and not isinstance(argument, bool)]
    at = integers[1] if step.operation in ("topk", "kthvalue") and len(integers) > 1 else dim
    if step.operation == "sort" and integers:
        at = integers[0]
    dims = list(x.dims)
    dims[at] = step.labels.freeze(dims[at], step.because(f"{step.operation} along it"))
    return [step.make(dims, (x,), index=index) for index in range(len(step.outputs))]


@rule("index")
def index(step: Step, x: Value, indices: list[Any]) -> Value:
    """Advanced indexing by tensors on neighbouring dimensions; anything else freezes all."""
    at = [d for d, one in enumerate(indices) if one is not None]
    if not at or at != list(range(at[0], at[-1] + 1)) or any(not isinstance(indices[d], Value) for d in at):
        return freeze_all(step, (x, indices), step.because("indexing"))[0]
    reason = step.because("indexing by a tensor")
    for value in [x.dims[d] for d in at] + [dim for d in at for dim in indices[d].dims]:
        step.labels.freeze(value, reason)
    new = len(step.shape) - (len(x.shape) - len(at))
    return step.make([*x.dims[: at[0]], *[reason] * new, *x.dims[at[-1] + 1 :]], (x, *[indices[d] for d in at]))


@rule("flip")
def flip(step: Step, x: Value, dims: Sequence[int]) -> Value:
    turned = list(x.dims)
    for d in dims:
        labels = turned[d]
        turned[d] = labels if isinstance(labels, str) else labels[::-1]
    return step.make(turned, (x,))


@rule("roll")
def roll(step: Step, x: Value, shifts: Any, dims: Any = ()) -> Value:
    at = list(dims) if isinstance(dims, list | tuple) else [dims]
    return frozen_at(step, x, at or range(len(x.shape)), "rolled")


@rule("triu", "tril")
def triangle(step: Step, x: Value, *_: Any) -> Value:
    return frozen_at(step, x, (-2, -1), "a triangle is taken")


def frozen_at(step: Step, x: Value, at: Iterable[int], what: str) -> Value:
    dims = list(x.dims)
    for d in at:
        dims[d] = step.labels.freeze(dims[d], step.because(what))
    return step.make(dims, (x,))


@rule("pad", "constant_pad_nd", *(f"{kind}_pad{n}d" for kind in ("reflection", "replication") for n in (1, 2, 3)))
def pad(step: Step, x: Value, padding: Sequence[int], *args: Any, **_: Any) -> Value:
    dims = list(x.dims)
    constant = step.operation == "constant_pad_nd" or (step.operation == "pad" and (not args or args[0] == "constant"))
    for back in range(len(padding) // 2):
        before, after = padding[2 * back], padding[2 * back + 1]
        labels = dims[-1 - back]
        if isinstance(labels, str) or (before, after) == (0, 0):
            continue
        if constant and before >= 0 and after >= 0:
            reason = step.because("padding")
            left, right = _as_labels(step, reason, before), _as_labels(step, reason, after)
            dims[-1 - back] = (*left, *labels, *right)
        else:
            dims[-1 - back] = step.labels.freeze(labels, step.because("padding"))
    return step.make(dims, (x,))
