"""What the callbacks of training frameworks share: after which epochs they prune, and what came of it."""

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

from bmrs import _checks
from bmrs.pruner import Pruner
from bmrs.reporting import PruneReport
from bmrs.structure.record import GATES

_GIVEN = ("self", "model", "example_inputs", "optimizer")  # by the callback itself


class PruningEpochs:
    """Prunes once after each epoch that is due."""

    def __init__(
        self, every_n_epochs: int, start_epoch: int, stop_epoch: int | None, pruner_options: Mapping[str, Any]
    ) -> None:
        self.every_n_epochs = _whole(every_n_epochs, "every_n_epochs", 1, "epochs from one pruning to the next")
        self.start_epoch = _whole(start_epoch, "start_epoch", 0, "the first epoch to count, from 0")
        self.stop_epoch = stop_epoch
        if stop_epoch is not None:
            first = self.start_epoch + 1
            self.stop_epoch = _whole(stop_epoch, "stop_epoch", first, "the first epoch not to count, after start_epoch")
        known = [name for name in inspect.signature(Pruner.__init__).parameters if name not in _GIVEN]
        for name in pruner_options:
            if name not in known:
                raise TypeError(f"'{name}' is no option of a Pruner in a callback: choose from {', '.join(known)}.")
        self.pruner_options = dict(pruner_options)
        self.pruner: Pruner | None = None
        self.reports: list[PruneReport] = []
        self.last_epoch = -1
        """The last epoch after which units were asked for, to ask once."""

    def due(self, epoch: int) -> bool:
        """Whether units go after this epoch, counted from 0."""
        if epoch < self.start_epoch or (self.stop_epoch is not None and epoch >= self.stop_epoch):
            return False
        return (epoch - self.start_epoch + 1) % self.every_n_epochs == 0

    def prune_after(self, epoch: int) -> None:
        if self.active and self.due(epoch) and epoch != self.last_epoch:
            self.last_epoch = epoch
            self.reports.append(self.attached.prune())

    @property
    def active(self) -> bool:
        """Whether there are gates to train."""
        return self.pruner is not None and not self.pruner.finished

    @property
    def attached(self) -> Pruner:
        if self.pruner is None:
            raise ValueError("there are no gates yet: train with the callback, or attach it, first.")
        return self.pruner

    def left(self) -> dict[str, int]:
        """What is logged: how much of the network is left."""
        own = sum(p.numel() for name, p in self.attached.model.named_parameters() if not name.startswith(GATES))
        return {"bmrs_units": len(self.attached.bank.mu), "bmrs_parameters": own}

    def finish(self) -> nn.Module:
        """Fold the gates into the weights and return the network they were on, smaller and plain.

        Training on with the callback then leaves the network alone.
        """
        return self.attached.finish()


def _whole(value: object, name: str, low: int, what: str) -> int:
    number = _checks.number(value, name, low, float("inf"), what)
    if number != int(number):
        raise ValueError(f"{name} must be a whole number, {what}; got {number:g}.")
    return int(number)
