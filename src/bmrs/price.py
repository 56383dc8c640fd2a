"""Prices: each unit's share of the KL in the loss, loss = mean cross-entropy + Σᵢ priceᵢ·KLᵢ.

| price   | of unit i                  | what it is                                                  |
|---------|----------------------------|-------------------------------------------------------------|
| layer   | s/(layers · layer's units) | as published: hardest on narrow layers                      |
| uniform | s/(all units)              | every unit alike                                            |
| params  | s·cᵢ/Σc                    | a unit pays for the parameters it occupies                  |
| macs    | s·cᵢ/Σc                    | a unit pays for the multiply-adds it causes                 |
| time    | s·cᵢ/Σc                    | and for the numbers it makes a GPU write and read           |
| elbo    | s/N                        | the exact evidence bound, N the number of training examples |

s is the strength, 1 unless said. Prices are set once for the whole network: removing a unit takes its term
out of the sum and leaves the others as they were.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from bmrs import _checks
from bmrs.structure import Structure

Price = str | Callable[[Structure], float | Tensor]
KINDS = ("layer", "uniform", "params", "macs", "time", "elbo")
# Multiply-adds for which a GPU has the time, in 16 bits, while it writes a number and reads it again: an H200 is made
# for 495 of the one and moves 2.4 of the other, in 10¹² a second.
NUMBER = 400.0


_COSTS: dict[str, Callable[[Structure], float]] = {
    "params": lambda s: s.params_per_unit,
    "macs": lambda s: s.macs_per_unit,
    "time": lambda s: s.macs_per_unit + NUMBER * s.activations_per_unit,
}


def prices(
    kind: str,
    units_per_layer: Sequence[int],
    *,
    strength: float = 1.0,
    num_examples: int | None = None,
    cost: Tensor | None = None,
) -> Tensor:
    """One price per unit, layer after layer.

    ``cost``: what each unit occupies, for ``params``, ``macs`` and ``time``. ``num_examples``: N, for ``elbo``.
    """
    if kind not in KINDS:
        raise ValueError(f"unknown price '{kind}': choose one of {', '.join(KINDS)}.")
    strength = _checks.number(strength, "strength", 0.0, math.inf, "a factor on every price")
    sizes = torch.tensor(list(units_per_layer), dtype=torch.float64)
    total = int(sizes.sum())
    if kind == "layer":
        per_layer = 1.0 / (len(sizes) * sizes)
        return strength * torch.repeat_interleave(per_layer, sizes.long())
    if kind == "uniform":
        return torch.full((total,), strength / total, dtype=torch.float64)
    if kind == "elbo":
        if num_examples is None or num_examples < 1:
            raise ValueError("price 'elbo' needs num_examples, the number of training examples, at least 1.")
        return torch.full((total,), strength / num_examples, dtype=torch.float64)
    if cost is None:
        raise ValueError(f"price '{kind}' needs cost, one entry per unit: what it occupies in the network.")
    if cost.shape != (total,) or not bool((cost >= 0).all()) or float(cost.sum()) <= 0:
        raise ValueError(f"cost must hold {total} non-negative entries, not all zero, one per unit.")
    share = cost.double() / cost.double().sum()
    return strength * share


def of_structures(
    price: Price, structures: Sequence[Structure], strength: float = 1.0, num_examples: int | None = None
) -> Tensor:
    """One price per unit, structure after structure. ``price``: one of the kinds, or a function of a structure that
    returns a number, or one for each unit.
    """
    sizes = [structure.units for structure in structures]
    if isinstance(price, str):
        per_unit = _COSTS.get(price)
        cost = None
        if per_unit is not None:
            cost = torch.cat([torch.full((s.units,), float(per_unit(s)), dtype=torch.float64) for s in structures])
        return prices(price, sizes, strength=strength, num_examples=num_examples, cost=cost)
    parts = []
    for structure in structures:
        given = price(structure)
        try:
            own = torch.as_tensor(given, dtype=torch.float64)
        except (TypeError, ValueError, RuntimeError):
            own = torch.tensor([])  # neither a number nor numbers
        if (
            own.dim() > 1
            or own.numel() not in (1, structure.units)
            or not bool((own >= 0).all() & own.isfinite().all())
        ):
            raise ValueError(
                f"price must return one number of at least 0, or one for each of the {structure.units} units, for "
                f"'{structure.name}'; got {given.tolist() if isinstance(given, Tensor) else given!r}."
            )
        parts.append(own.expand(structure.units))
    return strength * torch.cat(parts)
