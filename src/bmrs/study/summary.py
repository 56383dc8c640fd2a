"""From runs to cells: mean and spread over seeds of every setting, method and price, and how they are named."""

import math
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from bmrs.price import KINDS
from bmrs.study import published
from bmrs.study.published import Printed

Content = Mapping[str, Any]

NETWORKS = {"mlp": "MLP", "lenet5": "LeNet-5", "resnet50": "ResNet-50", "vit": "ViT-B/16"}
DATA = {
    "mnist": "MNIST",
    "fashion-mnist": "Fashion-MNIST",
    "cifar10": "CIFAR-10",
    "tiny-imagenet": "TinyImageNet",
    "digits": "digits",
}
_METHODS = {"none": "None", "l2": "L2", "gradient": "Gradient", "mean": "E[θ]", "snr": "SNR", "bmrs_n": "BMRS_N"}
_INTERVAL = re.compile(r"bmrs_u(\d+(?:\.\d+)?)")
# A cell is marked beyond the larger of these two distances from the paper; at the border itself it still agrees.
POINTS, SDS, _ROUNDING = 1.0, 2.0, 1e-9


def method_name(method: str) -> str:
    """As shown to people.

    >>> method_name("bmrs_u8"), method_name("mean")
    ('BMRS_U-8', 'E[θ]')
    """
    interval = _INTERVAL.fullmatch(method)
    return f"BMRS_U-{interval[1]}" if interval else _METHODS.get(method, method)


def p1_of(method: str) -> float | None:
    """The p₁ of a BMRS_U, None of any other method."""
    interval = _INTERVAL.fullmatch(method)
    return float(interval[1]) if interval else None


def ordered_methods(methods: Iterable[str]) -> list[str]:
    """In the order of the paper's tables: BMRS_U last, from the largest p₁ down, then what is not known here."""
    known = list(_METHODS)

    def place(method: str) -> tuple[int, float, str]:
        p1 = p1_of(method)
        if p1 is not None:
            return len(known), -p1, ""
        return (known.index(method), 0.0, "") if method in known else (len(known) + 1, 0.0, method)

    return sorted(set(methods), key=place)


def check_kind(content: Content, kind: str) -> None:
    """Refuse a result that another command wrote."""
    if content.get("kind") != kind:
        raise ValueError(f"content must be a result of kind '{kind}'; got '{content.get('kind')}': give another file.")
    if not content.get("runs"):
        raise ValueError("content has no runs: give the result of a study that has finished at least one setting.")


@dataclass(frozen=True)
class Spread:
    """Mean and standard deviation (ddof 1) of ``n`` values; one value has no sd, and none have the mean nan."""

    mean: float
    sd: float | None
    n: int


def spread(values: Iterable[float | None]) -> Spread:
    """Null and non-finite values are left out and do not count in ``n``.

    >>> spread([1.0, 2.0, None, 3.0])
    Spread(mean=2.0, sd=1.0, n=3)
    """
    finite = [float(value) for value in values if value is not None and math.isfinite(value)]
    if not finite:
        return Spread(math.nan, None, 0)
    return Spread(statistics.fmean(finite), statistics.stdev(finite) if len(finite) > 1 else None, len(finite))


def deviation(ours: Spread, paper: Printed) -> int:
    """1 or -1 where ours is further above or below the paper than max(2 published sd, 1 point); 0 elsewhere."""
    difference = ours.mean - paper.mean
    if not abs(difference) > max(SDS * paper.sd, POINTS) + _ROUNDING:  # nan: nothing to compare
        return 0
    return 1 if difference > 0 else -1


@dataclass(frozen=True)
class Setting:
    """One network on one data set."""

    key: str
    network: str
    data: str

    @property
    def name(self) -> str:
        """As shown to people."""
        return f"{self.network_name}, {self.data_name}"

    @property
    def network_name(self) -> str:
        return NETWORKS.get(self.network, self.network)

    @property
    def data_name(self) -> str:
        return DATA.get(self.data, self.data)


def settings(content: Content) -> list[Setting]:
    """Those with runs: the MLPs first, and the data sets in the paper's order."""
    found = []
    for key in {run["setting"] for run in content["runs"]}:
        entry = content.get("settings", {}).get(key, {})
        network, _, data = key.partition("-")
        found.append(Setting(key, entry.get("network", network), entry.get("data", data)))

    def place(names: Mapping[str, str], name: str) -> tuple[int, str]:
        return (list(names).index(name), "") if name in names else (len(names), name)

    return sorted(found, key=lambda s: (place(NETWORKS, s.network), place(DATA, s.data), s.key))


@dataclass(frozen=True)
class Cell:
    """All seeds of one setting, method and price. Percentages, except the counts of what is left."""

    setting: str
    method: str
    price: str
    strength: float
    accuracy: Spread
    validation: Spread
    published: Spread  # compression by the authors' counting
    actual: Spread  # compression of the physically reduced network
    parameters: Spread
    multiply_adds: Spread
    runs: int
    emptied: int  # runs in which a layer lost every unit


def cells(content: Content) -> list[Cell]:
    """One per setting, method, price and strength of a continuous study, in the order of the tables."""
    check_kind(content, "continuous")
    groups: dict[tuple[str, str, str, float], list[Mapping[str, Any]]] = {}
    for run in content["runs"]:
        strength = run.get("strength")
        key = (run["setting"], run["method"], run.get("price") or "layer", 1.0 if strength is None else float(strength))
        groups.setdefault(key, []).append(run)
    places = {setting.key: i for i, setting in enumerate(settings(content))}
    methods = ordered_methods(key[1] for key in groups)
    ordered = sorted(groups, key=lambda k: (places[k[0]], methods.index(k[1]), *price_place(k[2], k[3])))
    return [_cell(key, groups[key]) for key in ordered]


def price_place(price: str, strength: float) -> tuple[int, str, float]:
    """Sorts prices in the order of :mod:`bmrs.price`, the full strength first."""
    return (KINDS.index(price) if price in KINDS else len(KINDS), price, -strength)


def price_name(price: str, strength: float) -> str:
    """As shown to people.

    >>> price_name("uniform", 0.5), price_name("layer", 1.0)
    ('uniform, s = 0.5', 'layer')
    """
    return price if strength == 1.0 else f"{price}, s = {strength:.3g}"


def usual_n(spreads: Iterable[Spread]) -> int:
    """The commonest number of seeds, which a caption can state once; the largest of those equally common."""
    counts = Counter(s.n for s in spreads if s.n)
    return max(counts, key=lambda n: (counts[n], n), default=0)


def printed(setting: Setting, method: str) -> published.Result | None:
    """The paper's cell, or None where it has none."""
    return published.result(setting.network, setting.data, method)


def _cell(key: tuple[str, str, str, float], runs: list[Mapping[str, Any]]) -> Cell:
    def percent(values: Iterable[float | None]) -> Spread:
        return spread(None if value is None else 100.0 * value for value in values)

    return Cell(
        *key,
        accuracy=percent(run.get("accuracy") for run in runs),
        validation=percent(run.get("validation") for run in runs),
        published=percent(run["compression"].get("published") for run in runs),
        actual=percent(run["compression"].get("actual") for run in runs),
        parameters=spread(run.get("parameters") for run in runs),
        multiply_adds=spread(run.get("multiply_adds") for run in runs),
        runs=len(runs),
        emptied=sum(bool(run.get("emptied")) for run in runs),
    )
