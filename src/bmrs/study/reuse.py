"""Networks that another command trained already: tables and figures that share some train them once.

A member of a stack does what it would do alone, so its result may come from any stack of the same recipe.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from bmrs.study.store import content_of, finite

Offer = tuple[str, float]  # a price and its strength
_PLAIN = "none"  # without gates, it pays no price
_ONCE: Offer = ("layer", 1.0)  # and is filed under this one


@dataclass(frozen=True)
class Shared:
    """What is left to train, and what is there: runs, and which folder they come from."""

    methods: tuple[str, ...]
    prices: tuple[Offer, ...]
    runs: tuple[dict[str, Any], ...]
    sources: tuple[str, ...]
    setting: dict[str, Any] | None  # the entry of one of the sources


def shared(
    folders: Iterable[Path],
    key: str,
    recipe: dict[str, Any],
    form: int,
    made: Mapping[str, Any],
    methods: Sequence[str],
    prices: Sequence[Offer],
    seeds: Sequence[int],
) -> Shared:
    """Look in the folders of other commands for parts called ``key`` of the same recipe.

    ``made``: the machine and the commit they must come from, as provenance says them; several machines, each of which
    will do, have "; " between them.
    """
    have: dict[tuple[str, Offer], list[dict[str, Any]]] = {}
    came: dict[tuple[str, Offer], str] = {}
    setting = None
    for folder in folders:
        if _job(folder) != {"format": form, "protocol": "continuous"}:
            continue
        part = content_of(folder, key)
        if (
            part is None
            or part["recipe"] != finite(recipe)
            or part["made"].get("commit") != made["commit"]
            or not {*part["made"]["machine"].split("; ")} <= {*made["machine"].split("; ")}
        ):
            continue
        for method, offer in product(methods, prices):
            kind = _kind(method, offer)
            own = [
                run for run in part["runs"]
                if _kind(run["method"], (run["price"], run["strength"])) == kind and run["seed"] in seeds
            ]  # fmt: skip
            if kind not in have and sorted(run["seed"] for run in own) == sorted(seeds):
                have[kind], came[kind], setting = own, folder.parent.name, part["setting"]
    missing = [kind for kind in dict.fromkeys(_kind(m, o) for m, o in product(methods, prices)) if kind not in have]
    left = [method for method in methods if method in {method for method, _ in missing}]
    if "l2" in left and "bmrs_n" not in left:  # which says how many units it is to remove
        left.append("bmrs_n")
    offers = [offer for offer in prices if offer in {offer for method, offer in missing if method != _PLAIN}]
    trained = {_kind(method, offer) for method, offer in product(left, offers or prices)}
    reused = [kind for kind in have if kind not in trained]
    return Shared(
        tuple(left),
        tuple(offers or prices),
        tuple(run for kind in reused for run in have[kind]),
        tuple(sorted({came[kind] for kind in reused})),
        setting,
    )


def _kind(method: str, offer: Offer) -> tuple[str, Offer]:
    return (method, _ONCE if method == _PLAIN else (offer[0], float(offer[1])))


def _job(folder: Path) -> dict[str, Any]:
    """Of which job the parts in a folder are, as far as it matters here."""
    try:
        key = json.loads((folder / "key.json").read_bytes())
        return {name: key[name] for name in ("format", "protocol")}
    except (OSError, ValueError, KeyError, TypeError):
        return {}
