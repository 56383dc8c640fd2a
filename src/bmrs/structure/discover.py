"""From labels to findings: which variables sit on which dimensions, and what is known of them."""

import contextlib
import gc
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import nn

from bmrs.structure.analyse import analyse, live_nodes
from bmrs.structure.blocks import Block, find_blocks
from bmrs.structure.branches import Branch, find_branches
from bmrs.structure.capture import ExampleInputs, canonical_names, capture, first_line, named_tensors
from bmrs.structure.rules import ONE, Facts, Place, Value, Work

Label = frozenset[int]
"""The variables an index depends on: it is there while all of them are."""


@dataclass
class Request:
    """A size a module asks for by number. ``sure``: whenever it asks in this form, it means this dimension."""

    dims: list[list[Label]]
    sure: bool


@dataclass
class Findings:
    """Everything known of a network's dimensions, as it was when it was listed."""

    places: dict[Place, list[Label]]  # only dimensions with something free
    consumed: dict[Place, set[int]]  # variables whose gates belong on this dimension
    producers: set[Place]
    heads: dict[int, str]
    groups: dict[str, list[Label]]  # per module its groups
    sizes: dict[str, list[list[Label]]]  # per module the labelled dimensions it handles
    requests: dict[str, dict[tuple[str, int, int, int], Request]]
    work: list[tuple[int, list[list[Label]], str]]  # multiply-adds, the dimensions they run over, the module
    written: list[tuple[int, list[list[Label]], str]]  # numbers written, the dimensions they lie in, the module
    frozen: dict[Place, str]  # and why
    unknown: dict[str, str]
    notes: list[str] = field(default_factory=list)
    branches: dict[Branch, tuple[int, ...]] = field(default_factory=dict)  # variables of their rows
    streams: dict[str, list[Label]] = field(default_factory=dict)  # per branch the labels of what it is added to
    blocks: dict[Block, int] = field(default_factory=dict)  # the variable of each
    widths: dict[Place, list[Label]] = field(default_factory=dict)  # labels of what the last layers of blocks make


def explore(model: nn.Module, example_inputs: ExampleInputs) -> Findings:
    """Capture the network in both modes and find what is tied to what in either."""
    with _all_kept():
        return _explore(model, example_inputs)


@contextlib.contextmanager
def _all_kept() -> Iterator[None]:
    """Without the search for garbage: among millions of labels that are none, it would take a third of the time."""
    searching = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if searching:
            gc.enable()


def _explore(model: nn.Module, example_inputs: ExampleInputs) -> Findings:
    facts = Facts()
    notes: list[str] = []
    canonical = canonical_names(model)
    values = {}
    for name, tensor in named_tensors(model):
        if canonical[name] == name:
            shape = tuple(tensor.shape)
            dims = tuple(facts.labels.fresh(size) if size > 1 else ONE for size in shape)
            values[name] = Value(shape, dims, True, tuple(frozenset({(name, d)}) for d in range(len(shape))))
    evaluation = capture(model, example_inputs)
    analyse(evaluation, values, facts)
    work, written = list(facts.work), list(facts.written)
    try:
        training = capture(model, example_inputs, training=True)
    except Exception as problem:
        # Some networks train on other inputs only. What holds in evaluation is all there is to go by.
        notes.append(
            f"seen in evaluation mode only, since it cannot be captured in training mode: {first_line(problem)}"
        )
    else:
        analyse(training, values, facts)
    findings = _findings(facts, values, work, written)
    findings.notes = notes
    _add_blocks(findings, facts, values, find_blocks(model, evaluation, live_nodes(evaluation.graph)))
    _add_branches(findings, facts, values, find_branches(model, evaluation))
    return findings


def _add_blocks(findings: Findings, facts: Facts, values: dict[str, Value], blocks: list[Block]) -> None:
    """All indices of a block's tensors get the block's variable beside their own."""
    for block in blocks:
        (own,) = facts.labels.fresh(1)
        alone = frozenset({own})
        findings.blocks[block] = own
        known: dict[Label, Label] = {frozenset(): alone}
        for name in block.tensors:
            for dim, size in enumerate(values[name].shape):
                place = name, dim
                labels = findings.places.get(place)
                if place in block.scale:
                    findings.widths[place] = labels or [frozenset()] * size
                if labels is not None:
                    findings.places[place] = [known.setdefault(label, label | alone) for label in labels]
                elif dim == 0 or place in block.scale:
                    findings.places[place] = [alone] * size
        for place in block.scale:
            findings.consumed.setdefault(place, set()).add(own)


def _add_branches(findings: Findings, facts: Facts, values: dict[str, Value], branches: list[Branch]) -> None:
    """Rows of a branch's last layer get a variable of their own beside those of the stream they are added to."""
    for branch in branches:
        if any(name not in values for name, _ in branch.rows):
            continue  # a tied layer
        name, dim = branch.rows[0]
        size = values[name].shape[dim]
        variables = facts.labels.fresh(size)
        findings.branches[branch] = variables
        findings.streams[branch.path] = findings.places.get((name, dim), [frozenset()] * size)
        for place in branch.rows:
            stream = findings.places.get(place, [frozenset()] * size)
            findings.places[place] = [label | {own} for label, own in zip(stream, variables, strict=True)]
        for place in branch.scale:
            findings.consumed.setdefault(place, set()).update(variables)


def _findings(facts: Facts, values: dict[str, Value], work: list[Work], written: list[Work]) -> Findings:
    labels = facts.labels
    places: dict[Place, list[Label]] = {}
    frozen: dict[Place, str] = {}
    for name, value in values.items():
        for d, dim in enumerate(value.dims):
            if isinstance(dim, str):
                continue
            own = labels.resolve_all(dim)
            if any(own):
                places[name, d] = own
            else:
                reasons = (labels.reason(label) for label in dim)
                frozen[name, d] = next(filter(None, reasons), "")
    known: dict[int, list[Label]] = {}

    def resolved(dim: tuple[int, ...]) -> list[Label]:
        if id(dim) not in known:
            known[id(dim)] = labels.resolve_all(dim)
        return known[id(dim)]

    consumed: dict[Place, set[int]] = defaultdict(set)
    for consumer in facts.consumers:
        consumed[consumer.weight].update(*resolved(consumer.labels))
    sizes: dict[str, list[list[Label]]] = {}
    for module, dims in facts.sizes.items():
        sizes[module] = list({tuple(r): r for dim in dims.values() if any(r := resolved(dim))}.values())
    requests = {}
    for module, asked in facts.requests.items():
        found = {}
        for key, seen in asked.items():
            free = [r for dim in seen if not isinstance(dim, str) and any(r := resolved(dim))]
            if free:
                alternatives = list({tuple(r): r for r in free}.values())
                found[key] = Request(alternatives, sure=len(free) == len(seen) and len(alternatives) == 1)
        if found:
            requests[module] = found

    def done(work: list[Work]) -> list[tuple[int, list[list[Label]], str]]:
        return [(count, [resolved(dim) for dim in dims], module) for count, dims, module in work]

    return Findings(
        places,
        {place: variables for place, variables in consumed.items() if variables},
        facts.producers,
        {free: module for label, module in facts.heads.items() for free in labels.resolve(label)},
        {module: resolved(dim) for module, dim in facts.groups.items()},
        sizes,
        requests,
        done(work),
        done(written),
        frozen,
        facts.unknown,
    )
