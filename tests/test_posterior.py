import math
import re

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import stats
from torch.func import grad, vmap

from bmrs import TruncatedLogNormal, evidence, posterior
from bmrs._truncated import Frame, kl_gradient, quantile
from tests.quantities import QUANTITIES, RELATIVE, grid
from tests.reference import Reference
from tests.tolerance import assert_close

DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
MU = st.floats(-60, 20) | st.floats(-20.001, -19.999) | st.floats(-0.001, 0.001)
LOG_SIGMA = st.floats(-10, 5)


def units(mu, log_sigma, log_a=-20.0, log_b=0.0):
    return TruncatedLogNormal(
        torch.tensor([mu], dtype=torch.float64), torch.tensor([log_sigma], dtype=torch.float64), log_a, log_b
    )


class TestAgainstGolden:
    @DTYPES
    @pytest.mark.parametrize("name", QUANTITIES)
    def test_quantity(self, golden, dtype, name):
        q = TruncatedLogNormal(golden["mu"].to(dtype), golden["log_sigma"].to(dtype))
        got = QUANTITIES[name](q)
        assert got.dtype == dtype
        # E[θ] reaches down to 2e-9, where an absolute tolerance would accept anything.
        assert_close(got, golden[name], RELATIVE[dtype], absolute=0.0 if name in ("mean", "snr") else 1e-6)

    @DTYPES
    @pytest.mark.parametrize(("key", "u"), [("1e-6", 1e-6), ("0.5", 0.5), ("1-1e-6", 1 - 1e-6)])
    def test_quantile(self, golden, dtype, key, u):
        q = TruncatedLogNormal(golden["mu"].to(dtype), golden["log_sigma"].to(dtype))
        theta = q.icdf(torch.tensor(u, dtype=torch.float64))
        assert theta.dtype == dtype
        assert_close(theta.double().log(), golden[f"log_theta_at_u_{key}"], 0.0, absolute=1e-6)


class TestAgainstReferenceArithmetic:
    """Other points than the golden ones, against the textbook forms in 80 digits."""

    @given(MU, LOG_SIGMA, st.floats(0, 20), st.floats(0.5, 8))
    @settings(deadline=None, max_examples=150)
    @example(-10.0, -10.0, 8.0, 15.0)
    @example(13.9, 0.6, 4.0, 19.0)
    def test_scores(self, mu, log_sigma, p1, bits):
        q, want = units(mu, log_sigma), Reference(mu, log_sigma)
        assert_close(q.kl(), float(want.kl()), 1e-9, 1e-12)
        assert_close(q.mean(), float(want.mean()), 1e-9, 0.0)
        assert_close(q.log_mean(), float(want.log_mean()), 1e-9, 1e-14)
        assert_close(q.snr(), float(want.snr()), 1e-7, 0.0)
        assert_close(evidence.spike(q), float(want.spike()), 1e-9, 1e-12)
        assert_close(evidence.interval(q, p1, p1 + bits), float(want.interval(p1, p1 + bits)), 1e-9, 1e-11)
        lo, hi = 2.0 ** -(p1 + bits), 2.0**-p1
        assert_close(q.log_mass(lo, hi), float(want.log_mass(lo, hi)), 1e-9, 1e-11)

    @given(MU, LOG_SIGMA)
    @settings(deadline=None, max_examples=100)
    def test_kl_gradient(self, mu, log_sigma):
        by_mu, by_log_sigma = Reference(mu, log_sigma).kl_gradient()
        q = units(mu, log_sigma)
        got = kl_gradient(Frame(q.mu, q.log_sigma, q.log_a, q.log_b))
        assert_close(got[0], float(by_mu), 1e-8, 1e-12)
        assert_close(got[1], float(by_log_sigma), 1e-8, 1e-12)

    @given(MU, LOG_SIGMA, st.floats(1e-12, 1 - 1e-12))
    @settings(deadline=None, max_examples=100)
    @example(-10.0797, -7.8, 0.947)
    def test_quantile_and_its_gradient(self, mu, log_sigma, u):
        q, want = units(mu, log_sigma), Reference(mu, log_sigma)
        x, by_mu, by_log_sigma = quantile(
            Frame(q.mu, q.log_sigma, q.log_a, q.log_b), torch.tensor([u], dtype=torch.float64)
        )
        x = x.item()
        # The error of x is that of its probability over the density there.
        error = float((want.cdf(x) - u) / math.e ** want.log_density(x))
        assert abs(error) < 1e-11
        expected = [float(value) for value in want.quantile_gradient(x)]
        assert_close(by_mu, expected[0], 1e-8, 1e-9)
        assert_close(by_log_sigma, expected[1], 1e-8, 1e-9)

    @given(st.floats(-40, 5), st.floats(0.1, 60), st.floats(-3, 4), LOG_SIGMA, st.floats(1e-9, 1 - 1e-9))
    @settings(deadline=None, max_examples=100)
    def test_other_bounds(self, log_a, width, place, log_sigma, u):
        log_b = log_a + width
        mu = log_a + place * width
        q, want = units(mu, log_sigma, log_a, log_b), Reference(mu, log_sigma, log_a, log_b)
        assert_close(q.kl(), float(want.kl()), 1e-9, 1e-10)
        assert_close(q.mean(), float(want.mean()), 1e-9, 0.0)
        assert_close(evidence.spike(q), float(want.spike()), 1e-9, 1e-10)
        x, _, _ = quantile(Frame(q.mu, q.log_sigma, log_a, log_b), torch.tensor([u], dtype=torch.float64))
        assert abs(float((want.cdf(x.item()) - u) / math.e ** want.log_density(x.item()))) < 1e-9


class TestFinite:
    @DTYPES
    def test_nothing_overflows_anywhere(self, dtype):
        mu, log_sigma = grid(dtype)
        q = TruncatedLogNormal(mu, log_sigma)
        for name, quantity in QUANTITIES.items():
            assert torch.isfinite(quantity(q)).all(), name
        q.kl().sum().backward()
        assert torch.isfinite(mu.grad).all()
        assert torch.isfinite(log_sigma.grad).all()

    @DTYPES
    def test_draws_and_their_gradients(self, dtype):
        mu, log_sigma = grid(dtype)
        theta = TruncatedLogNormal(mu, log_sigma).rsample((3,))
        theta.sum().backward()
        assert (theta > 0).all()
        assert (theta <= 1).all()
        assert torch.isfinite(mu.grad).all()
        assert torch.isfinite(log_sigma.grad).all()

    def test_far_outside_the_trained_range(self):
        mu = torch.tensor([-1e6, 1e6, 0.0, -20.0, 1e4, 0.0], dtype=torch.float64)
        log_sigma = torch.tensor([-20.0, -20.0, -1e4, 1e4, 5.0, 0.0], dtype=torch.float64)
        q = TruncatedLogNormal(mu, log_sigma)
        for name, quantity in QUANTITIES.items():
            assert torch.isfinite(quantity(q)).all(), name

    def test_probabilities_zero_and_one_give_the_bounds(self):
        mu = torch.tensor([-30.0, -10.0, 0.0, 5.0], dtype=torch.float64)
        x, by_mu, by_log_sigma = quantile(
            Frame(mu, torch.zeros_like(mu), -20.0, 0.0), torch.tensor([[0.0], [1.0]], dtype=torch.float64)
        )
        assert (x[0] == -20).all()
        assert (x[1] == 0).all()
        assert (by_mu == 0).all()
        assert (by_log_sigma == 0).all()


class TestDraws:
    # inside, a little below a, far below a, a little above b, far above b, almost the prior
    @pytest.mark.parametrize(
        ("mu", "log_sigma"), [(-5.0, 0.0), (-20.5, -1.0), (-40.0, 1.0), (0.1, -2.0), (8.0, 1.0), (-3.0, 4.0)]
    )
    @DTYPES
    def test_follow_the_distribution(self, mu, log_sigma, dtype):
        generator = torch.Generator().manual_seed(11)
        q = TruncatedLogNormal(torch.tensor([mu], dtype=dtype), torch.tensor([log_sigma], dtype=dtype))
        x = q.rsample((2000,), generator=generator).double().log().squeeze(1)
        reference = Reference(mu, log_sigma)
        statistic = stats.kstest(x.numpy(), np.vectorize(lambda at: float(reference.cdf(at))))
        assert statistic.pvalue > 1e-3

    def test_a_wrong_distribution_fails_that_test(self):
        q = units(0.1, -2.0)
        x = q.rsample((2000,), generator=torch.Generator().manual_seed(11)).log().squeeze(1)
        reference = Reference(0.15, -2.0)
        statistic = stats.kstest(x.numpy(), np.vectorize(lambda at: float(reference.cdf(at))))
        assert statistic.pvalue < 1e-3

    @pytest.mark.parametrize(("mu", "log_sigma"), [(-5.0, 0.0), (-20.5, -1.0), (-30.0, 1.0), (0.1, -2.0), (8.0, 1.0)])
    def test_gradient_is_that_of_the_quantile(self, mu, log_sigma):
        u = torch.linspace(0.01, 0.99, 25, dtype=torch.float64)
        mu = torch.full_like(u, mu).requires_grad_()
        log_sigma = torch.full_like(u, log_sigma).requires_grad_()
        theta = posterior._Draw.apply(mu, log_sigma, u, -20.0, 0.0)[0]
        theta.sum().backward()
        step = 1e-5
        for parameter, other in ((mu, 0), (log_sigma, 1)):
            moved = [mu.detach(), log_sigma.detach()]
            moved[other] = moved[other] + step
            up = TruncatedLogNormal(*moved).icdf(u)
            moved[other] = moved[other] - 2 * step
            down = TruncatedLogNormal(*moved).icdf(u)
            assert_close(parameter.grad, (up - down) / (2 * step), 1e-6, 1e-12)

    def test_gradient_sums_over_the_draws(self):
        mu = torch.tensor([-1.0, 0.1], dtype=torch.float64, requires_grad=True)
        log_sigma = torch.zeros(2, dtype=torch.float64, requires_grad=True)
        u = torch.rand(6, 2, dtype=torch.float64)
        weight = torch.randn(6, 2, dtype=torch.float64)

        def total(mu, log_sigma):
            return (posterior._Draw.apply(mu, log_sigma, u, -20.0, 0.0)[0] * weight).sum()

        assert torch.autograd.gradcheck(total, (mu, log_sigma))

    def test_vmap_equals_a_loop(self):
        mu = torch.randn(4, 7, dtype=torch.float64)
        log_sigma = torch.randn(4, 7, dtype=torch.float64)
        u = torch.rand(4, 7, dtype=torch.float64)

        def member(mu, log_sigma, u):
            kl = TruncatedLogNormal(mu, log_sigma, validate=False).kl()
            return kl, posterior._Draw.apply(mu, log_sigma, u, -20.0, 0.0)[0]

        def loss(mu, log_sigma, u):
            kl, theta = member(mu, log_sigma, u)
            return (kl + theta).sum()

        stacked = (*vmap(member)(mu, log_sigma, u), vmap(grad(loss))(mu, log_sigma, u))
        for i in range(4):
            leaf = mu[i].clone().requires_grad_()
            loss(leaf, log_sigma[i], u[i]).backward()
            alone = (*member(mu[i], log_sigma[i], u[i]), leaf.grad)
            assert all(torch.equal(a[i], b) for a, b in zip(stacked, alone, strict=True))

    def test_second_derivatives_are_refused(self):
        mu = torch.zeros(3, requires_grad=True)
        q = TruncatedLogNormal(mu, torch.zeros(3))
        for value in (q.kl(), q.rsample()):
            (slope,) = torch.autograd.grad(value.sum(), mu, create_graph=True)
            with pytest.raises(RuntimeError):
                slope.sum().backward()


class TestShapesAndTypes:
    def test_many_units_equal_few(self):
        # More than one block takes a path of its own, with units sorted by where they lie.
        n = posterior._BLOCK + 1000
        mu, log_sigma = torch.empty(n).uniform_(-60, 20), torch.empty(n).uniform_(-10, 5)
        mu[:3] = torch.tensor([0.0, -20.0, math.nan])
        q = TruncatedLogNormal(mu, log_sigma, validate=False)
        for name, quantity in QUANTITIES.items():
            few = torch.cat(
                [
                    quantity(TruncatedLogNormal(m, s, validate=False))
                    for m, s in zip(mu.split(999), log_sigma.split(999), strict=True)
                ]
            )
            torch.testing.assert_close(quantity(q), few, rtol=1e-6, atol=1e-9, equal_nan=True, msg=name)

    def test_any_shape(self):
        q = TruncatedLogNormal(torch.zeros(2, 3), torch.full((2, 3), -5.0))
        assert q.mean().shape == q.kl().shape == q.snr().shape == (2, 3)
        assert q.rsample((4,)).shape == (4, 2, 3)
        empty = TruncatedLogNormal(torch.zeros(0), torch.zeros(0))
        assert empty.mean().shape == empty.kl().shape == evidence.spike(empty).shape == (0,)
        assert TruncatedLogNormal(0.0, -5.0).mean().shape == ()

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_half_precision_parameters_give_float32(self, dtype):
        q = TruncatedLogNormal(torch.zeros(2, dtype=dtype), torch.full((2,), -8.0, dtype=dtype))
        assert q.kl().dtype == q.rsample().dtype == evidence.spike(q).dtype == torch.float32
        assert torch.isfinite(evidence.spike(q)).all()

    def test_log_sigma_is_clamped_and_says_so(self):
        q = TruncatedLogNormal(torch.zeros(2), torch.tensor([-50.0, 50.0]))
        assert q.log_sigma.tolist() == [-20.0, 5.0]

    def test_mass_outside_the_bounds_is_zero(self):
        q = units(-1.0, 0.0)
        assert q.log_mass(1.5, 2.0).item() == -math.inf
        assert q.log_mass(0.0, 2.0).item() == pytest.approx(0.0, abs=1e-12)

    def test_one_probability_for_all_units(self):
        q = TruncatedLogNormal(torch.zeros(3), torch.zeros(3))
        assert torch.equal(q.icdf(0.25), q.icdf(torch.full((3,), 0.25)))

    def test_from_sigma(self):
        q = TruncatedLogNormal.from_sigma(torch.zeros(1), torch.tensor([math.e]))
        assert q.log_sigma.item() == pytest.approx(1.0)


class TestBadInput:
    ONE = torch.zeros(1)

    @pytest.mark.parametrize(
        ("make", "error", "sentence"),
        [
            (lambda o: TruncatedLogNormal(o, o, log_a=0.0, log_b=-1.0), ValueError, "log_a must be below log_b"),
            (
                lambda o: TruncatedLogNormal(o, o, log_a=-math.inf),
                ValueError,
                "log_a must be finite, the log of the smallest θ",
            ),
            (
                lambda o: TruncatedLogNormal(o, o, log_b=o),
                TypeError,
                "log_b must be a number, the log of the largest θ",
            ),
            (lambda o: TruncatedLogNormal(o, torch.zeros(2)), ValueError, "mu and log_sigma must have the same shape"),
            (
                lambda o: TruncatedLogNormal(o.int(), o),
                TypeError,
                "mu must be a floating-point tensor; got torch.int32",
            ),
            (lambda o: TruncatedLogNormal(o, o.long()), TypeError, "log_sigma must be a floating-point tensor"),
            (lambda o: TruncatedLogNormal(o, [0.0]), TypeError, "log_sigma must be a tensor; got list"),
            (lambda o: TruncatedLogNormal(o * math.nan, o), ValueError, "mu must be finite, but 1 of its 1 values"),
            (lambda o: TruncatedLogNormal(o, o + math.inf), ValueError, "log_sigma must be finite"),
            (lambda o: TruncatedLogNormal(o, o.double()), ValueError, "must share dtype and device"),
            (lambda o: TruncatedLogNormal.from_sigma(o, o - 1.0), ValueError, "sigma must be positive"),
            (lambda o: TruncatedLogNormal(o, o).icdf(o + 1.5), ValueError, "u must lie in [0, 1]"),
            (lambda o: TruncatedLogNormal(o, o).icdf(torch.tensor(math.nan)), ValueError, "u must lie in [0, 1]"),
            (lambda o: TruncatedLogNormal(o, o).log_mass(0.5, 0.1), ValueError, "lo must be at least 0 and below hi"),
        ],
    )
    def test_one_clear_sentence(self, make, error, sentence):
        with pytest.raises(error, match=re.escape(sentence)) as caught:
            make(self.ONE)
        assert "\n" not in str(caught.value)
