"""Table 2 and what the authors do not report: what the networks left cost when they run."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bmrs.study import answers, footers, summary, tables
from bmrs.study.large.measuring import faster
from bmrs.study.large.recipe import SETTINGS, Recipe
from bmrs.study.markup import Grid, Group
from bmrs.study.summary import Cell, Content, Setting, Spread
from bmrs.study.tables import NOTHING, Tables, amount

PLACES = {"cuda": "GPU", "cpu": "processor"}
Row = Mapping[str, Any]
_SAID = {  # of a recipe, what the table says in words of its own or not at all
    "weights", "vit_weights", "scratch", "vit", "patch", "step", "channels_last", "images", "phi_lr", "gates",
}  # fmt: skip
_NAMES = {"learning_rate": "learning rate", "fine_tune": "epochs of fine-tuning", "log_sigma": "first log σ",
          "round_to": "widths in multiples of", "prune_every": "epochs between removals"}  # fmt: skip


def table2(content: Content) -> Tables:
    """Compression and accuracy beside the paper's where the gates are the paper's; what is left, and how fast it is."""
    cells, settings = summary.cells(content), summary.settings(content)
    n = summary.usual_n(cell.accuracy for cell in cells)
    grids = []
    if all(as_published(content, setting) for setting in settings):
        grids += [tables.beside_paper(name, own, cells, n) for name, own in tables.by_network(settings, cells)]
    grids += [_left(setting, content, cells, n) for setting in settings]
    grids += [grid for setting in settings if (grid := _speed(setting, content)) is not None]
    notes = [
        *[_recipe(setting, content) for setting in settings],
        "Points lost are those below the same study's network without gates. "
        + (f"{tables.over_seeds(n)} " if n > 1 else "One seed, so there is no spread. ")
        + "Removed is 1 − what the physically smaller network has / what the network without gates has.",
        *([tables.marks(settings, cells)] if grids and len(grids[0].groups) and _compared(content, settings) else []),
        *_how_measured(content),
        *_folded(content),
        *footers.lines(content),
    ]
    return tables.both(grids, notes, content)


def as_published(content: Content, setting: Setting) -> bool:
    """Whether the gates are where the paper has them and pay what they pay there."""
    entry = content["settings"].get(setting.key, {})
    return (entry.get("gates"), entry.get("price"), entry.get("strength")) == ("paper", "layer", 1.0)


def _compared(content: Content, settings: Sequence[Setting]) -> bool:
    return all(as_published(content, setting) for setting in settings)


def as_timing(content: Content) -> list[dict[str, Any]]:
    """What was measured as a result of the kind "timing", for the report; none where nothing was.

    The whole network as it took turns with pruned ones: alone, at another time, it may be slower or faster.
    """
    runs = []
    beside = [run for run in content["runs"] if any(row["network"] == "pruned" for row in _measured(run))]
    raced = {run["setting"] for run in beside}
    for run in [*beside, *(run for run in content["runs"] if run["setting"] not in raced)]:
        for row in _measured(run):
            method = "none" if row["network"] == "whole" else summary.method_name(run["method"])
            mode = f"{row['how']}, {PLACES.get(row['device'], row['device'])}, batch {row['batch']}"
            fields = {name: row[name] for name in ("batch", "ms", "ms_spread", "memory_mib")}
            runs.append({"setting": run["setting"], "method": method, "mode": mode, **fields})
    if not runs:
        return []
    shared = {name: content[name] for name in ("provenance", "settings", "energy")}
    return [{"name": f"{content['name']}, measured", "kind": "timing", **shared, "runs": runs}]


def headline(content: Content) -> list[dict[str, Any]]:
    """As the study's other commands have it, and how many times as fast what is left is, in the largest batches."""
    rows = answers.headline(content)
    batch = max((row["batch"] for run in content["runs"] for row in _measured(run)), default=0)
    for row in rows:
        own = [r for r in content["runs"] if (r["setting"], r["method"]) == (row["setting"], row["method"])]
        for device, name in PLACES.items():
            found = [gain for run in own if (gain := faster(run.get("physical") or {}, device, batch)) is not None]
            if found:
                row[f"× on {name}"] = round(statistics.fmean(found), 2)
    return rows


def _measured(run: Row) -> Sequence[Row]:
    rows: Sequence[Row] = (run.get("physical") or {}).get("runs", ())
    return rows


def _left(setting: Setting, content: Content, cells: Sequence[Cell], n: int) -> Grid:
    """One row for each method: accuracy, what it lost, and what is left."""
    entry = content["settings"][setting.key]
    own = [cell for cell in cells if cell.setting == setting.key]
    whole = next((cell for cell in own if cell.method == "none"), None)
    rows = []
    for cell in own:
        theirs, plain = (summary.printed(setting, method) for method in (cell.method, "none"))
        lost = _lost(whole.accuracy.mean if whole else math.nan, cell.accuracy.mean)
        printed = _lost(plain.accuracy.mean, theirs.accuracy.mean) if theirs and plain else NOTHING
        price = "" if cell.method == "none" else f", {summary.price_name(cell.price, cell.strength)}"
        share = 1 - cell.multiply_adds.mean / entry["multiply_adds"] if entry.get("multiply_adds") else math.nan
        rows.append((
            summary.method_name(cell.method) + price, amount(cell.accuracy, n),
            NOTHING if cell.method == "none" else lost, NOTHING if cell.method == "none" else printed,
            amount(cell.actual, n), amount(Spread(100 * share, None, n), n),
            f"{cell.parameters.mean:,.0f}", f"{cell.multiply_adds.mean:,.0f}", _seconds(content, setting.key, cell),
        ))  # fmt: skip
    groups = (
        Group("", ("acc. (%)",)),
        Group("points lost", ("ours", "paper")),
        Group("removed (%)", ("parameters", "multiply-adds")),
        Group("left", ("parameters", "multiply-adds")),
        Group("", ("s per epoch",)),
    )
    return Grid(f"{setting.name}: what is left, and what it lost; {tables.of_seeds(n)}", ("method",), groups, (
        tuple(rows),))  # fmt: skip


def _lost(whole: float, pruned: float) -> str:
    return NOTHING if math.isnan(whole - pruned) else f"{whole - pruned + 0.0:.2f}"


def _seconds(content: Content, key: str, cell: Cell) -> str:
    """Of training in the first epoch and in the last, as a mean over seeds."""
    own = [r["seconds_per_epoch"] for r in content["runs"] if (r["setting"], r["method"]) == (key, cell.method)]
    first, last = (statistics.fmean(one[name] for one in own) for name in ("first", "last"))
    return f"{first:.3g} → {last:.3g}"


def _speed(setting: Setting, content: Content) -> Grid | None:
    """One row for each way of running: the whole network and the pruned one, side by side."""
    blocks = []
    methods = summary.ordered_methods(r["method"] for r in content["runs"] if r["setting"] == setting.key)
    for method in methods:
        own = [r for r in content["runs"] if (r["setting"], r["method"]) == (setting.key, method) and r.get("physical")]
        measured = [row for run in own for row in run["physical"]["runs"]]
        ways = list(dict.fromkeys((row["device"], row["how"], row["batch"]) for row in measured))
        rows: list[tuple[str, ...]] = []
        for way in ways if method != "none" or len(methods) == 1 else ():
            here = [row for row in measured if (row["device"], row["how"], row["batch"]) == way]
            whole, pruned = ([row for row in here if row["network"] == name] for name in ("whole", "pruned"))
            name = summary.method_name(method) if not rows else ""
            label = f"{PLACES.get(way[0], way[0])}, {way[1]}, batch {way[2]}"
            rows.append((name, label, *_pair(whole, pruned, "ms"), _gain(whole, pruned),
                         *_pair(whole, pruned, "memory_mib")))  # fmt: skip
        if rows:
            blocks.append(tuple(rows))
    if not blocks:
        return None
    groups = (
        Group("ms for a batch", ("whole", "pruned")), Group("", ("times faster",)),
        Group("memory, MiB", ("whole", "pruned")),
    )  # fmt: skip
    return Grid(f"{setting.name}: how fast what is left runs", ("method", ""), groups, tuple(blocks))


def _pair(whole: Sequence[Row], pruned: Sequence[Row], field: str) -> tuple[str, str]:
    a, b = (_mean([row[field] for row in rows if row[field] is not None]) for rows in (whole, pruned))
    return tuple(NOTHING if v is None else f"{v:.3g}" if v < 1e3 else f"{v:,.0f}" for v in (a, b))  # type: ignore[return-value]


def _gain(whole: Sequence[Row], pruned: Sequence[Row]) -> str:
    a, b = (_mean([row["ms"] for row in rows]) for rows in (whole, pruned))
    return NOTHING if a is None or b is None else f"{a / b:.2f}"


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return statistics.fmean(found) if found else None


def _recipe(setting: Setting, content: Content) -> str:
    """Which network it is, how it was trained, and what is not as in the paper."""
    entry = content["settings"][setting.key]
    usual = Recipe().of(SETTINGS[setting.key]).to_json(SETTINGS[setting.key]) if setting.key in SETTINGS else {}
    other = [
        f"{_NAMES.get(name, name)} {entry[name]} instead of {usual[name]}"
        for name in usual if name in entry and name not in _SAID and entry[name] != usual[name] and entry[name]
    ]  # fmt: skip
    if entry.get("gates") != "paper":
        other.append("gates on inner channels, streams, heads and whatever else can go instead of the paper's places")
    if entry.get("phi_lr") != usual.get("phi_lr"):
        other.append(f"gates that learn {entry.get('phi_lr'):g} times as fast as the weights")
    if entry.get("images"):
        other.append(f"only {entry['images']} of the training images")
    differs = f"not as in the paper: {'; '.join(other)}" if other else "all as in the paper"
    return (
        f"{setting.name}: {entry.get('made', setting.network_name)}; {entry.get('epochs')} epochs and "
        f"{entry.get('fine_tune')} of fine-tuning, {entry.get('resolution')}×{entry.get('resolution')} pixels, batches "
        f"of {entry.get('batch')}, {entry.get('precision')}; {differs}."
    )


def _how_measured(content: Content) -> list[str]:
    found = [run["physical"] for run in content["runs"] if run.get("physical")]
    if not found:
        return []
    kinds = dict.fromkeys(f"{PLACES.get(d, d)} {p}" for one in found for d, p in one["precision"].items())
    skipped = dict.fromkeys(
        f"{row['how']} on the {PLACES.get(row['device'], row['device'])} ({row['why']})"
        for one in found for row in one["skipped"] if not row["why"].startswith(("only a GPU", "measured on"))
    )  # fmt: skip
    notes = [
        f"Times are medians over rounds in which the whole network and the pruned one take turns; {', '.join(kinds)}; "
        f"the processor with {found[0]['threads']} threads. Memory is what a pass takes at most beyond what was taken "
        f"before it."
    ]
    return notes + ([f"Not measured: {'; '.join(skipped)}."] if skipped else [])


def _folded(content: Content) -> list[str]:
    pairs = [run["finish"] for run in content["runs"] if run.get("finish", {}).keys() >= {"before", "after"}]
    if not pairs:
        return []
    most = max(abs(pair["after"] - pair["before"]) for pair in pairs)
    return [f"Multiplying the gates into the weights changed the accuracy by at most {100 * most:.2f} points."]
