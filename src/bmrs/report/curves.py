"""Accuracy against compression after training: the mean curve, where the evidence stops, and the knee."""

from collections.abc import Mapping, Sequence
from typing import Any

from bmrs.report.averages import average, embedded, number, short
from bmrs.study.summary import ordered_methods

Run = Mapping[str, Any]
COUNTINGS = ("published", "actual")


def curves(groups: Mapping[tuple[Any, ...], Sequence[Run]]) -> dict[str, Any]:
    """Setting → {"whole": accuracy before removal, "methods": method → curve}."""
    found: dict[str, dict[str, Any]] = {}
    for (setting, method), runs in groups.items():
        whole = embedded(run.get("whole") for run in runs)
        place = found.setdefault(str(setting), {"whole": whole, "methods": {}})
        place["whole"] = place["whole"] or whole
        place["methods"][str(method)] = _curve(runs, whole)
    for place in found.values():
        place["methods"] = {name: place["methods"][name] for name in ordered_methods(place["methods"])}
    return found


def _curve(runs: Sequence[Run], whole: list[float | None] | None) -> dict[str, Any]:
    at: dict[float, list[tuple[Any, ...]]] = {}
    for run in runs:
        columns = [run["compression"].get(counting) or [] for counting in COUNTINGS]
        for i, fraction in enumerate(run["fractions"]):
            if number(fraction) is not None:
                row = (*(_item(column, i) for column in columns), _item(run["accuracy"], i))
                at.setdefault(round(float(fraction), 6), []).append(row)
    points = []
    for fraction in sorted(at):
        rows = at[fraction]
        published, actual, accuracy = (average(column) for column in zip(*rows, strict=True))
        # Where a criterion stopped early on most seeds, the mean of the rest would bend the curve.
        if accuracy.n and 2 * len(rows) >= len(runs):
            points.append((fraction, published, actual, accuracy))
    shown: dict[str, list[Any]] = {
        "fraction": [short(f, 4) for f, *_ in points],
        "published": [_short(p.mean) if p.n else None for _, p, _, _ in points],
        "actual": [_short(a.mean) if a.n else None for *_, a, _ in points],
        "accuracy": [_short(y.mean) for *_, y in points],
        "sd": [None if y.sd is None else _short(y.sd) for *_, y in points],
    }
    if whole is not None and points and points[0][0] > 0:
        for column, value in zip(shown.values(), (0, 0, 0, whole[0], whole[1]), strict=True):
            column.insert(0, value)
    return {
        "n": len(runs),
        **shown,
        "boundary": _boundary(runs),
        "knee": {counting: knee(shown[counting], shown["accuracy"]) for counting in COUNTINGS},
    }


def _boundary(runs: Sequence[Run]) -> dict[str, Any] | None:
    """Mean and spread of where the method's own rule stops, and the seeds one by one."""
    stops = [run["boundary"] for run in runs if isinstance(run.get("boundary"), Mapping)]
    fields = ("fraction", *COUNTINGS, "accuracy")
    means = {field: embedded(stop.get(field) for stop in stops) for field in fields}
    if means["accuracy"] is None:
        return None
    seeds = [[_number(stop.get(field), 6) for field in (*COUNTINGS, "accuracy")] for stop in stops]
    return {**means, "seeds": seeds}


def knee(x: Sequence[float | None], y: Sequence[float | None]) -> int | None:
    """The point furthest above the chord from the curve's first point to its last; None where none is above.

    >>> knee([0.0, 0.5, 0.9, 1.0], [0.9, 0.9, 0.8, 0.1])
    2
    """
    known = [(i, a, b) for i, (a, b) in enumerate(zip(x, y, strict=True)) if a is not None and b is not None]
    if len(known) < 3:
        return None
    known.sort(key=lambda point: point[1])
    (_, x0, y0), (_, x1, y1) = known[0], known[-1]
    if x1 == x0:
        return None
    height, best = max((b - y0 - (y1 - y0) * (a - x0) / (x1 - x0), i) for i, a, b in known)
    return best if height > 1e-9 else None


def _item(column: Sequence[Any], i: int) -> Any:
    return column[i] if i < len(column) else None


def _short(value: float) -> float:
    return short(value, 6)


def _number(value: Any, digits: int) -> float | None:
    known = number(value)
    return None if known is None else short(known, digits)
