"""One run, of the demo or of a Recorder, as the results of a study: the whole network and the pruned one."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from bmrs.report.averages import number


def as_study(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Results of the kinds continuous and timing, and posteriors where the run wrote its gates."""
    made = dict(content.get("provenance") or {})
    recipe: dict[str, Any] = dict(made["recipe"]) if isinstance(made.get("recipe"), Mapping) else {}
    network, data = str(made.get("network", "network")), str(made.get("data", "data"))
    setting = f"{network}-{data}"
    units = {str(name): pair for name, pair in content["units"].items() if isinstance(pair, Mapping)}
    before, after = content["before"], content["after"]
    entry = {
        **recipe,
        "network": network,
        "data": data,
        "layers": {name: pair.get("before") for name, pair in units.items()},
        "parameters": before.get("parameters"),
        "multiply_adds": before.get("multiply_adds"),
    }
    seed = recipe.get("seed", 0)
    price = {"price": recipe.get("price", "uniform"), "strength": recipe.get("strength", 1.0)}
    method = method_of(str(made.get("criterion", "")))

    def run(name: str, measured: Mapping[str, Any], left: str) -> dict[str, Any]:
        kept = _ratio(measured.get("parameters"), before.get("parameters"))
        return {
            "setting": setting, "method": name, "seed": seed, **price, "accuracy": measured.get("accuracy"),
            "compression": {"actual": None if kept is None else 1 - kept},
            "parameters": measured.get("parameters"), "multiply_adds": measured.get("multiply_adds"),
            "units": {layer: pair.get(left) for layer, pair in units.items()},
        }  # fmt: skip

    runs = [run("none", before, "before"), run(method, after, "after")]
    gates = content.get("gates")
    if isinstance(content.get("history"), list):
        runs[1]["history"] = content["history"]
    elif isinstance(gates, Mapping) and isinstance(gates.get("removed_at"), list):
        runs[1]["history"] = history(gates["removed_at"], recipe.get("epochs"))
    head = {"provenance": made, "settings": {setting: entry}}
    results = [{**head, "kind": "continuous", "runs": runs, "energy": content.get("energy")}]
    times = [
        {"setting": setting, "method": name, "mode": "train_epoch", "batch": recipe.get("batch"),
         "ms": _times(measured.get("epoch_seconds"), 1000)}
        for name, measured in (("none", before), ("removed", after)) if measured.get("epoch_seconds") is not None
    ]  # fmt: skip
    if times:
        results.append({**head, "kind": "timing", "runs": times})
    if isinstance(gates, Mapping) and {"layer", "mean", "delta_f"} <= gates.keys():
        scores = gates["delta_f"]
        scores = scores if isinstance(scores, Mapping) else {"bmrs_n": scores}
        results.append({**head, "kind": "posteriors",
                        "runs": [{**gates, "setting": setting, "seed": seed, "delta_f": scores,
                                  "removed_by": method}]})  # fmt: skip
    return results


def history(removed_at: Sequence[Any], epochs: Any = None) -> list[dict[str, int]]:
    """Units left after every epoch, from the epoch after which each went; 0 is a unit that stayed.

    >>> history([0, 2, 2, 0], 3)
    [{'epoch': 1, 'units': 4}, {'epoch': 2, 'units': 2}, {'epoch': 3, 'units': 2}]
    """
    went = [int(number(epoch) or 0) for epoch in removed_at]
    last = max([int(number(epochs) or 0), *went])
    return [{"epoch": e, "units": sum(not 0 < at <= e for at in went)} for e in range(1, last + 1)]


def method_of(criterion: str) -> str:
    """The study's name of a criterion from how it prints.

    >>> method_of("BMRS_N(tolerance=0.9189)"), method_of("BMRS_U(p1=8, p2=23, tolerance=0)"), method_of("SNR(1)")
    ('bmrs_n', 'bmrs_u8', 'snr')
    """
    name = criterion.split("(")[0].strip().lower() or "pruned"
    bits = re.search(r"p1=(\d+(?:\.\d+)?)", criterion)
    return f"{name}{float(bits[1]):g}" if name == "bmrs_u" and bits else name


def _ratio(a: Any, b: Any) -> float | None:
    return a / b if isinstance(a, (int, float)) and isinstance(b, (int, float)) and b else None


def _times(value: Any, factor: float) -> float | None:
    return value * factor if isinstance(value, (int, float)) else None
