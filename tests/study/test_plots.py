import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image

from bmrs.criteria import BMRS_N
from bmrs.posterior import TruncatedLogNormal
from bmrs.study import plots, plots_curves, plots_gates
from tests.study import made_results

TWO = ("mlp-mnist", "lenet5-cifar10")


def words(figure):
    """All that is written on a figure."""
    figure.draw_without_rendering()
    return " ".join(text.get_text() for text in figure.findobj(Text))


@pytest.mark.parametrize("steep", [3, 8, 20])
def test_knee_of_a_known_curve(steep):
    # y = 1 - x^k is furthest above its chord where the slope is that of the chord: x = k^(-1/(k-1))
    x = np.linspace(0, 1, 2001)
    at = plots.knee(x, 1 - x**steep)
    assert x[at] == pytest.approx(steep ** (-1 / (steep - 1)), abs=1e-3)
    # neither units nor an offset move it
    assert plots.knee(100 * x + 5, 40 * (1 - x**steep) + 10) == at


def test_knee_of_two_lines_is_their_corner():
    x = np.arange(11.0)
    assert plots.knee(x, np.where(x <= 7, 90.0, 90.0 - 20 * (x - 7))) == 7


def test_no_knee():
    x = np.arange(5.0)
    assert plots.knee(x, 1 - x) is None
    assert plots.knee(x, (4 - x) ** 2) is None  # falls first, then flattens
    assert plots.knee([0, 1], [1, 0]) is None
    with pytest.raises(ValueError, match="got 5 and 2"):
        plots.knee(x, [1, 2])


def test_mean_curve_is_numpys_and_starts_at_the_whole_network():
    content = made_results.post_training(("mlp-mnist",), ("snr",), seeds=4)
    runs = content["runs"]
    runs[0]["accuracy"][10] = None  # of one seed
    for run in runs[:3]:
        run["accuracy"][20] = None  # of most seeds: left out
    curve = plots_curves.mean_curve(runs, "actual")
    assert len(curve.fraction) == 100
    assert (curve.fraction[0], curve.compression[0]) == (0.0, 0.0)
    assert curve.accuracy[0] == pytest.approx(100 * np.mean([run["whole"] for run in runs]))
    assert curve.accuracy[11] == pytest.approx(100 * np.mean([run["accuracy"][10] for run in runs[1:]]))
    last = [100 * run["accuracy"][50] for run in runs]
    at = int(np.flatnonzero(np.isclose(curve.fraction, 0.51))[0])
    assert curve.sd[at] == pytest.approx(np.std(last, ddof=1))
    assert 0.21 not in curve.fraction


def test_density_is_that_of_scipy():
    stats = pytest.importorskip("scipy.stats")
    rng = np.random.default_rng(0)
    x, y = rng.normal(70, 2, 12), rng.normal(90, 1, 12)
    grid_x, grid_y = np.linspace(60, 80, 80), np.linspace(85, 95, 70)
    density, levels = plots_curves.density_levels(x, y, grid_x, grid_y)
    wanted = stats.gaussian_kde([x, y])(np.stack(np.meshgrid(grid_x, grid_y)).reshape(2, -1)).reshape(70, 80)
    np.testing.assert_allclose(density / density.sum(), wanted / wanted.sum(), rtol=1e-6, atol=1e-12)
    inside = [density[density >= level].sum() / density.sum() for level in levels]
    assert inside == pytest.approx([0.9, 0.5], abs=0.02)
    assert plots_curves.density_levels(x, x, grid_x, grid_y) is None  # a line has no density in the plane
    assert plots_curves.density_levels(x[:2], y[:2], grid_x, grid_y) is None


def test_figure1_removes_what_bmrs_n_removes_and_its_density_is_right():
    content = made_results.posteriors(("lenet5-digits",), seeds=1)
    run = content["runs"][0]
    q = TruncatedLogNormal(torch.tensor(run["mu"]).double(), torch.tensor(run["log_sigma"]).double())
    removed = int(BMRS_N().remove(BMRS_N().scores(q)).sum())
    text = words(plots.figure1(content))
    assert f"({removed})" in text
    assert f"kept ({len(run['mu']) - removed})" in text
    assert "LeNet-5, digits, seed 0" in text
    x = np.linspace(-20, 0, 20_001)
    density = plots_gates._density(-3.0, 0.5, x)
    below = density[(x >= -4) & (x <= -2)].sum() * (x[1] - x[0])
    q = TruncatedLogNormal(-3.0, 0.5)
    assert below == pytest.approx(float(q.log_mass(np.exp(-4.0), np.exp(-2.0)).exp()), abs=1e-3)


def test_figure1_names_what_it_cannot_find():
    content = made_results.posteriors(("lenet5-digits",), seeds=1)
    with pytest.raises(ValueError, match="setting 'mlp-x' has no runs: choose one of lenet5-digits"):
        plots.figure1(content, "mlp-x")
    with pytest.raises(ValueError, match="seed 7 has no run in 'lenet5-digits': choose one of 0"):
        plots.figure1(content, seed=7)


def test_figure2_marks_boundaries_and_leaves_the_gradient_to_the_appendix():
    content = made_results.post_training(TWO, seeds=3)
    text = words(plots.figure2(content))
    assert "Gradient" not in text
    assert all(name in text for name in ("MLP, MNIST", "LeNet-5, CIFAR-10", "knee of SNR", "n = 3", "BMRS$_U$-4"))
    assert "Gradient" in words(plots.appendix(content, "actual"))
    left, right = plots.figure2(content).axes[:2]
    stops = [run["boundary"] for run in content["runs"] if (run["setting"], run["method"]) == ("mlp-mnist", "bmrs_n")]
    mean = [100 * np.mean([b["published"] for b in stops]), 100 * np.mean([b["accuracy"] for b in stops])]
    points = [line.get_xydata()[0] for line in left.lines if len(line.get_xydata()) == 1]
    assert any(np.allclose(point, mean) for point in points)
    # a BMRS goes no further than it would itself
    ends = [line.get_xdata()[-1] for line in left.lines if line.get_color() == "#0072b2" and len(line.get_xdata()) > 1]
    assert ends
    assert max(ends) <= mean[0] + 1.5
    assert sum(len(collection.get_offsets()) for collection in right.collections[:1]) == 3


def test_neighbours_have_the_same_scale():
    axes = plots.figure2(made_results.post_training(("mlp-cifar10", "lenet5-cifar10"), seeds=3)).axes
    assert axes[0].get_ylim() == axes[2].get_ylim()
    assert np.ptp(axes[1].get_ylim()) == pytest.approx(np.ptp(axes[3].get_ylim()))
    one, other = plots.prices_figure(made_results.prices(("mlp-cifar10", "lenet5-cifar10"), seeds=3)).axes
    assert np.ptp(one.get_ylim()) == pytest.approx(np.ptp(other.get_ylim()))
    assert one.get_xlim() == other.get_xlim()


def test_figure3_writes_the_mean_and_sorts_what_runs_list_differently():
    content = made_results.correlations(("mlp-mnist",), seeds=2)
    first, second = content["runs"]
    second["methods"] = second["methods"][::-1]
    second["spearman"] = [line[::-1] for line in second["spearman"][::-1]]
    wanted = (first["spearman"][0][4] + second["spearman"][5][1]) / 2
    first["spearman"][1][5] = None
    text = words(plots.figure3(content))
    assert f"{wanted:.2f}".replace("-", "−") in text
    assert f"{second['spearman'][4][0]:.2f}".replace("-", "−") in text
    assert "n = 2 seeds" in text


def test_figure4_needs_bmrs_u():
    axes = plots.figure4(made_results.by_p1(p1s=(4, 8), seeds=3)).axes[1]
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["4", "8"]
    with pytest.raises(ValueError, match="no runs of bmrs_u"):
        plots.figure4(made_results.prices(("mlp-mnist",), seeds=1))


@pytest.mark.parametrize(
    "draw",
    [
        lambda: plots.figure2(made_results.post_training(("mlp-digits",), ("snr", "bmrs_n"), 1)),
        lambda: plots.appendix(made_results.post_training(("mlp-digits",), ("l2", "gradient"), 2)),
        lambda: plots.figure3(made_results.correlations(("mlp-digits",), 1)),
        lambda: plots.figure4(made_results.by_p1(seeds=1)),
        lambda: plots.prices_figure(made_results.prices(("mlp-digits",), 1)),
    ],
)
def test_one_seed_or_few_methods_are_enough(draw):
    figure = draw()
    assert isinstance(figure, Figure)
    assert "n = " in words(figure)


@pytest.mark.parametrize(("seeds", "contours"), [(3, False), (10, True)])
@pytest.mark.parametrize("settings", [("mlp-mnist",), ("mlp-mnist", "lenet5-mnist")])
def test_captions_speak_of_contours_where_there_are_any(seeds, contours, settings):
    figure = plots.figure2(made_results.post_training(settings, ("snr", "bmrs_n"), seeds))
    assert ("contours hold 50 and 90 %" in words(figure)) == contours


def test_legends_name_only_what_is_drawn():
    # The paper has nothing on the digits, and one of the settings has no BMRS_N.
    text = words(plots.prices_figure(made_results.prices(("mlp-digits",), 1)))
    assert "paper" not in text
    assert "not pruned" in text
    assert "actual compression" in text
    content = made_results.by_p1(("mlp-cifar10", "lenet5-cifar10"), (4, 8), 1)
    content["runs"] = [r for r in content["runs"] if r["setting"] != "mlp-cifar10" or r["method"].startswith("bmrs_u")]
    assert {"BMRS$_N$", "not pruned"} <= {t.get_text() for t in plots.figure4(content).legends[0].get_texts()}


def test_save_writes_vectors_and_300_dots_per_inch(tmp_path):
    figure = plots.figure4(made_results.by_p1(seeds=2))
    pdf, png = plots.save(figure, tmp_path / "new" / "figure4.v1")
    assert (pdf.name, png.name) == ("figure4.v1.pdf", "figure4.v1.png")
    assert pdf.read_bytes().startswith(b"%PDF")
    assert b"/Subtype /Image" not in pdf.read_bytes()
    with Image.open(png) as image:
        assert image.size == tuple(round(300 * inches) for inches in figure.get_size_inches())
        assert round(image.info["dpi"][0]) == 300
    again = plots.save(plots.figure4(made_results.by_p1(seeds=2)), tmp_path / "again")
    assert again[0].read_bytes() == pdf.read_bytes()
