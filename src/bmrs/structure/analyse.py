"""Walks a captured graph and lets every operation's rule tie dimensions."""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bmrs.structure.capture import Captured, module_of
from bmrs.structure.mend import form, split_form
from bmrs.structure.rules import ONE, RULES, Facts, Step, Value, freeze_all, values_in

# Operations that only check something.
_SILENT = {"_assert_tensor_metadata", "_assert_async", "_assert_scalar", "sym_constrain_range_for_size", "sym_size"}
# They hand on what they were given, the last ones in evaluation, without their schema saying so.
_HAND_ON = {"_unsafe_view", "dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout"}
# All indices of what they make are alike, so each could go by itself.
_UNIFORM = {"zeros", "ones", "full", "new_zeros", "new_ones", "new_full"}
# They run a graph of their own with another setting: what they do is in there.
_WRAPPERS = {"wrap_with_set_grad_enabled": 1, "wrap_with_autocast": 4}


def analyse(captured: Captured, parameters: dict[str, Value], facts: Facts) -> None:
    """``parameters``: the labels of parameters and buffers, the same for every graph of a network."""
    inputs = []
    for node in captured.graph.find_nodes(op="placeholder"):
        name = captured.tensors.get(node.name)
        if name is not None:
            inputs.append(parameters[name])
        else:
            constant = node.name in captured.constants
            reason = "it is a constant" if constant else "it comes from the model's input"
            inputs.append(_fixed(node.meta.get("val"), reason))
    outputs = _walk(captured.module, inputs, facts)
    for value in values_in(outputs):
        for dim in value.dims:
            facts.labels.freeze(dim, "it is the model's output")


def _fixed(value: Any, reason: str) -> Any:
    """A tensor that stays as it is; what is no tensor goes on as it is."""
    if isinstance(value, Tensor):
        shape = _concrete(value)
        return Value(shape, (reason,) * len(shape))
    if isinstance(value, list | tuple):
        return [_fixed(one, reason) for one in value]
    return value


def _concrete(tensor: Tensor) -> tuple[int, ...]:
    return tuple(size if isinstance(size, int) else -1 for size in tensor.shape)


def _walk(module: torch.fx.GraphModule, inputs: Sequence[Any], facts: Facts) -> Any:
    known: dict[torch.fx.Node, Any] = {}
    waiting = iter(inputs)
    live = live_nodes(module.graph)
    for node in module.graph.nodes:
        if node.op == "placeholder":
            known[node] = next(waiting)
        elif node.op == "get_attr":
            target = operator.attrgetter(str(node.target))(module)
            known[node] = _fixed(target, "it is a constant") if isinstance(target, Tensor) else target
        elif node not in live:
            continue
        elif node.op == "output":
            return torch.fx.map_arg(node.args[0], lambda one: known[one])
        else:
            args = torch.fx.map_arg(node.args, lambda one: known[one])
            kwargs = torch.fx.map_arg(node.kwargs, lambda one: known[one])
            known[node] = _apply(node, args, kwargs, facts)
            _note_sizes(module_of(node), (args, kwargs, known[node]), facts)
            _note_request(node, args, known[node], facts)
    return None


def live_nodes(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """The nodes that reach the output, or change something in place: what is computed in vain ties nothing."""
    live: set[torch.fx.Node] = set()
    for node in reversed(graph.nodes):
        schema = getattr(node.target, "_schema", None)
        changes = schema is not None and schema.is_mutable
        if node.op in ("output", "placeholder") or changes or any(user in live for user in node.users):
            live.add(node)
    return live


def _apply(node: torch.fx.Node, args: Any, kwargs: Any, facts: Facts) -> Any:
    if node.target is operator.getitem:
        return args[0][args[1]]
    made = node.meta.get("val")
    operation = _name(node.target)
    if operation in _WRAPPERS:
        before = _WRAPPERS[operation]
        return _walk(args[before], args[before + 1 :], facts)
    several = made if isinstance(made, list | tuple) else [made]
    tensors = [one for one in several if isinstance(one, Tensor)]
    if not tensors or operation in _SILENT:
        return made
    step = Step(facts, operation, module_of(node), [_concrete(tensor) for tensor in tensors])
    single = isinstance(made, Tensor)
    inputs = values_in((args, kwargs))
    if operation in _UNIFORM:
        dims = [facts.labels.fresh(size) if size > 1 else ONE for size in step.shape]
        return Value(step.shape, tuple(dims))
    if not inputs:
        return _fixed(made, "made in the forward pass")
    consumers = len(facts.consumers)
    try:
        results = _by_rule(step, args, kwargs)
    except _NoRuleError:
        facts.unknown.setdefault(operation, step.module)
        results = freeze_all(step, (args, kwargs), step.because(f"'{operation}' has no rule for it"))
    if not results[0].constant:
        if operation not in _HAND_ON and not _looks(node.target):
            for value in results:
                step.note_written(value)
        consumed = {consumer.weight for consumer in facts.consumers[consumers:]}
        facts.producers.update(
            place for v in inputs for places in v.origin or () for place in places if place not in consumed
        )
    return results[0] if single else results


class _NoRuleError(Exception):
    pass


def _by_rule(step: Step, args: Any, kwargs: Any) -> list[Value]:
    rule = RULES.get(step.operation) or RULES.get(step.operation.rstrip("_"))
    inputs = values_in((args, kwargs))
    if rule is None or any(size < 0 for shape in (*step.outputs, *(v.shape for v in inputs)) for size in shape):
        raise _NoRuleError
    try:
        made = rule(step, *args, **kwargs)
    except Exception as wrong:
        # A form of the operation the rule was not written for. What it tied by then is too much, never too little.
        raise _NoRuleError from wrong
    results = made if isinstance(made, list) else [made]
    for value, shape in zip(results, step.outputs, strict=False):
        sizes = [size if isinstance(dim, str) else len(dim) for dim, size in zip(value.dims, shape, strict=False)]
        if tuple(sizes) != shape or len(value.dims) != len(shape):
            raise _NoRuleError
    if len(results) != len(step.outputs):
        raise _NoRuleError
    return results


def _looks(target: Any) -> bool:
    """Whether what an operation makes is numbers that are there already, seen in another way."""
    returns = target._schema.returns if isinstance(target, torch._ops.OpOverload) else ()
    return any(one.alias_info is not None and not one.alias_info.is_write for one in returns)


def _name(target: Any) -> str:
    """aten.add_.Tensor → add_"""
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.split("::")[-1]
    return str(getattr(target, "__name__", target))


def _note_sizes(module: str, values: Any, facts: Facts) -> None:
    """Which labelled dimensions a module handles: their sizes may be written down in its attributes."""
    sizes = facts.sizes.setdefault(module, {})
    for value in values_in(values):
        for dim in value.dims:
            if not isinstance(dim, str):
                sizes[id(dim)] = dim


def _note_request(node: torch.fx.Node, args: Any, made: Any, facts: Facts) -> None:
    """The sizes a module asks for by number, and what is labelled there."""
    operation = _name(node.target)
    if operation in ("view", "reshape", "_unsafe_view"):
        kind, dims = form("view", args[1]), made.dims
    elif operation == "expand":
        kind, dims = "expand", made.dims
    elif operation == "unflatten":
        first = args[1] % len(args[0].shape)
        kind, dims = form("unflatten", args[2]), made.dims[first : first + len(args[2])]
    elif operation in ("split", "split_with_sizes"):
        dim: Any = args[2] if len(args) > 2 else node.kwargs.get("dim", 0)
        parts = [part.dims[dim] for part in made]
        kind, dims = (
            split_form(dim, len(args[0].shape)),
            tuple(parts if isinstance(args[1], list | tuple) else parts[:1]),
        )
    else:
        return
    requests = facts.requests.setdefault(module_of(node), {})
    for position, dim in enumerate(dims):
        requests.setdefault((kind, len(args[0].shape), len(dims), position), []).append(dim)
