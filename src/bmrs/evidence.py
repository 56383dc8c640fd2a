"""Bayesian model reduction of one gate: how the log evidence changes when its prior is reduced.

ΔF = log evidence with the reduced prior p̃ minus log evidence with the prior p = log ∫ q(θ) p̃(θ)/p(θ) dθ.
It comes from the posterior q alone; nothing is trained again. ΔF > 0 says the data are better explained
without the unit. These values are exact: what is worth keeping is decided in :mod:`bmrs.criteria`.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from bmrs import _checks, _normal, _truncated
from bmrs._normal import LOG_2PI
from bmrs._truncated import Frame
from bmrs.posterior import TruncatedLogNormal

SPIKE_SCALE = 1e-6
_LOG_2 = math.log(2.0)


class Scores(NamedTuple):
    """What is known of every unit: E[θ], E[θ]/sd[θ], and ΔF of switching it off."""

    mean: Tensor
    snr: Tensor
    delta_f: Tensor


def scores(q: TruncatedLogNormal, scale: float = SPIKE_SCALE) -> Scores:
    """All three in one pass, which costs little more than the SNR alone."""
    _check_scale(scale)
    return Scores(*q.per_unit(lambda f: f.log_mean.exp(), _truncated.snr, lambda f: _spike(f, scale)))


def spike(q: TruncatedLogNormal, scale: float = SPIKE_SCALE) -> Tensor:
    """ΔF for ``p̃ = LogN[a,b](log a, scale²)``, a spike at the lower end of the gate: the unit is off.

    As scale → 0 this is the Savage-Dickey ratio: the log of q's density at log θ = log a over the prior's.
    """
    _check_scale(scale)
    return q.per_unit(lambda f: _spike(f, scale))[0]


def spike_posterior(q: TruncatedLogNormal, scale: float = SPIKE_SCALE) -> TruncatedLogNormal:
    """The posterior under the spike. In float64: float32 cannot place a spike of width 1e-6 at -20."""
    _check_scale(scale)
    with torch.no_grad():
        mu, log_sigma = q.mu.double(), q.log_sigma.double()
        log_ratio = 2.0 * (log_sigma - math.log(scale))  # log σ²/s²
        reduced_mu = q.log_a + (mu - q.log_a) * torch.sigmoid(-log_ratio)
        reduced_log_sigma = math.log(scale) + 0.5 * torch.nn.functional.logsigmoid(log_ratio)
    return TruncatedLogNormal(reduced_mu, reduced_log_sigma, q.log_a, q.log_b, validate=False)


def interval(q: TruncatedLogNormal, p1: float = 8, p2: float | None = 23) -> Tensor:
    """ΔF for ``p̃ = LogU[2^-p2, 2^-p1]``: the gate is below what p1 bits of precision can tell from zero.

    ``p2=None`` lets the interval reach down to a.
    """
    low, high = _interval_bounds(q, p1, p2)
    log_width_ratio = math.log((q.log_b - q.log_a) / (high - low))
    return q.per_unit(lambda f: _truncated.log_interval_mass(f, low, high) + log_width_ratio)[0]


def interval_posterior(q: TruncatedLogNormal, p1: float = 8, p2: float | None = 23) -> TruncatedLogNormal:
    """The posterior under the interval: the same normal, truncated to it."""
    low, high = _interval_bounds(q, p1, p2)
    return TruncatedLogNormal(q.mu, q.log_sigma, low, high, validate=False)


def _spike(f: Frame, scale: float) -> Tensor:
    """Two normals in log θ multiply to a third, truncated to the same bounds."""
    variance = f.sigma.square() + scale**2
    alpha = f.alpha * (scale / variance.sqrt())
    length = f.width * variance.sqrt() / (f.sigma * scale)
    beta = alpha + length

    def outer() -> Tensor:
        return _normal.log_tail_mass(torch.maximum(alpha, -beta).clamp(min=0.0), length)

    def inside() -> Tensor:
        overlap = _normal.log_mass(alpha, beta, length) - 0.5 * (f.mu - f.log_a).square() / variance
        return overlap - f.inner

    def below() -> Tensor:  # all exponents cancel
        return outer() - f.outer

    def above() -> Tensor:  # q's way from b to a; or the spike's to b, where a broad one leaves the product above
        to_a = _normal.log_inner_mass(alpha, beta, length) + 0.5 * alpha.square()
        to_a = to_a - f.length * (f.outer_t + 0.5 * f.length)
        to_b = outer() - 0.5 * (f.width / scale) ** 2
        return torch.where(beta > 0.0, to_a, to_b) - f.outer

    log_spike_mass = math.log(0.5 * math.erf(f.width / scale / math.sqrt(2.0)))
    constant = math.log(f.width) - 0.5 * LOG_2PI - log_spike_mass
    return constant - 0.5 * variance.log() + f.choose(inside, below, above)


def _check_scale(scale: float) -> None:
    if not (isinstance(scale, int | float) and 0.0 < scale < math.inf):
        raise ValueError(f"scale must be a positive number, the spike's standard deviation in log θ; got {scale}.")


def _interval_bounds(q: TruncatedLogNormal, p1: float, p2: float | None) -> tuple[float, float]:
    """[log a', log b'] of the interval, inside [log a, log b]."""
    fewest, most = 0.0 - q.log_b / _LOG_2, 0.0 - q.log_a / _LOG_2  # 0 - x: no minus zero in the error
    p1 = _checks.number(p1, "p1", fewest, most, "the bits of precision in which a kept gate shows")
    if p2 is None:
        low = q.log_a
    else:
        p2 = _checks.number(p2, "p2", fewest, most, "the bits at which the interval ends (None: at a itself)")
        low = -p2 * _LOG_2
    high = -p1 * _LOG_2
    if not low < high:
        raise ValueError(f"p1 must be below p2, since the interval is [2^-p2, 2^-p1]; got p1={p1}, p2={p2}.")
    return low, high
