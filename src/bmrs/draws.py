"""Gates in bulk: θ of every network of a stack, example and unit, with its gradient; their means; the KL's gradient.

Random numbers are a function of the network's seed, the step, the example and the unit alone: a network draws what it
would draw alone, whatever is stacked beside it. For float32 one kernel does it all, Triton's on a GPU and compiled C on
a processor (:mod:`bmrs.native`); elsewhere the exact quantile in float64, at the same random numbers.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from bmrs import _truncated, fused, native
from bmrs._truncated import Frame, Regime
from bmrs.posterior import LOG_A, LOG_B, LOG_SIGMA_RANGE, TruncatedLogNormal

_MASK = 0xFFFFFFFF
_BLOCK = 1 << 14  # draws at a time, which stay in a processor's cache


def draw(
    mu: Tensor, log_sigma: Tensor, alive: Tensor, seeds: Tensor, step: Tensor, units: Tensor, examples: int,
    low: float = LOG_A, high: float = LOG_B,
) -> Tensor:  # fmt: skip
    """θ, [members, examples, units]; 0 where a unit is not alive.

    ``mu``, ``log_sigma``, ``alive``, ``units``: [members, units], the last the unit's own number; or of one network
    alone, [units], for θ of [examples, units]. ``seeds``: [members].
    ``step``: one whole number on the device, which names the draw. ``low``, ``high``: the bounds of log θ.
    """
    if torch.compiler.is_compiling():  # which takes an operation of ours as it is, and its gradient along
        drawn: Sequence[Tensor] = torch.ops.bmrs.draw(mu, log_sigma, alive, seeds, step, units, examples, low, high)
        return drawn[0]
    theta: Tensor = _Draw.apply(mu, log_sigma, alive, seeds, step, units, examples, low, high)[0]
    return theta


def uniforms(seeds: Tensor, step: Tensor, units: Tensor, examples: int) -> Tensor:
    """The random numbers behind :func:`draw`, in (0, 1), float64: [members, examples, units]."""
    key = _mixed(seeds ^ _mixed(step))[:, None, None]
    row = _mixed(key + torch.arange(examples, device=seeds.device)[:, None])
    bits = _mixed(row ^ _mixed(units[:, None, :]))
    return ((bits >> 8).double() + 0.5) / (1 << 24)


def kl_gradient(
    mu: Tensor, log_sigma: Tensor, weights: Tensor, low: float = LOG_A, high: float = LOG_B
) -> tuple[Tensor, Tensor]:
    """The gradients of Σ weight·KL by μ and log σ of every gate, in the precision of ``mu``."""
    mu, log_sigma, weights = mu.detach(), log_sigma.detach(), weights.detach().to(mu.dtype)
    chosen = _fused(mu)
    if chosen is not None:
        by_mu, by_log_sigma = chosen.kl_gradient(mu, log_sigma, weights, low, high)
        return by_mu, by_log_sigma
    return exact_kl_gradient(mu, log_sigma, weights, low, high)


def exact_kl_gradient(
    mu: Tensor, log_sigma: Tensor, weights: Tensor, low: float = LOG_A, high: float = LOG_B
) -> tuple[Tensor, Tensor]:
    """The same in plain torch."""
    least, most = LOG_SIGMA_RANGE
    inside = (log_sigma >= least) & (log_sigma <= most)
    by_mu, by_log_sigma = _truncated.kl_gradient(Frame(mu, log_sigma.clamp(least, most), low, high))
    return (weights * by_mu).to(mu.dtype), (weights * by_log_sigma * inside).to(mu.dtype)


def mean(mu: Tensor, log_sigma: Tensor, low: float = LOG_A, high: float = LOG_B) -> Tensor:
    """E[θ] of every gate, in the precision of ``mu``, without gradients."""
    mu, log_sigma = mu.detach(), log_sigma.detach()
    if torch.compiler.is_compiling():
        result: Tensor = torch.ops.bmrs.mean(mu, log_sigma, low, high)
        return result
    return _mean(mu, log_sigma, low, high)


def exact_mean(mu: Tensor, log_sigma: Tensor, low: float = LOG_A, high: float = LOG_B) -> Tensor:
    """The same in plain torch."""
    return TruncatedLogNormal(mu, log_sigma, low, high, validate=False).mean()


def _mean(mu: Tensor, log_sigma: Tensor, low: float, high: float) -> Tensor:
    chosen = _fused(mu)
    result: Tensor = (exact_mean if chosen is None else chosen.mean)(mu, log_sigma, low, high)
    return result


def _mixed(number: Tensor) -> Tensor:
    """A hash of 32 bits: neighbours become strangers."""
    number = number & _MASK
    number = ((number ^ (number >> 16)) * 0x7FEB352D) & _MASK
    number = ((number ^ (number >> 15)) * 0x846CA68B) & _MASK
    return number ^ (number >> 16)


def _fused(mu: Tensor) -> Any:
    """Who computes gates of this kind at once; None: plain torch does."""
    if mu.dtype != torch.float32:
        return None
    if mu.is_cuda:
        return fused.kernels("_draw_kernels")
    return native if mu.device.type == "cpu" and native.available() else None


def _drawn(
    mu: Tensor, log_sigma: Tensor, alive: Tensor, seeds: Tensor, step: Tensor, units: Tensor, examples: int,
    low: float, high: float,
) -> Sequence[Tensor]:  # fmt: skip
    """θ and its derivatives by μ and log σ."""
    if mu.dim() == 1:
        alone = _drawn(mu[None], log_sigma[None], alive[None], seeds, step, units[None], examples, low, high)
        return [part[0] for part in alone]
    chosen = _fused(mu)
    if chosen is not None and examples:
        drawn: Sequence[Tensor] = chosen.draw(mu, log_sigma, alive, seeds, step, units, examples, low, high)
        return drawn
    return exact(mu, log_sigma, alive, uniforms(seeds, step, units, examples), low, high)


class _Draw(Function):
    """θ and its derivatives by μ and log σ, which the backward pass sums over the examples."""

    @staticmethod
    def forward(ctx: Any, mu: Tensor, log_sigma: Tensor, alive: Tensor, seeds: Tensor, step: Tensor, units: Tensor,
                examples: int, low: float, high: float) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        theta, by_mu, by_log_sigma = _drawn(mu, log_sigma, alive, seeds, step, units, examples, low, high)
        ctx.mark_non_differentiable(by_mu, by_log_sigma)
        ctx.save_for_backward(by_mu, by_log_sigma)
        return theta, by_mu, by_log_sigma

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        by_mu, by_log_sigma = ctx.saved_tensors
        to_mu, to_log_sigma = _sums(grad, by_mu, by_log_sigma)
        return to_mu, to_log_sigma, None, None, None, None, None, None, None


@torch.library.custom_op("bmrs::draw", mutates_args=())
def _operation(mu: Tensor, log_sigma: Tensor, alive: Tensor, seeds: Tensor, step: Tensor, units: Tensor,
               examples: int, low: float, high: float) -> list[Tensor]:  # fmt: skip
    """The same for graphs of torch.compile, which cannot look inside."""
    return [part.contiguous() for part in _drawn(mu, log_sigma, alive, seeds, step, units, examples, low, high)]


@_operation.register_fake
def _shapes(mu: Tensor, log_sigma: Tensor, alive: Tensor, seeds: Tensor, step: Tensor, units: Tensor,
            examples: int, low: float, high: float) -> list[Tensor]:  # fmt: skip
    return [mu.new_empty(*mu.shape[:-1], examples, mu.shape[-1]) for _ in range(3)]


def _sums(grad: Tensor, by_mu: Tensor, by_log_sigma: Tensor) -> list[Tensor]:
    """Over the examples, of grad·∂θ/∂μ and grad·∂θ/∂log σ."""
    chosen = _fused(grad)
    if chosen is None:
        return [(grad * by_mu).sum(-2), (grad * by_log_sigma).sum(-2)]
    if grad.dim() == 2:
        return [part[0] for part in chosen.sums(grad[None].contiguous(), by_mu[None], by_log_sigma[None])]
    return list(chosen.sums(grad.contiguous(), by_mu, by_log_sigma))


@torch.library.custom_op("bmrs::sums", mutates_args=())
def _sums_operation(grad: Tensor, by_mu: Tensor, by_log_sigma: Tensor) -> list[Tensor]:
    return _sums(grad, by_mu, by_log_sigma)


@_sums_operation.register_fake
def _per_unit(grad: Tensor, by_mu: Tensor, by_log_sigma: Tensor) -> list[Tensor]:
    return [by_mu.new_empty(*by_mu.shape[:-2], by_mu.shape[-1]) for _ in range(2)]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.save_for_backward(*output[1:])


def _back(ctx: Any, grads: list[Tensor]) -> tuple[Tensor | None, ...]:
    to_mu, to_log_sigma = torch.ops.bmrs.sums(grads[0], *ctx.saved_tensors)
    return to_mu, to_log_sigma, None, None, None, None, None, None, None


_operation.register_autograd(_back, setup_context=_keep)


@torch.library.custom_op("bmrs::mean", mutates_args=())
def _mean_operation(mu: Tensor, log_sigma: Tensor, low: float, high: float) -> Tensor:
    return _mean(mu, log_sigma, low, high)


@_mean_operation.register_fake
def _like(mu: Tensor, log_sigma: Tensor, low: float, high: float) -> Tensor:
    return torch.empty_like(mu)


def exact(
    mu: Tensor, log_sigma: Tensor, alive: Tensor, u: Tensor, low: float = LOG_A, high: float = LOG_B
) -> list[Tensor]:
    """θ and its derivatives, [members, examples, units], in the precision of ``mu``, by plain torch."""
    least, most = LOG_SIGMA_RANGE
    free = (log_sigma >= least) & (log_sigma <= most)
    members, examples, units = u.shape
    # Gates as rows, so that those of one regime can be taken together and one form evaluated for each.
    own, width, rows = mu.flatten(), log_sigma.clamp(least, most).flatten(), u.mT.flatten(0, 1)
    out = [mu.new_zeros(members * units, examples) for _ in range(3)]
    for chosen, regime in _regimes(own, alive.flatten(), max(1, _BLOCK // max(1, examples)), low, high):
        frame = Frame(own[chosen, None], width[chosen, None], low, high, regime)
        x, by_mu, by_log_sigma = _truncated.quantile(frame, rows[chosen])
        theta = x.exp()
        by_log_sigma = by_log_sigma * free.flatten()[chosen, None]
        for part, value in zip(out, (theta, theta * by_mu, theta * by_log_sigma), strict=True):
            part[chosen] = value.to(mu.dtype)
    return [part.view(members, units, examples).mT * alive[:, None] for part in out]


def _regimes(
    mu: Tensor, alive: Tensor, block: int, low: float, high: float
) -> Iterator[tuple[Tensor | slice, Regime | None]]:
    """The gates that are alive, in blocks of the same regime; on a GPU all at once, since it waits for nothing."""
    if mu.device.type != "cpu":
        yield slice(None), None
        return
    inside, above = (mu > low) & (mu < high), mu >= high
    regimes: list[tuple[Tensor, Regime]] = [(inside, "inside"), (above, "above"), (~(inside | above), "below")]
    for mask, regime in regimes:
        for chosen in (mask & alive).nonzero().squeeze(1).split(block):
            if len(chosen):
                yield chosen, regime
