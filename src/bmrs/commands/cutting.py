"""Which units go from a network that is trained already, and their removal: what ``bmrs prune`` does."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import bmrs
from bmrs.commands import saving
from bmrs.commands.proof import proved
from bmrs.structure import remove
from bmrs.structure.capture import first_line


@dataclass(frozen=True)
class Cut:
    """What goes from a structure: units by their original numbers."""

    structure: str
    kind: str
    before: int
    gone: list[int]

    @property
    def after(self) -> int:
        return self.before - len(self.gone)


class Cutting:
    """A trained network and what it is going to lose.

    ``state``: of a training's checkpoint, whose gates know what units are worth; without one the weights say.
    ``fraction``: this share of all units, or with ``per_structure`` of every structure; None: the criterion's own
    boundary. ``round_to``: widths left are multiples of it. Nothing is removed before :meth:`done`.
    """

    def __init__(
        self, network: nn.Module, examples: Any, criterion: bmrs.Criterion, fraction: float | None,
        *, per_structure: bool = False, round_to: int = 1, state: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self.network, self.state = network.eval(), state
        found = proved(network, examples)
        self.pruner = bmrs.Pruner(network, examples, criterion=criterion, structures=found, round_to=round_to)
        if state is not None:
            try:
                self.pruner.load_state_dict({**state["pruner"], "optimizers": []})
            except ValueError as problem:
                raise ValueError(
                    f"--checkpoint is of another network ({str(problem).rstrip('.')}): give its MODEL, and the "
                    f"--weights its training began with."
                ) from problem
        self.kept = {s.name: s.kept for s in self._gated()}
        if per_structure and fraction is not None:
            self.going = {
                name: _lowest(criterion, worth, fraction, self.pruner.structures[name], round_to)
                for name, worth in self.pruner.scores().items()
            }
        else:
            self.going = self._tried(fraction)

    def _gated(self) -> list[bmrs.Structure]:
        return [s for s in self.pruner.structures if s.name in self.pruner.bank.layers]

    def _tried(self, fraction: float | None) -> dict[str, list[int]]:
        """What the Pruner removes, by place among the units that are there; all of it is put back."""
        report = self.pruner.prune(fraction, undoable=True)
        left = {s.name: set(s.kept) for s in self._gated()}
        if report.removed:
            self.pruner.undo()
        return {name: [n for n, unit in enumerate(kept) if unit not in left[name]] for name, kept in self.kept.items()}

    @property
    def cuts(self) -> list[Cut]:
        return [
            Cut(s.name, s.kind, len(self.kept[s.name]), [self.kept[s.name][n] for n in self.going[s.name]])
            for s in self._gated()
        ]  # fmt: skip

    def plain(self) -> nn.Module:
        """The network as it was trained, without gates."""
        if self.state is None:
            self.pruner.bank.detach()  # untouched gates: their means are no part of the network
        else:
            self.pruner.finish()
            if self.state["done"].get("fine-tune"):
                self.network.load_state_dict(self.state["network"])
        return self.network

    def done(self) -> nn.Module:
        """Remove the units from the plain network."""
        remove(self.network, {self.pruner.structures[name]: units for name, units in self.going.items()})
        return self.network


def _lowest(
    criterion: bmrs.Criterion, worth: torch.Tensor, fraction: float, structure: bmrs.Structure, round_to: int
) -> list[int]:
    """The share of a structure's units that is worth least; one stays, and what has no finite worth."""
    order = criterion.rank(worth)[: min(math.floor(fraction * len(worth) + 1e-9), len(worth) - 1)]
    order = order[torch.isfinite(worth[order])]
    return sorted(order[: structure.rounded(len(order), round_to)].tolist())


def checkpoint_of(path: Path) -> dict[str, Any]:
    """The state ``bmrs train`` left in a folder, or in this very file."""
    file = path / saving.PARTS / f"{saving.PART}.checkpoint.pt" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"--checkpoint: there is no checkpoint {file}: give the --out of a bmrs train.")
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
    # Damage shows as almost any error: of zip, of pickle, of torch itself.
    except Exception as problem:
        raise ValueError(
            f"--checkpoint: {file} cannot be read ({first_line(problem)[:120].rstrip('. ')}): give the --out of a "
            f"bmrs train."
        ) from problem
    if not isinstance(state, dict) or "done" not in state:
        raise ValueError(f"--checkpoint: {file} is no checkpoint of bmrs train: give the --out of one.")
    if "pruner" not in state:
        raise ValueError(f"--checkpoint: the training in {path} has no epoch of pruning behind it: let it go on first.")
    return state
