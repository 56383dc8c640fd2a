"""What the page says first: what was pruned, how much of it went, and at what accuracy."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from bmrs.report.words import count_of, percent, signed, span

Digest = Mapping[str, Any]


@dataclass(frozen=True)
class Row:
    """One setting, pruned by the method the headline speaks of. Shares, not percentages."""

    setting: str
    removed: float
    accuracy: float | None
    whole: float | None
    n: int
    # standard deviations over the seeds, None for one seed
    removed_sd: float | None = None
    accuracy_sd: float | None = None
    whole_sd: float | None = None
    parameters: tuple[float, float] | None = None  # before, after
    multiply_adds: tuple[float, float] | None = None

    @property
    def points(self) -> float | None:
        """Accuracy gained, in percentage points."""
        return None if self.accuracy is None or self.whole is None else 100 * (self.accuracy - self.whole)


@dataclass(frozen=True)
class Headline:
    sentence: str
    lede: str
    method: str
    rows: list[Row]


def headline(data: Digest) -> Headline:
    """From the networks pruned in training where there are any, else from the curves, else what there is."""
    method, rows = _pruned(data)
    if rows:
        return Headline(_sentence(data, method, rows), _lede(data, method, rows), method, rows)
    method, rows = _stopped(data)
    if rows:
        lede = "Pruned after training, where the method's own rule stops, and fine-tuned for one epoch."
        return Headline(_sentence(data, method, rows), lede, method, rows)
    for part, sentence, lede in (
        ("curves", "Accuracy as more and more is removed", "Pruned after training, then fine-tuned for one epoch."),
        (
            "gates",
            "What the gates learned",
            "The posteriors of the gates after training, and the evidence for each unit.",
        ),
        ("correlations", "How alike the criteria rank", "Rank correlations between the scores of the same units."),
        ("timing", "What a pass takes", "Times before gates, with gates, and after removal."),
    ):
        if data[part]:
            return Headline(sentence, lede, "", [])
    return Headline("Nothing to show yet", "The results hold no runs.", "", [])


def _pick(methods: Iterable[str]) -> str:
    """The method to speak of: BMRS_N, else another BMRS, else the first."""
    names = [name for name in methods if name != "none"]
    return next(
        (n for n in names if n == "bmrs_n"), next((n for n in names if n.startswith("bmrs")), (names or [""])[0])
    )


def _pruned(data: Digest) -> tuple[str, list[Row]]:
    method = _pick(dict.fromkeys(m for cells in data["pruned"].values() for m in cells))
    rows = []
    for key in data["settings"]:
        cells = data["pruned"].get(key, {})
        cell = cells.get(method)
        removed = cell and (cell["actual"] or cell["published"])
        if not cell or not removed:
            continue
        whole = cells["none"]["accuracy"] if "none" in cells else None
        before = data["settings"][key]
        rows.append(
            Row(
                key, removed[0], cell["accuracy"] and cell["accuracy"][0], whole and whole[0], cell["n"],
                removed[1], cell["accuracy"] and cell["accuracy"][1], whole and whole[1],
                *((before[field], cell[field][0]) if before.get(field) and cell[field] else None
                  for field in ("parameters", "multiply_adds")),
            )
        )  # fmt: skip
    return method, rows


def _stopped(data: Digest) -> tuple[str, list[Row]]:
    method = _pick(
        dict.fromkeys(m for part in data["curves"].values() for m, c in part["methods"].items() if c["boundary"])
    )
    rows = []
    for key in data["settings"]:
        part = data["curves"].get(key)
        stop = part and part["methods"].get(method, {}).get("boundary")
        removed = stop and (stop["actual"] or stop["published"])
        if removed:
            whole = part["whole"]
            sds = removed[1], stop["accuracy"][1], whole and whole[1]
            rows.append(Row(key, removed[0], stop["accuracy"][0], whole and whole[0], len(stop["seeds"]), *sds))
    return method, rows


def _sentence(data: Digest, method: str, rows: list[Row]) -> str:
    name = data["methods"].get(method, method)
    if len(rows) == 1:
        row = rows[0]
        setting = data["settings"][row.setting]["name"]
        return f"{setting}: {percent(row.removed)} of the parameters removed" + (
            "" if row.accuracy is None else f", {percent(row.accuracy)} test accuracy"
        )
    removed = span([100 * row.removed for row in rows])
    what = count_of(len(rows), "network")
    points = [row.points for row in rows if row.points is not None]
    if not points:
        return f"{name} removed {removed} % of the parameters of {what}"
    return f"{name} removed {removed} % of the parameters of {what}; accuracy changed by {changes(points)} points"


def changes(points: list[float]) -> str:
    """
    >>> changes([-0.5, -11.3]), changes([-0.2])
    ('−11.3 to −0.5', '−0.2')
    """
    low, high = signed(min(points)), signed(max(points))
    return low if low == high else f"{low} to {high}"


def _lede(data: Digest, method: str, rows: list[Row]) -> str:
    seeds = {row.n for row in rows}
    name = data["methods"].get(method, method)
    said = f"Units went while the networks trained, as {name} decided"
    if len(rows) == 1:
        said = f"Units went while the network trained, as {name} decided"
        if rows[0].points is not None and rows[0].whole is not None:
            said += f"; the whole network reaches {percent(rows[0].whole)} ({signed(rows[0].points)} points)"
    counted = count_of(seeds.pop(), "seed") if len(seeds) == 1 else f"{min(seeds)} to {max(seeds)} seeds"
    counted = counted.capitalize() + (" each" if len(rows) > 1 else "")
    if any(row.accuracy_sd is not None for row in rows):
        counted += ", shown as mean ± standard deviation" if len(rows) > 1 else ""
    return f"{said}. {counted}. Parameters are counted in the network that is left."
