import itertools
import math
import re

import numpy as np
import pytest
import torch
from scipy import integrate

from bmrs import TruncatedLogNormal, evidence
from tests.reference import Reference

A, B = -20.0, 0.0


def random_posteriors(seed, count=60):
    rng = np.random.default_rng(seed)
    return zip(rng.uniform(-26, 4, count), rng.uniform(-2, 5, count), strict=True)


def unit(mu, log_sigma):
    return TruncatedLogNormal(*(torch.tensor([value], dtype=torch.float64) for value in (mu, log_sigma)))


def log_integral(log_f, low, high):
    """log ∫ exp(log_f) over [low, high], with the peak taken out so that nothing underflows."""
    x = np.linspace(low, high, 4001)
    values = np.array([log_f(at) for at in x])
    peak, where = values.max(), x[values.argmax()]
    # Split around the peak, or the quadrature can miss it.
    points = sorted({low, high, *(min(max(where + d, low), high) for w in (1e-3, 1e-2, 0.1, 1) for d in (-w, w))})
    total = sum(
        integrate.quad(lambda at: math.exp(log_f(at) - peak), left, right, epsabs=0, epsrel=1e-11)[0]
        for left, right in itertools.pairwise(points)
    )
    return peak + math.log(total)


class TestAgainstNumericalIntegration:
    """ΔF = log ∫ q p̃/p, every density normalised numerically too."""

    def delta_f(self, mu, log_sigma, log_reduced, low, high):
        sigma = math.exp(log_sigma)
        log_q = lambda x: -0.5 * ((x - mu) / sigma) ** 2  # noqa: E731
        log_z = log_integral(log_q, A, B)
        log_p = -math.log(B - A)
        return log_integral(lambda x: log_q(x) - log_z + log_reduced(x) - log_p, low, high)

    @pytest.mark.parametrize(("p1", "p2"), [(8, 23), (4, 23), (1, 12.5)])
    def test_interval(self, p1, p2):
        low, high = -p2 * math.log(2), -p1 * math.log(2)
        for mu, log_sigma in random_posteriors(seed=p1):
            want = self.delta_f(mu, log_sigma, lambda x: -math.log(high - low), low, high)
            got = evidence.interval(unit(mu, log_sigma), p1, p2).item()
            assert got == pytest.approx(want, rel=1e-8, abs=1e-9)

    # Wide enough to integrate; the limit towards the default width is tested below.
    @pytest.mark.parametrize("scale", [0.05, 0.5, 3.0, 20.0])
    def test_spike(self, scale):
        def log_shape(x):
            return -0.5 * ((x - A) / scale) ** 2

        log_z = log_integral(log_shape, A, B)
        for mu, log_sigma in random_posteriors(seed=int(100 * scale)):
            want = self.delta_f(mu, log_sigma, lambda x: log_shape(x) - log_z, A, B)
            got = evidence.spike(unit(mu, log_sigma), scale).item()
            assert got == pytest.approx(want, rel=1e-8, abs=1e-9)

    def test_a_narrow_spike_is_the_savage_dickey_ratio(self):
        for mu, log_sigma in random_posteriors(seed=3):
            q_at_a = float(Reference(mu, log_sigma).log_density(A))
            want = q_at_a + math.log(B - A)
            assert evidence.spike(unit(mu, log_sigma)).item() == pytest.approx(want, rel=1e-4, abs=1e-4)


class TestReducedPosterior:
    """q̃ = q p̃/p / exp(ΔF): the ratio of the two sides is 1 at every θ, not only on average."""

    @pytest.mark.parametrize("scale", [1e-6, 0.1, 4.0])
    def test_spike(self, scale):
        spike = Reference(A, math.log(scale))
        for mu, log_sigma in random_posteriors(seed=5, count=20):
            q = unit(mu, log_sigma)
            reduced = evidence.spike_posterior(q, scale)
            tilde = Reference(reduced.mu.item(), reduced.log_sigma.item())
            for depth in (0.0, 0.3, 1.7):
                x = A + depth * min(scale, 5.0)
                want = Reference(mu, log_sigma).log_density(x) + spike.log_density(x) + math.log(B - A)
                want -= evidence.spike(q, scale).item()
                assert float(tilde.log_density(x)) == pytest.approx(float(want), rel=1e-6, abs=1e-5)

    def test_interval(self):
        for mu, log_sigma in random_posteriors(seed=6, count=20):
            q = unit(mu, log_sigma)
            reduced = evidence.interval_posterior(q, p1=4, p2=20)
            low, high = -20 * math.log(2), -4 * math.log(2)
            assert (reduced.log_a, reduced.log_b) == (low, high)
            tilde = Reference(mu, log_sigma, low, high)
            for x in (low, 0.5 * (low + high), high):
                want = Reference(mu, log_sigma).log_density(x) + math.log((B - A) / (high - low))
                want -= evidence.interval(q, 4, 20).item()
                assert float(tilde.log_density(x)) == pytest.approx(float(want), rel=1e-8, abs=1e-8)


class TestKnownProperties:
    def test_a_gate_that_forgot_everything_has_no_evidence_either_way(self):
        q = unit(0.0, 5.0)  # as close to the prior as log σ goes
        assert evidence.spike(q).item() == pytest.approx(0.0, abs=0.02)
        assert evidence.spike(q).item() < 0

    def test_spike_evidence_is_negative_wherever_training_goes(self):
        mu, log_sigma = torch.meshgrid(torch.linspace(-13.2, 20, 300), torch.linspace(-10, 5, 300), indexing="ij")
        assert (evidence.spike(TruncatedLogNormal(mu, log_sigma)) < 0).all()
        assert evidence.spike(unit(-15.0, 2.0)).item() > 0

    def test_log_sigma_must_rise_by_seven_nats_before_anything_can_go(self):
        log_sigma = torch.linspace(-5, 5, 2001, dtype=torch.float64)
        prunable = evidence.spike(TruncatedLogNormal(torch.zeros_like(log_sigma), log_sigma)) >= -0.5 * math.log(
            2 * math.pi
        )
        assert 7.0 < log_sigma[prunable].min().item() + 5.0 < 8.0

    def test_the_interval_keeps_gates_surely_below_it_unless_it_reaches_down(self):
        q = unit(-18.5, -3.0)
        assert evidence.interval(q, p1=8, p2=23).item() < 0
        assert evidence.interval(q, p1=8, p2=None).item() > 0


def test_scores_are_those_computed_one_by_one():
    q = TruncatedLogNormal(torch.empty(500).uniform_(-60, 20), torch.empty(500).uniform_(-10, 5))
    together = evidence.scores(q)
    assert torch.equal(together.mean, q.mean())
    assert torch.equal(together.snr, q.snr())
    assert torch.equal(together.delta_f, evidence.spike(q))


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda q: evidence.spike(q, scale=-1.0), "scale must be a positive number"),
        (lambda q: evidence.spike(q, scale=math.nan), "scale must be a positive number"),
        (lambda q: evidence.interval(q, p1=23, p2=8), "p1 must be below p2"),
        (lambda q: evidence.interval(q, p1=-1), "p1 must be in [0, 28.8539]"),
        (lambda q: evidence.interval(q, p1=8, p2=40), "p2 must be in [0, 28.8539]"),
    ],
)
def test_bad_input_gives_one_sentence(call, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)) as caught:
        call(unit(0.0, 0.0))
    assert "\n" not in str(caught.value)
