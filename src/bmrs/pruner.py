"""From posteriors to a decision: which gates close now."""

import torch
from torch import Tensor

from bmrs.criteria import BMRS_N, Criterion, Units, spare_best
from bmrs.noise import NoiseBank


@torch.no_grad()
def prune(bank: NoiseBank, criterion: Criterion | None = None) -> Tensor:
    """Close the gates the criterion rejects and return the mask of those that closed now.

    The default criterion is :class:`BMRS_N`. Where a layer would lose every unit, its best one stays.
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
