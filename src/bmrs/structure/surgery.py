"""Removing units: checked, tried, done, and followed by whatever must shrink along."""

import contextlib
import warnings
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from bmrs import _checks
from bmrs.structure.listing import Structure, Structures
from bmrs.structure.plan import record
from bmrs.structure.removal import apply
from bmrs.structure.verify import CLEARLY_EXACT, CannotRunError, Trial


def remove_units(
    model: nn.Module, units: Mapping[Structure, Iterable[int]], optimizers: Sequence[torch.optim.Optimizer]
) -> None:
    """See :func:`bmrs.remove`."""
    if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in optimizers):
        raise ValueError(
            "optimizer must keep its state per parameter, which LBFGS does not: build it anew after removing."
        )
    _checks.in_one_piece(model, "model", "remove units from the whole network, as bmrs.sharded.Sharded does")
    chosen = {structure: _checked(structure, model, indices) for structure, indices in units.items()}
    chosen = {structure: indices for structure, indices in chosen.items() if indices}
    _check_left(chosen)
    if not chosen:
        return
    owners = {id(structure.owner): structure.owner for structure in chosen}
    if len(owners) > 1:
        raise ValueError(
            "units must name structures of one listing: call bmrs.structures(model, ...) once and use its structures."
        )
    (owner,) = owners.values()
    for follower in owner.followers:
        follower.check_unfolded()
    owner.verify([structure for structure in chosen if structure.status == "not verified yet"])
    for structure in chosen:
        if structure.status != "exact":
            warnings.warn(f"'{structure.name}' is left alone: {structure.status}.", stacklevel=4)
    going: set[int] = set()
    for structure, indices in chosen.items():
        if structure.status == "exact":
            present = [v for v in structure.variables if v not in owner.gone]
            going.update(present[index] for index in indices)
    if not going:
        return
    going = owner.with_blocks(owner.gone | going) - owner.gone
    _check_this(owner, going)
    apply(model, record(owner, owner.gone | going, owner.mends), optimizers)
    owner.gone |= going
    for follower in owner.followers:
        follower.shrink(owner.everything, optimizers)


def _check_this(owner: Structures, going: set[int]) -> None:
    """The very units about to go, tried once before anything changes."""
    trial = Trial(owner)
    gates = dict.fromkeys(going, 0.0)
    error = trial.compare(gates, going, owner.mends, False, torch.float32)
    if error > CLEARLY_EXACT:
        with contextlib.suppress(CannotRunError):
            error = trial.compare(gates, going, owner.mends, False, torch.float64)
        if error > 10 * CLEARLY_EXACT:
            raise RuntimeError(
                f"nothing was removed, since these units cannot go exactly: {trial.problem} (difference {error:.1g})."
            )


def _checked(structure: Structure, model: nn.Module, indices: Iterable[int]) -> list[int]:
    if not isinstance(structure, Structure):
        raise TypeError(f"units must map structures to indices; got a key of type {type(structure).__name__}.")
    if structure.owner.model is not model:
        raise ValueError(
            f"'{structure.name}' belongs to another model: list this one with bmrs.structures(model, ...)."
        )
    wanted = sorted({int(index) for index in indices})
    if wanted and (wanted[0] < 0 or wanted[-1] >= structure.units):
        raise ValueError(
            f"units['{structure.name}'] must be between 0 and {structure.units - 1}, one for each unit left; "
            f"got {wanted[0]} to {wanted[-1]}."
        )
    return wanted


def _check_left(chosen: Mapping[Structure, Sequence[int]]) -> None:
    """That a unit of every structure stays, unless all it is lies in blocks that go."""
    going = {
        [v for v in structure.variables if v not in structure.owner.gone][index]
        for structure, indices in chosen.items() if structure.kind == "block"
        for index in indices
    }  # fmt: skip
    for structure, indices in chosen.items():
        if len(indices) >= structure.units and not structure.owner.with_blocks(going).issuperset(structure.variables):
            raise ValueError(
                f"units['{structure.name}'] would remove all {structure.units} units: one must stay, so name fewer."
            )
