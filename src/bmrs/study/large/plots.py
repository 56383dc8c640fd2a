"""Table 2 as a picture: what each method removes and what it loses, ours and the paper's."""

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from bmrs.study import plot_style, summary
from bmrs.study.large.tables import as_published
from bmrs.study.plot_style import look, save
from bmrs.study.summary import Cell, Content, Setting

__all__ = ["save", "table2"]

_MOST = 20.0  # points of accuracy
_BAR: dict[str, Any] = {"elinewidth": 0.8, "capsize": 2, "capthick": 0.8, "linestyle": "none", "markersize": 4.5}


@plot_style.styled
def table2(content: Content) -> Figure:
    """Points of accuracy lost against the parameters removed, for every setting; hollow marks are the paper's."""
    cells = summary.cells(content)
    rows, columns, places = plot_style.setting_grid(summary.settings(content))
    width = plot_style.width_for(columns, 2)
    figure = Figure(figsize=(width, 0.8 + 1.9 * rows), layout="constrained")
    all_axes = figure.subplots(rows, columns, squeeze=False)
    for axes in all_axes.flat:
        axes.set_axis_off()
    for count, place in enumerate(sorted(places)):
        setting, axes = places[place], all_axes[place]
        axes.set_axis_on()
        own = [cell for cell in cells if cell.setting == setting.key]
        _points(axes, setting, own, beside=as_published(content, setting))
        axes.set_title(plot_style.letter(count, len(places)) + plot_style.plain(setting.name))
        axes.set_xlabel("parameters removed (%)")
        axes.set_ylabel("points of accuracy lost")
    methods = summary.ordered_methods(cell.method for cell in cells if cell.method != "none")
    handles = [Line2D([], [], label=plot_style.label(m), color=look(m).color, **_mark(m)) for m in methods]
    n = summary.usual_n(cell.accuracy for cell in cells)
    compared = any(as_published(content, setting) for setting in places.values())
    caption = plot_style.count_text(n) + (
        ";\ncompression as the paper counts it, hollow: the paper's" if compared else ";\nactual compression"
    )
    if handles:
        plot_style.legend(figure, handles, 3 if columns == 1 else 6, caption)
    return figure


def _mark(method: str) -> dict[str, Any]:
    return {"marker": look(method).marker, "linestyle": "none", "markersize": 4.5}


def _points(axes: Axes, setting: Setting, cells: list[Cell], beside: bool) -> None:
    whole = next((cell for cell in cells if cell.method == "none"), None)
    plain = summary.printed(setting, "none")
    beyond = []
    for cell in cells:
        if cell.method == "none":
            continue
        style = look(cell.method)
        shown = {"color": style.color, "marker": style.marker, **_BAR}
        compression = cell.published if beside else cell.actual
        if whole is not None:
            lost = whole.accuracy.mean - cell.accuracy.mean
            axes.errorbar(compression.mean, lost, xerr=compression.sd, yerr=cell.accuracy.sd, zorder=3, **shown)
        theirs = summary.printed(setting, cell.method)
        if beside and theirs is not None and plain is not None:
            lost = plain.accuracy.mean - theirs.accuracy.mean
            if lost > _MOST:  # it would leave no room for the others
                beyond.append(f"paper's {plot_style.label(cell.method)}: {lost:.0f} points")
                continue
            axes.errorbar(
                theirs.compression.mean, lost, xerr=theirs.compression.sd, yerr=theirs.accuracy.sd, zorder=2,
                markerfacecolor="none", **shown,
            )  # fmt: skip
    if beyond:
        axes.text(0.02, 0.97, "\n".join(beyond), transform=axes.transAxes, va="top", fontsize=6, color="0.35")
    axes.axhline(0.0, color=look("none").color, linestyle=look("none").line, linewidth=1, zorder=1)
    axes.margins(0.1, 0.15)
    axes.grid(color="0.92", linewidth=0.5)
    axes.set_axisbelow(True)
