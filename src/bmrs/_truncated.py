"""Closed forms for the normal (μ, σ²) of x = log θ truncated to [A, B], in float64 and without autograd.

Write α = (A-μ)/σ, β = (B-μ)/σ, L = β-α, and t = max(α, -β) for the distance, in σ, from μ to the nearer
bound (negative when μ lies inside). Trained gates sit at or beyond a bound, so every quantity has up to three
forms, for μ inside, at or below A, at or above B; in each the large exponents are subtracted on paper.
"""

from collections.abc import Callable
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.special import ndtri

from bmrs import _normal
from bmrs._normal import LOG_2PI, Hazard

Regime = Literal["inside", "below", "above"]
Form = Callable[[], Tensor]

# Below this distance a bound is out of sight (λ < 1e-22) while erfcx would soon overflow.
_OUT_OF_SIGHT = -10.0


class Frame:
    """Where posteriors lie relative to their bounds, with what several quantities share."""

    def __init__(self, mu: Tensor, log_sigma: Tensor, log_a: float, log_b: float, regime: Regime | None = None) -> None:
        """``regime`` says that all units lie in one place, which saves evaluating the other forms."""
        self.mu = mu.double()
        self.sigma = log_sigma.double().exp()
        self.log_a, self.log_b, self.width = log_a, log_b, log_b - log_a
        self.regime = regime
        self.alpha = (log_a - self.mu) / self.sigma
        self.beta = (log_b - self.mu) / self.sigma
        self.length = self.width / self.sigma
        self.t = torch.maximum(self.alpha, -self.beta)

    def choose(self, inside: Form, below: Form, above: Form) -> Tensor:
        """The form that applies to each unit. Without a known regime all are evaluated: no device waits."""
        if self.regime is not None:
            return {"inside": inside, "below": below, "above": above}[self.regime]()
        return torch.where(self.t < 0.0, inside(), torch.where(self.near_b, above(), below()))

    @cached_property
    def near_b(self) -> Tensor:
        """Is B the nearer bound?"""
        return -self.beta >= self.alpha

    @cached_property
    def outer_t(self) -> Tensor:
        """t where it is meaningful beyond a bound; 0 for units inside."""
        return self.t.clamp(min=0.0)

    @cached_property
    def edge(self) -> Hazard:
        """The hazard at the nearer bound."""
        return Hazard(self.t.clamp(min=_OUT_OF_SIGHT))

    @cached_property
    def outer(self) -> Tensor:
        """ln Z + t²/2 beyond a bound."""
        return _normal.log_tail_mass(self.outer_t, self.length, self.edge.scaled)

    @cached_property
    def inner(self) -> Tensor:
        """ln Z inside."""
        return _normal.log_inner_mass(self.alpha, self.beta, self.length)

    @cached_property
    def log_mean(self) -> Tensor:
        return _log_moment(self, 1)


def _log_moment(f: Frame, k: int) -> Tensor:
    """log E[θᵏ]: θᵏ tilts the normal to mean μ + kσ², so each moment is a ratio of two masses."""
    alpha = f.alpha - k * f.sigma
    beta = f.beta - k * f.sigma
    t = torch.maximum(alpha, -beta)

    def outer() -> Tensor:
        return _normal.log_tail_mass(t.clamp(min=0.0), f.length)

    def inner() -> Tensor:
        return _normal.log_inner_mass(alpha, beta, f.length)

    def inside() -> Tensor:  # the tilted mean is still inside, or beyond b
        stays = k * f.mu + 0.5 * (k * f.sigma).square() + inner()
        leaves = k * f.log_b - 0.5 * f.beta.square() + outer()
        return torch.where(t < 0.0, stays, leaves) - f.inner

    def below() -> Tensor:  # the tilted mean is still below a, inside, or beyond b
        overshoot = torch.where(-beta > alpha, -0.5 * f.length * (alpha + beta), 0.0)
        reach = torch.where(t < 0.0, 0.5 * alpha.square() + inner(), outer() + overshoot)
        return k * f.log_a + reach - f.outer

    def above() -> Tensor:
        return k * f.log_b + outer() - f.outer

    return f.choose(inside, below, above)


def snr(f: Frame) -> Tensor:
    """expm1(v)^-½ with v = log E[θ²] - 2 log E[θ], from the cumulants of log θ where v itself would cancel."""
    edge = f.edge
    variance = edge.variance()
    third = torch.where(f.near_b, -1.0, 1.0) * edge.third_cumulant()
    fourth = (7.0 / 12.0) * edge.fourth_cumulant()
    narrow = f.sigma.square() * (variance + f.sigma * (third + f.sigma * fourth))
    # The cumulants know one bound only: use them where the other is out of reach.
    out_of_reach = (f.t + f.length).square() - f.outer_t.square() > 100.0
    v = torch.where((f.sigma.square() * variance < 1e-6) & out_of_reach, narrow, _log_moment(f, 2) - 2.0 * f.log_mean)
    return torch.expm1(v).rsqrt()


def log_interval_mass(f: Frame, low: float, high: float) -> Tensor:
    """log q(low ≤ x ≤ high) for A ≤ low < high ≤ B."""
    start = (low - f.mu) / f.sigma
    end = (high - f.mu) / f.sigma
    length = (high - low) / f.sigma

    def inside() -> Tensor:
        return _normal.log_mass(start, end, length) - f.inner

    def below() -> Tensor:  # the exponents differ by the way from a to the interval
        way = 0.5 * (low - f.log_a) / f.sigma * (start + f.alpha)
        return _normal.log_tail_mass(start.clamp(min=0.0), length) - way - f.outer

    def above() -> Tensor:
        way = 0.5 * (f.log_b - high) / f.sigma * (f.beta + end)
        return _normal.log_tail_mass((-end).clamp(min=0.0), length) + way - f.outer

    return f.choose(inside, below, above)


class _Tail(NamedTuple):
    """What KL and its gradient share beyond a bound."""

    t: Tensor
    near: Hazard  # at the nearer bound
    far: Hazard  # at the other one
    share: Tensor  # r: mass beyond the far end over mass beyond the near end
    odds: Tensor  # λ r/(1-r)
    density: Tensor  # of z at the far end


def _tail(f: Frame) -> _Tail:
    t = f.outer_t
    near, far = Hazard(t), Hazard(t + f.length)
    decay = _normal.vanishing_exp(-f.length * (t + 0.5 * f.length))
    share = decay * near.rate / far.rate
    rest = 1.0 - share
    return _Tail(t, near, far, share, near.rate * share / rest, near.rate * decay / rest)


def _inner_edges(f: Frame) -> tuple[Tensor, Tensor]:
    """The densities of z at α and at β when μ lies inside."""
    at_a = _normal.vanishing_exp(-0.5 * (f.alpha.square() + LOG_2PI) - f.inner)
    at_b = _normal.vanishing_exp(-0.5 * (f.beta.square() + LOG_2PI) - f.inner)
    return at_a, at_b


def kl(f: Frame) -> Tensor:
    """KL(q‖p) against the uniform prior of x."""

    def inside() -> Tensor:
        at_a, at_b = _inner_edges(f)
        return -f.inner - 0.5 * (f.alpha * at_a - f.beta * at_b)

    def beyond() -> Tensor:
        s = _tail(f)
        edges = (s.t + f.length) * s.density - s.t * (s.near.excess + s.odds)
        return -f.outer + 0.5 * edges

    # log(B - A) - log σ = log L
    return f.length.log() - 0.5 * (LOG_2PI + 1.0) + torch.where(f.t < 0.0, inside(), beyond())


def kl_gradient(f: Frame) -> tuple[Tensor, Tensor]:
    """∂KL/∂μ = -Cov(z, z²)/2σ and ∂KL/∂log σ = -Var(z²)/2, z = (x-μ)/σ."""
    at_a, at_b = _inner_edges(f)
    first = at_a - at_b
    second = 1.0 + f.alpha * at_a - f.beta * at_b
    third = 2.0 * first + f.alpha.square() * at_a - f.beta.square() * at_b
    fourth = 3.0 * second + f.alpha**3 * at_a - f.beta**3 * at_b
    inside_mu = -0.5 * (third - first * second)
    inside_log_sigma = -0.5 * (fourth - second.square())

    # Beyond a bound these moments cancel; the derivatives of the KL in t and L do not.
    s = _tail(f)
    rate_gain = f.length + s.far.excess - s.near.excess  # λ(t+L) - λ(t)
    rest = 1.0 - s.share
    ratio = s.share / rest
    odds_t = s.odds * (s.near.excess - rate_gain / rest)
    odds_l = -s.odds * s.far.rate / rest
    end = s.t + f.length
    density_t = s.density * (s.near.excess - f.length - rate_gain * ratio)
    density_l = -s.density * (end + s.far.rate * ratio)
    near_t = s.near.excess + s.t * s.near.variance()
    by_t = 0.5 * (near_t - s.odds - s.t * odds_t + s.density + end * density_t) - rate_gain * ratio
    by_l = 0.5 * (s.density + end * density_l - s.t * odds_l) - s.far.rate * ratio
    beyond_mu = torch.where(f.near_b, by_t, -by_t)
    beyond_log_sigma = -1.0 - s.t * by_t - f.length * by_l

    inside = f.t < 0.0
    by_mu = torch.where(inside, inside_mu, beyond_mu) / f.sigma
    return by_mu, torch.where(inside, inside_log_sigma, beyond_log_sigma)


def quantile(f: Frame, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x at probability u with ∂x/∂μ and ∂x/∂log σ; u broadcasts against the units."""
    u = u.double()
    if f.regime is not None:
        x, by_mu, by_log_sigma = (_inner_quantile if f.regime == "inside" else _tail_quantile)(f, u)
    else:
        both = zip(_inner_quantile(f, u), _tail_quantile(f, u), strict=True)
        x, by_mu, by_log_sigma = (torch.where(f.t < 0.0, inside, beyond) for inside, beyond in both)
    # At u = 0 and u = 1 the quantile is the bound itself, which no parameter moves.
    bottom, top = u <= 0.0, u >= 1.0
    x = x.clamp(f.log_a, f.log_b).masked_fill(bottom, f.log_a).masked_fill(top, f.log_b)
    return x, by_mu.masked_fill(bottom | top, 0.0), by_log_sigma.masked_fill(bottom | top, 0.0)


def _inner_quantile(f: Frame, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """μ inside: invert Φ from the nearer tail."""
    mass = f.inner.exp()
    lower = _normal.below(f.alpha) + u * mass
    upper = _normal.below(-f.beta) + (1.0 - u) * mass
    z = ndtri(torch.minimum(lower, upper))
    z = torch.where(lower <= upper, z, -z)
    z = torch.minimum(torch.maximum(z, f.alpha), f.beta)
    # (1-u)·φ(z)/φ(α) and u·φ(z)/φ(β), with u in the exponent so that 0·inf cannot arise.
    at_a = _normal.vanishing_exp(torch.log1p(-u) + 0.5 * (z - f.alpha) * (z + f.alpha))
    at_b = _normal.vanishing_exp(torch.log(u) + 0.5 * (z - f.beta) * (z + f.beta))
    by_sigma = z - f.alpha * at_a - f.beta * at_b
    return f.mu + f.sigma * z, 1.0 - at_a - at_b, f.sigma * by_sigma


def _tail_quantile(f: Frame, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """μ at or beyond a bound: solve for the depth W of z behind that bound.

    The mass within depth W grows as 1 - exp(-h), h(W) = tW + W²/2 - ln e(t+W) + ln e(t), whose slope is the
    hazard λ(t+W). Halley's method on h, started from a hazard that grows linearly, needs three steps.
    """
    t = f.outer_t
    near, far = Hazard(t), Hazard(t + f.length)
    share = _normal.vanishing_exp(-f.length * (t + 0.5 * f.length)) * near.rate / far.rate
    v = torch.where(f.near_b, 1.0 - u, u)
    rest = torch.where(f.near_b, u, 1.0 - u)  # 1 - v, to full precision near the far end
    h = torch.where(v < 0.5, -torch.log1p(-v * (1.0 - share)), -torch.log(rest + v * share))
    h = h.clamp(max=750.0)  # only u = 0 or 1 goes beyond
    depth = 2.0 * h / (near.rate + torch.sqrt(near.rate * (near.rate + 2.0 * h * near.excess)))
    for _ in range(3):
        here = Hazard(t + depth)
        miss = depth * (t + 0.5 * depth) - near.log_ratio(depth, here) - h
        newton = miss / here.rate
        # The slope of the hazard is λδ, so Halley divides Newton's step by 1 - ½·step·δ.
        depth = (depth - newton / (1.0 - 0.5 * newton * here.excess)).clamp(min=0.0)
        depth = torch.minimum(depth, f.length)
    # ∂x/∂μ = 1 - (1-u)φ(z)/φ(α) - uφ(z)/φ(β), the terms near 1 cancelled on paper.
    at_far = v * _normal.vanishing_exp(-(f.length - depth) * (t + 0.5 * (f.length + depth)))
    by_mu = -torch.expm1(near.log_ratio(depth, Hazard(t + depth)))
    by_mu = by_mu + at_far * torch.expm1(near.log_ratio(f.length, far))
    by_sigma = depth + t * by_mu - f.length * at_far
    sign = torch.where(f.near_b, -1.0, 1.0)
    bound = torch.full_like(f.mu, f.log_a).masked_fill(f.near_b, f.log_b)
    return bound + sign * f.sigma * depth, by_mu, sign * f.sigma * by_sigma
