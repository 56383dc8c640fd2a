"""From the variables that go to a record: what every tensor, integer and hook of the smaller network is."""

import copy
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from bmrs.structure.discover import Label
from bmrs.structure.listing import Structures, alive
from bmrs.structure.mend import Correction, is_builtin
from bmrs.structure.record import Removed
from bmrs.structure.standin import Silence, module_at


@dataclass(frozen=True)
class Mend:
    """One way to mend all modules of a class: set an attribute, or correct the sizes its code asks for."""

    cls: type
    attribute: str | None  # None: correct sizes
    dim: int = 0  # which of the dimensions the module handles the attribute is the size of


def record(owner: Structures, gone: set[int], mends: set[Mend]) -> Removed:
    """What the network's record is when these variables are gone."""
    findings, base = owner.findings, owner.base
    now = copy.deepcopy(base)
    for (name, dim), labels in findings.places.items():
        stays = [index for index, label in enumerate(labels) if gone.isdisjoint(label)]
        if len(stays) < len(labels):
            before = base.kept.get(name, {}).get(dim)
            now.kept.setdefault(name, {})[dim] = [before[i] for i in stays] if before else stays
            now.shapes.setdefault(name, list(owner.shapes[name]))
    for path, groups in findings.groups.items():
        if is_builtin(module_at(owner.model, path)) and alive(groups, gone) < len(groups):
            now.groups[path] = alive(groups, gone)
            attribute = "num_groups" if isinstance(module_at(owner.model, path), nn.GroupNorm) else "groups"
            now.originals.setdefault(path, {}).setdefault(attribute, len(groups))
    for branch, variables in findings.branches.items():
        if not gone.isdisjoint(variables):
            # Present indices of the stream, and which of them this branch still computes.
            labels = findings.streams[branch.path]
            stream = [own for own, label in zip(variables, labels, strict=True) if gone.isdisjoint(label)]
            at = [index for index, own in enumerate(stream) if own not in gone]
            now.widened[branch.path] = (branch.dim, len(stream), at)
    for path, silence in owner.base.silenced.items():
        # A network listed when blocks were gone already: their stand-ins have the width of the stream they are on.
        for labels in findings.sizes.get(path, []):
            if len(labels) == silence.width:
                now.silenced[path] = replace(silence, width=alive(labels, gone))
    for block, own in findings.blocks.items():
        if own in gone:
            for vacancy in block.vacancies:
                width = vacancy.width
                if isinstance(width, tuple):
                    width = alive(findings.widths[width], gone)
                now.silenced[vacancy.path] = Silence(vacancy.passes, width, vacancy.place)
            for name in block.tensors:
                now.shapes.setdefault(name, list(owner.shapes[name]))
    if mends:
        for path in findings.sizes:
            module = module_at(owner.model, path)
            for mend in mends:
                if mend.cls is type(module):
                    _mend(owner, gone, now, path, module, mend)
    return now


def _mend(owner: Structures, gone: set[int], now: Removed, path: str, module: nn.Module, mend: Mend) -> None:
    findings = owner.findings
    if mend.attribute is None:
        base = {(c.kind, c.dims, c.count, c.position, c.new): c for c in owner.base.corrections.get(path, [])}
        corrections = dict(base)
        for (kind, dims, count, position), request in findings.requests.get(path, {}).items():
            for labels in request.dims:
                if "open" in kind and len(set(labels)) < len(labels):
                    continue  # examples are merged into it: no number says what is meant
                size, left = len(labels), alive(labels, gone)
                before = base.get((kind, dims, count, position, size))
                if left < size or before is not None:
                    old = before.old if before else size
                    made = Correction(kind, count, position, old, left, request.sure, dims)
                    corrections[kind, dims, count, position, size] = made
        if corrections or _shrinks(findings.sizes.get(path, []), gone):
            now.corrections[path] = list(corrections.values())
        return
    original = owner.integers(path).get(mend.attribute)
    value = new_value(original, owner.dims_of(path), mend.dim, gone)
    if value is not None:
        now.integers.setdefault(path, {})[mend.attribute] = value
        now.originals.setdefault(path, {}).setdefault(mend.attribute, original)


def _shrinks(sizes: list[list[Label]], gone: set[int]) -> bool:
    return any(alive(labels, gone) < len(labels) for labels in sizes)


def new_value(value: Any, dims: list[list[Label]], dim: int, gone: set[int]) -> Any:
    """What an integer becomes when it is the size of this dimension, which shrinks; None if it stays.

    In a sequence of integers each is the size of the first dimension that has it, from this one on.
    """
    if isinstance(value, list | tuple):
        changed = []
        for one in value:
            labels = next((labels for labels in dims[dim:] if len(labels) == one), None)
            changed.append(one if labels is None else alive(labels, gone))
        return type(value)(changed) if changed != list(value) else None
    if dim < len(dims) and len(dims[dim]) == value and (left := alive(dims[dim], gone)) < value:
        return left
    return None
