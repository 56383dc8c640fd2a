"""Draws the pictures of the documentation: the network of the README is trained on seed 0, the rest needs no training.

    python docs/figures.py                 # all of them, into docs/images: 20 s on one core
    python docs/figures.py evidence        # one

They are read without colour too: lines differ in dashes too. ``make demo`` draws demo.png.
"""

import argparse
import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import matplotlib as mpl
import torch
import torch.nn.functional as F
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyArrowPatch, FancyBboxPatch
from torch import Tensor, nn

import bmrs

IMAGES = Path(__file__).parent / "images"
KEPT, GONE, EDGE, GREY = "#1b4965", "#f4a259", "#a65e1a", "0.35"
TAU = bmrs.BMRS_N().tolerance
# The same numbers give the same file: letters as outlines, no date, names that do not change.
RC = {"svg.fonttype": "path", "svg.hashsalt": "bmrs", "font.size": 10.5, "axes.spines.top": False,
      "axes.spines.right": False}  # fmt: skip


@dataclass(frozen=True)
class Training:
    """μ and log σ of every gate, [times, units], and how many epochs had passed."""

    mu: Tensor
    log_sigma: Tensor
    epochs: Tensor

    def posterior(self, time: int) -> bmrs.TruncatedLogNormal:
        return bmrs.TruncatedLogNormal(self.mu[time].double(), self.log_sigma[time].double())

    @property
    def worth(self) -> Tensor:
        """-ΔF, [times, units]."""
        return -bmrs.evidence.spike(bmrs.TruncatedLogNormal(self.mu.double(), self.log_sigma.double()))


@cache
def training(epochs: int = 20, seed: int = 0) -> Training:
    """The gates of the README's network as it trains, with nothing removed."""
    torch.manual_seed(seed)
    x = torch.randn(1024, 20)
    y = (x[:, 0] * x[:, 1] > 0).long()
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    bank = bmrs.Pruner(model, x[:2], optimizer, num_examples=len(x), warmup=300).bank
    seen = [(bank.mu.detach().clone(), bank.log_sigma.detach().clone())]
    for _ in range(epochs):
        for number, batch in enumerate(torch.randperm(1024).split(32), 1):
            optimizer.zero_grad()
            F.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
            if number % 8 == 0:
                seen.append((bank.mu.detach().clone(), bank.log_sigma.detach().clone()))
    mu, log_sigma = (torch.stack(part) for part in zip(*seen, strict=True))
    return Training(mu, log_sigma, torch.linspace(0, epochs, len(seen)))


def density(q: bmrs.TruncatedLogNormal, edges: Tensor) -> Tensor:
    """Of log θ, averaged over the bins between the edges: [bins, units]."""
    pairs = zip(edges[:-1].exp().tolist(), edges[1:].exp().tolist(), strict=True)
    widths = edges.diff()[:, None]
    return torch.stack([q.log_mass(low, high) for low, high in pairs]).exp() / widths


# --- the pictures -----------------------------------------------------------------------------------------------------


def gate() -> Figure:
    """A hidden layer with a gate on every unit, as drawn in one forward pass."""
    figure = Figure(figsize=(8.2, 3.7), layout="constrained")
    axes = figure.subplots()
    inputs, outputs = (2.5, 1.5, 0.5), (2.1, 0.9)
    for height, theta in zip((3, 2, 1, 0), (0.98, 0.03, 0.91, 0.00), strict=True):
        gone = theta < 0.1
        line = {"color": EDGE if gone else KEPT, "linestyle": (0, (2, 2)) if gone else "-", "zorder": 1}
        for start in inputs:
            axes.plot([0, 2.4], [start, height], color="0.75", linewidth=0.8, zorder=1)
        axes.plot([2.4, 4.8], [height, height], linewidth=1.4, **line)
        for end in outputs:
            axes.plot([5.4, 8], [height, end], linewidth=0.6 + 1.6 * theta, **line)
        axes.add_patch(Circle((2.4, height), 0.27, facecolor="white", edgecolor=KEPT, linewidth=1.6, zorder=2))
        axes.add_patch(
            FancyBboxPatch((4.5, height - 0.2), 1.2, 0.4, boxstyle="round,pad=0.05", zorder=2, linewidth=1.2,
                           facecolor="white" if gone else "#dbe7ef", edgecolor=EDGE if gone else KEPT)
        )  # fmt: skip
        axes.text(5.1, height, f"θ = {theta:.2f}", ha="center", va="center_baseline", zorder=3)
    for x, places, colour in ((0, inputs, "0.5"), (8, outputs, KEPT)):
        for place in places:
            axes.add_patch(Circle((x, place), 0.22, facecolor="white", edgecolor=colour, linewidth=1.4, zorder=2))
    axes.text(3.45, 3.12, "output", color=GREY, fontsize=9.5, ha="center")
    axes.text(5.1, 3.55, "1: all of it passes; 0: the unit is off", color=GREY, fontsize=9.5, ha="center")
    for x, text in ((0, "inputs"), (2.4, "units of a layer"), (5.1, "gates, drawn anew\nfor every example"),
                    (8, "the layer that\nconsumes them")):  # fmt: skip
        axes.text(x, -0.6, text, ha="center", va="top", color=GREY)
    axes.set(xlim=(-0.9, 9.1), ylim=(-1.3, 3.8), aspect="equal")
    axes.set_axis_off()
    return figure


def posteriors() -> Figure:
    """What is believed of a useful gate and of a forgotten one, before and after training."""
    seen = training()
    last = len(seen.epochs) - 1
    worth = seen.worth[last]
    useful, forgotten = int(worth.argmax()), int(worth.argsort()[len(worth) // 2])
    edges = torch.cat([torch.linspace(-20, -2, 60), torch.linspace(-2, 0, 200)[1:]]).double()
    middle = (edges[1:] + edges[:-1]) / 2
    figure = Figure(figsize=(8.2, 3.4), layout="constrained")
    views = figure.subplots(1, 2, sharey=True)
    for axes, time, title in ((views[0], 0, "Before training"), (views[1], last, "After 20 epochs")):
        values = density(seen.posterior(time), edges)
        axes.fill_between([-20, 0], 1e-3, 1 / 20, facecolor="0.92", linewidth=0)
        axes.text(-19.4, 0.0055, "prior: all sizes of θ alike", color=GREY, va="center")
        axes.plot(middle, values[:, useful], color=KEPT, linewidth=2)
        if time == 0:
            axes.text(-1.2, 12, "every gate: θ is near 1", ha="right", va="center", color=KEPT)
        else:
            axes.plot(middle, values[:, forgotten], color=EDGE, linewidth=2, linestyle="--")
            axes.text(-1.2, 12, f"a useful one: still near 1\n-ΔF = {worth[useful]:,.0f} nats", ha="right",
                      va="center", color=KEPT)  # fmt: skip
            axes.text(-1.6, 0.3, f"a forgotten one: any size\n-ΔF = {worth[forgotten]:.2f} nats", ha="right",
                      va="center", color=EDGE)  # fmt: skip
        axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
        axes.set(yscale="log", ylim=(1e-3, 400), xlim=(-20, 0.4), xlabel="log θ  (-20: off, 0: on)")
    views[0].set_ylabel("density")
    return figure


def evidence() -> Figure:
    """The evidence as the posterior's density over the prior's where the unit is off."""
    edges = torch.linspace(-20, 0, 200).double()
    middle = (edges[1:] + edges[:-1]) / 2
    mu = torch.tensor([-2.0, -2.0, -1.0], dtype=torch.float64)
    q = bmrs.TruncatedLogNormal(mu, torch.tensor([5.0, 2.2, 1.62], dtype=torch.float64))
    values, delta = density(q, edges), bmrs.evidence.spike(q).tolist()
    figure = Figure(figsize=(7.8, 3.9), layout="constrained")
    axes = figure.subplots()
    axes.plot([-24.4, 0], [1 / 20, 1 / 20], color="0.6", linewidth=1.2)
    axes.axvline(-20, color="0.8", linewidth=1, zorder=0)
    axes.text(0.25, 0.049, "prior, and forgotten", color=EDGE, va="center")
    axes.text(-26.2, 0.058, f"forgotten: ΔF = {delta[0]:.2f}", color=EDGE, va="bottom")
    for unit, colour, dashes, name in ((0, EDGE, "--", ""), (1, "0.25", "-.", "undecided"), (2, KEPT, "-", "useful")):
        axes.plot(middle, values[:, unit], linestyle=dashes, color=colour, linewidth=2)
        if name:
            low, place = float(values[0, unit]), -20.0 - (1.2 if unit == 1 else 3.6)
            axes.text(0.25, float(values[-1, unit]), name, color=colour, va="center")
            axes.plot([place, -20], [low, low], ":", color=colour, linewidth=1)
            axes.add_patch(FancyArrowPatch((place, 1 / 20), (place, low), arrowstyle="-|>", mutation_scale=11,
                                           color=colour, linewidth=1.6, shrinkA=0, shrinkB=0))  # fmt: skip
            axes.text(place - 0.2, low * 0.8, f"{name}:\nΔF = {delta[unit]:.1f}", color=colour, ha="center", va="top")
    axes.set(yscale="log", ylim=(2e-5, 0.6), xlim=(-26.5, 5.2), xlabel="log θ", ylabel="density (log scale)")
    axes.set_xticks([-20, -15, -10, -5, 0], ["-20: off", "-15", "-10", "-5", "0: on"])
    return figure


def trained() -> Figure:
    """The evidence for keeping each of 64 gates while a network trains."""
    seen = training()
    worth, last = seen.worth, len(seen.epochs) - 1
    kept = worth[last] > TAU
    figure = Figure(figsize=(7.6, 4.2), layout="constrained")
    axes = figure.subplots()
    for unit in (~kept).nonzero().flatten().tolist():
        axes.plot(seen.epochs, worth[:, unit], "--", color=EDGE, linewidth=0.7, alpha=0.6)
    for unit in kept.nonzero().flatten().tolist():
        axes.plot(seen.epochs, worth[:, unit], color=KEPT, linewidth=1.8)
    _tolerance(axes, float(seen.epochs[-1]) * 0.985, "right")
    axes.text(19.7, 6e3, f"{int(kept.sum())} units the task needs", ha="right", va="bottom", color=KEPT)
    low = float(worth[last][~kept].min())
    axes.text(19.7, low * 0.55, f"{int((~kept).sum())} forgotten ones: towards 0, and never below it", ha="right",
              va="top", color=EDGE)  # fmt: skip
    axes.set(yscale="log", ylim=(1.5e-3, 6e4), xlim=(0, 20), xlabel="epoch")
    axes.set_xticks(range(0, 21, 5))
    axes.set_ylabel("-ΔF: evidence for keeping the unit (nats)")
    return figure


def tolerance() -> Figure:
    """The evidence for keeping a gate as its posterior widens towards the prior."""
    log_sigma = torch.linspace(-5, 5, 1000, dtype=torch.float64)
    figure = Figure(figsize=(8.5, 4.2), layout="constrained")
    axes = figure.subplots()
    for mu, style in ((0.5, "-"), (0.0, "--"), (-3.0, "-."), (-8.0, ":")):
        q = bmrs.TruncatedLogNormal(torch.full_like(log_sigma, mu), log_sigma)
        axes.plot(log_sigma, -bmrs.evidence.spike(q), style, color=KEPT, linewidth=2, label=f"μ = {mu:g}")
    _tolerance(axes, -4.9, "left")
    axes.text(
        -4.9, 1.4e-3, "the printed rule would remove only what is below 0, off this axis", va="bottom", color="0.3"
    )
    axes.set_yscale("log")
    axes.set(ylim=(1e-3, 1e8), xlim=(-5, 5), xlabel="log σ (training starts at -5)")
    axes.set_ylabel("-ΔF: evidence for keeping the unit (nats)")
    axes.legend(frameon=False, loc="upper right")
    return figure


def _tolerance(axes: Axes, x: float, side: str) -> None:
    axes.axhspan(1e-3, TAU, color=GONE, alpha=0.2, linewidth=0)
    axes.axhline(TAU, color=EDGE, linestyle="--", linewidth=1.2)
    text = f"worth less than τ = ½ log 2π = {0.5 * math.log(2 * math.pi):.2f} nats: removed"
    axes.text(x, TAU * 0.8, text, ha=side, va="top", color=EDGE)


FIGURES = {
    "gate.svg": gate, "posteriors.svg": posteriors, "evidence.svg": evidence, "trained.svg": trained,
    "tolerance.png": tolerance,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="of figures; default all")
    wanted = parser.parse_args().names
    with mpl.rc_context(RC):
        for file, draw in FIGURES.items():
            if not wanted or Path(file).stem in wanted:
                svg = file.endswith("svg")
                draw().savefig(IMAGES / file, dpi=160, metadata={"Date": None} if svg else None, facecolor="white")
                print(IMAGES / file)


if __name__ == "__main__":
    main()
