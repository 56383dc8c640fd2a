"""Rules for products of tensors: linear layers, convolutions, embeddings, matrix products, einsum, attention.

Where activations meet parameters, the dimension summed over is *consumed*: a unit's gate belongs there. Where
activations meet activations, nothing can be taken out of the sum, and the dimension stays whole.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

from bmrs.structure.dims import Dim
from bmrs.structure.rules.base import ONE, Consumer, Step, Value, freeze_all, rule
from bmrs.structure.rules.pointwise import broadcast


def consume(step: Step, x: Dim, weight: Value, dim: int) -> None:
    """Sum over ``x`` weighted by a dimension of a tensor made of parameters."""
    labels = step.labels.unify(x, weight.dims[dim])
    if weight.origin is None or not weight.origin[dim]:
        step.labels.freeze(labels, step.because("summed with weights that are computed from parameters"))
        return
    if not isinstance(labels, str):
        for place in weight.origin[dim]:
            step.facts.consumers.append(Consumer(place, labels))


def sum_over(step: Step, first: Value, i: int, second: Value, j: int) -> None:
    """Σ over dimension i of the first and j of the second."""
    if first.shape[i] == 1:
        return
    if second.constant and second.origin is not None:
        consume(step, first.dims[i], second, j)
    elif first.constant:
        consume(step, second.dims[j], first, i)
    elif second.constant:
        consume(step, first.dims[i], second, j)
    else:
        labels = step.labels.unify(first.dims[i], second.dims[j])
        step.labels.freeze(labels, step.because("a product of activations sums over it"))


def _note_heads(step: Step, first: Value, second: Value, dims: Sequence[Dim]) -> None:
    """Dimensions that both factors share and keep separate independent products: attention heads."""
    if not first.constant and not second.constant:
        for dim in dims:
            if not isinstance(dim, str):
                for label in dim:
                    step.facts.heads.setdefault(label, step.module)


@rule("linear")
def linear(step: Step, x: Value, weight: Value, bias: Value | None = None) -> Value:
    sum_over(step, x, -1, weight, -1)
    out: list[Dim] = [*x.dims[:-1], *weight.dims[:-1]]
    if bias is not None and bias.shape:
        out[-1] = step.labels.unify(out[-1], bias.dims[0])
    step.note_work(prod(step.shape) * x.shape[-1], (*out, weight.dims[-1]))
    linear = x.origin and weight.origin and bias is None
    origin = (*(x.origin or ())[:-1], *(weight.origin or ())[:-1]) if linear else None
    return step.make(out, (x, weight, bias), origin)


@rule("matmul", "mm", "bmm")
def matmul(step: Step, a: Value, b: Value) -> Value:
    rows = a.dims[-2:-1]
    columns = b.dims[-1:] if len(b.shape) > 1 else ()
    sum_over(step, a, -1, b, -2 if len(b.shape) > 1 else 0)
    stacks = [Value(v.shape[:-2], v.dims[:-2]) for v in (a, b) if len(v.shape) > 2]
    batch_shape = step.shape[: len(step.shape) - len(rows) - len(columns)]
    batch = broadcast(step, stacks, batch_shape)
    if len(stacks) == 2:
        _note_heads(step, a, b, batch)
    step.note_work(prod(step.shape) * a.shape[-1], (*batch, *rows, *columns, a.dims[-1]))
    origin = None
    if a.origin and b.origin and not batch_shape:
        origin = (*a.origin[-2:-1], *(b.origin[-1:] if len(b.shape) > 1 else ()))
    return step.make([*batch, *rows, *columns], (a, b), origin)


@rule("mv", "dot")
def product_with_vector(step: Step, a: Value, b: Value) -> Value:
    sum_over(step, a, -1, b, 0)
    return step.make(list(a.dims[:-1]), (a, b))


@rule("addmm", "baddbmm")
def addmm(step: Step, bias: Value, a: Value, b: Value, **_: Any) -> Value:
    product = matmul(step, a, b)
    return step.make(broadcast(step, (product, bias), step.shape), (bias, a, b))


@rule("einsum")
def einsum(step: Step, equation: str, operands: list[Value], **_: Any) -> Value:
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = [_letters(term, len(v.shape)) for term, v in zip(left.split(","), operands, strict=True)]
    if any(len(set(term)) < len(term) for term in terms):  # a diagonal
        return freeze_all(step, operands, step.because("einsum takes a diagonal"))[0]
    if arrow:
        result = _letters(right, len(step.shape))
    else:
        joined = [letter for term in terms for letter in term]
        result = sorted(letter for letter in set(joined) if joined.count(letter) == 1)
    found: dict[str, Dim] = {}
    for letter in dict.fromkeys(letter for term in terms for letter in term):
        where = [(v, term.index(letter)) for v, term in zip(operands, terms, strict=True) if letter in term]
        where = [(v, d) for v, d in where if v.shape[d] > 1]
        if not where:
            found[letter] = ONE
            continue
        found[letter] = step.labels.unify_all([v.dims[d] for v, d in where])
        if letter in result:
            if len(where) > 1 and len(operands) == 2:
                _note_heads(step, operands[0], operands[1], [found[letter]])
        elif len(where) == 2 and len(operands) == 2:
            (first, i), (second, j) = where
            sum_over(step, first, i, second, j)
        else:
            step.labels.freeze(found[letter], step.because("einsum sums over it"))
    if len(operands) > 1:
        sizes = {letter: v.shape[d] for v, term in zip(operands, terms, strict=True) for d, letter in enumerate(term)}
        step.note_work(prod(sizes.values()), found.values())
    return step.make([found[letter] for letter in result], operands)


def _letters(term: str, dims: int) -> list[str]:
    """One symbol per dimension; those of an ellipsis are numbered from the last."""
    head, dots, tail = term.partition("...")
    hidden = dims - len(head) - len(tail) if dots else 0
    return [*head, *(f"...{hidden - n}" for n in range(hidden)), *tail]


@rule("embedding")
def embedding(step: Step, weight: Value, indices: Value, *_: Any, **__: Any) -> Value:
    step.labels.freeze(weight.dims[0], step.because("looked up by number"))
    return step.make([*indices.dims, weight.dims[1]], (weight, indices))


@rule("scaled_dot_product_attention")
def attention(
    step: Step, query: Value, key: Value, value: Value, mask: Value | None = None, *_: Any, **kwargs: Any
) -> Value:
    reason = step.because("the attention's inner product sums over it")
    for dim in (query.dims[-1], key.dims[-1]):
        step.labels.freeze(dim, reason)
    positions = step.because("attention over positions")
    for dim in (key.dims[-2], value.dims[-2]):
        step.labels.freeze(dim, positions)
    batch: list[Dim] = list(query.dims[:-2])
    if kwargs.get("enable_gqa") and query.shape[-3] != key.shape[-3]:
        groups = key.shape[-3]
        shared, _each = step.labels.split(query.dims[-3], [groups, query.shape[-3] // groups])
        step.labels.unify_all([shared, key.dims[-3], value.dims[-3]])
        batch[:-1] = [
            step.labels.unify_all(dims) for dims in zip(batch[:-1], key.dims[:-3], value.dims[:-3], strict=True)
        ]
        _note_heads(step, query, key, [shared, query.dims[-3]])
    else:
        stacks = [Value(v.shape[:-2], v.dims[:-2]) for v in (query, key, value)]
        batch = broadcast(step, stacks, step.shape[:-2])
        _note_heads(step, query, key, batch)
    if mask is not None:
        scores = (*step.shape[:-1], key.shape[-2])
        broadcast(step, (Value(scores, (*batch, query.dims[-2], positions)), mask), scores)
    step.note_work(prod(step.shape[:-1]) * key.shape[-2] * query.shape[-1], (*batch, query.dims[-2]))
    step.note_work(prod(step.shape) * key.shape[-2], (*batch, query.dims[-2], value.dims[-1]))
    return step.make([*batch, query.dims[-2], value.dims[-1]], (query, key, value))


# --- convolutions -----------------------------------------------------------------------------------------------------


@rule("conv1d", "conv2d", "conv3d")
def convolution_nd(step: Step, x: Value, weight: Value, bias: Any = None, stride: Any = 1, padding: Any = 0,
                   dilation: Any = 1, groups: int = 1) -> Value:  # fmt: skip
    return _convolve(step, x, weight, bias, groups, transposed=False)


@rule("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def convolution_transposed_nd(step: Step, x: Value, weight: Value, bias: Any = None, stride: Any = 1, padding: Any = 0,
                              output_padding: Any = 0, groups: int = 1, dilation: Any = 1) -> Value:  # fmt: skip
    return _convolve(step, x, weight, bias, groups, transposed=True)


@rule("convolution")
def convolution(step: Step, x: Value, weight: Value, bias: Any, stride: Any, padding: Any, dilation: Any,
                transposed: bool, output_padding: Any, groups: int) -> Value:  # fmt: skip
    return _convolve(step, x, weight, bias, groups, transposed=transposed)


def _convolve(step: Step, x: Value, weight: Value, bias: Value | None, groups: int, *, transposed: bool) -> Value:
    labels = step.labels
    spatial = len(weight.shape) - 2
    at = len(x.shape) - spatial - 1  # an unbatched input has no dimension 0
    reason = step.because("convolved over")
    for dim in (*x.dims[at + 1 :], *weight.dims[2:]):
        labels.freeze(dim, reason)
    own_in, own_out = (0, 1) if transposed else (1, 0)
    if groups == 1:
        sum_over(step, x, at, weight, own_in)
        out = weight.dims[own_out]
    else:
        out = _grouped(step, x, at, weight, groups, transposed=transposed)
    step.note_work(prod(x.shape if transposed else step.shape) * prod(weight.shape[1:]), (out, weight.dims[own_in]))
    if bias is not None:
        out = labels.unify(out, bias.dims[0])
    return step.make([*x.dims[:at], out, *[reason] * spatial], (x, weight, bias))


def _grouped(step: Step, x: Value, at: int, weight: Value, groups: int, *, transposed: bool) -> Dim:
    """Channels are (group, inner): groups run along, the inner ones are summed over."""
    labels = step.labels
    channels = x.shape[at]
    whole, inner = labels.split(x.dims[at], [groups, channels // groups])
    # The weight's dimension 0 is (group, inner) too: of the outputs, or of the inputs of a transposed convolution.
    stacked, own = labels.split(weight.dims[0], [groups, weight.shape[0] // groups])
    whole = labels.unify(whole, stacked)
    if not isinstance(whole, str):
        step.facts.groups[step.module] = whole
    if transposed:
        inner_weight, result = own, labels.merge([whole, weight.dims[1]], [groups, weight.shape[1]])
    else:
        inner_weight, result = weight.dims[1], weight.dims[0]
    if channels > groups:
        summed = labels.unify(inner, inner_weight)
        origin = weight.origin[0 if transposed else 1] if weight.origin and weight.constant else None
        if not origin:
            labels.freeze(summed, step.because("summed with weights that are computed from parameters"))
        elif not isinstance(summed, str):
            for place in origin:
                step.facts.consumers.append(Consumer(place, summed))
    return result
