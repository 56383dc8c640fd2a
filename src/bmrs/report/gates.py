"""Posteriors of the gates and how alike the criteria rank them, in a form small enough to draw."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from bmrs.criteria import PUBLISHED_TOLERANCE
from bmrs.posterior import LOG_A, LOG_B
from bmrs.report.averages import embedded, number, short, significant

Run = Mapping[str, Any]
# E[θ] of a gate about which the data say nothing: (b - a)/(log b - log a)
PRIOR_MEAN = (math.exp(LOG_B) - math.exp(LOG_A)) / (LOG_B - LOG_A)
BINS = 25
POINTS = 1500  # of a setting; more are thinned evenly


def gates(runs: Sequence[Run]) -> dict[str, Any]:
    """Setting → E[θ] and ΔF of one seed's units, and a histogram of E[θ], its mean over the seeds."""
    by_setting: dict[str, list[Run]] = {}
    for run in runs:
        by_setting.setdefault(str(run["setting"]), []).append(run)
    return {setting: _of_setting(mine) for setting, mine in by_setting.items()}


def _of_setting(runs: Sequence[Run]) -> dict[str, Any]:
    first = runs[0]
    mean = [number(value) for value in first["mean"]]
    names = list(dict.fromkeys(map(str, first["layer"])))
    units = min(len(mean), len(first["layer"]))
    thinned = range(0, units, -(-units // POINTS) if units else 1)
    gone = first.get("removed_at") if isinstance(first.get("removed_at"), list) else None
    methods = [str(m) for m, scores in first["delta_f"].items() if isinstance(scores, list)]

    def score(method: str, i: int) -> float | None:
        value = number(first["delta_f"][method][i]) if i < len(first["delta_f"][method]) else None
        return None if value is None else significant(value)

    return {
        "seed": first.get("seed"),
        "n": len(runs),
        "units": units,
        "layers": names,
        "layer": [names.index(str(first["layer"][i])) for i in thinned],
        "mean": [None if (m := mean[i]) is None else short(m, 4) for i in thinned],
        "delta_f": {method: [score(method, i) for i in thinned] for method in methods},
        "tolerance": {method: tolerance(method, first) for method in methods},
        # Units that went during training are shown as they were then, and the rule is not asked again.
        "removed_by": first.get("removed_by"),
        "removed": None if gone is None else [int(bool(gone[i])) if i < len(gone) else 0 for i in thinned],
        "histogram": {method: _histogram(runs, method) for method in methods},
    }


def tolerance(method: str, run: Run) -> float:
    """τ: a unit goes where ΔF ≥ -τ. The run's own where it says so."""
    own = number(run.get("tolerance"))
    return short(own if own is not None else PUBLISHED_TOLERANCE if method == "bmrs_n" else 0.0, 4)


def _histogram(runs: Sequence[Run], method: str) -> dict[str, list[float]]:
    """Units in each of the bins of E[θ] in [0, 1], kept and removed by the method: means over the seeds."""
    kept, removed = [0] * BINS, [0] * BINS
    for run in runs:
        tau = tolerance(method, run)
        gone = run.get("removed_at") if isinstance(run.get("removed_at"), list) else None
        for i, (m, score) in enumerate(zip(run["mean"], run["delta_f"].get(method) or (), strict=False)):
            theta, delta = number(m), number(score)
            if theta is None:
                continue
            out = bool(gone[i]) if gone is not None and i < len(gone) else delta is not None and delta >= -tau
            (removed if out else kept)[min(BINS - 1, max(0, int(theta * BINS)))] += 1
    return {"kept": [short(k / len(runs), 2) for k in kept], "removed": [short(r / len(runs), 2) for r in removed]}


def correlations(groups: Mapping[tuple[Any, ...], Sequence[Run]]) -> dict[str, Any]:
    """Setting → the criteria and their Spearman rank correlations, means over the seeds."""
    found = {}
    for (setting,), runs in groups.items():
        methods = [str(name) for name in runs[0]["methods"]]
        alike = [run for run in runs if [str(name) for name in run["methods"]] == methods]
        found[str(setting)] = {"methods": methods, "n": len(alike), "spearman": _means(alike, len(methods))}
    return found


def _means(runs: Sequence[Run], size: int) -> list[list[float | None]]:
    def cell(run: Run, i: int, j: int) -> Any:
        rows = run["spearman"]
        return rows[i][j] if i < len(rows) and isinstance(rows[i], list) and j < len(rows[i]) else None

    table = [[embedded((cell(run, i, j) for run in runs), 3) for j in range(size)] for i in range(size)]
    return [[None if mean is None else mean[0] for mean in row] for row in table]
