"""Numbers over seeds, as the page embeds them: means and spreads, rounded."""

import math
from collections.abc import Iterable
from typing import Any

from bmrs.study.summary import Spread, spread


def number(value: Any) -> float | None:
    """The value as a finite number, or None: results write null for what is not finite."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


def average(values: Iterable[Any]) -> Spread:
    """Over what is a finite number among the values.

    >>> average([1.0, 2.0, None, "?"])
    Spread(mean=1.5, sd=0.7071067811865476, n=2)
    """
    return spread(number(value) for value in values)


def embedded(values: Iterable[Any], digits: int = 7) -> list[float | None] | None:
    """[mean, sd] of the values, sd None for one value; None where there is none.

    More digits than are shown: what is rounded twice should not differ from what a table rounds once.

    >>> embedded([0.25, 0.75]), embedded([3]), embedded([None])
    ([0.5, 0.3535534], [3, None], None)
    """
    found = average(values)
    if not found.n:
        return None
    return [short(found.mean, digits), None if found.sd is None else short(found.sd, digits)]


def short(value: float, digits: int = 5) -> float:
    """Rounded, and a whole number where it is one.

    >>> short(0.1234567), short(3.0)
    (0.12346, 3)
    """
    rounded = round(value, digits)
    return int(rounded) if rounded == int(rounded) else rounded


def significant(value: float, figures: int = 4) -> float:
    """Rounded to that many figures, for values that span orders of magnitude.

    >>> significant(-1234.56), significant(0.000123456)
    (-1235, 0.0001235)
    """
    return short(value, figures - 1 - math.floor(math.log10(abs(value)))) if value else 0
