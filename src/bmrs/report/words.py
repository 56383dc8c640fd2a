"""Counts, percentages and times as people read them."""

from collections.abc import Sequence

_NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")


def count_of(n: int, singular: str, plural: str | None = None) -> str:
    """
    >>> count_of(1, "seed"), count_of(10, "seed"), count_of(70, "network")
    ('one seed', 'ten seeds', '70 networks')
    """
    return f"{_NUMBERS[n] if n < len(_NUMBERS) else f'{n:,}'} {singular if n == 1 else plural or singular + 's'}"


def percent(value: float, digits: int = 1) -> str:
    return f"{100 * value:.{digits}f} %"


def span(values: Sequence[float], digits: int = 0) -> str:
    """From the smallest to the largest, once where they read alike.

    >>> span([93, 49.8]), span([93, 93.1])
    ('50 to 93', '93')
    """
    low, high = (f"{v:.{digits}f}" for v in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def signed(value: float, digits: int = 1) -> str:
    """With a true minus sign, and none on zero.

    >>> signed(-0.44), signed(0.04), signed(2)
    ('−0.4', '0.0', '+2.0')
    """
    text = f"{abs(value):.{digits}f}"
    if float(text) == 0:
        return text
    return ("−" if value < 0 else "+") + text


def plus_minus(mean: float, sd: float | None, digits: int = 1) -> str:
    """
    >>> plus_minus(49.83, 1.25), plus_minus(49.83, None)
    ('49.8 ± 1.2', '49.8')
    """
    return f"{mean:.{digits}f}" + ("" if sd is None else f" ± {sd:.{digits}f}")


def seconds(value: float) -> str:
    """
    >>> seconds(0.8), seconds(75), seconds(4000)
    ('0.8 s', '1 min 15 s', '1 h 6 min')
    """
    if value < 60:
        return f"{value:.1f} s" if value < 10 else f"{value:.0f} s"
    whole = round(value)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
