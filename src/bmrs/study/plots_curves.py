"""Figure 2 and its version in the appendix: accuracy against compression after training, and where evidence stops."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from bmrs.study import plot_style, summary
from bmrs.study.plot_style import KNEE, Counting, look
from bmrs.study.summary import Content, Setting

Array = npt.NDArray[np.float64]
Run = Mapping[str, Any]

_COUNTED = {"published": "compression as the paper counts it", "actual": "actual compression"}
_MASSES = (0.5, 0.9)  # of the density, inside the contours
_SMALLEST = (3.0, 1.0)  # points of compression and accuracy that a magnified view shows at least


@dataclass(frozen=True)
class Curve:
    """Means over seeds at every fraction of units removed, the whole network first. Percent; sd 0 for one seed."""

    fraction: Array
    compression: Array
    accuracy: Array
    sd: Array


@dataclass(frozen=True)
class Boundary:
    """Where a method's own rule stops: one point per seed. Percent, and the fraction of units."""

    fraction: Array
    compression: Array
    accuracy: Array


@plot_style.styled
def figure2(content: Content, counting: Counting = "published") -> Figure:
    """Accuracy against compression, and the (compression, accuracy) at which each BMRS stops, for every setting."""
    return _figure(content, counting, leave_out=("gradient",))


@plot_style.styled
def appendix(content: Content, counting: Counting = "published") -> Figure:
    """The same with the gradient criterion."""
    return _figure(content, counting, leave_out=())


def knee(x: Sequence[float] | Array, y: Sequence[float] | Array) -> int | None:
    """Index of the knee of a curve that is flat and then falls: the point furthest above the chord of its ends.

    This is Kneedle without smoothing, for a mean curve. None where no point lies above the chord.

    >>> knee([0, 1, 2, 3], [1.0, 1.0, 0.9, 0.0])
    2
    """
    x, y = np.asarray(x, float), np.asarray(y, float)
    if len(x) != len(y):
        raise ValueError(f"x and y must be of one length, point by point; got {len(x)} and {len(y)}.")
    if len(x) < 3 or not x[-1] > x[0]:
        return None
    # The distance at right angles, and that in the unit square, are this one times a constant.
    above = y - (y[0] + (y[-1] - y[0]) * (x - x[0]) / (x[-1] - x[0]))
    best = int(np.argmax(above))
    return best if above[best] > 1e-9 * max(1.0, float(np.abs(y).max())) else None


def mean_curve(runs: Sequence[Run], counting: Counting = "published") -> Curve:
    """Over the seeds, at every fraction that at least half of them have."""
    whole = [(0.0, 100.0 * run["whole"]) for run in runs if run["whole"] is not None]
    points: dict[float, list[tuple[float, float]]] = {0.0: whole} if whole else {}
    for run in runs:
        for fraction, x, y in zip(run["fractions"], run["compression"][counting], run["accuracy"], strict=True):
            if x is not None and y is not None:
                points.setdefault(float(fraction), []).append((100.0 * x, 100.0 * y))
    kept = sorted(fraction for fraction, found in points.items() if 2 * len(found) >= len(runs))
    spreads = [[summary.spread(column) for column in zip(*points[f], strict=True)] for f in kept]
    return Curve(
        np.array(kept),
        np.array([x.mean for x, _ in spreads]),
        np.array([y.mean for _, y in spreads]),
        np.array([y.sd or 0.0 for _, y in spreads]),
    )


def boundaries(runs: Sequence[Run], counting: Counting = "published") -> Boundary | None:
    """Of the runs that have one."""
    found = [run["boundary"] for run in runs if run.get("boundary")]
    found = [b for b in found if None not in (b[counting], b["accuracy"], b["fraction"])]
    if not found:
        return None
    return Boundary(
        np.array([b["fraction"] for b in found], float),
        np.array([100.0 * b[counting] for b in found]),
        np.array([100.0 * b["accuracy"] for b in found]),
    )


def density_levels(x: Array, y: Array, grid_x: Array, grid_y: Array) -> tuple[Array, list[float]] | None:
    """A normal kernel estimate on the grid (Scott's width), and the levels that hold 90 and 50 % of it.

    None where the points do not spread over the plane.
    """
    if len(x) < 4:
        return None
    deviations = np.stack([x - x.mean(), y - y.mean()])
    covariance = deviations @ deviations.T / (len(x) - 1) * len(x) ** (-1.0 / 3.0)
    if not np.linalg.det(covariance) > 1e-12 * max(float(np.trace(covariance)), 1e-12) ** 2:
        return None
    dx, dy = grid_x[None, :, None] - x, grid_y[:, None, None] - y
    a, b, c = np.linalg.inv(covariance)[[0, 0, 1], [0, 1, 1]]
    density = np.exp(-0.5 * (a * dx**2 + 2 * b * dx * dy + c * dy**2)).sum(-1)
    ordered = np.sort(density.ravel())[::-1]
    mass = np.cumsum(ordered) / ordered.sum()
    levels = sorted({float(ordered[min(int(np.searchsorted(mass, m)), len(ordered) - 1)]) for m in _MASSES})
    return density, levels


def _figure(content: Content, counting: Counting, leave_out: tuple[str, ...]) -> Figure:
    summary.check_kind(content, "post-training")
    runs: dict[tuple[str, str], list[Run]] = {}
    for run in content["runs"]:
        if run["method"] not in leave_out:
            runs.setdefault((run["setting"], run["method"]), []).append(run)
    rows, pairs_across, places = plot_style.setting_grid(summary.settings(content))
    columns = 2 * pairs_across
    figure = Figure(figsize=(plot_style.width_for(columns, 4), 0.55 + 1.72 * rows), layout="constrained")
    all_axes = figure.subplots(rows, columns, squeeze=False, width_ratios=(1.35, 1) * pairs_across)
    count, contours = 0, False
    for row in range(rows):
        pairs = []
        for column in range(pairs_across):
            left, right = all_axes[row, 2 * column], all_axes[row, 2 * column + 1]
            setting = places.get((row, column))
            if setting is None:
                left.set_axis_off()
                right.set_axis_off()
                continue
            own = {m: runs[setting.key, m] for k, m in runs if k == setting.key}
            _curves(left, own, counting)
            contours |= _stops(right, own, counting)
            left.set_title(plot_style.letter(count, len(places)) + plot_style.plain(setting.name))
            right.set_title("at the boundary")
            pairs.append((left, right))
            count += 1
        _same_scales(pairs)
    _axis_labels(all_axes, places)
    methods = summary.ordered_methods(method for _, method in runs)
    n = summary.usual_n(summary.spread(r["whole"] for r in found) for found in runs.values())
    caption = f"{plot_style.count_text(n)}; {_COUNTED[counting]}"
    if contours:
        caption += f"; contours hold {100 * _MASSES[0]:.0f} and {100 * _MASSES[1]:.0f} % of a density"
    _legend(figure, methods, caption, narrow=columns < 4)
    return figure


def _curves(axes: Axes, runs: Mapping[str, list[Run]], counting: Counting) -> None:
    for place, method in enumerate(summary.ordered_methods(runs)):
        curve, style = mean_curve(runs[method], counting), look(method)
        stop = boundaries(runs[method], counting) if method.startswith("bmrs") else None
        # A BMRS has nothing to say beyond its boundary.
        shown = curve.fraction <= stop.fraction.mean() + 1e-9 if stop else np.full(len(curve.fraction), True)
        x, y, sd = curve.compression[shown], curve.accuracy[shown], curve.sd[shown]
        zorder = 3.0 if method.startswith("bmrs") else 2.0
        axes.fill_between(x, y - sd, y + sd, color=style.color, alpha=0.15, linewidth=0)
        axes.plot(
            x, y, color=style.color, linestyle=style.line, marker=style.marker, markersize=2.6, zorder=zorder,
            markevery=(0.06 + 0.025 * place, 0.2), markeredgewidth=0.7,
        )  # fmt: skip
        if stop:
            axes.plot(
                stop.compression.mean(), stop.accuracy.mean(), linestyle="none", marker=style.marker, markersize=5.5,
                color=style.color, markeredgecolor="black", markeredgewidth=0.7, zorder=5,
            )  # fmt: skip
    _mark_knee(axes, runs, counting)
    axes.set_xlim(0, 100)
    axes.set_xticks(range(0, 101, 25))


def _mark_knee(axes: Axes, runs: Mapping[str, list[Run]], counting: Counting) -> tuple[float, float] | None:
    if "snr" not in runs:
        return None
    curve = mean_curve(runs["snr"], counting)
    at = knee(curve.compression, curve.accuracy)
    if at is None:
        return None
    x, y = float(curve.compression[at]), float(curve.accuracy[at])
    axes.plot(x, y, linestyle="none", markersize=7.5, zorder=6, **KNEE)
    return x, y


def _stops(axes: Axes, runs: Mapping[str, list[Run]], counting: Counting) -> bool:
    """Every seed's boundary with density contours, over the curve of SNR; whether there are enough for contours."""
    knee_at = _mark_knee(axes, runs, counting)
    stops = {m: boundaries(runs[m], counting) for m in summary.ordered_methods(runs) if m.startswith("bmrs")}
    found = {method: stop for method, stop in stops.items() if stop is not None}
    if not found:
        plot_style.note(axes, "no boundary")
        return False
    xs = [*(x for stop in found.values() for x in stop.compression), *([knee_at[0]] if knee_at else [])]
    ys = [*(y for stop in found.values() for y in stop.accuracy), *([knee_at[1]] if knee_at else [])]
    axes.set_xlim(*_window(xs, _SMALLEST[0]))
    axes.set_ylim(*_window(ys, _SMALLEST[1]))
    if "snr" in runs:
        curve, style = mean_curve(runs["snr"], counting), look("snr")
        axes.plot(curve.compression, curve.accuracy, color=style.color, linestyle=style.line, linewidth=0.9, zorder=1)
    grid_x, grid_y = np.linspace(*axes.get_xlim(), 90), np.linspace(*axes.get_ylim(), 90)
    contours = False
    for method, stop in found.items():
        style = look(method)
        axes.scatter(
            stop.compression, stop.accuracy, s=11, marker=style.marker, color=style.color, alpha=0.85,
            edgecolor="black", linewidth=0.3, zorder=4,
        )  # fmt: skip
        estimate = density_levels(stop.compression, stop.accuracy, grid_x, grid_y)
        if estimate is not None:
            contours = True
            density, levels = estimate
            axes.contour(
                grid_x, grid_y, density, levels=levels, colors=style.color, linewidths=0.8,
                linestyles=[style.line], zorder=3,
            )  # fmt: skip
    return contours


def _window(values: Sequence[float], smallest: float) -> tuple[float, float]:
    low, high = min(values), max(values)
    half = 0.5 * max(1.7 * (high - low), smallest)
    return 0.5 * (low + high) - half, 0.5 * (low + high) + half


def _same_scales(pairs: Sequence[tuple[Axes, Axes]]) -> None:
    """In one row the curves share their axes, and the magnified views show equally many points of each."""
    if not pairs:
        return
    top = max(float(left.dataLim.y1) for left, _ in pairs)
    for left, _ in pairs:
        left.set_ylim(0, math.ceil(top / 10) * 10 + 3)
    views = [right for _, right in pairs if right.has_data()]
    plot_style.equal_spans(views, "x")
    plot_style.equal_spans(views, "y")


def _axis_labels(all_axes: Any, places: Mapping[tuple[int, int], Setting]) -> None:
    for row, column in places:
        left, right = all_axes[row, 2 * column], all_axes[row, 2 * column + 1]
        left.set_ylabel("test accuracy (%)")
        if (row + 1, column) not in places:
            for axes in (left, right):
                axes.set_xlabel("compression (%)")


def _legend(figure: Figure, methods: Sequence[str], caption: str, narrow: bool) -> None:
    handles: list[Line2D] = []
    for method in methods:
        style = look(method)
        handles.append(
            Line2D(
                [], [], color=style.color, linestyle=style.line, marker=style.marker, markersize=3,
                label=plot_style.label(method),
            )
        )  # fmt: skip
    if any(method.startswith("bmrs") for method in methods):
        handles.append(
            Line2D([], [], linestyle="none", marker="o", markersize=5.5, color="0.85", markeredgecolor="black",
                   markeredgewidth=0.7, label="evidence boundary")
        )  # fmt: skip
    if "snr" in methods:
        handles.append(Line2D([], [], linestyle="none", markersize=7.5, label="knee of SNR", **KNEE))
    if narrow:
        caption = caption.replace("; ", ";\n")
    plot_style.legend(figure, handles, 3 if narrow else len(handles) if len(handles) < 9 else 5, caption)
