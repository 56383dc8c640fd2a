"""What the page shows, boiled down from the results: means and spreads instead of runs.

Everything the page says comes from the one JSON object made here, which it also carries and offers for download.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bmrs.report.averages import embedded, number, short
from bmrs.report.curves import curves
from bmrs.report.gates import PRIOR_MEAN, correlations, gates
from bmrs.report.single import as_study
from bmrs.study import published
from bmrs.study.summary import (
    DATA,
    NETWORKS,
    Spread,
    deviation,
    method_name,
    ordered_methods,
    p1_of,
    price_name,
    price_place,
)

Content = Mapping[str, Any]
Run = Mapping[str, Any]
_FEW_BITS = 3  # as many values of p₁ are a series of their own, not rows of the table
_PUBLISHED_BITS = (8.0, 4.0)


def digest(results: Sequence[Content]) -> dict[str, Any]:
    """One object from all results. The first result that holds a setting's method is the one shown."""
    study: list[Content] = []
    for result in results:
        study += as_study(result) if result["kind"] == "demo" else [result]
    continuous = _groups(_of_kind(study, "continuous"), lambda run: (run["setting"], run["method"], *_price(run)))
    after = [run for result in _of_kind(study, "post-training") for run in result["runs"]]
    shown = {
        "pruned": _pruned(continuous),
        "prices": _prices(continuous),
        "bits": _bits(continuous),
        "curves": curves(_groups(_of_kind(study, "post-training"), lambda run: (run["setting"], run["method"]))),
        "gates": gates([run for result in _of_kind(study, "posteriors") for run in result["runs"]]),
        "correlations": correlations(_groups(_of_kind(study, "correlations"), lambda run: (run["setting"],))),
        "timing": _timing(_of_kind(study, "timing")),
    }
    keys = {str(run["setting"]): None for result in study for run in result["runs"]}
    methods = [str(run["method"]) for key, runs in continuous.items() for run in runs] + [
        str(r["method"]) for r in after
    ]
    methods += [m for part in shown["correlations"].values() for m in part["methods"]]
    methods += [m for part in shown["gates"].values() for m in (*part["delta_f"], part["removed_by"]) if m]
    settings = _settings(study, keys)
    _beside_the_paper(shown["pruned"], settings)
    pruned_at = {_main_price(continuous, key) for key in shown["pruned"]}
    return {
        "settings": settings,
        "methods": {name: method_name(name) for name in ordered_methods(methods)},
        "prior_mean": short(PRIOR_MEAN),
        "price": [price_name(*price) for price in sorted(pruned_at, key=lambda price: price_place(*price))],
        **shown,
        "results": [_how_made(result) for result in results],
    }


def _of_kind(study: Iterable[Content], kind: str) -> list[Content]:
    return [result for result in study if result["kind"] == kind]


def _groups(results: Iterable[Content], key: Any) -> dict[tuple[Any, ...], list[Run]]:
    """Runs that differ in the seed alone; a group that an earlier result has is not mixed with a later one's."""
    groups: dict[tuple[Any, ...], list[Run]] = {}
    for result in results:
        mine: dict[tuple[Any, ...], list[Run]] = {}
        for run in result["runs"]:
            mine.setdefault(key(run), []).append(run)
        for name, runs in mine.items():
            groups.setdefault(name, runs)
    return groups


def _price(run: Run) -> tuple[str, float]:
    return str(run.get("price") or "layer"), number(run.get("strength")) or 1.0


def _settings(study: Sequence[Content], keys: Iterable[str]) -> dict[str, Any]:
    """In the paper's order: the MLPs first, data sets as there."""
    found: dict[str, Any] = {}
    for key in keys:
        entries = [result.get("settings") or {} for result in study]
        entry: Mapping[str, Any] = next((e[key] for e in entries if isinstance(e.get(key), Mapping)), {})
        network, _, data = key.partition("-")
        network, data = str(entry.get("network", network)), str(entry.get("data", data))
        name = f"{NETWORKS.get(network, network)}, {DATA.get(data, data)}" if data else key
        layers = entry.get("layers")
        found[key] = {
            **{k: v for k, v in entry.items() if isinstance(v, (str, int, float))},
            "name": name, "network": network, "data": data,
            "layers": {str(n): number(u) for n, u in layers.items()} if isinstance(layers, Mapping) else {},
        }  # fmt: skip

    def place(key: str) -> tuple[int, int]:
        order = [list(names).index(found[key][field]) if found[key][field] in names else len(names)
                 for field, names in (("network", NETWORKS), ("data", DATA))]  # fmt: skip
        return order[0], order[1]

    return {key: found[key] for key in sorted(found, key=place)}


def _main_price(groups: Mapping[tuple[Any, ...], Any], setting: str) -> tuple[str, float]:
    """The published price where it was run, else the first one."""
    prices = [(p, s) for (where, method, p, s) in groups if where == setting and method != "none"]
    return ("layer", 1.0) if ("layer", 1.0) in prices or not prices else prices[0]


def _pruned(groups: Mapping[tuple[Any, ...], list[Run]]) -> dict[str, Any]:
    """Setting → method → what is left, at the setting's main price."""
    found: dict[str, dict[str, Any]] = {}
    series = _bits(groups)
    for (setting, method, *price), runs in groups.items():
        of_series = setting in series and p1_of(method) not in (None, *_PUBLISHED_BITS)
        if of_series or (method != "none" and tuple(price) != _main_price(groups, setting)):
            continue
        found.setdefault(setting, {}).setdefault(method, _cell(runs))
    return {key: {m: cells[m] for m in ordered_methods(cells)} for key, cells in found.items()}


def _beside_the_paper(pruned: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """The published cell, in fractions like ours, and where ours is above (1) or below (-1) what it allows."""
    for key, cells in pruned.items():
        for method, cell in cells.items():
            printed = published.result(settings[key]["network"], settings[key]["data"], method)
            if printed is None:
                continue
            cell["paper"], cell["differs"] = {}, {}
            for ours, theirs in (("published", printed.compression), ("accuracy", printed.accuracy)):
                cell["paper"][ours] = [short(theirs.mean / 100), short(theirs.sd / 100)]
                if cell[ours] is not None:
                    cell["differs"][ours] = deviation(Spread(100 * cell[ours][0], None, cell["n"]), theirs)


def _prices(groups: Mapping[tuple[Any, ...], list[Run]]) -> dict[str, Any]:
    """Setting → one cell per price, strength and method, for settings where there is more than one price."""
    found: dict[str, list[dict[str, Any]]] = {}
    for (setting, method, price, strength), runs in groups.items():
        if method != "none":
            cell = {"price": price, "strength": strength, "method": method, **_cell(runs)}
            found.setdefault(setting, []).append({k: v for k, v in cell.items() if k not in ("units", "history")})
    several = {key: cells for key, cells in found.items() if len({(c["price"], c["strength"]) for c in cells}) > 1}
    for key, cells in several.items():
        # Methods that were run at one price only have their place in the table of methods.
        varied = {c["method"] for c in cells if (c["price"], c["strength"]) != _main_price(groups, key)}
        several[key] = sorted(
            (c for c in cells if c["method"] in varied), key=lambda c: price_place(c["price"], c["strength"])
        )
    return several


def _bits(groups: Mapping[tuple[Any, ...], list[Run]]) -> dict[str, Any]:
    """Setting → BMRS_U by p₁, where enough values were run to be a series."""
    found: dict[str, dict[float, dict[str, Any]]] = {}
    for (setting, method, *price), runs in groups.items():
        p1 = p1_of(method)
        if p1 is not None and tuple(price) == _main_price(groups, setting):
            cell = _cell(runs)
            found.setdefault(setting, {}).setdefault(
                p1, {"p1": p1, **{k: cell[k] for k in ("n", "accuracy", "published", "actual")}}
            )
    return {key: [by[p] for p in sorted(by)] for key, by in found.items() if len(by) >= _FEW_BITS}


def _cell(runs: Sequence[Run]) -> dict[str, Any]:
    layers = list(dict.fromkeys(name for run in runs for name in _mapping(run.get("units"))))
    emptied = sum(bool(run.get("emptied")) for run in runs)
    return {
        "n": len(runs),
        "accuracy": embedded(run["accuracy"] for run in runs),
        "published": embedded(run["compression"].get("published") for run in runs),
        "actual": embedded(run["compression"].get("actual") for run in runs),
        "parameters": embedded((run.get("parameters") for run in runs), 0),
        "multiply_adds": embedded((run.get("multiply_adds") for run in runs), 0),
        "units": {name: embedded((_mapping(run.get("units")).get(name) for run in runs), 1) for name in layers},
        "history": _history(runs),
        "emptied": emptied,
    }


def _history(runs: Iterable[Run]) -> list[list[float | None]]:
    """[epoch, mean units left] after every epoch."""
    by_epoch: dict[float, list[Any]] = {}
    for run in runs:
        for row in run.get("history") or ():
            epoch = number(_mapping(row).get("epoch"))
            if epoch is not None:
                by_epoch.setdefault(epoch, []).append(row.get("units"))
    means = {epoch: embedded(by_epoch[epoch], 1) for epoch in sorted(by_epoch)}
    return [[epoch, mean[0]] for epoch, mean in means.items() if mean is not None]


def _timing(results: Iterable[Content]) -> dict[str, Any]:
    """Setting → mode → method → milliseconds of a batch, their spread, and memory."""
    key = ("setting", "mode", "method", "batch")
    groups = _groups(results, lambda run: tuple(run.get(part) for part in key))
    found: dict[str, list[dict[str, Any]]] = {}
    for (setting, mode, method, batch), runs in groups.items():
        ends = [
            run["ms_spread"] for run in runs if isinstance(run.get("ms_spread"), list) and len(run["ms_spread"]) == 2
        ]
        found.setdefault(setting, []).append(
            {
                "mode": str(mode),
                "method": str(method),
                "batch": number(batch),
                "ms": embedded(run["ms"] for run in runs),
                "spread": [number(min(low for low, _ in ends)), number(max(high for _, high in ends))]
                if ends
                else None,
                "memory_mib": embedded((run.get("memory_mib") for run in runs), 1),
            }
        )
    return found


def _how_made(result: Content) -> dict[str, Any]:
    """Settings, provenance and energy as the result has them."""
    settings = result.get("settings") or {}
    return {
        "kind": result["kind"],
        "runs": len(result.get("runs") or ()) or 1,
        "settings": settings,
        "provenance": result.get("provenance") or {},
        "energy": result.get("energy"),
    }


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
