"""Triton kernels of gates: draws in float32, finite everywhere and as accurate as training needs; means and the KL's
gradient in float64.

The forms are those of :mod:`bmrs._truncated`. Of the draws, what float32 cannot hold is cut off: exponents end at ±80,
and depths behind a bound come from two Newton steps.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from bmrs.posterior import LOG_A, LOG_B, LOG_SIGMA_RANGE


def draw(
    mu: Tensor, log_sigma: Tensor, alive: Tensor, seeds: Tensor, step: Tensor, units: Tensor, examples: int,
    low: float = LOG_A, high: float = LOG_B,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    members, number = mu.shape
    out = [mu.new_empty(members, examples, number) for _ in range(3)]
    block_u, block_e = min(128, triton.next_power_of_2(number)), 4
    grid = (triton.cdiv(examples, block_e), triton.cdiv(number, block_u), members)
    _draw[grid](
        mu, log_sigma, alive, seeds, step, units, out[0], out[1], out[2], examples, number,
        low, high, *LOG_SIGMA_RANGE, EXAMPLES=block_e, UNITS=block_u, num_warps=4,
    )  # fmt: skip
    return out[0], out[1], out[2]


def sums(grad: Tensor, by_mu: Tensor, by_log_sigma: Tensor) -> tuple[Tensor, Tensor]:
    """Σ over examples of grad·∂θ/∂μ and grad·∂θ/∂log σ."""
    members, examples, number = grad.shape
    to_mu, to_log_sigma = (grad.new_empty(members, number) for _ in range(2))
    block = min(64, triton.next_power_of_2(number))
    _sums[(triton.cdiv(number, block), members)](
        grad, by_mu, by_log_sigma, to_mu, to_log_sigma, examples, number, EXAMPLES=32, UNITS=block, num_warps=4
    )
    return to_mu, to_log_sigma


def kl_gradient(
    mu: Tensor, log_sigma: Tensor, weights: Tensor, low: float = LOG_A, high: float = LOG_B
) -> tuple[Tensor, Tensor]:
    """The gradients of Σ weight·KL by μ and log σ of every gate."""
    mu, log_sigma, weights = mu.contiguous(), log_sigma.contiguous(), weights.contiguous()
    by_mu, by_log_sigma = torch.empty_like(mu), torch.empty_like(mu)
    _kl_gradient[(triton.cdiv(mu.numel(), 128),)](
        mu, log_sigma, weights, by_mu, by_log_sigma, mu.numel(), low, high, *LOG_SIGMA_RANGE, BLOCK=128, num_warps=4
    )
    return by_mu, by_log_sigma


def mean(mu: Tensor, log_sigma: Tensor, low: float = LOG_A, high: float = LOG_B) -> Tensor:
    """E[θ] of every gate."""
    mu, log_sigma = mu.contiguous(), log_sigma.contiguous()
    result = torch.empty_like(mu)
    _mean[(triton.cdiv(mu.numel(), 128),)](
        mu, log_sigma, result, mu.numel(), low, high, *LOG_SIGMA_RANGE, BLOCK=128, num_warps=4
    )
    return result


@triton.jit
def _mixed(number):
    number = (number ^ (number >> 16)) * 0x7FEB352D
    number = (number ^ (number >> 15)) * 0x846CA68B
    return number ^ (number >> 16)


@triton.jit
def _exp(x):
    return tl.exp(tl.minimum(tl.maximum(x, -80.0), 80.0))


@triton.jit
def _excess(t):
    """δ = λ - t, the hazard of a standard normal at t beyond t itself."""
    inverse = 1.0 / tl.maximum(t, 15.0)
    y = inverse * inverse
    series = inverse * (1.0 + y * (-2.0 + y * (10.0 + y * (-74.0 + y * 706.0))))
    direct = 0.7978845608028654 / libdevice.erfcx(t * 0.7071067811865476) - t
    return tl.where(t > 15.0, series, direct)


@triton.jit(do_not_specialize=["examples", "number"])
def _draw(
    mu, log_sigma, alive, seeds, step, units, theta, by_mu, by_log_sigma, examples, number,
    low, high, least, most, EXAMPLES: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    root_half = 0.7071067811865476
    member = tl.program_id(2)
    column = tl.program_id(1) * UNITS + tl.arange(0, UNITS)
    row = tl.program_id(0) * EXAMPLES + tl.arange(0, EXAMPLES)
    some = column < number
    at = member * number + column
    m = tl.load(mu + at, some, 0.0)
    raw = tl.load(log_sigma + at, some, 0.0)
    on = tl.load(alive + at, some, 0).to(tl.float32)
    s = tl.exp(tl.minimum(tl.maximum(raw, least), most))
    free = ((raw >= least) & (raw <= most)).to(tl.float32)

    # Random numbers, the same as in plain torch.
    now = _mixed(tl.load(step).to(tl.uint32))
    key = _mixed(tl.load(seeds + member).to(tl.uint32) ^ now)
    own = _mixed(key + row.to(tl.uint32))
    bits = _mixed(own[:, None] ^ _mixed(tl.load(units + at, some, 0).to(tl.uint32))[None, :])
    u = ((bits >> 8).to(tl.float32) + 0.5) * 5.960464477539063e-08

    alpha, beta, length = (low - m) / s, (high - m) / s, (high - low) / s
    t = tl.maximum(alpha, -beta)
    near_b = -beta >= alpha

    # μ inside the bounds: invert Φ from the nearer tail.
    under, over = libdevice.normcdf(alpha), libdevice.normcdf(-beta)
    narrow = 0.5 * (libdevice.erf(beta * root_half) - libdevice.erf(alpha * root_half))
    mass = tl.where(length > 4.0, 1.0 - under - over, narrow)
    lower, upper = under[None, :] + u * mass[None, :], over[None, :] + (1.0 - u) * mass[None, :]
    z = libdevice.normcdfinv(tl.maximum(tl.minimum(lower, upper), 1e-37))
    z = tl.where(lower <= upper, z, -z)
    z = tl.minimum(tl.maximum(z, alpha[None, :]), beta[None, :])
    at_a = _exp(tl.log(1.0 - u) + 0.5 * (z - alpha[None, :]) * (z + alpha[None, :]))
    at_b = _exp(tl.log(u) + 0.5 * (z - beta[None, :]) * (z + beta[None, :]))
    x_in = m[None, :] + s[None, :] * z
    mu_in = 1.0 - at_a - at_b
    sigma_in = z - alpha[None, :] * at_a - beta[None, :] * at_b

    # μ at or beyond a bound: the depth of z behind it.
    d = tl.maximum(t, 0.0)
    excess, far = _excess(d), _excess(d + length)
    rate, far_rate = d + excess, d + length + far  # the hazards λ = t + δ
    share = _exp(-length * (d + 0.5 * length)) * rate / far_rate
    v = tl.where(near_b[None, :], 1.0 - u, u)
    h = tl.minimum(-libdevice.log1p(-v * (1.0 - share)[None, :]), 17.3)
    depth = 2.0 * h / (rate[None, :] + tl.sqrt(rate[None, :] * (rate[None, :] + 2.0 * h * excess[None, :])))
    depth = tl.minimum(depth, length[None, :])
    for _ in tl.static_range(2):
        here = _excess(d[None, :] + depth)
        gain = (depth + here - excess[None, :]) / rate[None, :]  # λ(t + W)/λ(t) - 1
        miss = depth * (d[None, :] + 0.5 * depth) + libdevice.log1p(gain) - h
        depth = depth - miss / (d[None, :] + depth + here)
        depth = tl.minimum(tl.maximum(depth, 0.0), length[None, :])
    here = _excess(d[None, :] + depth)
    at_far = v * _exp(-(length[None, :] - depth) * (d[None, :] + 0.5 * (length[None, :] + depth)))
    mu_out = (depth + here - excess[None, :]) / (d[None, :] + depth + here)
    mu_out -= at_far * ((length + far - excess) / far_rate)[None, :]
    sigma_out = depth + d[None, :] * mu_out - length[None, :] * at_far
    sign = tl.where(near_b, -1.0, 1.0)
    x_out = tl.where(near_b, high, low)[None, :] + (sign * s)[None, :] * depth

    inside = (t < 0.0)[None, :]
    x = tl.minimum(tl.maximum(tl.where(inside, x_in, x_out), low), high)
    value = tl.exp(x) * on[None, :]
    slope = tl.where(inside, mu_in, mu_out)
    width = tl.where(inside, sigma_in, sign[None, :] * sigma_out) * (s * free)[None, :]
    to = (member.to(tl.int64) * examples + row[:, None]) * number + column[None, :]
    mask = (row < examples)[:, None] & some[None, :]
    tl.store(theta + to, value, mask)
    tl.store(by_mu + to, value * slope, mask)
    tl.store(by_log_sigma + to, value * width, mask)


@triton.jit(do_not_specialize=["examples", "number"])
def _sums(
    grad, by_mu, by_log_sigma, to_mu, to_log_sigma, examples, number, EXAMPLES: tl.constexpr, UNITS: tl.constexpr
):
    member = tl.program_id(1)
    column = tl.program_id(0) * UNITS + tl.arange(0, UNITS)
    some = column < number
    first, second = tl.zeros((UNITS,), tl.float32), tl.zeros((UNITS,), tl.float32)
    for start in range(0, examples, EXAMPLES):
        row = start + tl.arange(0, EXAMPLES)
        at = (member.to(tl.int64) * examples + row[:, None]) * number + column[None, :]
        mask = (row < examples)[:, None] & some[None, :]
        slope = tl.load(grad + at, mask, 0.0)
        first += tl.sum(slope * tl.load(by_mu + at, mask, 0.0), 0)
        second += tl.sum(slope * tl.load(by_log_sigma + at, mask, 0.0), 0)
    tl.store(to_mu + member * number + column, first, some)
    tl.store(to_log_sigma + member * number + column, second, some)


@triton.jit
def _vanishing_exp(x):
    return tl.exp(tl.maximum(x, -200.0))


@triton.jit
def _hazard(t):
    """λ(t), its excess δ = λ - t, and 1 - λδ."""
    rate = 0.7978845608028654 / libdevice.erfcx(t * 0.7071067811865476)
    inverse = 1.0 / tl.maximum(t, 25.0)
    y = inverse * inverse
    excess = inverse * (1.0 + y * (-2.0 + y * (10.0 + y * (-74.0 + y * (706.0 + y * (-8162.0 + y * 110410.0))))))
    variance = y * (1.0 + y * (-6.0 + y * (50.0 + y * (-518.0 + y * (6354.0 + y * -89782.0)))))
    excess = tl.where(t > 25.0, excess, rate - t)
    return rate, excess, tl.where(t > 25.0, variance, 1.0 - rate * excess)


@triton.jit(do_not_specialize=["number"])
def _kl_gradient(mu, log_sigma, weights, by_mu, by_log_sigma, number, low, high, least, most, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = tl.load(mu + at, at < number, 0.0).to(tl.float64)
    raw = tl.load(log_sigma + at, at < number, 0.0)
    s = tl.exp(tl.minimum(tl.maximum(raw, least), most).to(tl.float64))
    alpha, beta, length = (low - m) / s, (high - m) / s, (high - low) / s
    t = tl.maximum(alpha, -beta)

    # μ inside the bounds.
    under = 0.5 * libdevice.erfc(tl.maximum(alpha, -37.0) * -0.7071067811865476)
    over = 0.5 * libdevice.erfc(tl.maximum(-beta, -37.0) * -0.7071067811865476)
    narrow = 0.5 * (libdevice.erf(beta * 0.7071067811865476) - libdevice.erf(alpha * 0.7071067811865476))
    mass = tl.where(length > 4.0, 1.0 - under - over, narrow)
    at_a = 0.3989422804014327 * _vanishing_exp(-0.5 * alpha * alpha) / mass
    at_b = 0.3989422804014327 * _vanishing_exp(-0.5 * beta * beta) / mass
    first = at_a - at_b
    second = 1.0 + alpha * at_a - beta * at_b
    third = 2.0 * first + alpha * alpha * at_a - beta * beta * at_b
    fourth = 3.0 * second + alpha * alpha * alpha * at_a - beta * beta * beta * at_b
    mu_in = -0.5 * (third - first * second)
    sigma_in = -0.5 * (fourth - second * second)

    # μ at or beyond a bound.
    d = tl.maximum(t, 0.0)
    rate, excess, variance = _hazard(d)
    far_rate, far_excess, _ = _hazard(d + length)
    decay = _vanishing_exp(-length * (d + 0.5 * length))
    share = decay * rate / far_rate
    rest = 1.0 - share
    odds, density, ratio = rate * share / rest, rate * decay / rest, share / rest
    gain = length + far_excess - excess
    odds_t, odds_l = odds * (excess - gain / rest), -odds * far_rate / rest
    end = d + length
    density_t = density * (excess - length - gain * ratio)
    density_l = -density * (end + far_rate * ratio)
    near_t = excess + d * variance
    by_t = 0.5 * (near_t - odds - d * odds_t + density + end * density_t) - gain * ratio
    by_l = 0.5 * (density + end * density_l - d * odds_l) - far_rate * ratio
    mu_out = tl.where(-beta >= alpha, by_t, -by_t)
    sigma_out = -1.0 - d * by_t - length * by_l

    free = (raw >= least) & (raw <= most)
    weight = tl.load(weights + at, at < number, 0.0)
    tl.store(by_mu + at, (weight * tl.where(t < 0.0, mu_in, mu_out) / s).to(tl.float32), at < number)
    slope = tl.where(free, tl.where(t < 0.0, sigma_in, sigma_out), 0.0)
    tl.store(by_log_sigma + at, (weight * slope).to(tl.float32), at < number)


@triton.jit
def _outer(t, length):
    """The log of a normal's mass from t ≥ 0 on over this length, plus t²/2."""
    rate, _, _ = _hazard(t)
    far, _, _ = _hazard(t + length)
    share = _vanishing_exp(-length * (t + 0.5 * length)) * rate / far
    return tl.log(0.3989422804014327 / rate) + libdevice.log1p(-share)


@triton.jit
def _inner(a, b):
    """The log of a normal's mass between bounds with 0 between them."""
    under = 0.5 * libdevice.erfc(tl.maximum(a, -37.0) * -0.7071067811865476)
    over = 0.5 * libdevice.erfc(tl.maximum(-b, -37.0) * -0.7071067811865476)
    narrow = 0.5 * (libdevice.erf(b * 0.7071067811865476) - libdevice.erf(a * 0.7071067811865476))
    return tl.where(b - a > 4.0, libdevice.log1p(-under - over), tl.log(narrow))


@triton.jit(do_not_specialize=["number"])
def _mean(mu, log_sigma, result, number, low, high, least, most, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = tl.load(mu + at, at < number, 0.0).to(tl.float64)
    raw = tl.load(log_sigma + at, at < number, 0.0)
    s = tl.exp(tl.minimum(tl.maximum(raw, least), most).to(tl.float64))
    a, b, length = (low - m) / s, (high - m) / s, (high - low) / s
    a1, b1 = a - s, b - s  # θ tilts the normal by σ: the mean is a ratio of two masses
    t, t1 = tl.maximum(a, -b), tl.maximum(a1, -b1)
    tilted, plain = _outer(tl.maximum(t1, 0.0), length), _outer(tl.maximum(t, 0.0), length)
    within = _inner(a1, b1)
    inside = tl.where(t1 < 0.0, m + 0.5 * s * s + within, high - 0.5 * b * b + tilted) - _inner(a, b)
    beyond = tl.where(-b1 > a1, -0.5 * length * (a1 + b1), 0.0)
    below = low + tl.where(t1 < 0.0, 0.5 * a1 * a1 + within, tilted + beyond) - plain
    found = tl.where(t < 0.0, inside, tl.where(-b >= a, high + tilted - plain, below))
    tl.store(result + at, tl.exp(found).to(tl.float32), at < number)
