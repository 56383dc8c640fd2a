"""One output index per input index."""

from collections.abc import Sequence
from math import prod
from typing import Any

from bmrs.structure.dims import Dim
from bmrs.structure.rules.base import ONE, Place, Step, Value, rule, values_in

_POINTWISE = (
    "abs", "acos", "acosh", "add", "addcdiv", "addcmul", "alias", "alpha_dropout", "and", "asin", "asinh", "atan",
    "atan2", "atanh", "bernoulli", "bitwise_and", "bitwise_left_shift", "bitwise_not", "bitwise_or",
    "bitwise_right_shift", "bitwise_xor", "ceil", "celu", "clamp", "clamp_max", "clamp_min", "clone", "contiguous",
    "copy", "copysign", "cos", "cosh", "detach", "detach_", "digamma", "div", "divide", "dropout", "elu",
    "empty_like", "eq", "erf", "erfc", "erfinv", "exp", "exp2", "expm1", "feature_alpha_dropout", "feature_dropout",
    "fill", "float_power", "floor", "floor_divide", "fmax", "fmin", "fmod", "frac", "full_like", "ge", "gelu",
    "greater", "greater_equal", "gt", "hardshrink", "hardsigmoid", "hardswish", "hardtanh", "isfinite", "isinf",
    "isnan", "leaky_relu", "lerp", "less", "less_equal", "lift_fresh", "lift_fresh_copy", "log", "log10", "log1p",
    "log2", "log_sigmoid", "logaddexp", "logical_and", "logical_not", "logical_or", "logical_xor", "logit",
    "lshift", "lt", "masked_fill", "maximum", "minimum", "mish", "mul", "multiply", "mvlgamma", "nan_to_num",
    "native_dropout", "ne", "neg", "negative", "not_equal", "ones_like", "or", "polygamma", "positive", "pow",
    "rand_like", "randint_like", "randn_like", "reciprocal", "relu", "relu6", "remainder", "requires_grad", "round",
    "rrelu", "rrelu_with_noise", "rshift", "rsqrt", "rsub", "selu", "sgn", "sigmoid", "sign", "signbit", "silu",
    "sin", "sinc", "sinh", "softplus", "softshrink", "softsign", "special_expit", "special_expm1", "sqrt", "square",
    "sub", "subtract", "tan", "tanh", "tanhshrink", "threshold", "to", "_to_copy", "true_divide", "trunc",
    "type_as", "where", "xlogy", "xor", "zero", "zeros_like",
)  # fmt: skip
_SUMS = {"add", "sub"}
_COPIES = {"alias", "clone", "contiguous", "detach", "to", "_to_copy", "type_as", "lift_fresh_copy", "dropout"}
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
    results = [
        step.make(dims, inputs, _pointwise_origin(step, args, inputs), index) for index in range(len(step.outputs))
    ]
    return results if len(results) > 1 else results[0]


def _pointwise_origin(step: Step, args: Sequence[Any], inputs: Sequence[Value]) -> Any:
    """Of a sum of tensors, a tensor times a number, or a tensor as it is: all keep zero zero."""
    operation = step.operation.rstrip("_")
    if operation in _SUMS:
        terms = list(inputs) if len(inputs) == len(args) == 2 else []
    elif operation in _SCALING:
        terms = list(inputs[:1]) if all(prod(value.shape) == 1 for value in inputs[1:]) else []
    else:
        terms = list(inputs) if operation in _COPIES and len(inputs) == 1 else []
    if not terms or any(term.origin is None for term in terms):
        return None
    return tuple(_origin_at(terms, back, step.shape[-back]) for back in range(len(step.shape), 0, -1))


def _origin_at(terms: Sequence[Value], back: int, size: int) -> frozenset[Place]:
    """Where a dimension's numbers come from; nowhere, if a term repeats the same one along it."""
    if any(len(term.shape) < back or term.shape[-back] != size for term in terms):
        return frozenset()
    return frozenset[Place]().union(*(term.origin[-back] for term in terms if term.origin))


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
