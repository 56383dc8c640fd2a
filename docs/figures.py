"""Draws the figures of the documentation that need no training.

python docs/figures.py                 # writes docs/images/tolerance.png
"""

from pathlib import Path

import torch
from matplotlib.figure import Figure

import bmrs


def tolerance() -> Figure:
    """The evidence for keeping a gate as its posterior widens towards the prior."""
    log_sigma = torch.linspace(-5, 5, 1000, dtype=torch.float64)
    figure = Figure(figsize=(8.5, 4.2), layout="constrained")
    axes = figure.subplots()
    for mu, style in ((0.5, "-"), (0.0, "--"), (-3.0, "-."), (-8.0, ":")):
        q = bmrs.TruncatedLogNormal(torch.full_like(log_sigma, mu), log_sigma)
        axes.plot(log_sigma, -bmrs.evidence.spike(q), style, color="#1b4965", linewidth=2, label=f"μ = {mu:g}")
    tau = bmrs.BMRS_N().tolerance
    axes.axhspan(1e-3, tau, color="#f4a259", alpha=0.2, linewidth=0)
    axes.axhline(tau, color="#a65e1a", linestyle="--", linewidth=1.2)
    axes.text(-4.9, tau * 0.8, "worth less than τ = ½ log 2π = 0.92 nats: removed", va="top", color="#a65e1a")
    axes.text(
        -4.9, 1.4e-3, "the printed rule would remove only what is below 0, off this axis", va="bottom", color="0.3"
    )
    axes.set_yscale("log")
    axes.set(ylim=(1e-3, 1e8), xlim=(-5, 5), xlabel="log σ (training starts at -5)")
    axes.set_ylabel("-ΔF: evidence for keeping the unit (nats)")
    axes.legend(frameon=False, loc="upper right")
    axes.spines[["top", "right"]].set_visible(False)
    return figure


if __name__ == "__main__":
    tolerance().savefig(Path(__file__).parent / "images" / "tolerance.png", dpi=160)
