import math
import re

import pytest
import torch

import bmrs
from bmrs import BMRS_N, BMRS_U, L2, SNR, Gradient, Mean, TruncatedLogNormal, Units, criteria, evidence

# Three gates as training leaves them: useful, half useful, forgotten.
Q = TruncatedLogNormal(torch.tensor([0.05, -0.7, -3.0]), torch.tensor([-3.0, 0.0, 4.0]))
ALL = [
    (BMRS_N(), Units(Q)),
    (BMRS_U(), Units(Q)),
    (SNR(), Units(Q)),
    (Mean(), Units(Q)),
    (L2(fraction=1 / 3), Units(weight_norm=torch.tensor([3.0, 2.0, 0.1]))),
    (Gradient(1.0, 1.0), Units(weight_norm=torch.tensor([3.0, 0.5, 0.1]), gradient_norm=torch.tensor([2.0, 5.0, 0.1]))),
]


@pytest.mark.parametrize(("criterion", "units"), ALL, ids=lambda value: getattr(value, "name", ""))
class TestEveryCriterion:
    def test_removes_the_forgotten_gate_and_ranks_it_first(self, criterion, units):
        scores = criterion.scores(units)
        assert criterion.remove(scores).tolist() == [False, False, True]
        assert criterion.rank(scores)[0] == 2

    def test_what_goes_is_a_prefix_of_the_ranking(self, criterion, units):
        scores = torch.randn(200).abs() * 3 - 0.5
        gone = criterion.remove(scores)
        count = int(gone.sum())
        assert 0 < count < 200
        assert gone[criterion.rank(scores)[:count]].all()

    def test_a_score_that_is_not_finite_is_kept_and_reported(self, criterion, units):
        scores = torch.tensor([math.nan, -math.inf, math.inf, 0.0, 0.01, 50.0])
        with pytest.warns(UserWarning, match="3 of 6 units have a score that is not finite and are kept"):
            gone = criterion.remove(scores)
        assert gone[:3].tolist() == [False] * 3
        assert gone[3]
        assert set(criterion.rank(scores)[3:].tolist()) == {0, 1, 2}

    def test_prints_its_settings(self, criterion, units):
        assert repr(criterion).startswith(type(criterion).__name__ + "(")


def test_bmrs_n_score_is_the_evidence_for_keeping():
    assert torch.equal(BMRS_N().scores(Units(Q)), -evidence.spike(Q))
    assert BMRS_N().tolerance == pytest.approx(0.9189385332)
    scores = torch.tensor([0.5, 0.9189, 0.9190, 3.0])
    assert BMRS_N().remove(scores).tolist() == [True, True, False, False]
    assert BMRS_N(tolerance=0).remove(scores).tolist() == [False] * 4


def test_bmrs_u_takes_its_interval():
    assert torch.equal(BMRS_U(p1=4).scores(Units(Q)), -evidence.interval(Q, 4, 23))
    below = Units(TruncatedLogNormal(torch.tensor([-18.5]), torch.tensor([-3.0])))
    assert not BMRS_U().remove(BMRS_U().scores(below))
    reaching = BMRS_U(p2=None)
    assert reaching.remove(reaching.scores(below))


def test_a_posterior_alone_will_do():
    assert torch.equal(SNR().scores(Q), SNR().scores(Units(Q)))
    with pytest.raises(ValueError, match="L2 needs Units"):
        L2(0.5).scores(Q)


def test_units_may_have_any_shape():
    scores = torch.rand(4, 25)
    for criterion in (L2(0.3), SNR(0.3)):
        assert torch.equal(criterion.remove(scores).flatten(), criterion.remove(scores.flatten()))
        assert torch.equal(criterion.rank(scores), criterion.rank(scores.flatten()))


def test_l2_removes_the_fraction_asked_for():
    norms = torch.rand(100)
    for fraction, count in ((0.0, 0), (0.29, 29), (0.5, 50), (1.0, 100)):
        assert int(L2(fraction).remove(norms).sum()) == count


def test_gradient_needs_both_norms_small():
    units = Units(weight_norm=torch.tensor([0.5, 0.5, 2.0, 2.0]), gradient_norm=torch.tensor([0.1, 0.3, 0.1, 0.3]))
    criterion = Gradient(weight_threshold=1.0, gradient_threshold=0.2)
    assert criterion.remove(criterion.scores(units)).tolist() == [True, False, False, False]


def test_spare_best():
    scores = torch.tensor([0.1, 0.3, 0.2])
    assert criteria.spare_best(torch.ones(3, dtype=torch.bool), scores).tolist() == [True, False, True]
    some = torch.tensor([True, True, False])
    assert torch.equal(criteria.spare_best(some, scores), some)


def test_by_name():
    assert isinstance(criteria.by_name("bmrs_u", p1=4), BMRS_U)
    with pytest.raises(ValueError, match="unknown criterion 'magic': choose one of bmrs_n, bmrs_u"):
        criteria.by_name("magic")


@pytest.mark.parametrize(
    ("make", "error", "sentence"),
    [
        (lambda: BMRS_N(tolerance=-1), ValueError, "tolerance must be a finite number of at least 0"),
        (lambda: BMRS_N(tolerance=math.nan), ValueError, "tolerance must be"),
        (lambda: BMRS_N(tolerance="much"), TypeError, "tolerance must be a number, in nats of evidence; got str"),
        (lambda: BMRS_U(p1=8, p2=4), ValueError, "p1 must be below p2"),
        (lambda: BMRS_U(p1=-8), ValueError, "p1 must be"),
        (lambda: BMRS_U(p1=2, p2=60).scores(Units(Q)), ValueError, "p2 must be in [0, 28.8539]"),
        (lambda: SNR(threshold=-0.1), ValueError, "threshold must be"),
        (lambda: SNR(threshold=math.inf), ValueError, "threshold must be"),
        (lambda: Mean(threshold=1.5), ValueError, "threshold must be in [0, 1], a value of the gate's mean; got 1.5"),
        (lambda: L2(fraction=1.01), ValueError, "fraction must be in [0, 1], the share of units to remove; got 1.01"),
        (lambda: Gradient(0.0, 1.0), ValueError, "weight_threshold must be"),
        (lambda: BMRS_N().scores(Units()), ValueError, "BMRS_N needs Units(posterior=...)"),
        (lambda: L2(0.5).scores(Units(Q)), ValueError, "L2 needs Units(weight_norm=...)"),
        (
            lambda: Gradient(1, 1).scores(Units(None, torch.ones(2), torch.ones(3))),
            ValueError,
            "weight_norm and gradient_norm must have the same shape",
        ),
        (lambda: SNR().remove(torch.tensor([1, 2])), TypeError, "scores must be a floating-point tensor"),
    ],
)
def test_bad_input_gives_one_sentence(make, error, sentence):
    with pytest.raises(error, match=re.escape(sentence)) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_all_are_public():
    assert all(getattr(bmrs, criterion.__name__) is criterion for criterion in criteria.BY_NAME.values())
