"""Figure 1: what a trained network's gates look like, and what the evidence says of them."""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from bmrs.criteria import PUBLISHED_TOLERANCE
from bmrs.posterior import LOG_A, LOG_B
from bmrs.study import plot_style, summary
from bmrs.study.figures import GONE, KEPT, PRIOR_MEAN
from bmrs.study.summary import Content

Array = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

_SETTING = "mlp-cifar10"  # the paper's choice for this figure
_MARKERS = "osD^vPX*<>hp"
_P1, _P2 = 8, 23
_SPIKE = "#d55e00"


@plot_style.styled
def figure1(content: Content, setting: str | None = None, seed: int | None = None) -> Figure:
    """E[θ] of all gates, priors and posteriors, ΔF against E[θ], and what BMRS_N removes, of one trained network.

    ``setting``: the MLP on CIFAR-10 unless said, or else the first there is. ``seed``: the first unless said.
    """
    summary.check_kind(content, "posteriors")
    run = _chosen(content, setting, seed)
    needed = [run[name] for name in ("mu", "log_sigma", "mean")] + [run["delta_f"]["bmrs_n"]]
    usable = [i for i, values in enumerate(zip(*needed, strict=True)) if None not in values]
    if not usable:
        raise ValueError("content has no gate with a finite E[θ] and ΔF in this run: choose another seed.")

    def column(values: Sequence[float | None]) -> Array:
        return np.array([values[i] for i in usable], float)

    mean, delta_f = column(run["mean"]), column(run["delta_f"]["bmrs_n"])
    layers = [run["layer"][i] for i in usable]
    gone = delta_f >= -PUBLISHED_TOLERANCE
    figure = Figure(figsize=(plot_style.PAGE, 4.6), layout="constrained")
    (first, second), (third, fourth) = figure.subplots(2, 2, width_ratios=(1, 1.15))
    _histogram(first, mean, gone)
    _priors(second, column(run["mu"]), column(run["log_sigma"]), mean, gone)
    _evidence(third, mean, delta_f, gone, layers)
    _widths(fourth, gone, layers)
    titles = ("gates after training", "priors and posteriors", "evidence", "what is removed")
    for i, (axes, title) in enumerate(zip((first, second, third, fourth), titles, strict=True)):
        axes.set_title(plot_style.letter(i) + title)
    name = next(s.name for s in summary.settings(content) if s.key == run["setting"])
    figure.suptitle(f"{plot_style.plain(name)}, seed {run['seed']}", fontsize=8)
    return figure


def _chosen(content: Content, setting: str | None, seed: int | None) -> Mapping[str, Any]:
    keys = [s.key for s in summary.settings(content)]
    if setting is None:
        setting = _SETTING if _SETTING in keys else keys[0]
    runs: dict[int, Mapping[str, Any]] = {run["seed"]: run for run in content["runs"] if run["setting"] == setting}
    if not runs:
        raise ValueError(f"setting '{setting}' has no runs: choose one of {', '.join(keys)}.")
    seed = min(runs) if seed is None else seed
    if seed not in runs:
        raise ValueError(f"seed {seed} has no run in '{setting}': choose one of {', '.join(map(str, sorted(runs)))}.")
    return runs[seed]


def _histogram(axes: Axes, mean: Array, gone: Mask) -> None:
    edges = np.linspace(0.0, 1.0, 26)
    removed, kept = (np.histogram(mean[part], edges)[0] for part in (gone, ~gone))
    style: dict[str, Any] = {"width": edges[1], "align": "edge", "linewidth": 0.6}
    axes.bar(edges[:-1], removed, label=f"removed by BMRS$_N$ ({gone.sum()})", **style, **GONE)
    some = kept > 0  # an empty bar would still draw its edge
    label = f"kept ({(~gone).sum()})"
    axes.bar(edges[:-1][some], kept[some], bottom=removed[some], label=label, **style, **KEPT)
    axes.axvline(PRIOR_MEAN, color="black", linestyle=":", label="E[θ] of the prior")
    # Most gates are forgotten and fall in one bar; the scale keeps the others visible.
    axes.set_yscale("symlog", linthresh=10, linscale=0.9)
    top = int((removed + kept).max())
    ticks = [t for t in (0, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000) if t <= max(top, 5)]
    axes.set_yticks(ticks, [str(t) for t in ticks])
    axes.set_yticks([], minor=True)
    axes.set_ylim(0, max(top, 10) * 1.3)
    axes.set(xlim=(0, 1), xlabel="posterior mean E[θ] of a gate", ylabel="gates (linear to 10, then logarithmic)")
    axes.legend(frameon=False, loc="upper center")


def _priors(axes: Axes, mu: Array, log_sigma: Array, mean: Array, gone: Mask) -> None:
    """Densities over log θ, where the prior is flat. The spike is an arrow: its density at log a is 8·10⁵."""
    x = np.linspace(LOG_A, LOG_B, 20_001)
    axes.axhline(1.0 / (LOG_B - LOG_A), color="black", linestyle="--", label="prior: log-uniform")
    (spike,) = axes.plot([], [], color=_SPIKE, marker="^", markersize=3.5, label="reduced prior of BMRS$_N$: a spike")
    low, high = -_P2 * math.log(2.0), -_P1 * math.log(2.0)
    box: dict[str, Any] = {"facecolor": "#cfe8dd", "edgecolor": "#009e73", "hatch": "....", "linewidth": 0.8}
    axes.fill_between([low, high], 1.0 / (high - low), label=f"reduced prior of BMRS$_U$-{_P1}", **box)
    tallest = 1.0
    for part, style, word in (
        (gone, {"color": GONE["edgecolor"], "linestyle": (0, (4, 1, 1, 1))}, "removed"),
        (~gone, {"color": KEPT["facecolor"]}, "kept"),
    ):
        unit = _typical(mean, part)
        if unit is not None:
            density = _density(mu[unit], log_sigma[unit], x)
            tallest = max(tallest, float(density.max()))
            label = f"posterior of a {word} gate, E[θ] = {mean[unit]:.2g}"
            axes.plot(x, density, linewidth=1.5, label=label, **style)
    axes.set_yscale("log")
    axes.set(xlim=(LOG_A - 0.6, LOG_B + 0.6), ylim=(0.01, 3.0 * tallest))
    arrow = {"arrowstyle": "-|>", "color": spike.get_color(), "linewidth": 1.5, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", (LOG_A, 2.5 * tallest), (LOG_A, 0.01), arrowprops=arrow)
    axes.set_xticks(range(round(LOG_A), round(LOG_B) + 1, 5))
    axes.set(xlabel="log θ (natural logarithm)", ylabel="density of log θ (logarithmic)")
    axes.legend(frameon=False, loc="upper center", borderaxespad=0)


def _typical(mean: Array, part: Mask) -> int | None:
    """The gate in the middle of those, by E[θ]."""
    units = np.flatnonzero(part)
    return int(units[np.argsort(mean[units])[len(units) // 2]]) if len(units) else None


def _density(mu: float, log_sigma: float, x: Array) -> Array:
    """Of log θ under the truncated log-normal, on a fine regular grid from log a to log b."""
    exponent = -0.5 * ((x - mu) / math.exp(log_sigma)) ** 2
    weight: Array = np.exp(exponent - exponent.max())
    normalised: Array = weight / (weight.sum() * (x[1] - x[0]))
    return normalised


def _evidence(axes: Axes, mean: Array, delta_f: Array, gone: Mask, layers: Sequence[str]) -> None:
    names = list(dict.fromkeys(layers))
    for i, name in enumerate(names):
        here = np.array([layer == name for layer in layers])
        marker = _MARKERS[i % len(_MARKERS)]
        for part, style in (
            (here & ~gone, {"color": KEPT["facecolor"], "linewidth": 0, "alpha": 0.8}),
            (here & gone, {"facecolor": "none", "edgecolor": GONE["edgecolor"], "linewidth": 0.7}),
        ):
            axes.scatter(mean[part], delta_f[part], marker=marker, s=9, **style)
    axes.set_yscale("symlog", linthresh=1.0)
    top = max(3.0, 1.5 * float(delta_f.max()))
    axes.set(xlim=(-0.02, 1.04), ylim=(min(-10.0, 3 * float(delta_f.min())), top))
    axes.axhline(0.0, color="0.6", linewidth=0.8)
    axes.axhspan(-PUBLISHED_TOLERANCE, top, color=GONE["facecolor"], alpha=0.18, linewidth=0)
    axes.axhline(-PUBLISHED_TOLERANCE, color=GONE["edgecolor"], linestyle="--")
    rule = f"removed: ΔF ≥ −τ, τ = {PUBLISHED_TOLERANCE:.2f}"
    axes.text(1.03, top * 0.93, rule, ha="right", va="top", color="#7a4310")
    axes.set(xlabel="posterior mean E[θ] of a gate", ylabel="ΔF: log evidence without − with (nats)")
    handles = [
        Line2D([], [], linestyle="none", marker=marker, color="0.3", markersize=3, label=plot_style.plain(name))
        for name, marker in zip(names, itertools.cycle(_MARKERS), strict=False)
    ]
    axes.legend(handles=handles, frameon=False, loc="lower left", ncols=1 + (len(names) - 1) // 4, columnspacing=1)


def _widths(axes: Axes, gone: Mask, layers: Sequence[str]) -> None:
    names = list(dict.fromkeys(layers))
    before = [layers.count(name) for name in names]
    after = [sum(layer == name and not g for layer, g in zip(layers, gone, strict=True)) for name in names]
    rows = range(len(names))
    axes.barh(rows, before, height=0.64, linewidth=0.6, **GONE)
    axes.barh(rows, after, height=0.64, linewidth=0.6, **KEPT)
    for row, (b, a) in enumerate(zip(before, after, strict=True)):
        axes.text(b + max(before) * 0.02, row, f"{b} → {a}", va="center")
    axes.set_yticks(rows, [plot_style.plain(name) for name in names])
    axes.invert_yaxis()
    axes.set(xlim=(0, max(before) * 1.25), ylim=(len(names) - 0.5, -1.4), xlabel="units")
    handles = [Patch(**GONE, label="removed"), Patch(**KEPT, label="kept")]
    axes.legend(handles=handles, frameon=False, loc="upper right", ncols=2, borderaxespad=0)
