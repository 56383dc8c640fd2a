"""Result files in, checked contents out. Every error is one sentence."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

# What a run of each kind cannot be shown without.
NEEDED = {
    "continuous": ("setting", "method", "accuracy", "compression"),
    "post-training": ("setting", "method", "fractions", "compression", "accuracy"),
    "correlations": ("setting", "methods", "spearman"),
    "posteriors": ("setting", "layer", "mean", "delta_f"),
    "timing": ("setting", "method", "mode", "ms"),
}
_LISTS = {"fractions", "methods", "spearman", "layer", "mean"}
_OBJECTS = {"compression", "delta_f"}
_ALSO_LISTS = {"post-training": {"accuracy"}}


def load(paths: Iterable[str | Path] | str | Path) -> list[dict[str, Any]]:
    """The results in these JSON files, in that order; ValueError for what is not a result."""
    paths = [paths] if isinstance(paths, (str, Path)) else list(paths)
    return [_read(Path(path)) for path in paths]


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist: name the JSON file a run has written.") from None
    except IsADirectoryError:
        raise ValueError(f"{path} is a folder: name the JSON file in it.") from None
    except OSError as wrong:
        raise ValueError(f"{path} cannot be read ({wrong.strerror}): check its permissions.") from None
    except (ValueError, RecursionError):  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise ValueError(f"{path} is not JSON: name the .json file a run has written.") from None
    return checked(content, str(path))


def checked(content: Any, where: str) -> dict[str, Any]:
    """The content as a result, its runs known to have what the page needs."""
    if not isinstance(content, Mapping):
        raise ValueError(f"{where} is not a result: a result is a JSON object with 'kind' and 'runs'.")
    kind = content.get("kind", "demo" if {"before", "after"} <= content.keys() else None)
    if kind == "demo":
        for part in ("before", "after", "units"):
            if not isinstance(content.get(part), Mapping):
                raise ValueError(f"{where} is not a run's result: '{part}' is missing; write it again.")
        return {**content, "kind": "demo"}
    if kind not in NEEDED:
        raise ValueError(f"{where} is not a result: its 'kind' must be one of {', '.join(NEEDED)}; got {kind!r}.")
    runs = content.get("runs")
    if not isinstance(runs, list):
        raise ValueError(f"{where} is not a result: 'runs' must be a list; run the study again.")
    for i, run in enumerate(runs):
        _check_run(run, kind, f"run {i} in {where}")
    for part in ("settings", "provenance", "energy"):
        if not isinstance(content.get(part) or {}, Mapping):
            raise ValueError(f"{where} is not a result: '{part}' must be an object; run the study again.")
    return dict(content)


def _check_run(run: Any, kind: str, where: str) -> None:
    if not isinstance(run, Mapping):
        raise ValueError(f"{where} must be an object; run the study again.")
    for field in NEEDED[kind]:
        if field not in run:
            raise ValueError(f"{where} has no '{field}', which every {kind} run needs; run the study again.")
        lists = _LISTS | _ALSO_LISTS.get(kind, set())
        wanted: type = list if field in lists else Mapping if field in _OBJECTS else object
        if not isinstance(run[field], wanted):
            raise ValueError(
                f"'{field}' of {where} must be {'a list' if wanted is list else 'an object'}; run the study again."
            )
