"""The standard normal restricted to an interval, accurate however far out the interval lies.

Everything takes and returns float64 tensors and is meant to be called without autograd. The textbook
forms divide two numbers that both underflow once the interval leaves the bulk; here the common factor
exp(-t²/2) is taken out with the scaled complementary error function e(t) = erfcx(t/√2), where t is the
distance from the mean to the nearer end of the interval (negative when the mean lies inside).
"""

import math
from functools import cached_property

import torch
from torch import Tensor
from torch.special import erfcx

_SQRT_2 = math.sqrt(2.0)
_SQRT_2_OVER_PI = math.sqrt(2.0 / math.pi)
LOG_2PI = math.log(2.0 * math.pi)

# Beyond this distance λ - t and its relatives cancel; their asymptotic series are exact to rounding there.
_SERIES_FROM = 25.0


def scaled_tail(t: Tensor) -> Tensor:
    """e(t) = erfcx(t/√2) = 2·Φ(-t)·exp(t²/2)."""
    scaled: Tensor = erfcx(t / _SQRT_2)
    return scaled


def below(z: Tensor) -> Tensor:
    """Φ(z), accurate down to Φ(-37) = 1e-299; torch.special.ndtr is 2 % off at -8 already."""
    return 0.5 * torch.erfc(z.clamp(min=-37.0) / -_SQRT_2)


def vanishing_exp(x: Tensor) -> Tensor:
    """exp(x), stopping at 1e-87: nothing here can tell it from 0, and denormal numbers are slow."""
    return torch.exp(x.clamp(min=-200.0))


def _series(y: Tensor, *coefficients: float) -> Tensor:
    """The polynomial in y with these coefficients, lowest first."""
    total = torch.full_like(y, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        total = total * y + coefficient
    return total


class Hazard:
    """A standard normal above t: its hazard λ(t) = φ(t)/Φ(-t) and the cumulants of z - t."""

    def __init__(self, t: Tensor) -> None:
        self.t = t
        self.scaled = scaled_tail(t)
        self.rate = _SQRT_2_OVER_PI / self.scaled

    @cached_property
    def excess(self) -> Tensor:
        """δ = λ - t, the mean of z - t."""
        series = self._inverse * _series(self._y, 1.0, -2.0, 10.0, -74.0, 706.0, -8162.0, 110410.0)
        return torch.where(self._far, series, self.rate - self.t)

    @cached_property
    def _far(self) -> Tensor:
        return self.t > _SERIES_FROM

    @cached_property
    def _inverse(self) -> Tensor:
        return self.t.clamp(min=_SERIES_FROM).reciprocal()

    @cached_property
    def _y(self) -> Tensor:
        return self._inverse.square()

    def log_ratio(self, step: Tensor, after: "Hazard") -> Tensor:
        """ln e(t + step) - ln e(t), ``after`` being the hazard at t + step, without subtracting logarithms.

        e = √(2/π)/λ, and λ grows by the step plus the (small) change of its excess.
        """
        return -torch.log1p((step + (after.excess - self.excess)) / self.rate)

    def variance(self) -> Tensor:
        """1 - λδ."""
        series = self._y * _series(self._y, 1.0, -6.0, 50.0, -518.0, 6354.0, -89782.0)
        return torch.where(self._far, series, 1.0 - self.rate * self.excess)

    def third_cumulant(self) -> Tensor:
        series = self._inverse**3 * _series(self._y, 2.0, -24.0, 300.0, -4144.0, 63540.0)
        direct = self.rate * (self.excess * (2.0 * self.rate - self.t) - 1.0)
        return torch.where(self._far, series, direct)

    def fourth_cumulant(self) -> Tensor:
        series = self._y.square() * _series(self._y, 6.0, -120.0, 2100.0, -37296.0, 698940.0)
        t, rate, excess = self.t, self.rate, self.excess
        direct = -rate * (
            excess * (excess * (2.0 * rate - t) - 2.0)
            + 2.0 * rate * (excess.square() + rate * excess - 1.0)
            + t * (1.0 - rate * excess)
        )
        return torch.where(self._far, series, direct)


def log_tail_mass(t: Tensor, length: Tensor, scaled: Tensor | None = None) -> Tensor:
    """ln ∫ φ over [t, t + length] plus t²/2, for t ≥ 0; ``scaled`` is e(t), where known."""
    near = scaled_tail(t) if scaled is None else scaled
    far_share = vanishing_exp(-length * (t + 0.5 * length)) * scaled_tail(t + length) / near
    return torch.log(0.5 * near) + torch.log1p(-far_share)


def log_inner_mass(alpha: Tensor, beta: Tensor, length: Tensor) -> Tensor:
    """ln ∫ φ over [alpha, beta] when zero lies inside."""
    wide = torch.log1p(-below(alpha) - below(-beta))
    narrow = torch.log(0.5 * (torch.erf(beta / _SQRT_2) - torch.erf(alpha / _SQRT_2)))
    return torch.where(length > 4.0, wide, narrow)


def log_mass(alpha: Tensor, beta: Tensor, length: Tensor) -> Tensor:
    """ln ∫ φ over [alpha, beta], wherever it lies; length = beta - alpha, given apart for precision."""
    t = torch.maximum(alpha, -beta)
    outer = log_tail_mass(t.clamp(min=0.0), length) - 0.5 * t.square()
    return torch.where(t >= 0.0, outer, log_inner_mass(alpha, beta, length))
