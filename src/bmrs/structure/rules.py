"""One rule per ATen operation: how it ties the dimensions of what it reads and what it makes.

A rule gets a :class:`Step` and the operation's own arguments, tensors as :class:`Value`, and returns the dimensions
of the result. It must account for *every* dimension: tie it, pass it on, or freeze it with a reason. An operation
without a rule freezes all it touches. Rules for products of tensors are in :mod:`bmrs.structure.contractions`.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from bmrs.structure.dims import Dim, Labels

Place = tuple[str, int]
"""A dimension of a parameter or buffer: its name and the dimension's number."""

ONE = "a dimension of size 1"


@dataclass(frozen=True)
class Value:
    """What is known of a tensor in the graph."""

    shape: tuple[int, ...]
    dims: tuple[Dim, ...]
    constant: bool = False  # computed from parameters and buffers alone
    # Per dimension the parameter dimensions it runs along, where the tensor is a linear function of parameters: scaling
    # those scales this. None elsewhere.
    origin: tuple[frozenset[Place], ...] | None = None


@dataclass(frozen=True)
class Consumer:
    """A sum over a dimension, weighted by parameters: here a unit's share is added up, so here its gate belongs."""

    weight: Place
    labels: tuple[int, ...]
    module: str
    operation: str


@dataclass
class Facts:
    """What the rules find out, over all graphs of one network."""

    labels: Labels = field(default_factory=Labels)
    consumers: list[Consumer] = field(default_factory=list)
    # Label → module, of labels that separate independent products of activations: attention heads.
    heads: dict[int, str] = field(default_factory=dict)
    # Module → labels of the whole groups of a grouped convolution or group norm.
    groups: dict[str, tuple[int, ...]] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)  # operation without a rule → where it was met
    # Module → the labelled dimensions it handles, by identity.
    sizes: dict[str, dict[int, tuple[int, ...]]] = field(default_factory=dict)
    # Module → sizes it asks for: (kind of request, how many numbers it has, which of them) → dimensions found there.
    requests: dict[str, dict[tuple[str, int, int], list[Dim]]] = field(default_factory=dict)
    # Parameter dimensions whose indices become indices of an activation.
    producers: set[Place] = field(default_factory=set)
    # Products of tensors: multiply-adds, and the labelled dimensions they run over.
    work: list[tuple[int, tuple[tuple[int, ...], ...]]] = field(default_factory=list)


@dataclass
class Step:
    """One node of the graph: where it stands and what it makes."""

    facts: Facts
    operation: str
    module: str
    outputs: list[tuple[int, ...]]  # shapes

    @property
    def labels(self) -> Labels:
        return self.facts.labels

    @property
    def shape(self) -> tuple[int, ...]:
        return self.outputs[0]

    def note_work(self, multiply_adds: int, dims: Iterable[Dim]) -> None:
        self.facts.work.append((multiply_adds, tuple(dim for dim in dims if not isinstance(dim, str))))

    def because(self, what: str) -> str:
        return f"{what} in {self.module or 'the model itself'}"

    def make(self, dims: Sequence[Dim], inputs: Iterable[Any], origin: Any = None, index: int = 0) -> Value:
        constant = all(value.constant for value in inputs if isinstance(value, Value))
        return Value(self.outputs[index], tuple(dims), constant, origin if constant else None)


Rule = Callable[..., Value | list[Value]]
RULES: dict[str, Rule] = {}


def rule(*operations: str) -> Callable[[Rule], Rule]:
    def register(function: Rule) -> Rule:
        for operation in operations:
            RULES[operation] = function
        return function

    return register


def values_in(arguments: Any) -> list[Value]:
    """Every tensor among nested arguments."""
    if isinstance(arguments, Value):
        return [arguments]
    if isinstance(arguments, dict):
        arguments = arguments.values()
    elif not isinstance(arguments, list | tuple):
        return []
    return [value for argument in arguments for value in values_in(argument)]


def freeze_all(step: Step, arguments: Any, reason: str) -> list[Value]:
    """What is done where nothing is known."""
    inputs = values_in(arguments)
    for value in inputs:
        for dim in value.dims:
            step.labels.freeze(dim, reason)
    return [step.make([reason] * len(shape), inputs, index=index) for index, shape in enumerate(step.outputs)]


# --- one output index per input index ---------------------------------------------------------------------------------

_POINTWISE = """
abs acos acosh add addcdiv addcmul alias alpha_dropout and asin asinh atan atan2 atanh bernoulli bitwise_and
bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor ceil celu clamp clamp_max clamp_min clone
contiguous copy copysign cos cosh detach detach_ digamma div divide dropout elu empty_like eq erf erfc erfinv exp exp2
expm1 feature_alpha_dropout feature_dropout fill float_power floor floor_divide fmax fmin fmod frac full_like ge gelu
greater greater_equal gt hardshrink hardsigmoid hardswish hardtanh isfinite isinf isnan leaky_relu lerp less less_equal
lift_fresh lift_fresh_copy log log10 log1p log2 log_sigmoid logaddexp logical_and logical_not logical_or logical_xor
logit lshift lt masked_fill maximum minimum mish mul multiply mvlgamma nan_to_num native_dropout ne neg negative
not_equal ones_like or polygamma positive pow rand_like randint_like randn_like reciprocal relu relu6 remainder
requires_grad round rrelu rrelu_with_noise rshift rsqrt rsub selu sgn sigmoid sign signbit silu sin sinc sinh softplus
softshrink softsign special_expit special_expm1 sqrt square sub subtract tan tanh tanhshrink threshold to _to_copy
true_divide trunc type_as where xlogy xor zero zeros_like
""".split()
_LINEAR = {"add", "sub", "alias", "clone", "contiguous", "detach", "to", "_to_copy", "type_as", "lift_fresh_copy", "dropout"}
_SCALING = {"mul", "multiply", "div", "true_divide", "neg"}


def broadcast(step: Step, inputs: Sequence[Value], shape: tuple[int, ...]) -> list[Dim]:
    """Tie, dimension by dimension from the last, what is not broadcast."""
    dims: list[Dim] = []
    for back in range(len(shape), 0, -1):
        size = shape[-back]
        met = [v.dims[-back] for v in inputs if len(v.shape) >= back and v.shape[-back] == size]
        dims.append(ONE if size == 1 else step.labels.unify_all(met) if met else "made in the forward pass")
    return dims


@rule(*_POINTWISE)
def pointwise(step: Step, *args: Any, **kwargs: Any) -> Value | list[Value]:
    inputs = values_in((args, kwargs))
    if step.operation in ("type_as", "copy_"):  # the second only lends its type, the first only its place
        inputs = inputs[:1] if step.operation == "type_as" else inputs
    dims = broadcast(step, inputs, step.shape)
    results = [step.make(dims, inputs, _pointwise_origin(step, inputs), index) for index in range(len(step.outputs))]
    return results if len(results) > 1 else results[0]


def _pointwise_origin(step: Step, inputs: Sequence[Value]) -> Any:
    operation = step.operation.rstrip("_")
    wide = [value for value in inputs if prod(value.shape) > 1]
    linear = operation in _LINEAR or (operation in _SCALING and len(wide) == 1 and inputs[0] is wide[0])
    if not linear or not wide or any(v.origin is None or len(v.shape) != len(step.shape) for v in wide):
        return None
    return tuple(
        frozenset[Place]().union(*(v.origin[d] for v in wide if v.origin and v.shape[d] == step.shape[d]))
        for d in range(len(step.shape))
    )


@rule("prelu")
def prelu(step: Step, x: Value, weight: Value) -> Value:
    dims = list(x.dims)
    if prod(weight.shape) > 1:
        dims[1] = step.labels.unify(dims[1], weight.dims[0])
    return step.make(dims, (x, weight))


@rule("new_empty", "new_tensor")
def made_anew(step: Step, x: Value, *_: Any, **__: Any) -> Value:
    """Takes only type and device from x."""
    return Value(step.shape, ("made in the forward pass",) * len(step.shape))


# --- other shapes of the same numbers ---------------------------------------------------------------------------------


@rule("view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as", "reshape_as", "ravel")
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


# --- parts and wholes -------------------------------------------------------------------------------------------------


def _part(step: Step, x: Value, dim: int, start: int, stop: int, index: int = 0) -> Value:
    dims = list(x.dims)
    labels = dims[dim]
    if not isinstance(labels, str):
        dims[dim] = labels[start:stop]
    return step.make(dims, (x,), x.origin, index)


@rule("slice")
def slice_(step: Step, x: Value, dim: int = 0, start: Any = None, end: Any = None, step_: int = 1, **kwargs: Any) -> Value:
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


@rule("index_select", "gather", "take_along_dim", "cumsum", "cumprod", "softmax", "_softmax", "log_softmax", "logcumsumexp")
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
    return _frozen_at(step, x, at or range(len(x.shape)), "rolled")


@rule("triu", "tril")
def triangle(step: Step, x: Value, *_: Any) -> Value:
    return _frozen_at(step, x, (-2, -1), "a triangle is taken")


def _frozen_at(step: Step, x: Value, at: Iterable[int], what: str) -> Value:
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


# --- sums and statistics ----------------------------------------------------------------------------------------------


@rule("mean", "sum", "amax", "amin", "var", "std", "var_mean", "std_mean", "norm", "linalg_vector_norm", "logsumexp", "prod",
      "any", "all", "argmax", "argmin", "nansum", "nanmean", "max", "min", "count_nonzero", "aminmax")  # fmt: skip
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


# --- images -----------------------------------------------------------------------------------------------------------


@rule(*(f"{kind}{n}d" for kind in ("max_pool", "avg_pool", "adaptive_avg_pool", "adaptive_max_pool", "_adaptive_avg_pool")
        for n in (1, 2, 3)), *(f"max_pool{n}d_with_indices" for n in (2, 3)), *(f"upsample_{how}" for how in
      ("nearest1d", "nearest2d", "nearest3d", "_nearest_exact2d", "linear1d", "bilinear2d", "trilinear3d", "bicubic2d")),
      "_upsample_nearest_exact2d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa", "grid_sampler", "grid_sampler_2d",
      "affine_grid_generator", "lp_pool2d")  # fmt: skip
def spatial(step: Step, x: Value, *_: Any, **__: Any) -> Value | list[Value]:
    """Works within each channel; positions mix."""
    count = 3 if "3d" in step.operation else 1 if "1d" in step.operation else 2
    frozen = _frozen_at(step, x, range(-count, 0), step.operation)
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
    kept = _frozen_at(step, x, (-2, -1), "pixel_unshuffle")
    channel = step.labels.merge([x.dims[-3], reason], [x.shape[-3], factor**2])
    return step.make([*kept.dims[:-3], channel, *kept.dims[-2:]], (x,))


@rule("channel_shuffle", "native_channel_shuffle")
def channel_shuffle(step: Step, x: Value, groups: int) -> Value:
    sizes = [groups, x.shape[1] // groups]
    outer, inner = step.labels.split(x.dims[1], sizes)
    return step.make([x.dims[0], step.labels.merge([inner, outer], sizes[::-1]), *x.dims[2:]], (x,))


@rule("im2col")
def im2col(step: Step, x: Value, kernel: Sequence[int], *_: Any) -> Value:
    kept = _frozen_at(step, x, (-2, -1), "patches are taken")
    reason = step.because("patches are taken")
    return step.make([*kept.dims[:-3], step.labels.merge([x.dims[-3], reason], [x.shape[-3], prod(kernel)]), reason], (x,))


@rule("col2im")
def col2im(step: Step, x: Value, size: Any, kernel: Sequence[int], *_: Any) -> Value:
    channel, inner = step.labels.split(x.dims[-2], [x.shape[-2] // prod(kernel), prod(kernel)])
    reason = step.labels.freeze(inner, step.because("patches are added up"))
    step.labels.freeze(x.dims[-1], reason)
    return step.make([*x.dims[:-2], channel, reason, reason], (x,))
