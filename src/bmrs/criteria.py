"""Criteria: what a unit is worth, and which units are not worth keeping.

Every criterion turns what is known of the units into one score each, the worth of the unit in the criterion's
own measure (nats, a ratio, a norm), and then says which scores are too low. The lowest go first. A score
that is not a finite number means *keep*, and is reported.
"""

import math
import warnings
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from bmrs import _checks, evidence
from bmrs.posterior import TruncatedLogNormal

PUBLISHED_TOLERANCE = 0.5 * math.log(2.0 * math.pi)


@dataclass(frozen=True)
class Units:
    """What a criterion may look at, one entry per unit. Each criterion says which of these it needs."""

    posterior: TruncatedLogNormal | None = None
    weight_norm: Tensor | None = None
    gradient_norm: Tensor | None = None


class Criterion(ABC):
    """Scores in, "remove these" out, with a ranking.

    >>> q = TruncatedLogNormal(torch.tensor([0.5, -3.0]), torch.tensor([-4.0, 3.0]))
    >>> criterion = BMRS_N()
    >>> criterion.remove(criterion.scores(q))
    tensor([False,  True])
    """

    name: ClassVar[str]
    needs: ClassVar[tuple[str, ...]] = ("posterior",)
    """The fields of :class:`Units` it looks at."""

    @abstractmethod
    def scores(self, units: "Units | TruncatedLogNormal") -> Tensor:
        """What each unit is worth. A posterior alone will do for the criteria that need nothing else."""

    @abstractmethod
    def _too_low(self, scores: Tensor) -> Tensor:
        """Which of these finite scores do not justify the unit."""

    def remove(self, scores: Tensor) -> Tensor:
        """True where a unit is not worth keeping."""
        sound = torch.isfinite(_checks.floating(scores, "scores"))
        unsound = int((~sound).sum())
        if unsound:
            warnings.warn(
                f"{unsound} of {scores.numel()} units have a score that is not finite and are kept: "
                f"check the training for NaN.",
                stacklevel=2,
            )
        return sound & self._too_low(scores.nan_to_num(math.inf, math.inf, math.inf))

    def rank(self, scores: Tensor) -> Tensor:
        """Indices of the units, the least worth first; ties keep their order, non-finite scores come last."""
        _checks.floating(scores, "scores")
        worth = torch.where(torch.isfinite(scores), scores, math.inf)
        return torch.argsort(worth.flatten(), stable=True)

    def _posterior(self, units: Units | TruncatedLogNormal) -> TruncatedLogNormal:
        if isinstance(units, TruncatedLogNormal):
            return units
        if units.posterior is None:
            raise ValueError(f"{type(self).__name__} needs Units(posterior=...), the gates' posterior.")
        return units.posterior

    def _norm(self, units: Units | TruncatedLogNormal, field: str, of: str) -> Tensor:
        norm = getattr(units, field, None)
        if norm is None:
            raise ValueError(f"{type(self).__name__} needs Units({field}=...), the L2 norm of each unit's {of}.")
        return _checks.floating(norm, field)


class BMRS_N(Criterion):
    """Remove unless the evidence for keeping the unit is worth more than ``tolerance`` nats.

    The score is -ΔF for a spike at zero. At tolerance 0, the rule as printed, a trained network loses nothing:
    a unit the data do not need has ΔF → 0 from below. The default, ½ log 2π = 0.919, gives the published results.
    """

    name = "bmrs_n"

    def __init__(self, tolerance: float = PUBLISHED_TOLERANCE) -> None:
        self.tolerance = _checks.number(tolerance, "tolerance", 0.0, math.inf, "in nats of evidence")

    def scores(self, units: Units | TruncatedLogNormal) -> Tensor:
        return -evidence.spike(self._posterior(units))

    def _too_low(self, scores: Tensor) -> Tensor:
        return scores <= self.tolerance

    def __repr__(self) -> str:
        return f"BMRS_N(tolerance={self.tolerance:.4g})"


class BMRS_U(Criterion):
    """Remove unless the evidence against θ ∈ [2^-p2, 2^-p1] is worth more than ``tolerance`` nats.

    The score is -ΔF for that interval. It splits units in two and is a poor ranking of either half.
    ``p2=None`` lets the interval reach down to a, so that gates surely below 2^-23 go too.
    """

    name = "bmrs_u"

    def __init__(self, p1: float = 8, p2: float | None = 23, tolerance: float = 0.0) -> None:
        self.p1 = _checks.number(p1, "p1", 0.0, math.inf, "the bits of precision in which a kept gate shows")
        self.p2 = p2
        if p2 is not None:
            self.p2 = _checks.number(p2, "p2", 0.0, math.inf, "the bits at which the interval ends")
            if self.p1 >= self.p2:
                raise ValueError(f"p1 must be below p2, since the interval is [2^-p2, 2^-p1]; got {p1} and {p2}.")
        self.tolerance = _checks.number(tolerance, "tolerance", 0.0, math.inf, "in nats of evidence")

    def scores(self, units: Units | TruncatedLogNormal) -> Tensor:
        return -evidence.interval(self._posterior(units), self.p1, self.p2)

    def _too_low(self, scores: Tensor) -> Tensor:
        return scores <= self.tolerance

    def __repr__(self) -> str:
        return f"BMRS_U(p1={self.p1:g}, p2={self.p2}, tolerance={self.tolerance:.4g})"


class SNR(Criterion):
    """Remove where E[θ]/sd[θ] is below the threshold."""

    name = "snr"

    def __init__(self, threshold: float = 1.0) -> None:
        self.threshold = _checks.number(threshold, "threshold", 0.0, math.inf, "a signal-to-noise ratio")

    def scores(self, units: Units | TruncatedLogNormal) -> Tensor:
        return self._posterior(units).snr()

    def _too_low(self, scores: Tensor) -> Tensor:
        return scores < self.threshold

    def __repr__(self) -> str:
        return f"SNR(threshold={self.threshold:g})"


class Mean(Criterion):
    """Remove where E[θ] is below the threshold."""

    name = "mean"

    def __init__(self, threshold: float = 0.1) -> None:
        self.threshold = _checks.number(threshold, "threshold", 0.0, 1.0, "a value of the gate's mean")

    def scores(self, units: Units | TruncatedLogNormal) -> Tensor:
        return self._posterior(units).mean()

    def _too_low(self, scores: Tensor) -> Tensor:
        return scores < self.threshold

    def __repr__(self) -> str:
        return f"Mean(threshold={self.threshold:g})"


class L2(Criterion):
    """Remove this fraction of all units, those with the smallest weights."""

    name = "l2"
    needs = ("weight_norm",)

    def __init__(self, fraction: float) -> None:
        self.fraction = _checks.number(fraction, "fraction", 0.0, 1.0, "the share of units to remove")

    def scores(self, units: Units | TruncatedLogNormal) -> Tensor:
        return self._norm(units, "weight_norm", "weights")

    def _too_low(self, scores: Tensor) -> Tensor:
        lowest = self.rank(scores)[: math.floor(self.fraction * scores.numel() + 1e-9)]
        mask = torch.zeros(scores.numel(), dtype=torch.bool, device=scores.device)
        mask[lowest] = True
        return mask.reshape(scores.shape)

    def __repr__(self) -> str:
        return f"L2(fraction={self.fraction:g})"


class Gradient(Criterion):
    """Remove where both the weights of a unit and their gradients are small in L2 norm.

    The score is the larger of the two norms, each over its threshold, so a unit goes when it is below 1.
    """

    name = "gradient"
    needs = ("weight_norm", "gradient_norm")

    def __init__(self, weight_threshold: float, gradient_threshold: float) -> None:
        smallest = torch.finfo(torch.float32).tiny
        self.weight_threshold = _checks.number(
            weight_threshold, "weight_threshold", smallest, math.inf, "a norm of a unit's weights"
        )
        self.gradient_threshold = _checks.number(
            gradient_threshold, "gradient_threshold", smallest, math.inf, "a norm of a unit's gradients"
        )

    def scores(self, units: Units | TruncatedLogNormal) -> Tensor:
        weight = self._norm(units, "weight_norm", "weights")
        gradient = self._norm(units, "gradient_norm", "gradients")
        _checks.same_shape(weight, "weight_norm", gradient, "gradient_norm")
        return torch.maximum(weight / self.weight_threshold, gradient / self.gradient_threshold)

    def _too_low(self, scores: Tensor) -> Tensor:
        return scores < 1.0

    def __repr__(self) -> str:
        return f"Gradient(weight_threshold={self.weight_threshold:g}, gradient_threshold={self.gradient_threshold:g})"


BY_NAME: dict[str, type[Criterion]] = {c.name: c for c in (BMRS_N, BMRS_U, SNR, Mean, L2, Gradient)}


def by_name(name: str, **options: float) -> Criterion:
    """The criterion of that name, for command lines and configuration files."""
    if name not in BY_NAME:
        raise ValueError(f"unknown criterion '{name}': choose one of {', '.join(BY_NAME)}.")
    return BY_NAME[name](**options)


def spare_best(remove: Tensor, scores: Tensor) -> Tensor:
    """The same decision for the units of one layer, except that the best unit stays if all were to go."""
    if remove.numel() and bool(remove.all()):
        remove = remove.clone()
        remove[torch.argmax(scores)] = False
    return remove
