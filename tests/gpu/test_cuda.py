"""The same mathematics on a GPU. Skipped where there is none."""

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

import bmrs
from bmrs import TruncatedLogNormal, evidence
from bmrs.study import data, networks, training
from tests.quantities import QUANTITIES, RELATIVE, grid
from tests.reference import Reference
from tests.tolerance import assert_close

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32])


@DTYPES
@pytest.mark.parametrize("name", QUANTITIES)
def test_golden_values(golden, dtype, name):
    q = TruncatedLogNormal(golden["mu"].to("cuda", dtype), golden["log_sigma"].to("cuda", dtype))
    got = QUANTITIES[name](q)
    assert got.is_cuda
    assert_close(got.cpu(), golden[name], RELATIVE[dtype], absolute=0.0 if name in ("mean", "snr") else 1e-6)


@DTYPES
def test_golden_quantiles(golden, dtype):
    q = TruncatedLogNormal(golden["mu"].to("cuda", dtype), golden["log_sigma"].to("cuda", dtype))
    for key, u in (("1e-6", 1e-6), ("0.5", 0.5), ("1-1e-6", 1 - 1e-6)):
        theta = q.icdf(torch.tensor(u, dtype=torch.float64, device="cuda"))
        assert_close(theta.double().log().cpu(), golden[f"log_theta_at_u_{key}"], 0.0, absolute=1e-6)


@DTYPES
def test_nothing_overflows_and_the_cpu_agrees(dtype):
    host = grid(dtype)
    device = [p.detach().cuda().requires_grad_() for p in host]
    on_host, on_device = TruncatedLogNormal(*host), TruncatedLogNormal(*device)
    for name, quantity in QUANTITIES.items():
        torch.testing.assert_close(
            quantity(on_device).detach().cpu(), quantity(on_host).detach(), rtol=1e-6, atol=1e-8, msg=name
        )
    on_host.kl().sum().backward()
    TruncatedLogNormal(*device).kl().sum().backward()
    for a, b in zip(device, host, strict=True):
        assert torch.isfinite(a.grad).all()
        torch.testing.assert_close(a.grad.cpu(), b.grad, rtol=1e-5, atol=1e-7)


@DTYPES
def test_draws_follow_the_distribution(dtype):
    for mu, log_sigma in ((-5.0, 0.0), (-20.5, -1.0), (0.1, -2.0), (8.0, 1.0)):
        q = TruncatedLogNormal(*(torch.tensor([v], dtype=dtype, device="cuda") for v in (mu, log_sigma)))
        x = q.rsample((2000,), generator=torch.Generator("cuda").manual_seed(11)).double().log().squeeze(1).cpu()
        reference = Reference(mu, log_sigma)
        cdf = np.vectorize(lambda at, reference=reference: float(reference.cdf(at)))
        assert stats.kstest(x.numpy(), cdf).pvalue > 1e-4


def test_many_units_in_one_call():
    q = TruncatedLogNormal(
        torch.empty(10_000_000, device="cuda").uniform_(-60, 20),
        torch.empty(10_000_000, device="cuda").uniform_(-10, 5),
    )
    assert all(torch.isfinite(score).all() for score in evidence.scores(q))


def test_a_gated_network_trains_and_prunes():
    torch.manual_seed(0)
    digits = data.load("digits")
    parts = (data.Part(part.x.cuda(), part.y.cuda()) for part in (digits.train, digits.validation, digits.test))
    digits = data.DataSet("digits", 10, *parts)
    network = networks.build("lenet5", digits.input_shape, 10).cuda()
    log = training.train_pruning(network, digits, training.Recipe(epochs=25), bmrs.BMRS_N())
    assert torch.isfinite(log.delta_f).all()
    left = {name: int((log.removed_at[layer] == 0).sum()) for name, layer in log.layers.items()}
    assert sum(left.values()) < 150
    assert {name: getattr(network, name).weight.shape[0] for name in left} == left
    assert network.conv1.weight.is_cuda
    assert training.accuracy(network, digits.test) > 0.92


def test_structures_are_found_proved_and_removed_on_the_gpu():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 48, batch_first=True, dropout=0.0)
    model = nn.Sequential(nn.Linear(8, 32), layer, nn.Linear(32, 3)).cuda().double().eval()
    x = torch.randn(2, 5, 8, device="cuda", dtype=torch.float64)
    structures = bmrs.structures(model, x)
    bank = bmrs.NoiseBank.attach(model, [*structures, *structures.branches]).double()
    with torch.no_grad():
        bank.mu.uniform_(-3, 0)
    closing = torch.rand(bank.alive.shape, device="cuda") < 0.4
    for part in bank.layers.values():
        closing[part.start] = False
    bank.remove(closing)
    with torch.no_grad():
        want = model(x)
        bmrs.remove(model, {s: bank.closed(s.name) for s in structures.everything if s.name in bank.layers})
        torch.testing.assert_close(model(x), want, rtol=0, atol=1e-12)
        bank.fold()
        torch.testing.assert_close(model(x), want, rtol=0, atol=1e-12)
    assert all(tensor.is_cuda for tensor in (*model.parameters(), *model.buffers()))
