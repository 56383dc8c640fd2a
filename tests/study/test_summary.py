import math

import numpy as np
import pytest

from bmrs.study import published, summary
from bmrs.study.published import Printed
from bmrs.study.summary import Spread
from tests.study import made_results


def test_cells_are_numpys_mean_and_sd():
    content = made_results.continuous(seeds=7)
    cells = summary.cells(content)
    assert len(cells) == 6 * 7
    for cell in cells:
        runs = [r for r in content["runs"] if (r["setting"], r["method"]) == (cell.setting, cell.method)]
        for spread, values in (
            (cell.accuracy, [100 * r["accuracy"] for r in runs]),
            (cell.published, [100 * r["compression"]["published"] for r in runs]),
            (cell.actual, [100 * r["compression"]["actual"] for r in runs]),
            (cell.parameters, [r["parameters"] for r in runs]),
        ):
            assert spread.n == 7
            np.testing.assert_allclose([spread.mean, spread.sd], [np.mean(values), np.std(values, ddof=1)], atol=1e-9)


def test_cells_come_in_the_papers_order_and_prices_stay_apart():
    cells = summary.cells(made_results.continuous(settings=made_results.SIX[::-1], methods=made_results.METHODS[::-1]))
    assert [cell.method for cell in cells[:7]] == list(made_results.METHODS)
    assert list(dict.fromkeys(cell.setting for cell in cells)) == list(made_results.SIX)
    prices = [cell for cell in summary.cells(made_results.prices()) if cell.method == "bmrs_n"][:4]
    assert [(c.price, c.strength) for c in prices] == [("layer", 1.0), ("uniform", 1.0), ("params", 0.5), ("elbo", 1.0)]


def test_what_is_not_finite_does_not_count():
    assert summary.spread([1.0, None, 3.0, math.nan, math.inf]) == Spread(2.0, math.sqrt(2.0), 2)
    assert summary.spread([5.0]) == Spread(5.0, None, 1)
    nothing = summary.spread([None])
    assert math.isnan(nothing.mean)
    assert (nothing.sd, nothing.n) == (None, 0)
    content = made_results.continuous(settings=("mlp-mnist",), methods=("none",), seeds=3)
    content["runs"][0]["accuracy"] = None
    assert summary.cells(content)[0].accuracy.n == 2


@pytest.mark.parametrize(
    ("ours", "paper", "mark"),
    [
        (51.0, Printed(50.0, 0.3), 0),  # one point is the border where 2 sd are less
        (51.01, Printed(50.0, 0.3), 1),
        (48.99, Printed(50.0, 0.3), -1),
        (54.0, Printed(50.0, 2.0), 0),  # 2 sd where they are more
        (54.01, Printed(50.0, 2.0), 1),
        (45.99, Printed(50.0, 2.0), -1),
        (97.43 + 1.0, Printed(97.43, 0.14), 0),  # 98.43 - 97.43 is a little above 1 in binary
        (math.nan, Printed(50.0, 2.0), 0),
    ],
)
def test_marks_at_the_border(ours, paper, mark):
    assert summary.deviation(Spread(ours, None, 1), paper) == mark


def test_names():
    shown = [summary.method_name(method) for method in (*made_results.METHODS, "gradient", "bmrs_u12", "mine")]
    assert shown == ["None", "L2", "E[θ]", "SNR", "BMRS_N", "BMRS_U-8", "BMRS_U-4", "Gradient", "BMRS_U-12", "mine"]
    assert [summary.p1_of(method) for method in ("bmrs_u4", "bmrs_n")] == [4.0, None]
    found = summary.settings(made_results.continuous(settings=("lenet5-fashion-mnist", "mlp-digits"), seeds=1))
    assert [setting.name for setting in found] == ["MLP, digits", "LeNet-5, Fashion-MNIST"]


def test_published_numbers():
    assert published.result("lenet5", "cifar10", "snr").compression == Printed(70.29, 2.02)
    assert published.result("mlp", "mnist", "none").accuracy == Printed(97.43, 0.14)
    assert published.result("mlp", "digits", "none") is None
    assert published.runtime("mlp", "mnist", "bmrs_n") == published.Runtime(20.02, 1.14)
    # Tables 1 and 2 say bmrs_u8; the runtimes of the small networks are of any BMRS_U.
    assert published.runtime("mlp", "mnist", "bmrs_u8") == published.Runtime(19.99, 1.16)
    assert published.runtime("mlp", "mnist", "l2") is None


def test_the_wrong_kind_is_refused():
    with pytest.raises(ValueError, match="content must be a result of kind 'continuous'; got 'timing'"):
        summary.cells(made_results.timing())
    with pytest.raises(ValueError, match="content has no runs"):
        summary.cells({"kind": "continuous", "runs": []})
