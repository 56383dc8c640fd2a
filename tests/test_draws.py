"""Gates in bulk: compiled code against plain torch, and plain torch against the exact posterior."""

import math
import os
import stat

import numpy as np
import pytest
import torch
from scipy import stats

from bmrs import NoiseBank, draws, native
from tests.reference import Reference

compiled = pytest.mark.skipif(not native.available(), reason="no C compiler")
PLACES = {"useful": (0.05, -5.0), "where they begin": (0.0, -5.0), "inside": (-7.0, -0.5), "wide": (-3.0, 4.8),
          "above": (3.0, 1.0), "below": (-20.5, -1.0)}  # fmt: skip


def gates(members, units, seed=0):
    """All over the plane where training can take them, and many where useful ones are."""
    chance = torch.Generator().manual_seed(seed)
    mu = torch.empty(members, units).uniform_(-25.0, 3.0, generator=chance)
    log_sigma = torch.empty(members, units).uniform_(-8.0, 5.0, generator=chance)
    mu[0, : units // 2], log_sigma[0, : units // 2] = torch.linspace(-0.1, 0.5, units // 2), -5.0
    return mu, log_sigma


def place(members, units):
    alive = torch.rand(members, units) < 0.8
    return alive, torch.arange(members) * 1000 + 7, torch.arange(units).expand(members, units).contiguous()


@compiled
class TestCompiledCode:
    @pytest.mark.parametrize(("members", "units", "examples"), [(3, 401, 50), (1, 7, 1), (2, 33, 67), (1, 1000, 3)])
    def test_draws_are_the_exact_ones_up_to_rounding(self, members, units, examples):
        mu, log_sigma = gates(members, units, seed=units)
        alive, seeds, numbers = place(members, units)
        step = torch.tensor(123456)
        got = native.draw(mu, log_sigma, alive, seeds, step, numbers, examples)
        u = draws.uniforms(seeds, step, numbers, examples)
        want = draws.exact(mu.double(), log_sigma.double(), alive, u)
        gone = (~alive)[:, None].expand_as(got[0])
        assert all(torch.isfinite(part).all() and (part[gone] == 0).all() for part in got)
        # x = log θ reaches -20 and σ 148: a rounding of either is 1e-5 of θ.
        torch.testing.assert_close(got[0].double(), want[0], rtol=1e-3, atol=1e-8)
        for one, other in zip(got, want, strict=True):
            scale = 1.0 + log_sigma.exp().double()[:, None]
            assert float(((one - other).abs() / scale).max()) < 2e-5
            assert float((one - other).abs().median()) < 1e-7

    @pytest.mark.parametrize("where", PLACES)
    def test_draws_follow_the_posterior(self, where):
        mu, log_sigma = PLACES[where]
        one, number = torch.ones(1, 1, dtype=torch.bool), torch.zeros(1, 1).long()
        phi = torch.full((1, 1), mu), torch.full((1, 1), log_sigma)
        theta = native.draw(*phi, one, torch.tensor([5]), torch.tensor(1), number, 2000)[0]
        x = theta.flatten().double().log().numpy()
        follows, other = (Reference(mu + miss, log_sigma) for miss in (0.0, 0.3 * math.exp(min(log_sigma, 2.0))))
        assert stats.kstest(x, np.vectorize(lambda at: float(follows.cdf(at)))).pvalue > 1e-3
        if where == "inside":  # the test sees what is wrong
            assert stats.kstest(x, np.vectorize(lambda at: float(other.cdf(at)))).pvalue < 1e-3

    def test_sums_over_examples(self):
        grad, by_mu, by_log_sigma = (torch.randn(3, 21, 45) for _ in range(3))
        got = native.sums(grad.mT.contiguous().mT, by_mu, by_log_sigma)
        for one, each in zip(got, (by_mu, by_log_sigma), strict=True):
            torch.testing.assert_close(one, (grad.double() * each).sum(1).float(), rtol=1e-5, atol=1e-5)

    def test_means_and_the_gradient_of_the_kl_on_a_grid(self):
        mu, log_sigma = torch.meshgrid(torch.linspace(-60, 20, 161), torch.linspace(-22, 6, 113), indexing="ij")
        mu, log_sigma = mu.flatten(), log_sigma.flatten()
        weights = torch.rand_like(mu)
        got = (native.mean(mu, log_sigma), *native.kl_gradient(mu, log_sigma, weights))
        want = (draws.exact_mean(mu.double(), log_sigma.double()),
                *draws.exact_kl_gradient(mu.double(), log_sigma.double(), weights.double()))  # fmt: skip
        for one, other in zip(got, want, strict=True):
            torch.testing.assert_close(one.double(), other, rtol=1e-6, atol=1e-15)

    def test_other_bounds(self):
        mu, log_sigma = gates(1, 200)
        alive, seeds, numbers = place(1, 200)
        bounds, step = (-9.0, -1.0), torch.tensor(2)
        got = native.draw(mu, log_sigma, alive, seeds, step, numbers, 30, *bounds)[0]
        u = draws.uniforms(seeds, step, numbers, 30)
        want = draws.exact(mu.double(), log_sigma.double(), alive, u, *bounds)[0]
        torch.testing.assert_close(got.double(), want, rtol=1e-3, atol=1e-8)
        weights = torch.rand_like(mu)
        pairs = zip(
            (native.mean(mu, log_sigma, *bounds), *native.kl_gradient(mu, log_sigma, weights, *bounds)),
            (draws.exact_mean(mu.double(), log_sigma.double(), *bounds),
             *draws.exact_kl_gradient(mu.double(), log_sigma.double(), weights.double(), *bounds)), strict=True,
        )  # fmt: skip
        for one, other in pairs:
            torch.testing.assert_close(one.double(), other, rtol=1e-6, atol=1e-15)

    def test_what_is_not_a_number_is_seen(self):
        mu, log_sigma = torch.tensor([[0.0, float("nan"), -3.0, 0.0]]), torch.tensor([[-5.0, -5.0, float("nan"), 4.0]])
        alive, numbers = torch.ones(1, 4, dtype=torch.bool), torch.arange(4)[None]
        theta = native.draw(mu, log_sigma, alive, torch.tensor([1]), torch.tensor(1), numbers, 5)[0]
        assert theta.isnan().any(1).tolist() == [[False, True, True, False]]
        assert native.mean(mu, log_sigma).isnan().tolist() == [[False, True, True, False]]

    def test_gradients_by_finite_differences(self):
        mu, log_sigma = (part.double() for part in gates(1, 60))
        mu, log_sigma = mu.clamp(-18, 1).float(), log_sigma.clamp(-3, 2).float()
        alive, seeds, numbers = torch.ones(1, 60, dtype=torch.bool), torch.tensor([3]), torch.arange(60)[None]
        step, h = torch.tensor(8), 1e-5
        _, by_mu, by_log_sigma = native.draw(mu, log_sigma, alive, seeds, step, numbers, 40)
        u = draws.uniforms(seeds, step, numbers, 40)

        def theta(up, wide):
            return draws.exact(mu.double() + up, log_sigma.double() + wide, alive, u)[0]

        torch.testing.assert_close(by_mu.double(), (theta(h, 0) - theta(-h, 0)) / (2 * h), rtol=1e-2, atol=1e-4)
        torch.testing.assert_close(by_log_sigma.double(), (theta(0, h) - theta(0, -h)) / (2 * h), rtol=1e-2, atol=1e-4)


class TestRandomNumbers:
    def test_another_network_beside_it_changes_nothing(self):
        mu, log_sigma = gates(3, 50)
        alive, seeds, numbers = place(3, 50)
        step = torch.tensor(4)
        together = draws.draw(mu, log_sigma, alive, seeds, step, numbers, 9)
        for n in range(3):
            own = [part[n : n + 1] for part in (mu, log_sigma, alive, seeds)]
            assert torch.equal(draws.draw(*own, step, numbers[:1], 9)[0], together[n])

    def test_nothing_is_drawn_for_nobody(self):
        mu, log_sigma = gates(1, 5)
        alive, seeds, numbers = place(1, 5)
        assert draws.draw(mu, log_sigma, alive, seeds, torch.tensor(0), numbers, 0).shape == (1, 0, 5)


def test_means_of_the_golden_points(golden):
    got = draws.mean(golden["mu"].float(), golden["log_sigma"].float())
    torch.testing.assert_close(got.double(), golden["mean"], rtol=1e-6, atol=0)


@pytest.fixture
def afresh(monkeypatch, tmp_path):
    """As on a machine that has compiled nothing yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    native.available.cache_clear()
    native._library.cache_clear()
    yield tmp_path
    native.available.cache_clear()
    native._library.cache_clear()


def drawn():
    bank = NoiseBank({"layer": 30}, seed=1)
    bank.mu.data, bank.log_sigma.data = (part[0] for part in gates(1, 30))
    theta = bank.draw(20)
    theta.sum().backward()
    return theta.detach(), bank.mu.grad, bank.log_sigma.grad, bank.mean()


class TestWithoutACompiler:
    def same(self):
        for one, other in zip(drawn(), self.before, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)

    @pytest.mark.parametrize("compiler", ["/nowhere/cc", "false"])
    def test_plain_torch_computes_the_same(self, afresh, monkeypatch, compiler):
        self.before = drawn()
        native.available.cache_clear()
        native._library.cache_clear()
        monkeypatch.setenv("XDG_CACHE_HOME", str(afresh / "other"))
        monkeypatch.setenv("CC", compiler)
        assert not native.available()
        self.same()

    def test_where_it_is_not_wanted(self, afresh, monkeypatch):
        self.before = drawn()
        native.available.cache_clear()
        monkeypatch.setenv("BMRS_FUSED", "0")
        assert not native.available()
        self.same()

    @compiled
    def test_a_compiler_that_is_wrong_is_not_believed(self, afresh, monkeypatch, caplog):
        wrong = afresh / "wrong.c"
        text = native._SOURCE.read_text()
        assert "0.7978845608028654" in text
        wrong.write_text(text.replace("0.7978845608028654", "0.8"))
        compiler = afresh / "cc"
        compiler.write_text(f'#!/bin/sh\nfor last; do :; done\nexec cc -O1 -shared -fPIC -o "$9" {wrong} -lm\n')
        compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("CC", str(compiler))
        assert not native.available()
        assert "wrong on this machine" in caplog.text

    @compiled
    def test_it_is_compiled_once(self, afresh):
        assert native.available()
        (made,) = (afresh / "bmrs").iterdir()
        first = os.stat(made).st_mtime_ns
        native.available.cache_clear()
        native._library.cache_clear()
        assert native.available()
        assert os.stat(made).st_mtime_ns == first


def test_the_bounds_of_a_bank_are_those_of_its_draws():
    bank = NoiseBank({"layer": 200}, log_a=-6.0, log_b=-2.0, log_sigma=4.0)
    theta = bank.draw(50).log()
    assert theta.min() > -6.001
    assert theta.max() < -1.999
    assert theta.min() < -5.5


@compiled
def test_loading_it_disturbs_no_random_numbers(afresh):
    before = torch.random.get_rng_state()
    assert native.available()
    assert torch.equal(torch.random.get_rng_state(), before)
