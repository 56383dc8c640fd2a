"""The listing: every structure of a network, what a unit of it costs, and what stays whole and why."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, count
from math import prod
from typing import Any, Protocol

import torch
from torch import nn

from bmrs import _checks
from bmrs.structure.blocks import Block
from bmrs.structure.branches import Branch
from bmrs.structure.capture import ExampleInputs, named_tensors
from bmrs.structure.discover import Findings, Label, explore
from bmrs.structure.mend import integers_of
from bmrs.structure.record import GATES, Removed, removed
from bmrs.structure.rules import Place
from bmrs.structure.standin import lies_in, module_at

# Reasons that hold in every network and need no line.
_OBVIOUS = ("", "it comes from the model's input", "it is the model's output", "convolved over", "looked up by number")


def _and_more(names: Sequence[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


class Follower(Protocol):
    """What shrinks along when units are removed, and can stand aside while the network is tried out."""

    paused: bool

    def check_unfolded(self) -> None: ...
    def shrink(self, structures: Iterable["Structure"], optimizers: Iterable[torch.optim.Optimizer]) -> None: ...


@dataclass(eq=False)
class Structure:
    """Interchangeable units that occupy the same parameter dimensions."""

    name: str
    kind: str  # neuron, filter, head, group, block
    places: tuple[Place, ...]  # every parameter and buffer dimension a unit occupies
    consumers: tuple[Place, ...]  # those of them a unit's gate multiplies
    hidden: bool
    variables: tuple[int, ...] = field(repr=False)
    owner: "Structures" = field(repr=False)
    branch: Branch | None = None  # of structures that are rows of a residual branch's last layer

    @property
    def kept(self) -> list[int]:
        """The units still there, by their original numbers."""
        return [unit for unit, variable in enumerate(self.variables) if variable not in self.owner.gone]

    @property
    def units(self) -> int:
        """How many are still there."""
        return sum(variable not in self.owner.gone for variable in self.variables)

    @property
    def params_per_unit(self) -> float:
        """Parameters that go with one unit, on average."""
        return self.owner.parameters_in([self]) / len(self.variables)

    @property
    def macs_per_unit(self) -> float:
        """Multiply-adds per example input that go with one unit, on average."""
        return self.owner.multiply_adds_in(self) / len(self.variables)

    @property
    def activations_per_unit(self) -> float:
        """Numbers that are written per example input, by all operations, and go with one unit, on average."""
        return self.owner.activations_in(self) / len(self.variables)

    @property
    def foldable(self) -> bool:
        """Whether a gate can be multiplied into the weights: not where tied ones produce what they consume."""
        return self.at_output or not set(self.consumers) & self.owner.findings.producers

    @property
    def at_output(self) -> bool:
        """Whether gates multiply what layers make, rather than what they consume."""
        return self.branch is not None or self.kind == "block"

    def indices(self, place: Place) -> list[list[int]]:
        """Per unit still there, its original indices along a parameter dimension."""
        at: dict[int, list[int]] = defaultdict(list)
        for index, label in enumerate(self.owner.findings.places[place]):
            for variable in label:
                at[variable].append(index)
        return [at[variable] for variable in self.variables if variable not in self.owner.gone]

    def rounded(self, count: int, multiple: int) -> int:
        """How many of ``count`` units may go so that the width left is a multiple, in hardware's favour: at most
        ``count``, and none where no multiple is between.

        Heads, groups and blocks are no widths, and what is narrower than ``multiple`` is left at what it comes to.

        >>> model = nn.Sequential(nn.Linear(8, 20), nn.ReLU(), nn.Linear(20, 2))
        >>> hidden = Structures(model, torch.randn(2, 8))["0"]
        >>> [hidden.rounded(count, 8) for count in (3, 4, 11, 12, 19)]
        [0, 4, 4, 12, 12]
        """
        units = self.units
        if self.kind not in ("neuron", "filter") or units < multiple:
            return count
        left = units - count
        return max(0, count - -left % multiple)

    def verify(self) -> "Structure":
        """Prove that removal is exact, now; ``status`` says how it ended."""
        self.owner.verify([self])
        return self

    @property
    def paths(self) -> list[str]:
        """Of blocks the modules that go with them."""
        owned = {own: block for block, own in self.owner.findings.blocks.items()}
        return [vacancy.path for own in self.variables if own in owned for vacancy in owned[own].vacancies]

    @property
    def status(self) -> str:
        """Either "exact", or "not verified yet", or why units cannot be removed."""
        return self.owner.status.get(self, "not verified yet")

    def to_json(self) -> dict[str, Any]:
        """The line of the listing, and the dimensions a unit occupies, for programs."""
        return {
            "name": self.name,
            "kind": self.kind,
            "units": self.units,
            "params_per_unit": self.params_per_unit,
            "macs_per_unit": self.macs_per_unit,
            "activations_per_unit": self.activations_per_unit,
            "dimensions": [f"{name}:{dim}" for name, dim in self.places],
            "gated_at": [f"{name}:{dim}" for name, dim in self.consumers],
            "status": self.status,
        }


class Structures(Sequence[Structure]):
    """All structures of a network. Shrinks with it."""

    def __init__(self, model: nn.Module, example_inputs: ExampleInputs) -> None:
        if GATES in model._modules:
            raise ValueError(f"model has gates on it: take them off with model.{GATES}.fold() or .detach() first.")
        _checks.in_one_piece(model, "model", "list its structures, or make its Pruner, before fully_shard is called")
        self.model, self.example_inputs = model, example_inputs
        self.findings: Findings = explore(model, example_inputs)
        self.base = removed(model)
        self.shapes = {name: tuple(tensor.shape) for name, tensor in named_tensors(model)}
        self._parameters = {name for name, _ in model.named_parameters()}
        self.gone: set[int] = set()
        self.mends: set[Any] = set()
        self.status: dict[Structure, str] = {}
        self.followers: list[Follower] = []
        self._integers: dict[str, dict[str, Any]] = {}
        self._dims: dict[str, list[list[Label]]] = {}
        self.everything = _build(self)
        self._listed = [s for s in self.everything if not s.hidden and not s.at_output]
        self._hidden = [s for s in self.everything if s.hidden]
        self._branches = [s for s in self.everything if s.branch is not None]
        self._blocks = [s for s in self.everything if s.kind == "block"]

    def _there(self, structures: list[Structure]) -> list[Structure]:
        """Those that did not go with a block."""
        return [s for s in structures if s.units] if self.gone else structures

    @property
    def hidden(self) -> list[Structure]:
        """Structures that cross listed ones, such as the width inside heads."""
        return self._there(self._hidden)

    @property
    def branches(self) -> list[Structure]:
        """Rows of the last layers of residual branches."""
        return self._there(self._branches)

    @property
    def blocks(self) -> list[Structure]:
        """Residual branches as a whole: those of one stream that are alike are the units of a structure."""
        return self._blocks

    def __len__(self) -> int:
        return len(self._there(self._listed))

    def __iter__(self) -> Iterator[Structure]:
        return iter(self._there(self._listed))

    def __getitem__(self, key: Any) -> Any:
        """By number, or by name (those not listed too)."""
        if isinstance(key, str):
            for structure in self.everything:
                if structure.name == key:
                    return structure
            raise KeyError(f"no structure is called '{key}': see .table() for their names.")
        return self._there(self._listed)[key]

    def integers(self, path: str) -> dict[str, Any]:
        """The integers a module has written down, also in its configuration, as they were when it was listed."""
        if path not in self._integers:
            self._integers[path] = integers_of(module_at(self.model, path))
        return self._integers[path]

    def dims_of(self, path: str) -> list[list[Label]]:
        """The labelled dimensions a module handles, those it asks for by number first."""
        if path not in self._dims:
            asked = [dim for request in self.findings.requests.get(path, {}).values() for dim in request.dims]
            every = [*asked, *self.findings.sizes.get(path, [])]
            # Where examples are merged into a dimension, its size is that of one round of its labels.
            every += [list(dict.fromkeys(dim)) for dim in every]
            self._dims[path] = list({tuple(dim): dim for dim in every}.values())
        return self._dims[path]

    def parameters_in(self, structures: Iterable[Structure]) -> int:
        """Parameters that lie in any unit of these structures, as the network was when it was listed."""
        structures = list(structures)
        variables = {variable for structure in structures for variable in structure.variables}
        inside: dict[str, dict[int, int]] = defaultdict(dict)
        for name, dim in dict.fromkeys(place for structure in structures for place in structure.places):
            if name in self._parameters:
                inside[name][dim] = sum(not variables.isdisjoint(label) for label in self.findings.places[name, dim])
        total = 0
        for name, dims in inside.items():
            shape = self.shapes[name]
            total += prod(shape) - prod(size - dims.get(dim, 0) for dim, size in enumerate(shape))
        return total

    def multiply_adds_in(self, structure: Structure) -> int:
        """Multiply-adds of one forward pass that all units of a structure cause together."""
        return round(self._multiply_adds.get(structure, 0.0))

    def activations_in(self, structure: Structure) -> int:
        """Numbers written in one forward pass that all units of a structure cause together."""
        return round(self._activations.get(structure, 0.0))

    @cached_property
    def _multiply_adds(self) -> dict[Structure, float]:
        return self._caused(self.findings.work)

    @cached_property
    def _activations(self) -> dict[Structure, float]:
        return self._caused(self.findings.written)

    def _caused(self, work: list[tuple[int, list[list[Label]], str]]) -> dict[Structure, float]:
        """By all structures: each one's share of all that is done."""
        owners = {variable: structure for structure in self.everything for variable in structure.variables}
        totals: dict[Structure, float] = defaultdict(float)
        for structure in self.blocks:
            for path in structure.paths:
                totals[structure] += sum(done for done, _, module in work if lies_in(module, [path]))
        known: dict[int, Counter[Structure]] = {}  # most dimensions are those of many operations
        for done, dims, _ in work:
            left: dict[Structure, float] = defaultdict(lambda: 1.0)
            for dim in dims:
                if id(dim) not in known:
                    known[id(dim)] = Counter(s for label in dim for s in {owners[v] for v in label if v in owners})
                for structure, indices in known[id(dim)].items():
                    left[structure] *= 1 - indices / len(dim)
            for structure, share in left.items():
                totals[structure] += done * (1 - share)
        return totals

    @property
    def parameters(self) -> int:
        """Of the whole network, as it was when it was listed."""
        return sum(prod(self.shapes[name]) for name in self._parameters)

    @property
    def share(self) -> float:
        """Share of the network's parameters that lie in removable units."""
        return self.parameters_in(self) / max(1, self.parameters)

    @property
    def frozen(self) -> dict[str, list[str]]:
        """Why dimensions stay whole: reason → the parameter dimensions it holds for."""
        reasons: dict[str, list[str]] = defaultdict(list)
        for (name, dim), reason in self.findings.frozen.items():
            reasons[reason].append(f"{name}:{dim}")
        return dict(reasons)

    def adopt(self, record: Removed) -> None:
        """Take over what a record says is gone: a unit is, when every index it had is."""
        known: set[int] = set()
        alive: set[int] = set()
        for (name, dim), labels in self.findings.places.items():
            first = self.base.kept.get(name, {}).get(dim) or list(range(len(labels)))
            present = set(record.kept.get(name, {}).get(dim, first))
            known.update(*labels)
            alive.update(*(label for index, label in zip(first, labels, strict=True) if index in present))
        self.gone = known - alive
        for branch, rows in self.findings.branches.items():
            if branch.path not in record.widened:  # rows that went with what they are added to, not by themselves
                self.gone -= set(rows)

    def with_blocks(self, gone: set[int]) -> set[int]:
        """These variables, and those that lie in the blocks among them alone."""
        tensors = {name for block, own in self.findings.blocks.items() if own in gone for name in block.tensors}
        if not tensors:
            return gone
        inside: set[int] = set()
        outside: set[int] = set()
        for (name, _), labels in self.findings.places.items():
            (inside if name in tensors else outside).update(*labels)
        return gone | (inside - outside)

    def heading(self) -> str:
        name = type(self.model).__name__
        if not len(self):
            return f"{name}: nothing can be removed."
        found = "1 structure holds" if len(self) == 1 else f"{len(self)} structures hold"
        return f"{name}: {found} {self.share:.1%} of {self.parameters:,} parameters"

    def table(self, *, places: bool = False) -> str:
        """For people: a line per structure, and what stays whole and why.

        ``places``: every dimension a unit occupies too.
        """
        lines = [self.heading()]
        if len(self):
            rows = [("structure", "kind", "units", "parameters", "multiply-adds", "removal")]
            rows += [
                (s.name, s.kind, str(s.units), f"{s.params_per_unit:,.0f}", f"{s.macs_per_unit:,.0f}", s.status)
                for s in self
            ]
            widths = [max(len(row[column]) for row in rows) for column in range(5)]
            lines.append("")
            for row, structure in zip(rows, [None, *self], strict=True):
                cells = [
                    row[0].ljust(widths[0]),
                    row[1].ljust(widths[1]),
                    *(row[c].rjust(widths[c]) for c in (2, 3, 4)),
                ]
                lines.append("  ".join([*cells, row[5]]).rstrip())
                if places and structure is not None:
                    lines += [f"    {name} dimension {dim}" for name, dim in structure.places]
            lines += ["", "Parameters and multiply-adds are those of one unit."]
        lines += self.notes()
        return "\n".join(lines)

    def notes(self) -> list[str]:
        """What else there is to know: what is removable but not listed, and what stays whole and why, in lines."""
        lines = []
        unlisted = [structure.name for structure in (*self.blocks, *self.hidden, *self.branches)]
        if unlisted:
            lines.append(f"Also removable by name: {_and_more(unlisted, len(self.blocks) + 3)}.")
        alike: dict[str, list[str]] = defaultdict(list)
        for reason, names in self.frozen.items():
            what = reason.partition(" in ")[0]
            if what not in _OBVIOUS:
                alike[what] += names
        if alike:
            lines += ["", "What stays whole, and why:"]
            lines += [f"  {what}: {_and_more(names)}" for what, names in alike.items()]
        return [*lines, *(f"Note: {note}." for note in self.findings.notes)]

    def to_json(self) -> dict[str, Any]:
        """The listing for programs."""
        return {
            "model": type(self.model).__name__,
            "parameters": self.parameters,
            "share": self.share,
            "structures": [structure.to_json() for structure in self],
            "by_name": [structure.to_json() for structure in (*self.hidden, *self.branches, *self.blocks)],
            "frozen": self.frozen,
            "operations_without_a_rule": self.findings.unknown,
            "notes": self.findings.notes,
        }

    def verify(self, structures: Iterable[Structure] | None = None) -> "Structures":
        """Prove removal exact for these structures (default: all listed)."""
        from bmrs.structure.verify import prove

        if any(tensor.is_meta for _, tensor in named_tensors(self.model)):
            raise ValueError("model is on the meta device and has no numbers to test with: put it on a real one first.")
        prove(self, list(self if structures is None else structures))
        return self


def _build(owner: Structures) -> list[Structure]:
    findings = owner.findings
    beyond = {variable for variables in findings.branches.values() for variable in variables}
    beyond.update(findings.blocks.values())
    beside: dict[int, set[int]] = defaultdict(set)  # variables in the same label
    for labels in findings.places.values():
        for label in labels:
            if len(label) > 1 and len(crossing := label - beyond) > 1:
                for variable in crossing:
                    beside[variable].update(crossing)
    order = {place: number for number, place in enumerate(findings.places)}
    structures = [
        Structure("", _rows_kind(owner, branch), branch.rows, branch.scale, False, variables, owner, branch)
        for branch, variables in findings.branches.items()
        if len(variables) > 1
    ]
    for occupied, gates, units in _alike(findings):
        producing = [place for place in occupied if place not in gates or place in findings.producers]
        if not gates or not producing or len(units) < 2 or units[0] in beyond:
            continue  # a single unit can never go
        first = _first_indices(findings.places[producing[0]])
        units.sort(key=first.__getitem__)
        kind = _kind(owner, units[0], producing[0], beside[units[0]])
        structures.append(Structure("", kind, occupied, gates, False, tuple(units), owner))
    structures.sort(key=lambda s: order[s.places[0]])
    _hide_inner(structures, findings, beside)
    _name(structures, findings)
    return [*structures, *_blocks(owner, {structure.name for structure in structures})]


def _blocks(owner: Structures, used: set[str]) -> list[Structure]:
    families: dict[tuple[str, str], dict[Block, int]] = defaultdict(dict)
    for block, own in owner.findings.blocks.items():
        families[block.family][block] = own
    made = []
    for blocks in families.values():
        if len(blocks) > 1:
            occupied = tuple((name, _dim_of(block, name)) for block in blocks for name in block.tensors
                             if owner.shapes[name])  # fmt: skip
            gates = tuple(place for block in blocks for place in block.scale)
            # Where their names differ stands an asterisk: layer1.*.bn2
            parts = zip(*(block.name.split(".") for block in blocks), strict=True)
            common = ".".join(own[0] if len(set(own)) == 1 else "*" for own in parts)
            name = f"{common} blocks"
            number = next(n for n in count(1) if (name if n == 1 else f"{name} #{n}") not in used)
            name = name if number == 1 else f"{name} #{number}"
            used.add(name)
            made.append(Structure(name, "block", occupied, gates, False, tuple(blocks.values()), owner))
    return made


def _dim_of(block: Block, name: str) -> int:
    """A dimension of which all indices are the block's: the one it is gated along, where it is."""
    return next((dim for gated, dim in block.scale if gated == name), 0)


def _alike(findings: Findings) -> Iterator[tuple[tuple[Place, ...], tuple[Place, ...], list[int]]]:
    """Variables on the same dimensions, as often on each, and gated at the same ones: those two, and the variables."""
    # What a variable has been met on so far, as a number: (that before, how often here, whether gated here) → number.
    met: dict[int, int] = {}
    known: list[tuple[tuple[Place, ...], tuple[Place, ...]]] = [((), ())]
    for place, labels in findings.places.items():
        gated = findings.consumed.get(place, set())
        numbers: dict[tuple[int, int, bool], int] = {}
        for variable, often in Counter(chain.from_iterable(labels)).items():
            key = met.get(variable, 0), often, variable in gated
            if key not in numbers:
                numbers[key] = len(known)
                occupied, gates = known[key[0]]
                known.append(((*occupied, place), (*gates, place) if key[2] else gates))
            met[variable] = numbers[key]
    alike: dict[int, list[int]] = defaultdict(list)
    for variable, number in met.items():
        alike[number].append(variable)
    for number, variables in alike.items():
        yield *known[number], variables


def _first_indices(labels: list[Label]) -> dict[int, int]:
    """Where along a dimension each variable comes first."""
    first: dict[int, int] = {}
    for index, label in enumerate(labels):
        for variable in label:
            first.setdefault(variable, index)
    return first


def _rows_kind(owner: Structures, branch: Branch) -> str:
    return "filter" if len(owner.shapes[branch.rows[0][0]]) > 2 else "neuron"


def _kind(owner: Structures, variable: int, first: Place, beside: set[int]) -> str:
    findings = owner.findings
    if variable in findings.heads:
        # Grouped-query attention: a key-value group with all its query heads.
        return "group" if any(other != variable and other in findings.heads for other in beside) else "head"
    if any(variable in label for labels in findings.groups.values() for label in labels) and beside:
        return "group"
    return "filter" if len(owner.shapes[first[0]]) > 2 else "neuron"


def _hide_inner(structures: list[Structure], findings: Findings, beside: dict[int, set[int]]) -> None:
    """Of structures that cross in a head, list the one with most in it: heads or groups, not the width inside them."""
    by_variable = {variable: structure for structure in structures for variable in structure.variables}
    for structure in structures:
        crossing = {by_variable[v] for v in beside[structure.variables[0]] if v in by_variable} - {structure}
        heads = [s for s in (structure, *crossing) if s.variables[0] in findings.heads]
        if heads and crossing:
            listed = max(heads, key=lambda s: (len(s.places), s.owner.parameters_in([s])))
            structure.hidden = structure is not listed


def _layer(name: str) -> str:
    """The module a parameter belongs to; the parameter itself where that is the whole network."""
    return name.rpartition(".")[0] or name


def _name(structures: list[Structure], findings: Findings) -> None:
    used: dict[str, int] = defaultdict(int)
    for structure in structures:
        module = findings.heads.get(structure.variables[0])
        weights = [name for name, dim in structure.places if (name, dim) not in structure.consumers]
        layers = list(dict.fromkeys(_layer(name) for name in weights if name.endswith("weight")))
        layers = layers or list(dict.fromkeys(map(_layer, weights)))
        if structure.branch is not None:
            name = f"{structure.branch.path} branch"
        elif module is not None and structure.hidden:
            name = f"{module} queries inside groups".strip()
        elif module is not None and structure.kind in ("head", "group"):
            name = f"{module} {'heads' if structure.kind == 'head' else 'groups'}".strip()
        elif structure.hidden:
            name = f"{layers[0] if layers else structure.places[0][0]} width inside heads"
        else:
            name = layers[0] if layers else structure.places[0][0]
            if structure.kind == "group":
                name += " groups"
        used[name] += 1
        structure.name = name if used[name] == 1 else f"{name} #{used[name]}"


def alive(labels: list[Label], gone: set[int]) -> int:
    return sum(gone.isdisjoint(label) for label in labels)
