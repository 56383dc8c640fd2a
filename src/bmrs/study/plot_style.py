"""How the study's figures look: drawn at the size they are printed, legible in greyscale, and saved twice."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, Literal, ParamSpec

import matplotlib as mpl
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bmrs.study import summary
from bmrs.study.summary import Setting

Counting = Literal["published", "actual"]

COLUMN, PAGE = 3.4, 7.0  # inches: one column and both of a two-column page
DPI = 300
_EDGE = 2.0  # percent beyond 0 and 100 that axes may show, for the markers there
RC: Any = {  # Any: the names matplotlib knows differ between its versions
    "font.size": 7.0,
    "axes.titlesize": 7.5,
    "axes.labelsize": 7.0,
    "xtick.labelsize": 6.5,
    "ytick.labelsize": 6.5,
    "legend.fontsize": 7.0,
    "axes.linewidth": 0.6,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "lines.linewidth": 1.1,
    "hatch.linewidth": 0.6,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.unicode_minus": True,
    "pdf.fonttype": 42,  # real letters in the PDF, which journals ask for
    "mathtext.default": "regular",
    "figure.constrained_layout.h_pad": 0.03,
    "figure.constrained_layout.w_pad": 0.03,
}


@dataclass(frozen=True)
class Look:
    """Colour, line and marker, each of which alone tells a method from the others."""

    color: str
    line: Any
    marker: str


# Okabe and Ito's colours, which the colour-blind can tell apart
_LOOKS = {
    "none": Look("#555555", (0, (1, 1)), "None"),
    "l2": Look("#8c8c8c", (0, (1, 1.2)), "x"),
    "gradient": Look("#cc79a7", (0, (4, 1, 1, 1, 1, 1)), "P"),
    "mean": Look("#56b4e9", (0, (5, 1.5)), "v"),
    "snr": Look("#000000", (0, (2.5, 1.2)), "D"),
    "bmrs_n": Look("#0072b2", "solid", "o"),
    "bmrs_u8": Look("#d55e00", (0, (6, 1, 1, 1)), "s"),
    "bmrs_u4": Look("#009e73", (0, (3, 1, 3, 1, 1, 1)), "^"),
}
_SPARE = (Look("#e69f00", (0, (7, 2)), "<"), Look("#882255", (0, (2, 2)), ">"), Look("#332288", (0, (1, 2)), "h"))
KNEE: dict[str, Any] = {"marker": "*", "color": "#f0e442", "markeredgecolor": "black", "markeredgewidth": 0.6}

P = ParamSpec("P")


def styled(draw: Callable[P, Figure]) -> Callable[P, Figure]:
    """Draw with the settings above, and leave the caller's as they were."""

    @wraps(draw)
    def inside(*args: P.args, **kwargs: P.kwargs) -> Figure:
        with mpl.rc_context(RC):
            return draw(*args, **kwargs)

    return inside


def save(figure: Figure, path_without_suffix: str | Path) -> list[Path]:
    """As PDF, to print, and as PNG of 300 dots per inch, to look at; the folder is made."""
    stem = Path(path_without_suffix)
    stem.parent.mkdir(parents=True, exist_ok=True)
    paths = [stem.with_name(f"{stem.name}.{kind}") for kind in ("pdf", "png")]
    with mpl.rc_context(RC):
        # No date inside: the same numbers give the same file.
        figure.savefig(paths[0], metadata={"CreationDate": None})
        figure.savefig(paths[1], dpi=DPI)
    return paths


def look(method: str) -> Look:
    """Of a method; the few without one of their own share three spare ones."""
    return _LOOKS.get(method) or _SPARE[sum(map(ord, method)) % len(_SPARE)]


def label(method: str) -> str:
    """The shown name, with the subscript of BMRS set as one."""
    name = plain(summary.method_name(method))
    return name.replace("BMRS_N", "BMRS$_N$").replace("BMRS_U", "BMRS$_U$")


def plain(text: str) -> str:
    """Text from a file: its dollar signs are no formulas."""
    return text.replace("$", r"\$")


def setting_grid(settings: Sequence[Setting]) -> tuple[int, int, dict[tuple[int, int], Setting]]:
    """Rows, columns and what stands where: data sets down, networks across, so that the same data share a scale.

    Where that would leave gaps, the settings just follow each other.
    """
    data = list(dict.fromkeys(s.data for s in settings))
    order = [name for name in summary.DATA if name in data] + [name for name in data if name not in summary.DATA]
    networks = list(dict.fromkeys(s.network for s in settings))
    places = {(order.index(s.data), networks.index(s.network)): s for s in settings}
    if len(places) < len(order) * len(networks):
        places = {divmod(i, 2): s for i, s in enumerate(settings)}
    return 1 + max(row for row, _ in places), 1 + max(column for _, column in places), places


def width_for(columns: int, of: int) -> float:
    """As wide as the page where all columns are there, and one column of it for half of them."""
    return PAGE if columns > of / 2 else COLUMN


def equal_spans(views: Sequence[Axes], axis: Literal["x", "y"]) -> None:
    """Axes of percentages side by side show equally many points, each about its own middle and none beyond 0 or 100."""
    windows = [view.get_xlim() if axis == "x" else view.get_ylim() for view in views]
    span = min(max((high - low for low, high in windows), default=0.0), 100 + 2 * _EDGE)
    for (low, high), view in zip(windows, views, strict=True):
        start = max(min(0.5 * (low + high - span), 100 + _EDGE - span), -_EDGE)
        (view.set_xlim if axis == "x" else view.set_ylim)(start, start + span)


def letter(index: int, of: int = 26) -> str:
    """In front of a panel's title; a panel alone needs none."""
    return f"({chr(ord('a') + index % 26)}) " if of > 1 else ""


def note(axes: Axes, text: str) -> None:
    """A remark in place of axes that have nothing to show."""
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color="0.35")
    axes.set_axis_off()


def legend(figure: Figure, handles: Sequence[Artist], columns: int, caption: str) -> None:
    """Below all panels, filled row by row as people read, with what holds for all of them above it."""
    columns = min(columns, len(handles))
    ordered = [handle for start in range(columns) for handle in handles[start::columns]]
    below = figure.legend(
        handles=ordered, loc="outside lower center", ncols=columns, frameon=False, handlelength=2.6, columnspacing=1.2,
        title=caption, title_fontsize=6.5,
    )  # fmt: skip
    below.get_title().set_multialignment("center")


def count_text(n: int) -> str:
    """What the lines and the shades are, for a caption on the figure."""
    return f"mean and standard deviation over n = {n} seeds" if n > 1 else "n = 1 seed, so no spread"
