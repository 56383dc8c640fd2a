"""What rules work with: values, facts, steps, and the register of rules."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, TypeVar

from bmrs.structure.dims import Dim, Labels

Place = tuple[str, int]
"""A dimension of a parameter or buffer: its name and the dimension's number."""

Work = tuple[int, tuple[tuple[int, ...], ...], str]
"""Multiply-adds, the labelled dimensions they run over, and the module they are done in."""

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
    # Module → sizes it asks for: (kind of request, dimensions of the tensor asked, how many numbers, which of them) →
    # dimensions found there.
    requests: dict[str, dict[tuple[str, int, int, int], list[Dim]]] = field(default_factory=dict)
    # Parameter dimensions whose indices become indices of an activation.
    producers: set[Place] = field(default_factory=set)
    work: list[Work] = field(default_factory=list)  # multiply-adds of products of tensors
    written: list[Work] = field(default_factory=list)  # numbers that operations write


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
        self.facts.work.append((multiply_adds, _labelled(dims), self.module))

    def note_written(self, value: "Value") -> None:
        self.facts.written.append((prod(value.shape), _labelled(value.dims), self.module))

    def because(self, what: str) -> str:
        return f"{what} in {self.module or 'the model itself'}"

    def make(self, dims: Sequence[Dim], inputs: Iterable[Any], origin: Any = None, index: int = 0) -> Value:
        constant = all(value.constant for value in inputs if isinstance(value, Value))
        return Value(self.outputs[index], tuple(dims), constant, origin if constant else None)


def _labelled(dims: Iterable[Dim]) -> tuple[tuple[int, ...], ...]:
    return tuple(dim for dim in dims if not isinstance(dim, str))


Rule = Callable[..., Value | list[Value]]
AnyRule = TypeVar("AnyRule", bound=Rule)
RULES: dict[str, Rule] = {}


def rule(*operations: str) -> Callable[[AnyRule], AnyRule]:
    def register(function: AnyRule) -> AnyRule:
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
