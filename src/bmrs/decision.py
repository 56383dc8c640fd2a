"""From what units are worth to those that go."""

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from bmrs import _checks
from bmrs.criteria import BMRS_N, Criterion, Units, spare_best
from bmrs.gates import units_of_columns
from bmrs.noise import NoiseBank
from bmrs.structure import Structure
from bmrs.structure.capture import named_tensors


def chosen_by(criterion: Criterion, worth: Tensor, fraction: float | None) -> Tensor:
    """What the criterion rejects, or the lowest share of all units; never one whose worth is not finite."""
    if fraction is None:
        return criterion.remove(worth)
    fraction = _checks.number(fraction, "fraction", 0.0, 1.0, "the share of units to remove")
    chosen = torch.zeros_like(worth, dtype=torch.bool)
    chosen[criterion.rank(worth)[: math.floor(fraction * worth.numel() + 1e-9)]] = True
    return chosen & torch.isfinite(worth)


def spare(chosen: Tensor, worth: Tensor, layers: Mapping[str, slice]) -> set[str]:
    """Where a layer would lose every unit its best one stays. Changes the choice; returns the layers' names."""
    spared = set()
    for name, layer in layers.items():
        if bool(chosen[layer].all()):
            spared.add(name)
            chosen[layer] = spare_best(chosen[layer], worth[layer])
    return spared


def spare_widths(
    chosen: Tensor, worth: Tensor, structures: Iterable[Structure], layers: Mapping[str, slice], multiple: int
) -> Tensor:
    """Of what is to go, the best stay where a structure's width would be no multiple. Changes the choice; returns a
    mask of those that stay.
    """
    staying = torch.zeros_like(chosen)
    for structure in structures:
        layer = layers[structure.name]
        going = chosen[layer].nonzero().flatten() + layer.start
        stay = len(going) - structure.rounded(len(going), multiple)
        staying[going[worth[going].argsort(descending=True, stable=True)[:stay]]] = True
    chosen &= ~staying
    return staying


def uncross(chosen: Tensor, worth: Tensor, structures: list[Structure], layers: Mapping[str, slice]) -> set[str]:
    """Units of several structures may share an index, as a channel and the row of a branch that is added to it do.

    One index stays of each kind, unless its whole block goes, and a unit goes with the last of its indices. Changes the
    choice; returns the names of structures that were spared.
    """
    spared: set[str] = set()
    owner = structures[0].owner
    gone, units = owner.gone, [v for s in structures for v in s.variables]
    blocks = {v for s in structures if s.kind == "block" for v in s.variables}
    names = [name for name, layer in layers.items() for _ in range(layer.start, layer.stop)]
    units_there = [v for v in units if v not in gone]
    at = {variable: n for n, variable in enumerate(units_there)}
    places = [
        [[at[v] for v in label if v in at] for label in labels if gone.isdisjoint(label)]
        for labels in owner.findings.places.values()
    ]
    out, value = set(chosen.nonzero().flatten().tolist()), worth.tolist()
    for indices in places:
        going = [[n for n in index if n in out] for index in indices]
        if going and all(going) and not any(units_there[n] in blocks for n in going[0]):
            best = max(going, key=lambda index: min(value[n] for n in index))
            out -= set(best)
            spared |= {names[n] for n in best}
    left = {n for indices in places for index in indices if out.isdisjoint(index) for n in index}
    out |= {n for indices in places for index in indices for n in index} - left
    chosen.zero_()[sorted(out)] = True
    return spared


def norms(
    bank: NoiseBank, model: nn.Module, structures: Iterable[Structure], *, gradients: bool = False
) -> Tensor | None:
    """L2 norm of each unit's share of the weights that produce it, or of their gradients; None where there are none."""
    tensors = dict(named_tensors(model))
    squares = torch.zeros_like(bank.mu, dtype=torch.float64)
    found = False
    for structure in structures:
        first = bank.layers[structure.name].start
        producing = [place for place in structure.places if place not in structure.consumers or structure.at_output]
        for name, dim in producing:
            if name not in tensors:
                continue  # gone with a block
            tensor = tensors[name]
            value = tensor.grad if gradients else tensor
            if isinstance(tensor, nn.Parameter) and value is not None:
                found = True
                per_index = value.detach().double().square().movedim(dim, 0).reshape(value.shape[dim], -1).sum(1)
                units = torch.tensor(units_of_columns(structure, (name, dim), len(per_index), first))
                owned = (units >= 0).to(per_index.device)
                squares.index_add_(0, units.to(per_index.device)[owned], per_index[owned])
    return squares.sqrt() if found else None


@torch.no_grad()
def prune(bank: NoiseBank, criterion: Criterion | None = None) -> Tensor:
    """Close the gates the criterion rejects and return the mask of those that closed now.

    For gates without a :class:`Pruner`. The default criterion is :class:`BMRS_N`. Where a layer would lose every unit,
    its best one stays.
    """
    criterion = criterion or BMRS_N()
    worth = criterion.scores(Units(bank.posterior()))
    closing = torch.zeros_like(bank.alive)
    closing[bank.alive] = criterion.remove(worth[bank.alive])
    for layer in bank.layers.values():
        here = torch.arange(layer.start, layer.stop, device=worth.device)[bank.alive[layer]]
        closing[here] = spare_best(closing[here], worth[here])
    bank.remove(closing)
    return closing
