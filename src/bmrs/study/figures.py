"""Pictures. Kept and removed differ in hatching as well as colour, so they stay apart in greyscale."""

import math
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from bmrs.posterior import LOG_A, LOG_B
from bmrs.study.training import GateLog

KEPT: dict[str, Any] = {"facecolor": "#1b4965", "edgecolor": "#1b4965"}
GONE: dict[str, Any] = {"facecolor": "#f4a259", "edgecolor": "#a65e1a", "hatch": "///"}
_MARKERS = "osD^vP*X"
# E[θ] of a gate about which the data say nothing: (b - a)/(log b - log a)
PRIOR_MEAN = (math.exp(LOG_B) - math.exp(LOG_A)) / (LOG_B - LOG_A)


def posterior_figure(log: GateLog, tolerance: float | None) -> Figure:
    """E[θ] of all units, ΔF against E[θ], and what is left of every layer.

    A removed unit is shown as it was when it went. ``tolerance``: where BMRS_N drew its line.
    """
    layers, gone = log.layers, log.removed_at.cpu() > 0
    mean, delta_f = log.mean.cpu(), log.delta_f.cpu()
    figure = Figure(figsize=(13, 4.2), layout="constrained")
    left, middle, right = figure.subplots(1, 3, width_ratios=(1, 1.25, 0.9))
    _histogram(left, mean, gone)
    _evidence(middle, mean, delta_f, gone, layers, tolerance)
    _widths(right, gone, layers)
    for axes, title in zip((left, middle, right), ("Gates", "Evidence", "What is left"), strict=True):
        axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _histogram(axes: Axes, mean: Tensor, gone: Tensor) -> None:
    bins = 20
    kept, removed = (torch.histc(mean[part], bins, 0.0, 1.0).tolist() for part in (~gone, gone))
    starts = [i / bins for i in range(bins)]
    style: dict[str, Any] = {"width": 1 / bins, "align": "edge", "linewidth": 0.8}
    axes.bar(starts, removed, label=f"removed ({int(gone.sum())}), as they were then", **style, **GONE)
    kept_in = [i for i in range(bins) if kept[i]]  # an empty bar would still draw its edge
    axes.bar(
        [starts[i] for i in kept_in],
        [kept[i] for i in kept_in],
        bottom=[removed[i] for i in kept_in],
        label=f"kept ({int((~gone).sum())})",
        **style,
        **KEPT,
    )
    axes.axvline(PRIOR_MEAN, color="black", linewidth=1.6, linestyle=":", zorder=5, label="mean of the prior")
    # Forgotten gates pile up in one bar; the scale keeps the few others visible.
    axes.set_yscale("symlog", linthresh=10, linscale=0.9)
    top = max(r + k for r, k in zip(removed, kept, strict=True))
    ticks = [t for t in (0, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000) if t <= max(top, 5)]
    axes.set_yticks(ticks, [str(t) for t in ticks])
    axes.set_yticks([], minor=True)
    axes.set_ylim(0, max(top, 10) * 8)  # room for the legend
    axes.set(xlabel="posterior mean E[θ] of the gate", ylabel="units")
    axes.legend(frameon=False)


def _evidence(
    axes: Axes,
    mean: Tensor,
    delta_f: Tensor,
    gone: Tensor,
    layers: dict[str, slice],
    tolerance: float | None,
) -> None:
    for (name, layer), marker in zip(layers.items(), _MARKERS * math.ceil(len(layers) / 8), strict=False):
        x, y, out = mean[layer].numpy(), delta_f[layer].numpy(), gone[layer].numpy()
        axes.scatter(x[~out], y[~out], marker=marker, s=26, alpha=0.8, label=name, color=KEPT["facecolor"])
        axes.scatter(x[out], y[out], marker=marker, s=26, facecolor="none", edgecolor=GONE["edgecolor"], linewidth=1.1)
    axes.set_yscale("symlog", linthresh=1.0)
    bottom = min(-10.0, float(delta_f.min()) * 2)
    axes.set_ylim(bottom, 3.0)
    axes.set_xlim(-0.02, 1.04)
    axes.axhline(0.0, color="0.6", linewidth=1)
    if tolerance is not None:
        axes.axhspan(-tolerance, 3.0, color=GONE["facecolor"], alpha=0.18, linewidth=0)
        axes.axhline(-tolerance, color=GONE["edgecolor"], linewidth=1.2, linestyle="--")
        axes.annotate(
            f"removed: ΔF ≥ -τ,  τ = {tolerance:.2f} nats", (1.03, -tolerance), (0, 4), ha="right", va="bottom",
            textcoords="offset points", color=GONE["edgecolor"], fontsize=9,
        )  # fmt: skip
    axes.set(
        xlabel="posterior mean E[θ] of the gate",
        ylabel="ΔF: log evidence without - with (nats)",
    )
    axes.legend(frameon=False, loc="lower left", fontsize=9)


def _widths(axes: Axes, gone: Tensor, layers: dict[str, slice]) -> None:
    before = [layer.stop - layer.start for layer in layers.values()]
    after = [int((~gone[layer]).sum()) for layer in layers.values()]
    rows = list(range(len(layers)))
    axes.barh(rows, before, height=0.62, **GONE)
    axes.barh(rows, after, height=0.62, **KEPT)
    for row, (b, a) in enumerate(zip(before, after, strict=True)):
        axes.text(b + max(before) * 0.02, row, f"{b} → {a}", va="center")
    axes.set_yticks(rows, list(layers))
    axes.invert_yaxis()
    axes.set_xlim(0, max(before) * 1.4)
    axes.set(xlabel="units")
