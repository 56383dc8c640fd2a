"""Triton's kernels of gates against plain torch."""

import pytest
import torch
from torch import nn

from bmrs import draws
from bmrs.scaling import _laid_out
from tests.gpu.kernels import DEVICE, INTERPRETED, functions, needed

pytestmark = [needed, pytest.mark.filterwarnings("ignore")]  # of the interpreter's arithmetic with infinities

SHAPES = [
    ((3, 5, 7, 9), 1, 1, False), ((3, 5, 7, 9), 1, 1, True), ((4, 13), 1, 1, False), ((4, 26), 1, 2, False),
    ((2, 6, 11), 2, 1, False), ((33, 200, 1, 1), 1, 1, False), ((2, 130, 3, 3), 1, 1, True),
    ((2, 70, 40, 40), 1, 1, False), ((2, 3, 60, 60), 1, 1, True), ((1, 1), 1, 1, False),
]  # fmt: skip
CLOSE = {torch.float32: 1e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7 if INTERPRETED else 2**-8}


@pytest.fixture
def scaling():
    from bmrs import _scale_kernels

    return _scale_kernels


@pytest.fixture
def drawing(monkeypatch):
    from bmrs import _draw_kernels

    if INTERPRETED:
        monkeypatch.setattr(_draw_kernels, "libdevice", functions())
    return _draw_kernels


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize(("shape", "dim", "each", "last"), SHAPES)
def test_scaling_and_its_gradients(scaling, shape, dim, each, last, dtype):
    x = torch.randn(shape, device=DEVICE).to(dtype)
    x = x.to(memory_format=torch.channels_last) if last else x
    units = shape[dim] // each
    theta = torch.rand(shape[0], units + 5, device=DEVICE)[:, 3 : 3 + units]  # of a longer row, as in a bank
    laid = _laid_out(x, dim, each)
    spread = [1] * x.dim()
    spread[0], spread[dim] = shape[0], shape[dim]
    factors = theta.repeat_interleave(each, dim=1).reshape(spread)
    close = {"rtol": CLOSE[dtype], "atol": 1e-6}
    out = scaling.forward(x, theta, *laid)
    assert (out.stride(), out.dtype) == (x.stride(), dtype)
    torch.testing.assert_close(out.float(), x.float() * factors, **close)
    slope = torch.randn_like(x)
    to_x, to_theta = scaling.backward(slope, x, theta, *laid)
    torch.testing.assert_close(to_x.float(), slope.float() * factors, **close)
    beside = [n for n in range(x.dim()) if n not in (0, dim)]
    products = slope.double() * x.double()
    sums = (products.sum(beside) if beside else products).reshape(shape[0], units, each).sum(2)
    torch.testing.assert_close(to_theta.double(), sums, rtol=1e-5, atol=1e-4)
    again = scaling.backward(slope, x, theta, *laid)[1]
    assert torch.equal(again, to_theta)  # whatever runs first


@pytest.mark.parametrize("last", [False, True])
def test_the_gradient_behind_a_batch_norm(scaling, last):
    norm = nn.BatchNorm2d(70, device=DEVICE)
    with torch.no_grad():
        norm.weight.uniform_(-1.0, 1.0)
        norm.bias.uniform_(-1.0, 1.0)
    x = torch.randn(3, 70, 9, 5, device=DEVICE) * 3 + 1
    x = (x.to(memory_format=torch.channels_last) if last else x).requires_grad_()
    out = norm(x)
    kept = out.grad_fn
    slope, theta = torch.randn_like(out), torch.rand(3, 70, device=DEVICE)
    behind = (kept._saved_result1, kept._saved_result2, norm.weight.detach(), norm.bias.detach())
    got = scaling.backward(slope, kept._saved_input.detach(), theta, *_laid_out(out, 1, 1), *behind)[1]
    torch.testing.assert_close(got, (slope * out.detach()).sum((2, 3)), rtol=1e-4, atol=1e-4)


def gates(members, units):
    mu = torch.empty(members, units, device=DEVICE).uniform_(-25.0, 3.0)
    log_sigma = torch.empty(members, units, device=DEVICE).uniform_(-8.0, 5.0)
    mu[0, :40], log_sigma[0, :40] = torch.linspace(-0.1, 0.5, 40), -5.0  # where useful gates are
    return mu, log_sigma


def test_draws(drawing):
    mu, log_sigma = gates(3, 133)
    alive, seeds = torch.rand(3, 133, device=DEVICE) < 0.8, torch.arange(3, device=DEVICE) * 1000
    numbers, step = torch.arange(133, device=DEVICE).expand(3, 133).contiguous(), torch.tensor(7, device=DEVICE)
    got = drawing.draw(mu, log_sigma, alive, seeds, step, numbers, 21)
    u = draws.uniforms(seeds, step, numbers, 21)
    want = draws.exact(mu.double(), log_sigma.double(), alive, u)
    torch.testing.assert_close(got[0].double(), want[0], rtol=1e-3, atol=1e-8)
    for one, other in zip(got, want, strict=True):
        scale = 1.0 + log_sigma.exp().double()[:, None]
        assert float(((one - other).abs() / scale).max()) < 3e-4
        assert float((one - other).abs().median()) < 1e-6
    slope = torch.randn_like(got[0])
    for one, each in zip(drawing.sums(slope, got[1], got[2]), got[1:], strict=True):
        torch.testing.assert_close(one, (slope * each).sum(1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bounds", [(-20.0, 0.0), (-9.0, -1.0)])
def test_means_and_the_gradient_of_the_kl(drawing, bounds):
    mu, log_sigma = gates(2, 211)
    weights = torch.rand_like(mu)
    got = (drawing.mean(mu, log_sigma, *bounds), *drawing.kl_gradient(mu, log_sigma, weights, *bounds))
    phi = mu.double(), log_sigma.double()
    want = (draws.exact_mean(*phi, *bounds), *draws.exact_kl_gradient(*phi, weights.double(), *bounds))
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-9)
