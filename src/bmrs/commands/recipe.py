"""How ``bmrs train`` trains: every choice that changes the numbers."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from bmrs import _checks
from bmrs.commands import options
from bmrs.price import KINDS
from bmrs.study import training

GENTLE = 0.5  # of the learning rate, while fine-tuning
NEEDED = 8.0  # a gate lets go when its log σ has risen by about 7.5, by at most its learning rate at a step


@dataclass(frozen=True)
class Recipe(training.Recipe):
    """The demo's recipe and what a network of one's own may need besides.

    ``warmup``: optimizer steps over which the KL grows; None: a quarter of those with gates.
    """

    optimizer: str = "adam"
    criterion: str = "bmrs_n"
    noise: str = "example"
    warmup: int | None = None
    precision: str = "float32"
    loss: str = "cross_entropy"
    round_to: int = 1
    compare: bool = False  # train the network whole too

    def checked(self) -> "Recipe":
        """Itself; refuses what cannot work."""
        for name, choices in (
            ("optimizer", options.OPTIMIZERS), ("criterion", options.GATED), ("price", KINDS),
            ("noise", options.NOISES), ("precision", options.PRECISIONS),
        ):  # fmt: skip
            options.check(name, getattr(self, name), choices)
        _checks.number(self.strength, "strength", 0.0, math.inf, "a factor on every price")
        for name in ("batch", "learning_rate", "phi_rate"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be above 0; got {getattr(self, name)}.")
        for name, unit in (("epochs", "epochs"), ("fine_tune", "epochs"), ("warmup", "steps")):
            if (getattr(self, name) or 0) < 0:
                raise ValueError(f"{name} must be 0 {unit} or more; got {getattr(self, name)}.")
        if not self.epochs and not self.fine_tune:
            raise ValueError("epochs and fine_tune are both 0, so nothing would be trained: give one of them.")
        return self

    def steps_to_warm(self, steps_per_epoch: int) -> int:
        return self.epochs * steps_per_epoch // 4 if self.warmup is None else self.warmup

    def too_short(self, steps_per_epoch: int) -> str:
        """Why no gate can let go in this many steps; empty if it can.

        >>> Recipe(epochs=1).too_short(36)[:71]
        'no unit can go: learning rate × phi rate × steps is 1.1, and about 8 is'
        """
        way = self.learning_rate * self.phi_rate * self.epochs * steps_per_epoch
        # The steps of SGD are as long as the gradient.
        if way >= NEEDED or self.optimizer == "sgd" or not self.epochs:
            return ""
        return (
            f"no unit can go: learning rate × phi rate × steps is {way:.1f}, and about {NEEDED:g} is needed; give more "
            f"--epochs or a higher --phi-rate."
        )

    def make_optimizer(self, parameters: Iterable[nn.Parameter], gentle: bool = False) -> torch.optim.Optimizer:
        rate = self.learning_rate * (GENTLE if gentle else 1.0)
        if self.optimizer == "sgd":
            return torch.optim.SGD(parameters, lr=rate, momentum=0.9)
        kind = torch.optim.AdamW if self.optimizer == "adamw" else torch.optim.Adam
        return kind(parameters, lr=rate)
