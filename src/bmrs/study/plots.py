"""The study's figures, each a function from a loaded result to a :class:`matplotlib.figure.Figure`."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from bmrs.study import plot_style, summary
from bmrs.study.plot_style import look, save
from bmrs.study.plots_curves import appendix, figure2, knee
from bmrs.study.plots_gates import figure1
from bmrs.study.summary import Cell, Content, Setting, Spread

__all__ = ["appendix", "figure1", "figure2", "figure3", "figure4", "knee", "prices_figure", "save"]

_PRICE_LOOKS = {
    "layer": ("#0072b2", "o"), "uniform": ("#d55e00", "s"), "params": ("#009e73", "^"), "macs": ("#cc79a7", "v"),
    "time": ("#56b4e9", "P"), "elbo": ("#8c8c8c", "D"),
}  # fmt: skip
_FILLS = ("full", "none", "left", "right")  # one for each strength of a price
_PAPER: dict[str, Any] = {"linestyle": "none", "marker": "x", "color": "black", "markersize": 5, "elinewidth": 0.7}
_BAR: dict[str, Any] = {"elinewidth": 0.8, "capsize": 2, "capthick": 0.8}


@plot_style.styled
def figure3(content: Content) -> Figure:
    """Spearman's correlation between the rankings of every two criteria, mean over seeds, for every setting."""
    summary.check_kind(content, "correlations")
    settings = summary.settings(content)
    rows, columns, places = plot_style.setting_grid(settings)
    if rows > columns:  # three of these fit across
        rows, columns, places = columns, rows, {(column, row): setting for (row, column), setting in places.items()}
    width = plot_style.width_for(columns, 3)
    side = width / columns
    figure = Figure(figsize=(width, rows * (side + 0.15) + 0.75), layout="compressed")
    all_axes = figure.subplots(rows, columns, squeeze=False)
    image: Any = None
    ns = []
    for axes in all_axes.flat:
        axes.set_axis_off()
    for count, (row, column) in enumerate(sorted(places)):
        setting, axes = places[row, column], all_axes[row, column]
        methods, mean, n = _mean_correlation([run for run in content["runs"] if run["setting"] == setting.key])
        ns.append(Spread(0.0, None, n))
        image = _heat_map(axes, methods, mean, names_left=column == 0, cell_inches=side / len(methods))
        axes.set_title(plot_style.letter(count, len(places)) + plot_style.plain(setting.name))
    bar = figure.colorbar(image, ax=all_axes, orientation="horizontal", fraction=0.04, aspect=50, pad=0.02)
    n = summary.usual_n(ns)
    bar.set_label("Spearman's rank correlation, " + (f"mean over n = {n} seeds" if n > 1 else "n = 1 seed"))
    bar.outline.set_linewidth(0.5)
    return figure


def _mean_correlation(runs: Sequence[Mapping[str, Any]]) -> tuple[list[str], npt.NDArray[np.float64], int]:
    """Over the seeds that have a number, method pair by method pair, whatever order a run lists them in."""
    methods = summary.ordered_methods(method for run in runs for method in run["methods"])
    values: dict[tuple[str, str], list[float | None]] = {}
    for run in runs:
        for one, line in zip(run["methods"], run["spearman"], strict=True):
            for other, value in zip(run["methods"], line, strict=True):
                values.setdefault((one, other), []).append(value)
    mean = np.array([[summary.spread(values.get((a, b), [])).mean for b in methods] for a in methods])
    return methods, mean, len({run["seed"] for run in runs})


def _heat_map(
    axes: Axes, methods: Sequence[str], mean: npt.NDArray[np.float64], names_left: bool, cell_inches: float
) -> Any:
    axes.set_axis_on()
    # Lightness rises all the way from -1 to 1, so the order survives greyscale.
    image = axes.imshow(mean, cmap="cividis", vmin=-1.0, vmax=1.0)
    size = min(6.5, 72 * cell_inches / 4.4)
    for (i, j), value in np.ndenumerate(mean):
        text = "–" if np.isnan(value) else f"{value:.2f}".replace("-", "−")
        color = "black" if np.isnan(value) or value > 0.05 else "white"
        axes.text(j, i, text, ha="center", va="center", color=color, fontsize=size)
    names = [plot_style.label(method) for method in methods]
    axes.set_xticks(range(len(methods)), names, rotation=40, ha="right", rotation_mode="anchor")
    axes.set_yticks(range(len(methods)), names if names_left else [""] * len(methods))
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    return image


@plot_style.styled
def figure4(content: Content) -> Figure:
    """Accuracy and compression of BMRS_U against p₁, with the spread over seeds, one column for each setting."""
    cells = [cell for cell in summary.cells(content) if cell.method == "none" or cell.price == "layer"]
    with_p1 = {cell.setting for cell in cells if summary.p1_of(cell.method) is not None}
    settings = [s for s in summary.settings(content) if s.key in with_p1]
    if not settings:
        raise ValueError("content has no runs of bmrs_u: Figure 4 shows that method for several p1.")
    width = plot_style.COLUMN if len(settings) == 1 else plot_style.PAGE
    figure = Figure(figsize=(width, 3.6), layout="constrained")
    all_axes = figure.subplots(2, len(settings), squeeze=False, sharex=True, sharey="row")
    for column, setting in enumerate(settings):
        own = [cell for cell in cells if cell.setting == setting.key]
        top, bottom = all_axes[0, column], all_axes[1, column]
        _against_p1(top, setting, own, "accuracy", "accuracy")
        _against_p1(bottom, setting, own, "published", "compression")
        top.set_title(plot_style.letter(column, len(settings)) + plot_style.plain(setting.name))
        bottom.set_xlabel("$p_1$ (bits of precision)")
    all_axes[0, 0].set_ylabel("test accuracy (%)")
    all_axes[1, 0].set_ylabel("compression (%)")
    # The settings need not have the same references.
    labelled = [pair for axes in all_axes[0] for pair in zip(*axes.get_legend_handles_labels(), strict=True)]
    handles = list({words: mark for mark, words in labelled}.values())
    n = summary.usual_n(cell.accuracy for cell in cells)
    caption = f"{plot_style.count_text(n)};\ncompression as the paper counts it"
    plot_style.legend(figure, handles, 2 if len(settings) == 1 else 4, caption)
    return figure


def _against_p1(axes: Axes, setting: Setting, cells: Sequence[Cell], ours: str, theirs: str) -> None:
    """``ours`` and ``theirs``: what to show, as our cells and the paper's call it."""
    found = [(p1, cell) for cell in cells if (p1 := summary.p1_of(cell.method)) is not None]
    found.sort(key=lambda pair: pair[0])
    style = look("bmrs_u8")
    values: list[Spread] = [getattr(cell, ours) for _, cell in found]
    axes.errorbar(
        [p1 for p1, _ in found], [v.mean for v in values], [v.sd or 0.0 for v in values], color=style.color,
        marker=style.marker, markersize=3.5, label="BMRS$_U$", zorder=3, **_BAR,
    )  # fmt: skip
    papers = [(p1, printed) for p1, cell in found if (printed := summary.printed(setting, cell.method))]
    if papers:
        points = [getattr(printed, theirs) for _, printed in papers]
        # A little to the side: both error bars stay visible.
        places = [p1 + 0.25 for p1, _ in papers]
        axes.errorbar(
            places, [p.mean for p in points], [p.sd for p in points], label="paper, BMRS$_U$", zorder=4, **_PAPER
        )
    for method, words in (("bmrs_n", "BMRS$_N$"), ("none", "not pruned")):
        reference = next((cell for cell in cells if cell.method == method), None)
        if reference is not None and not (method == "none" and ours != "accuracy"):
            own = look(method)
            value: Spread = getattr(reference, ours)
            axes.axhline(value.mean, color=own.color, linestyle=own.line, linewidth=1, label=words, zorder=1)
            if value.sd:
                axes.axhspan(value.mean - value.sd, value.mean + value.sd, color=own.color, alpha=0.12, linewidth=0)
    axes.set_xticks([p1 for p1, _ in found], [f"{p1:g}" for p1, _ in found])


@plot_style.styled
def prices_figure(content: Content) -> Figure:
    """Accuracy against actual compression, one point for each price with its spread, for every setting."""
    cells = summary.cells(content)
    rows, columns, places = plot_style.setting_grid(summary.settings(content))
    width = plot_style.width_for(columns, 2)
    figure = Figure(figsize=(width, 0.6 + 1.85 * rows), layout="constrained")
    all_axes = figure.subplots(rows, columns, squeeze=False, sharex="row")
    pruned = [cell for cell in cells if cell.method == "bmrs_n"] or [c for c in cells if c.method != "none"]
    offers = sorted({(cell.price, cell.strength) for cell in pruned}, key=lambda offer: summary.price_place(*offer))
    for count, place in enumerate(sorted(places)):
        setting, axes = places[place], all_axes[place]
        own = [cell for cell in cells if cell.setting == setting.key]
        _prices(axes, setting, own, [cell for cell in pruned if cell.setting == setting.key], offers)
        axes.set_title(plot_style.letter(count, len(places)) + plot_style.plain(setting.name))
        axes.set_ylabel("test accuracy (%)")
        if (place[0] + 1, place[1]) not in places:
            axes.set_xlabel("compression: parameters removed (%)")
    for row in range(rows):
        plot_style.equal_spans([all_axes[row, c] for c in range(columns) if (row, c) in places], "y")
        for column in range(columns):
            if (row, column) not in places:
                all_axes[row, column].set_axis_off()
    also = (
        any(summary.printed(setting, "bmrs_n") for setting in places.values()),
        any(cell.method == "none" for cell in cells),
    )
    _prices_legend(figure, offers, also, summary.usual_n(cell.accuracy for cell in cells), narrow=columns == 1)
    return figure


def _price_style(offer: tuple[str, float], offers: Sequence[tuple[str, float]]) -> dict[str, Any]:
    """A colour and a marker for the price, a filling for the strength."""
    color, marker = _PRICE_LOOKS.get(offer[0], ("#e69f00", "P"))
    strengths = [strength for price, strength in offers if price == offer[0]]
    filling = _FILLS[strengths.index(offer[1]) % len(_FILLS)]
    return {"color": color, "marker": marker, "fillstyle": filling, "markersize": 4.5, "linestyle": "none"}


def _prices(
    axes: Axes, setting: Setting, cells: Sequence[Cell], pruned: Sequence[Cell], offers: Sequence[tuple[str, float]]
) -> None:
    whole = next((cell for cell in cells if cell.method == "none"), None)
    if whole is not None:
        style = look("none")
        axes.axhline(whole.accuracy.mean, color=style.color, linestyle=style.line, linewidth=1, zorder=1)
    printed = summary.printed(setting, "bmrs_n")
    if printed is not None:
        x, y = printed.compression, printed.accuracy
        axes.errorbar(x.mean, y.mean, xerr=x.sd, yerr=y.sd, zorder=2, **_PAPER)
    for cell in pruned:
        axes.errorbar(
            cell.actual.mean, cell.accuracy.mean, xerr=cell.actual.sd, yerr=cell.accuracy.sd, zorder=3,
            **_BAR, **_price_style((cell.price, cell.strength), offers),
        )  # fmt: skip
    axes.margins(0.08, 0.12)
    axes.grid(color="0.92", linewidth=0.5)
    axes.set_axisbelow(True)


def _prices_legend(
    figure: Figure, offers: Sequence[tuple[str, float]], also: tuple[bool, bool], n: int, narrow: bool
) -> None:
    """``also``: whether the paper's points are there, and the whole networks."""
    handles = [
        Line2D([], [], label=plot_style.plain(summary.price_name(*offer)), **_price_style(offer, offers))
        for offer in offers
    ]
    crossed = {name: value for name, value in _PAPER.items() if name != "elinewidth"}
    none = look("none")
    references = (
        Line2D([], [], label="paper's BMRS$_N$, its own counting", **crossed),
        Line2D([], [], label="not pruned", color=none.color, linestyle=none.line),
    )
    handles += [handle for handle, there in zip(references, also, strict=True) if there]
    caption = f"{plot_style.count_text(n)}; actual compression"
    if not narrow:
        caption += "; neighbours show equally many points of accuracy"
    plot_style.legend(figure, handles, 2 if narrow else 6, caption)
