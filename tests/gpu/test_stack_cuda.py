"""The kernels behind stacked training, against plain torch. Skipped where there is no GPU."""

import pytest
import torch
import torch.nn.functional as F

from bmrs import draws
from bmrs.study.operations import conv2d, max_pool2d

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS"),  # torch's own, at the first product of a thread
]


@pytest.mark.parametrize(
    ("members", "examples", "inputs", "outputs", "side", "size"),
    [(3, 4, 1, 6, 32, 5), (5, 3, 6, 16, 14, 5), (2, 3, 18, 48, 14, 5), (1, 1, 2, 70, 9, 3), (4, 2, 3, 1, 7, 7)],
)
def test_convolutions_and_their_gradients(members, examples, inputs, outputs, side, size):
    x = torch.randn(members * examples, inputs, side, side, device="cuda", requires_grad=True)
    weight = torch.randn(members, outputs, inputs, size, size, device="cuda", requires_grad=True)
    bias = torch.randn(members, outputs, device="cuda", requires_grad=True)
    out = conv2d(x, weight, bias)
    slope = torch.randn_like(out)
    got = (out, *torch.autograd.grad(out, (x, weight, bias), slope))
    parts = [tensor.detach().double().requires_grad_() for tensor in (x, weight, bias)]
    whole = torch.cat([F.conv2d(a, w, b) for a, w, b in zip(parts[0].split(examples), *parts[1:], strict=True)])
    want = (whole, *torch.autograd.grad(whole, parts, slope.double()))
    for one, other in zip(got, want, strict=True):
        assert one.shape == other.shape
        assert float((one - other).detach().norm() / other.detach().norm()) < 2e-3  # products in TF32


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(("shape", "size"), [((6, 5, 8, 10), 2), ((3, 16, 9, 7), 2), ((2, 1, 6, 6), 3)])
def test_pooling(shape, size, last):
    x = torch.randn(shape, device="cuda").relu()
    x = x.to(memory_format=torch.channels_last) if last else x
    x.requires_grad_()
    out, want = max_pool2d(x, size), F.max_pool2d(x, size)
    slope = torch.randn_like(want)
    assert torch.equal(out, want)
    assert torch.equal(*(torch.autograd.grad(y, x, slope)[0] for y in (out, want)))


def gates(members, units):
    mu = torch.empty(members, units, device="cuda").uniform_(-25.0, 3.0)
    log_sigma = torch.empty(members, units, device="cuda").uniform_(-8.0, 5.0)
    mu[0, :40], log_sigma[0, :40] = torch.linspace(-0.1, 0.5, 40), -5.0  # where useful gates are
    return mu.requires_grad_(), log_sigma.requires_grad_()


def test_draws_are_the_exact_ones_up_to_rounding():
    members, units, examples = 7, 133, 50
    mu, log_sigma = gates(members, units)
    alive = torch.rand(members, units, device="cuda") < 0.8
    seeds = torch.arange(members, device="cuda") * 1000
    numbers = torch.arange(units, device="cuda").expand(members, units).contiguous()
    step = torch.tensor(123456, device="cuda")
    theta = draws.draw(mu, log_sigma, alive, seeds, step, numbers, examples)
    slope = torch.randn_like(theta)
    got = torch.autograd.grad(theta, (mu, log_sigma), slope)
    u = draws.uniforms(seeds, step, numbers, examples)
    want, by_mu, by_log_sigma = draws.exact(mu.detach().double(), log_sigma.detach().double(), alive, u)
    assert torch.isfinite(theta).all()
    assert (theta[(~alive)[:, None].expand_as(theta)] == 0).all()
    torch.testing.assert_close(theta.double(), want, rtol=2e-3, atol=1e-7)
    miss = (theta.detach() - want).abs() / want.clamp(min=1e-12)
    assert float(miss[alive[:, None].expand_as(want)].median()) < 1e-5
    for one, each in zip(got, (by_mu, by_log_sigma), strict=True):
        sums, scale = (slope.double() * each).sum(1), (slope.double() * each).abs().sum(1)
        assert torch.isfinite(one).all()
        # By a very wide σ the derivative all but vanishes, as a difference of numbers that do not.
        assert float(((one - sums).abs() / (scale + 1e-4 * slope.abs().sum(1))).max()) < 0.01
        assert float(((one - sums).abs() / (scale + 1e-6)).median()) < 1e-4


def test_the_gradient_of_the_kl():
    mu, log_sigma = (part.detach() for part in gates(5, 211))
    one = torch.ones_like(mu)
    got = draws.kl_gradient(mu, log_sigma, one)
    for mine, other in zip(got, draws.kl_gradient(mu.double(), log_sigma.double(), one), strict=True):
        torch.testing.assert_close(mine.double(), other, rtol=1e-5, atol=1e-9)
