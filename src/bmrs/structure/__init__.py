"""Which parts of a network can be removed, the proof that removal is exact, and the removal itself."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from bmrs.structure.capture import ExampleInputs
from bmrs.structure.listing import Structure, Structures
from bmrs.structure.record import Removed, removed
from bmrs.structure.surgery import remove_units

__all__ = ["ExampleInputs", "Removed", "Structure", "Structures", "remove", "removed", "structures"]


def structures(model: nn.Module, example_inputs: ExampleInputs) -> Structures:
    """Everything that can be removed from a network.

    ``example_inputs``: a tensor, a tuple (positional) or a mapping (keyword), on the model's device.

    >>> model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    >>> [(s.name, s.kind, s.units) for s in structures(model, torch.randn(2, 8))]
    [('0', 'neuron', 16)]
    """
    return Structures(model, example_inputs)


def remove(
    model: nn.Module,
    units: Mapping[Structure, Iterable[int]],
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
) -> nn.Module:
    """Remove units, by their present numbers, from the network in place, and from the optimizer's state.

    Structures not verified yet are verified first; those that fail are left alone with a warning.
    """
    optimizers: Any = (
        () if optimizer is None else [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else optimizer
    )
    remove_units(model, units, list(optimizers))
    return model
