"""The truncated log-normal, the posterior of a gate: draws, KL, moments, quantiles, masses.

With x = log θ, the prior of x is uniform on [log a, log b] and its posterior is the normal (μ, σ²) truncated
to the same bounds. Everything is evaluated in float64 and returned in the caller's precision: the vectors are
short, one entry per unit. The closed forms are in :mod:`bmrs._truncated`.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, Self

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from bmrs import _checks, _truncated
from bmrs._truncated import Frame, Regime

LOG_A = -20.0
LOG_B = 0.0
LOG_SIGMA_RANGE = (-20.0, 5.0)

# On the CPU, more units than the first are sorted by regime, and done in blocks whose intermediate vectors stay
# in the cache.
_FEW = 1 << 11
_BLOCK = 1 << 15


class TruncatedLogNormal:
    """``q(θ) = LogN[a,b](μ, σ²)``, one per unit, in float64 accuracy for every μ and σ.

    ``log_sigma`` is clamped to [-20, 5], where q is practically a point or the prior itself; the attribute
    holds the clamped value. ``kl()`` and ``rsample()`` carry gradients to ``mu`` and ``log_sigma``; the
    scores (moments, masses, quantiles) do not. Results have the precision of ``mu``, at least float32.

    >>> q = TruncatedLogNormal(torch.zeros(3), torch.full((3,), -5.0))
    >>> q.mean()
    tensor([0.9946, 0.9946, 0.9946])
    """

    def __init__(
        self,
        mu: Tensor | float,
        log_sigma: Tensor | float,
        log_a: float = LOG_A,
        log_b: float = LOG_B,
        *,
        validate: bool = True,
    ) -> None:
        """``validate=False`` skips the search for NaN, which would wait for the device."""
        if isinstance(mu, int | float):
            mu = torch.full_like(log_sigma, mu) if isinstance(log_sigma, Tensor) else torch.tensor(float(mu))
        mu = _checks.floating(mu, "mu")
        if isinstance(log_sigma, int | float):
            log_sigma = torch.full_like(mu, log_sigma)
        log_sigma = _checks.floating(log_sigma, "log_sigma")
        _checks.same_shape(mu, "mu", log_sigma, "log_sigma")
        if mu.dtype != log_sigma.dtype or mu.device != log_sigma.device:
            raise ValueError(
                f"mu and log_sigma must share dtype and device; got {mu.dtype} on {mu.device} "
                f"and {log_sigma.dtype} on {log_sigma.device}: move one with .to()."
            )
        log_a = _checks.number(log_a, "log_a", -math.inf, math.inf, "the log of the smallest θ")
        log_b = _checks.number(log_b, "log_b", -math.inf, math.inf, "the log of the largest θ")
        if log_a >= log_b:
            raise ValueError(f"log_a must be below log_b; got log_a={log_a:g}, log_b={log_b:g}.")
        if validate:
            _checks.finite(mu, "mu")
            _checks.finite(log_sigma, "log_sigma")
        self.mu = mu
        self.log_sigma = log_sigma.clamp(*LOG_SIGMA_RANGE)
        self.log_a = log_a
        self.log_b = log_b

    @classmethod
    def from_sigma(cls, mu: Tensor, sigma: Tensor, log_a: float = LOG_A, log_b: float = LOG_B) -> Self:
        """The same posterior from σ instead of log σ."""
        sigma = _checks.floating(sigma, "sigma")
        if not bool((sigma > 0).all()):
            raise ValueError("sigma must be positive everywhere: it is the standard deviation of log θ.")
        return cls(mu, sigma.log(), log_a, log_b)

    @property
    def shape(self) -> torch.Size:
        return self.mu.shape

    @property
    def dtype(self) -> torch.dtype:
        """Of every result: that of ``mu``, and float32 for 16-bit parameters, which cannot hold a ΔF."""
        return _result_dtype(self.mu)

    def __repr__(self) -> str:
        return (
            f"TruncatedLogNormal({self.mu.numel()} units, θ in [exp({self.log_a:g}), exp({self.log_b:g})], "
            f"{self.mu.dtype}, {self.mu.device})"
        )

    def kl(self) -> Tensor:
        """KL(q‖p) against the log-uniform prior on the same bounds, with its analytic gradient."""
        kl: Tensor = _KL.apply(self.mu, self.log_sigma, self.log_a, self.log_b)
        return kl

    def rsample(self, shape: tuple[int, ...] = (), generator: torch.Generator | None = None) -> Tensor:
        """θ of the given shape + the shape of q, with the analytic gradient of the quantile."""
        u = torch.rand((*shape, *self.shape), generator=generator, dtype=torch.float64, device=self.mu.device)
        theta: Tensor = _Draw.apply(self.mu, self.log_sigma, u, self.log_a, self.log_b)[0]
        return theta

    @torch.no_grad()
    def icdf(self, u: Tensor | float) -> Tensor:
        """The θ below which q has mass u; u broadcasts against the units."""
        if isinstance(u, int | float):
            u = torch.tensor(u, dtype=torch.float64, device=self.mu.device)
        u = _checks.floating(u, "u")
        if not bool(((u >= 0) & (u <= 1)).all()):
            raise ValueError("u must lie in [0, 1] everywhere: it is a probability.")
        x, _, _ = _truncated.quantile(Frame(self.mu, self.log_sigma, self.log_a, self.log_b), u)
        return x.exp().to(self.dtype)

    def mean(self) -> Tensor:
        """E[θ], the factor a unit carries outside training."""
        return self.per_unit(lambda f: f.log_mean.exp())[0]

    def log_mean(self) -> Tensor:
        """log E[θ]."""
        return self.per_unit(lambda f: f.log_mean)[0]

    def snr(self) -> Tensor:
        """E[θ]/sd[θ]."""
        return self.per_unit(_truncated.snr)[0]

    def log_mass(self, lo: float, hi: float) -> Tensor:
        """log q(lo ≤ θ ≤ hi); the part of [lo, hi] outside [a, b] carries no mass."""
        if not 0.0 <= lo < hi:
            raise ValueError(f"lo must be at least 0 and below hi, both values of θ; got lo={lo}, hi={hi}.")
        low = max(math.log(lo) if lo > 0 else -math.inf, self.log_a)
        high = min(math.log(hi), self.log_b)
        if not low < high:
            return torch.full_like(self.mu, -math.inf, dtype=self.dtype)
        return self.per_unit(lambda f: _truncated.log_interval_mass(f, low, high))[0]

    @torch.no_grad()
    def per_unit(self, *functions: Callable[[Frame], Tensor]) -> list[Tensor]:
        """Each function of a :class:`Frame` for all units; they share what the frame computes once."""
        mu, log_sigma = self.mu.reshape(-1), self.log_sigma.reshape(-1)
        results = [torch.empty(mu.numel(), dtype=self.dtype, device=mu.device) for _ in functions]
        for units, regime in self._blocks(mu):
            part = Frame(mu[units], log_sigma[units], self.log_a, self.log_b, regime)
            for result, function in zip(results, functions, strict=True):
                result[units] = function(part).to(self.dtype)
        return [result.reshape(self.shape) for result in results]

    def _blocks(self, mu: Tensor) -> Iterator[tuple[slice | Tensor, Regime | None]]:
        """All units at once where they are few or on a GPU; else blocks of units in the same regime."""
        if mu.numel() <= _FEW or mu.device.type != "cpu":
            yield slice(None), None
            return
        inside = (mu > self.log_a) & (mu < self.log_b)
        above = mu >= self.log_b
        below = ~(inside | above)  # NaN included: it stays NaN there
        regimes: list[tuple[Tensor, Regime]] = [(inside, "inside"), (above, "above"), (below, "below")]
        for mask, regime in regimes:
            for units in mask.nonzero().squeeze(1).split(_BLOCK):
                if units.numel():
                    yield units, regime


def _result_dtype(mu: Tensor) -> torch.dtype:
    return torch.promote_types(mu.dtype, torch.float32)


class _KL(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(mu: Tensor, log_sigma: Tensor, log_a: float, log_b: float) -> Tensor:
        return _truncated.kl(Frame(mu, log_sigma, log_a, log_b)).to(_result_dtype(mu))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        mu, log_sigma, ctx.log_a, ctx.log_b = inputs
        ctx.save_for_backward(mu, log_sigma)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        mu, log_sigma = ctx.saved_tensors
        by_mu, by_log_sigma = _truncated.kl_gradient(Frame(mu, log_sigma, ctx.log_a, ctx.log_b))
        return (grad * by_mu).to(mu.dtype), (grad * by_log_sigma).to(mu.dtype), None, None


class _Draw(Function):
    """θ at probability u, and the two derivatives its backward pass needs."""

    generate_vmap_rule = True

    @staticmethod
    def forward(mu: Tensor, log_sigma: Tensor, u: Tensor, log_a: float, log_b: float) -> tuple[Tensor, Tensor, Tensor]:
        x, by_mu, by_log_sigma = _truncated.quantile(Frame(mu, log_sigma, log_a, log_b), u)
        dtype = _result_dtype(mu)
        theta = x.exp()
        return theta.to(dtype), (theta * by_mu).to(dtype), (theta * by_log_sigma).to(dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        _, by_mu, by_log_sigma = output
        ctx.mark_non_differentiable(by_mu, by_log_sigma)
        ctx.save_for_backward(by_mu, by_log_sigma)
        ctx.shape, ctx.dtype = inputs[0].shape, inputs[0].dtype

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        by_mu, by_log_sigma = ctx.saved_tensors
        to_units = [(grad * by).sum_to_size(ctx.shape).to(ctx.dtype) for by in (by_mu, by_log_sigma)]
        return to_units[0], to_units[1], None, None, None
