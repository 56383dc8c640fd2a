"""The published results of the paper, to show beside ours. Percent and milliseconds, as printed there."""

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any


@dataclass(frozen=True)
class Printed:
    """A mean and a standard deviation over the authors' seeds, in percent."""

    mean: float
    sd: float


@dataclass(frozen=True)
class Result:
    """One cell of Tables 1 and 2: parameters removed as the authors counted them, and test accuracy."""

    compression: Printed
    accuracy: Printed


@dataclass(frozen=True)
class Runtime:
    """One cell of Tables 3 and 4: a forward pass of 32 images before any removal, in milliseconds."""

    train_ms: float
    inference_ms: float


def result(network: str, data: str, method: str) -> Result | None:
    """What Tables 1 and 2 print, or None where they print nothing.

    >>> result("mlp", "mnist", "bmrs_n")
    Result(compression=Printed(mean=48.86, sd=1.32), accuracy=Printed(mean=96.95, sd=0.19))
    """
    cell = _tables("tables_1_2")["results"].get(network, {}).get(data, {}).get(method)
    return None if cell is None else Result(Printed(*cell["compression"]), Printed(*cell["accuracy"]))


def runtime(network: str, data: str, method: str) -> Runtime | None:
    """What Tables 3 and 4 print, or None where they print nothing."""
    methods = _tables("tables_3_4")["runtimes"].get(network, {}).get(data, {})
    # The small networks were timed once for every p1: the interval's end does not change the work.
    cell = methods.get(method) or (methods.get("bmrs_u") if method.startswith("bmrs_u") else None)
    return None if cell is None else Runtime(cell["train_ms"], cell["inference_ms"])


@cache
def _tables(name: str) -> dict[str, Any]:
    text = (resources.files("bmrs.study") / "published" / f"{name}.json").read_text(encoding="utf-8")
    content: dict[str, Any] = json.loads(text)
    return content
