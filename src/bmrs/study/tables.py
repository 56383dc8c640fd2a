"""The study's tables, ours beside the paper's, in Markdown and LaTeX."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bmrs.study import footers, markup, published, summary
from bmrs.study.markup import Grid, Group
from bmrs.study.published import Printed
from bmrs.study.summary import Cell, Content, Setting, Spread

NOTHING = "–"
_ARROWS = {0: "", 1: "↑ ", -1: "↓ "}
_MODES = ("forward, training", "forward, inference", "whole step")
_MODE_KEYS = ("train_forward", "inference", "train_step")
_STAGES = {"none": "without gates", "gated": "with gates", "removed": "after removal"}
_PAPER_STAGE = {"none": "none", "gated": "bmrs_n"}  # nothing was timed after removal


@dataclass(frozen=True)
class Tables:
    """The same tables twice: to read on screen, and to print."""

    markdown: str
    latex: str


def table1(content: Content) -> Tables:
    """Compression and accuracy of every method, ours beside the paper's; then the same by actual counting."""
    cells = [cell for cell in summary.cells(content) if _as_published(cell)]
    if not cells:
        raise ValueError("content has no runs at the price 'layer' with strength 1: Table 1 is made of those.")
    n = summary.usual_n(cell.accuracy for cell in cells)
    blocks = by_network(summary.settings(content), cells)
    grids = [beside_paper(name, settings, cells, n) for name, settings in blocks]
    grids += [actual(name, settings, cells, n) for name, settings in blocks]
    notes = [
        f"Compression is the share of parameters removed, as the paper counts it; {over_seeds(n)}",
        marks(summary.settings(content), cells),
        *_emptied(summary.settings(content), cells),
        "Actual compression is 1 − parameters of the physically reduced network / parameters of the network without "
        "gates; it includes the biases and the columns behind a flatten that the paper's counting misses.",
        *footers.lines(content),
    ]
    return both(grids, notes, content)


def prices_table(content: Content) -> Tables:
    """What every price removes, by actual counting, and the accuracy it leaves; BMRS_N as published beside."""
    cells = summary.cells(content)
    n = summary.usual_n(cell.accuracy for cell in cells)
    blocks = by_network(summary.settings(content), cells)
    grids = [_prices(name, settings, cells, n) for name, settings in blocks]
    notes = [
        f"Compression is actual: 1 − parameters of the physically reduced network / parameters of the network without "
        f"gates; {over_seeds(n)} s is the strength, 1 unless said.",
        "The paper's row is BMRS_N at the price `layer`, and its compression is the paper's own counting, which misses "
        "biases and the columns behind a flatten: compare it with the row `layer`, not digit by digit.",
        *_emptied(summary.settings(content), cells),
        *footers.lines(content),
    ]
    return both(grids, notes, content)


def timing_table(content: Content) -> Tables:
    """Milliseconds and memory without gates, with gates and after removal; the paper's milliseconds beside."""
    summary.check_kind(content, "timing")
    runs: dict[tuple[str, int], dict[tuple[str, str], Mapping[str, Any]]] = {}
    for run in content["runs"]:
        runs.setdefault((run["setting"], run["batch"]), {})[run["method"], run["mode"]] = run
    batches = sorted({batch for _, batch in runs})
    grids = []
    for batch in batches:
        here = [(s, runs[s.key, batch]) for s in summary.settings(content) if (s.key, batch) in runs]
        times, memory = (tuple(draw(*pair) for pair in here) for draw in (_times, _memories))
        groups = (
            Group("forward, training", ("ours", "paper")),
            Group("forward, inference", ("ours", "paper")),
            Group("whole step", ("ours",)),
        )
        grids.append(Grid(f"Milliseconds for a batch of {batch}", ("setting", ""), groups, times))
        if any(run.get("memory_mib") is not None for _, own in here for run in own.values()):
            grids.append(Grid(f"Memory for a batch of {batch}, MiB", ("setting", ""), (Group("", _MODES),), memory))
    notes = [
        "Milliseconds: the median over rounds in which all take turns, and in brackets the 10th and 90th percentile. "
        "The paper's were measured on another machine, one Titan X class GPU, with a batch of 32 and before any "
        "removal (BMRS_N where gates are on): compare the ratios, not the milliseconds.",
        *_how_timed(content, len(grids) > len(batches)),
        *_ratios(summary.settings(content), runs),
        *_epochs(content),
        *footers.lines(content),
    ]
    return both(grids, notes, content)


def amount(value: Spread, usual_n: int, decimals: int = 2) -> str:
    """Mean ± sd, with n where it is not the usual one; a dash where there is nothing.

    >>> amount(Spread(97.0, 0.123, 10), 10), amount(Spread(97.0, None, 1), 10)
    ('97.00 ± 0.12', '97.00 (n = 1)')
    """
    if math.isnan(value.mean):
        return NOTHING
    text = _number(value.mean, decimals)
    if value.sd is not None:
        text += f" ± {_number(value.sd, decimals)}"
    return text if value.n == usual_n else f"{text} (n = {value.n})"


def _number(value: float, decimals: int) -> str:
    return f"{round(value, decimals) + 0.0:.{decimals}f}"  # + 0.0: no minus zero


def both(grids: Sequence[Grid], notes: Sequence[str], content: Content) -> Tables:
    made = [text] if (text := footers.provenance(content)) else []
    return Tables(markup.markdown(grids, notes), markup.latex(grids, notes, made))


def _as_published(cell: Cell) -> bool:
    return cell.method == "none" or (cell.price == "layer" and cell.strength == 1.0)


def by_network(settings: Sequence[Setting], cells: Sequence[Cell]) -> list[tuple[str, list[Setting]]]:
    there = {cell.setting for cell in cells}
    names = dict.fromkeys(s.network_name for s in settings if s.key in there)
    return [(name, [s for s in settings if s.network_name == name and s.key in there]) for name in names]


def _find(cells: Iterable[Cell], setting: Setting, method: str) -> Cell | None:
    return next((cell for cell in cells if (cell.setting, cell.method) == (setting.key, method)), None)


def methods_of(settings: Sequence[Setting], cells: Iterable[Cell]) -> list[str]:
    keys = {s.key for s in settings}
    return summary.ordered_methods(cell.method for cell in cells if cell.setting in keys)


def beside_paper(network: str, settings: Sequence[Setting], cells: Sequence[Cell], n: int) -> Grid:
    has_paper = {s.key: summary.printed(s, "none") is not None for s in settings}
    groups = tuple(Group(s.data_name, ("ours", "paper") if has_paper[s.key] else ("ours",)) for s in settings)
    blocks = []
    for method in methods_of(settings, cells):
        rows: tuple[list[str], list[str]] = (
            [summary.method_name(method), "comp. (%)"],
            ["", "acc. (%)"],
        )
        for setting in settings:
            cell, paper = _find(cells, setting, method), summary.printed(setting, method)
            for row, ours, theirs in zip(rows, _pair(cell), _printed_pair(paper), strict=True):
                text = NOTHING if ours is None else amount(ours, n)
                row.append((_ARROWS[summary.deviation(ours, theirs)] if ours and theirs else "") + text)
                if has_paper[setting.key]:
                    row.append(f"{theirs.mean:.2f} ± {theirs.sd:.2f}" if theirs else NOTHING)
        blocks.append(tuple(tuple(row) for row in rows))
    beside = ", ours and the paper's" if any(has_paper.values()) else ""
    title = f"{network}: compression as the paper counts it, and accuracy{beside}; {of_seeds(n)}"
    return Grid(title, ("method", ""), groups, tuple(blocks))


def _pair(cell: Cell | None) -> tuple[Spread | None, Spread | None]:
    return (None, None) if cell is None else (cell.published, cell.accuracy)


def _printed_pair(result: published.Result | None) -> tuple[Printed | None, Printed | None]:
    return (None, None) if result is None else (result.compression, result.accuracy)


def actual(network: str, settings: Sequence[Setting], cells: Sequence[Cell], n: int) -> Grid:
    blocks = []
    for method in methods_of(settings, cells):
        rows = ([summary.method_name(method), "comp. (%)"], ["", "parameters left"], ["", "multiply-adds left"])
        for setting in settings:
            cell = _find(cells, setting, method)
            texts = [NOTHING] * 3
            if cell is not None:
                texts = [amount(cell.actual, n), _count(cell.parameters), _count(cell.multiply_adds)]
            for row, text in zip(rows, texts, strict=True):
                row.append(text)
        blocks.append(tuple(tuple(row) for row in rows))
    groups = (Group("", tuple(s.data_name for s in settings)),)
    title = f"{network}: actual compression, and the mean of what is left; {of_seeds(n)}"
    return Grid(title, ("method", ""), groups, tuple(blocks))


def _count(value: Spread) -> str:
    return NOTHING if math.isnan(value.mean) else f"{value.mean:,.0f}"


def _prices(network: str, settings: Sequence[Setting], cells: Sequence[Cell], n: int) -> Grid:
    keys = {s.key for s in settings}
    pruned = [cell for cell in cells if cell.setting in keys and cell.method != "none"]
    several = len({cell.method for cell in pruned}) > 1
    columns = sorted(
        {(cell.method, cell.price, cell.strength) for cell in pruned},
        key=lambda k: (*summary.price_place(k[1], k[2]), summary.ordered_methods(c.method for c in pruned).index(k[0])),
    )
    paper, whole = ["paper's BMRS_N, layer"], ["None"]
    for setting in settings:
        theirs, cell = summary.printed(setting, "bmrs_n"), _find(cells, setting, "none")
        paper += [f"{p.mean:.2f} ± {p.sd:.2f}" if p else NOTHING for p in _printed_pair(theirs)]
        whole += [NOTHING] * 2 if cell is None else [amount(cell.actual, n), amount(cell.accuracy, n)]
    rows = []
    for method, price, strength in columns:
        row = [summary.price_name(price, strength) + (f", {summary.method_name(method)}" if several else "")]
        for setting in settings:
            cell = next(
                (c for c in pruned if (c.setting, c.method, c.price, c.strength)
                 == (setting.key, method, price, strength)), None,
            )  # fmt: skip
            row += [NOTHING] * 2 if cell is None else [amount(cell.actual, n), amount(cell.accuracy, n)]
        rows.append(tuple(row))
    references = [tuple(row) for row in (whole, paper) if set(row[1:]) != {NOTHING}]
    groups = tuple(Group(s.data_name, ("comp. (%)", "acc. (%)")) for s in settings)
    title = f"{network}: actual compression and accuracy at every price; {of_seeds(n)}"
    return Grid(title, ("price",), groups, (tuple(references), tuple(rows)))


def _times(setting: Setting, runs: Mapping[tuple[str, str], Mapping[str, Any]]) -> tuple[tuple[str, ...], ...]:
    rows = []
    for stage, label in _stages(setting, runs):
        forward, inference, step = (_milliseconds(runs.get((stage, mode))) for mode in _MODE_KEYS)
        paper = published.runtime(setting.network, setting.data, _PAPER_STAGE.get(stage, ""))
        theirs = (f"{paper.train_ms:.2f}", f"{paper.inference_ms:.2f}") if paper else (NOTHING, NOTHING)
        rows.append((*label, forward, theirs[0], inference, theirs[1], step))
    return tuple(rows)


def _memories(setting: Setting, runs: Mapping[tuple[str, str], Mapping[str, Any]]) -> tuple[tuple[str, ...], ...]:
    return tuple(
        (*label, *(_memory(runs.get((stage, mode))) for mode in _MODE_KEYS)) for stage, label in _stages(setting, runs)
    )


def _stages(setting: Setting, runs: Mapping[tuple[str, str], Mapping[str, Any]]) -> list[tuple[str, tuple[str, str]]]:
    """Those that were measured, and the two words at the left of their rows."""
    found = [stage for stage in _STAGES if any(stage == measured for measured, _ in runs)]
    return [(stage, (setting.name if stage == found[0] else "", _STAGES[stage])) for stage in found]


def _milliseconds(run: Mapping[str, Any] | None) -> str:
    if run is None or run.get("ms") is None:
        return NOTHING
    decimals = 3 if run["ms"] < 1.0 else 2
    text = f"{run['ms']:.{decimals}f}"
    low, high = run.get("ms_spread") or (None, None)
    return text if low is None or high is None else f"{text} [{low:.{decimals}f}, {high:.{decimals}f}]"


def _memory(run: Mapping[str, Any] | None) -> str:
    return NOTHING if run is None or run.get("memory_mib") is None else f"{run['memory_mib']:.1f}"


def _how_timed(content: Content, memory: bool) -> list[str]:
    """What is no column: one thread, which units are gone, what memory is."""
    entries = {s.name: content.get("settings", {}).get(s.key, {}) for s in summary.settings(content)}
    notes = []
    if any(entry.get("threads") == 1 for entry in entries.values()):
        notes.append("The processor worked with one thread.")
    gone = [
        f"{name} {entry['removed']['parameters']:,} of {entry['parameters']:,} ({entry['removed']['why']})"
        for name, entry in entries.items()
        if "removed" in entry
    ]
    if gone:
        notes.append(f"Parameters left after the same share of units went from every structure: {'; '.join(gone)}.")
    if memory:
        notes.append("Memory is what a pass takes at most beyond what was taken before it.")
    return [" ".join(notes)] if notes else []


def _ratios(
    settings: Sequence[Setting], runs: Mapping[tuple[str, int], Mapping[tuple[str, str], Mapping[str, Any]]]
) -> list[str]:
    """What the gates cost and what their removal gains, as times of the network without gates; the paper's beside."""
    sentences = []
    for stage, mode, words in (
        ("gated", "train_forward", "With gates, the forward pass of training takes"),
        ("gated", "inference", "With gates, inference takes"),
        ("gated", "train_step", "With gates, a whole training step takes"),
        ("removed", "inference", "After removal, inference takes"),
    ):
        pairs = [(here.get((stage, mode)), here.get(("none", mode))) for here in runs.values()]
        found = [a["ms"] / b["ms"] for a, b in pairs if a and b and a.get("ms") and b.get("ms")]
        if found:
            paper = _printed_ratios(settings, mode) if stage == "gated" else []
            beside = f" (the paper: {_range(paper)})" if paper else ""
            sentences.append(f"{words} {_range(found)} times as long as without gates{beside}.")
    return [" ".join(sentences)] if sentences else []


def _epochs(content: Content) -> list[str]:
    """Where whole epochs were worked out: what they take beside those without gates."""
    entries = {s.name: content.get("settings", {}).get(s.key, {}) for s in summary.settings(content)}
    found = [
        f"{name} {times['none']:g} s without gates, {times['gated']:g} s with, {times['removed']:g} s after removal"
        for name, entry in entries.items()
        if (times := entry.get("seconds_per_epoch"))
    ]
    return [f"An epoch, from the time of a step: {'; '.join(found)}."] if found else []


def _printed_ratios(settings: Sequence[Setting], mode: str) -> list[float]:
    pairs = [[published.runtime(s.network, s.data, m) for m in ("bmrs_n", "none")] for s in settings]
    field = {"train_forward": "train_ms", "inference": "inference_ms"}.get(mode, "")
    return [getattr(gated, field) / getattr(plain, field) for gated, plain in pairs if gated and plain and field]


def _range(values: Sequence[float]) -> str:
    low, high = f"{min(values):.2f}", f"{max(values):.2f}"
    return low if low == high else f"{low} to {high}"


def of_seeds(n: int) -> str:
    return f"n = {n} seeds" if n > 1 else "one seed"


def over_seeds(n: int) -> str:
    return f"mean ± standard deviation over n = {n} seeds." if n > 1 else "n = 1: one seed, so there is no spread."


def marks(settings: Sequence[Setting], cells: Sequence[Cell]) -> str:
    compared, marked = 0, 0
    for setting in settings:
        for method in methods_of([setting], cells):
            pairs = zip(
                _pair(_find(cells, setting, method)), _printed_pair(summary.printed(setting, method)), strict=True
            )
            for ours, theirs in pairs:
                if ours and theirs and not math.isnan(ours.mean):
                    compared += 1
                    marked += summary.deviation(ours, theirs) != 0
    if not compared:
        return "The paper has no numbers for these settings."
    return (
        f"↑ and ↓ mark what lies further above or below the paper's mean than 2 of its standard deviations, or 1 point "
        f"if that is more: {marked} of {compared} numbers."
    )


def _emptied(settings: Sequence[Setting], cells: Sequence[Cell]) -> list[str]:
    """A network that lost a whole layer can only guess: say which did, since it explains their accuracy."""
    names = {s.key: s.name for s in settings}
    found = []
    for cell in cells:
        if cell.emptied:
            price = "" if _as_published(cell) else f" at {summary.price_name(cell.price, cell.strength)}"
            found.append(
                f"{summary.method_name(cell.method)}{price} on {names[cell.setting]} ({cell.emptied} of {cell.runs})"
            )
    return [f"Networks that lost every unit of a layer: {'; '.join(found)}."] if found else []
