"""The gates of many networks drawn at once: θ of every member, example and unit, with its gradient.

Random numbers are a function of the member's seed, the step, the example and the unit alone: a member draws what it
would draw alone, whatever is stacked beside it. On a GPU one kernel in float32 does it all; elsewhere the exact
quantile in float64, at the same random numbers.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from bmrs import _truncated
from bmrs._truncated import Frame, Regime
from bmrs.posterior import LOG_A, LOG_B, LOG_SIGMA_RANGE

_MASK = 0xFFFFFFFF
_BLOCK = 1 << 14  # draws at a time, which stay in a processor's cache


def draw(
    mu: Tensor, log_sigma: Tensor, alive: Tensor, seeds: Tensor, step: Tensor, units: Tensor, examples: int
) -> Tensor:
    """θ, [members, examples, units]; 0 where a unit is not alive.

    ``mu``, ``log_sigma``, ``alive``, ``units``: [members, units], the last the unit's own number. ``seeds``: [members].
    ``step``: one whole number on the device, which names the draw.
    """
    theta: Tensor = _Draw.apply(mu, log_sigma, alive, seeds, step, units, examples)[0]
    return theta


def uniforms(seeds: Tensor, step: Tensor, units: Tensor, examples: int) -> Tensor:
    """The random numbers behind :func:`draw`, in (0, 1), float64: [members, examples, units]."""
    key = _mixed(seeds ^ _mixed(step))[:, None, None]
    row = _mixed(key + torch.arange(examples, device=seeds.device)[:, None])
    bits = _mixed(row ^ _mixed(units[:, None, :]))
    return ((bits >> 8).double() + 0.5) / (1 << 24)


def kl_gradient(mu: Tensor, log_sigma: Tensor) -> tuple[Tensor, Tensor]:
    """∂KL/∂μ and ∂KL/∂log σ of every gate, in the precision of ``mu``."""
    mu, log_sigma = mu.detach(), log_sigma.detach()
    if mu.is_cuda and mu.dtype == torch.float32 and _kernels() is not None:
        by_mu, by_log_sigma = _kernels().kl_gradient(mu, log_sigma)
        return by_mu, by_log_sigma
    low, high = LOG_SIGMA_RANGE
    inside = (log_sigma >= low) & (log_sigma <= high)
    by_mu, by_log_sigma = _truncated.kl_gradient(Frame(mu, log_sigma.clamp(low, high), LOG_A, LOG_B))
    return by_mu.to(mu.dtype), (by_log_sigma * inside).to(mu.dtype)


def _mixed(number: Tensor) -> Tensor:
    """A hash of 32 bits: neighbours become strangers."""
    number = number & _MASK
    number = ((number ^ (number >> 16)) * 0x7FEB352D) & _MASK
    number = ((number ^ (number >> 15)) * 0x846CA68B) & _MASK
    return number ^ (number >> 16)


@cache
def _kernels() -> Any:
    """The module of kernels; None where Triton is not installed."""
    try:
        from bmrs.study import _draw_kernels
    except ImportError:
        return None
    return _draw_kernels


class _Draw(Function):
    """θ and its derivatives by μ and log σ, which the backward pass sums over the examples."""

    @staticmethod
    def forward(ctx: Any, mu: Tensor, log_sigma: Tensor, alive: Tensor, seeds: Tensor, step: Tensor, units: Tensor,
                examples: int) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        if mu.is_cuda and mu.dtype == torch.float32 and _kernels() is not None:
            drawn: Sequence[Tensor] = _kernels().draw(mu, log_sigma, alive, seeds, step, units, examples)
        else:
            drawn = _exact(mu, log_sigma, alive, uniforms(seeds, step, units, examples))
        theta, by_mu, by_log_sigma = drawn
        ctx.mark_non_differentiable(by_mu, by_log_sigma)
        ctx.save_for_backward(by_mu, by_log_sigma)
        return theta, by_mu, by_log_sigma

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        by_mu, by_log_sigma = ctx.saved_tensors
        if grad.is_cuda and grad.dtype == torch.float32 and _kernels() is not None:
            to_mu, to_log_sigma = _kernels().sums(grad.contiguous(), by_mu, by_log_sigma)
        else:
            to_mu, to_log_sigma = (grad * by_mu).sum(1), (grad * by_log_sigma).sum(1)
        return to_mu, to_log_sigma, None, None, None, None, None


def _exact(mu: Tensor, log_sigma: Tensor, alive: Tensor, u: Tensor) -> list[Tensor]:
    """θ and its derivatives, [members, examples, units], in the precision of ``mu``."""
    low, high = LOG_SIGMA_RANGE
    free = (log_sigma >= low) & (log_sigma <= high)
    members, examples, units = u.shape
    # Gates as rows, so that those of one regime can be taken together and one form evaluated for each.
    own, width, rows = mu.flatten(), log_sigma.clamp(low, high).flatten(), u.transpose(1, 2).reshape(-1, examples)
    out = mu.new_zeros(3, members * units, examples)
    for chosen, regime in _regimes(own, alive.flatten(), max(1, _BLOCK // examples)):
        frame = Frame(own[chosen, None], width[chosen, None], LOG_A, LOG_B, regime)
        x, by_mu, by_log_sigma = _truncated.quantile(frame, rows[chosen])
        theta = x.exp()
        by_log_sigma = by_log_sigma * free.flatten()[chosen, None]
        for part, value in zip(out, (theta, theta * by_mu, theta * by_log_sigma), strict=True):
            part[chosen] = value.to(mu.dtype)
    return list(out.view(3, members, units, examples).transpose(2, 3).mul_(alive[:, None]))


def _regimes(mu: Tensor, alive: Tensor, block: int) -> Iterator[tuple[Tensor | slice, Regime | None]]:
    """The gates that are alive, in blocks of the same regime; on a GPU all at once, since it waits for nothing."""
    if mu.is_cuda:
        yield slice(None), None
        return
    inside, above = (mu > LOG_A) & (mu < LOG_B), mu >= LOG_B
    regimes: list[tuple[Tensor, Regime]] = [(inside, "inside"), (above, "above"), (~(inside | above), "below")]
    for mask, regime in regimes:
        for chosen in (mask & alive).nonzero().squeeze(1).split(block):
            if len(chosen):
                yield chosen, regime
