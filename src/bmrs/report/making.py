"""How the results were made: energy, settings, provenance."""

from collections.abc import Mapping
from html import escape
from typing import Any

from bmrs.report.averages import number
from bmrs.report.tables import boxed, table, unbroken
from bmrs.report.words import count_of, seconds

KINDS = {
    "continuous": "Pruning while training", "post-training": "Pruning after training",
    "correlations": "Rank correlations", "posteriors": "Posteriors", "timing": "Times",
    "demo": "One network, pruned while training",
}  # fmt: skip
HOW = ("measured", "estimated", "unavailable")


def energies(data: Mapping[str, Any]) -> list[tuple[Mapping[str, Any], list[Mapping[str, Any]]]]:
    """Each computation's energy with the results that came from it: one computation may give several results."""
    found: list[tuple[Mapping[str, Any], list[Mapping[str, Any]]]] = []
    for result in data["results"]:
        known = result["energy"] if isinstance(result["energy"], Mapping) else {}
        shared = next((results for other, results in found if other == known), None)
        if shared is None:
            found.append((known, [result]))
        else:
            shared.append(result)
    return found


def energy(data: Mapping[str, Any]) -> str:
    """Energy and CO₂ of each computation, with how it is known."""
    rows, notes = [], []
    for known, results in energies(data):
        how = known.get("how") if known.get("how") in HOW else "unavailable"
        used, co2 = number(known.get("kwh")), number(known.get("co2_g"))
        notes.append(str(known.get("note") or "") or "Not recorded.")
        rows.append(
            [
                escape(", ".join(dict.fromkeys(KINDS[result["kind"]] for result in results))),
                "–" if used is None else kwh(used),
                "–" if co2 is None else f"{co2:,.3g} g" if co2 < 1000 else f"{co2 / 1000:,.3g} kg",
                f'<span class="badge {how}">{how}</span>',
            ]
        )
    head = ["Energy and CO₂ of", "Energy", "CO₂", ""]
    alike = len(set(notes)) == 1
    if not alike:
        head.append("What was counted")
        rows = [[*row, f'<span class="prose">{escape(note)}</span>'] for row, note in zip(rows, notes, strict=True)]
    foot = f'<p class="foot">{escape(notes[0])}</p>' if alike else ""
    return boxed(table(head, rows, kind="energy"), "Energy and CO₂") + foot


def kwh(value: float) -> str:
    """
    >>> kwh(0.0831), kwh(1.5)
    ('83.1 Wh', '1.5 kWh')
    """
    return f"{1000 * value:,.3g} Wh" if value < 1 else f"{value:,.3g} kWh"


def missing(data: Mapping[str, Any]) -> str:
    """What could be here and was not run: its absence is no result."""
    parts = {
        "pruned": "pruning while training", "curves": "curves of pruning after training",
        "gates": "posteriors of the gates", "correlations": "rank correlations",
        "prices": "a comparison of prices", "timing": "times and memory",
    }  # fmt: skip
    absent = [words for part, words in parts.items() if not data[part]]
    return f'<p class="foot">Not in these results: {", ".join(absent)}.</p>' if absent else ""


def how_made(data: Mapping[str, Any]) -> str:
    """One part to unfold for each result."""
    parts = []
    for result in data["results"]:
        about = count_of(result["runs"], "run")
        date = str(result["provenance"].get("date", ""))[:10]
        settings = result["settings"]
        parts.append(
            f"<details><summary><strong>{escape(KINDS[result['kind']])}</strong> "
            f"<code>{escape(str(result['provenance'].get('command', '')))}</code> "
            f'<span class="hush">{", ".join(unbroken(x) for x in (about, date) if x)}</span></summary>'
            f"{_list(result['provenance'])}{_settings(settings) if settings else ''}</details>"
        )
    return "".join(parts)


def _settings(settings: Mapping[str, Any]) -> str:
    entries = {str(key): entry if isinstance(entry, Mapping) else {} for key, entry in settings.items()}
    columns = [c for c in dict.fromkeys(name for e in entries.values() for name in e) if c not in ("network", "data")]
    rows = [
        [unbroken(key), *(_roomy(_plain(e.get(column), column)) for column in columns)] for key, e in entries.items()
    ]
    return boxed(table(["Setting", *(escape(c.replace("_", " ")) for c in columns)], rows, kind="settings"), "Settings")


def _roomy(cell: str) -> str:
    """A long cell, such as a list of layers, gets the width to be read in."""
    return cell if len(cell) < 30 else f'<span class="prose">{cell}</span>'


def _list(values: Mapping[str, Any]) -> str:
    rows = "".join(
        f"<dt>{escape(str(name).replace('_', ' '))}</dt><dd>{_plain(value, str(name))}</dd>"
        for name, value in values.items()
    )
    return f'<dl class="facts">{rows}</dl>' if rows else ""


def _plain(value: Any, name: str = "") -> str:
    """Any JSON value as escaped text."""
    if isinstance(value, Mapping):
        return ", ".join(f"{escape(str(k))} {_plain(v)}" for k, v in value.items())
    if isinstance(value, list):
        return ", ".join(map(_plain, value))
    if value is None:
        return "–"
    known = number(value)
    if known is not None:
        if name == "seconds":
            return seconds(known)
        return (
            f"{value:,}"
            if isinstance(value, int) and value >= 10_000
            else f"{value:g}"
            if known < 10_000
            else f"{known:,.0f}"
        )
    return escape(str(value))
