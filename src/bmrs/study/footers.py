"""What stands below every table: how the numbers were made, how long it took, and what it cost."""

from collections.abc import Mapping, Sequence
from typing import Any

from bmrs.study.summary import Content, settings


def lines(content: Content) -> list[str]:
    """One paragraph each: provenance, wall time, energy; what is not known is left out."""
    return [
        text
        for text in (
            provenance(content),
            _wall_time(content),
            _energy(content.get("energy")),
        )
        if text
    ]


def duration(seconds: float) -> str:
    """For people.

    >>> duration(8.25), duration(75), duration(7322)
    ('8.2 s', '1 min 15 s', '2 h 2 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def provenance(content: Content) -> str:
    """Command, seeds, machine, commit, date and versions, as far as they are known."""
    given, facts = content.get("provenance") or {}, []
    if given.get("command"):
        facts.append(f"Made by `{' '.join(str(given['command']).replace('`', chr(39)).split())}`")
    facts.append(_seeds(content["runs"]))
    facts += [f"{name} {given[name]}" for name in ("device", "machine", "commit", "date") if given.get(name)]
    versions = given.get("versions") or {}
    facts.append(", ".join(f"{name} {version}" for name, version in versions.items()))
    text = "; ".join(fact for fact in facts if fact)
    return f"{text[0].upper()}{text[1:]}." if text else ""


def _seeds(runs: Sequence[Mapping[str, Any]]) -> str:
    """0–9 rather than ten numbers where they follow each other; nothing where no run has a seed."""
    found = sorted({run["seed"] for run in runs if "seed" in run})
    if len(found) > 2 and found == list(range(found[0], found[-1] + 1)):
        return f"seeds {found[0]}–{found[-1]}"
    return f"{'seed' if len(found) == 1 else 'seeds'} {', '.join(map(str, found))}" if found else ""


def _wall_time(content: Content) -> str:
    entries = content.get("settings") or {}
    known = [(s, entries[s.key]) for s in settings(content) if entries.get(s.key, {}).get("seconds") is not None]
    if not known:
        return ""
    each = "; ".join(f"{s.name} {duration(entry['seconds'])}" for s, entry in known)
    networks = sum(entry.get("networks") or 0 for _, entry in known)
    trained = f" for {networks} networks" if networks else ""
    reused = (content.get("provenance") or {}).get("reused")
    others = f" Other networks were trained for {' and '.join(reused)}, with the same seeds." if reused else ""
    if (content.get("provenance") or {}).get("at_once"):
        each += "; settings that ran side by side are each given an equal share"
    return f"Wall time: {duration(sum(entry['seconds'] for _, entry in known))} in all{trained} ({each}).{others}"


def _energy(energy: Mapping[str, Any] | None) -> str:
    if not energy:
        return ""
    note = str(energy.get("note") or "").strip()
    if energy.get("how") == "unavailable" or energy.get("kwh") is None:
        return f"Energy: unavailable. {note}".strip()
    co2 = f", {energy['co2_g']:.3g} g CO₂" if energy.get("co2_g") is not None else ""
    return f"Energy: {energy['kwh']:.3g} kWh{co2}, {energy.get('how', 'origin unknown')}. {note}".strip()
