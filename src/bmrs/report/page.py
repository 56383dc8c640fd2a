"""The page itself: one file with its style, scripts and data inside."""

import base64
import hashlib
import json
from collections.abc import Mapping
from html import escape
from importlib import resources
from string import Template
from typing import Any

import bmrs
from bmrs.report import making, tables
from bmrs.report.averages import number
from bmrs.report.headline import Headline, changes, headline
from bmrs.report.words import span

Digest = Mapping[str, Any]
SCRIPTS = ("svg.js", "charts.js", "page.js")
SHORT = {"curves": "Curves", "gates": "Gates", "ranks": "Ranks", "bits": "p₁"}  # in the list of links


def page(data: Digest) -> str:
    """The whole HTML text."""
    head = headline(data)
    script = '"use strict";\n(() => {\n' + "\n".join(_asset(name) for name in SCRIPTS) + "})();\n"
    counted = any(_counted(data, "published")), any(_counted(data, "actual"))
    sections = _sections(data, head, all(counted))
    return Template(_asset("page.html")).substitute(
        # No address may be asked for anything, and no script may run but this one.
        policy=f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{_digest_of(script)}'",
        counting="actual" if counted[1] and not counted[0] else "published",
        title=_whole(head.sentence),
        style=_asset("page.css"),
        lede=_whole(head.lede),
        tiles=_tiles(data, head),
        links="".join(f'<a href="#{name}">{SHORT.get(name, title)}</a>' for name, title, _ in sections),
        glance=tables.glance(data, head) if len(head.rows) > 1 else "",
        controls=_controls(data, all(counted)),
        sections="".join(
            f'<section id="{name}" aria-labelledby="{name}-title"><h2 id="{name}-title">{title}'
            f"{_which(name) if len(data['settings']) > 1 else ''}</h2>{body}</section>"
            for name, title, body in sections
        ),
        data=embeddable(data),
        script=script,
        version=escape(bmrs.__version__),
    )


def embeddable(data: Any) -> str:
    """JSON that is safe inside a script element: no text in it can close the element or open a comment."""
    text = json.dumps(_finite(data), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _finite(value: Any) -> Any:
    """Provenance may hold anything a run wrote; what JSON cannot say becomes null."""
    if isinstance(value, Mapping):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    if isinstance(value, float):
        return value if abs(value) < float("inf") else None
    return value if value is None or isinstance(value, (str, int)) else str(value)


def _whole(text: str) -> str:
    """Escaped, and no line ends between a number and its percent sign."""
    return escape(text).replace(" %", "\u00a0%")


def _asset(name: str) -> str:
    return (resources.files("bmrs.report") / name).read_text(encoding="utf-8")


def _digest_of(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _counted(data: Digest, counting: str) -> list[bool]:
    cells = [bool(cell[counting]) for by in data["pruned"].values() for cell in by.values()]
    curves = [c for part in data["curves"].values() for c in part["methods"].values()]
    return cells + [any(x for x in curve[counting] if x is not None) for curve in curves]


def _tiles(data: Digest, head: Headline) -> str:
    """The few numbers to remember."""
    tiles = []
    if head.rows:
        tiles.append(
            (
                f"{span([100 * r.removed for r in head.rows], 0 if len(head.rows) > 1 else 1)} %",
                "of the parameters removed",
            )
        )
        points = [r.points for r in head.rows if r.points is not None]
        if points:
            tiles.append((changes(points), "points of accuracy"))
        work = [100 * (1 - r.multiply_adds[1] / r.multiply_adds[0]) for r in head.rows if r.multiply_adds]
        if work:
            tiles.append((f"{span(work, 0 if len(head.rows) > 1 else 1)} %", "of the multiply-adds saved"))
    used = [known for known, _ in making.energies(data) if number(known.get("kwh")) is not None]
    if used:
        how = "measured" if all(known.get("how") == "measured" for known in used) else "estimated"
        tiles.append((making.kwh(sum(known["kwh"] for known in used)), f"of energy, {how}"))
    return "".join(f'<div class="tile"><b>{escape(b)}</b><span>{escape(s)}</span></div>' for b, s in tiles)


def _controls(data: Digest, both: bool) -> str:
    charts = any(data[part] for part in ("pruned", "curves", "gates", "correlations", "prices", "bits"))
    settings = data["settings"]
    if not charts or (len(settings) < 2 and not both):
        return ""
    # First what has a curve: the page opens on something to see.
    first = next((key for key in settings if key in data["curves"]), next(iter(settings)))
    options = "".join(
        f'<option value="{escape(key)}"{" selected" if key == first else ""}>{escape(entry["name"])}</option>'
        for key, entry in settings.items()
    )
    chosen = f'<label class="field"><span class="cap">Setting</span><select id="setting">{options}</select></label>'
    counting = (
        '<fieldset class="switch"><legend class="cap">Counting</legend>'
        '<label><input type="radio" name="counting" value="published" checked><span>published</span></label>'
        '<label><input type="radio" name="counting" value="actual"><span>actual</span></label></fieldset>'
    )
    return f'<div class="controls needs-js">{chosen}{counting if both else ""}</div>'


def _sections(data: Digest, head: Headline, both: bool) -> list[tuple[str, str, str]]:
    """(id, title, HTML) of every section there is something to show in."""
    pruned = data["pruned"].values()
    layers = any(cell["units"] or cell["history"] for by in pruned for cell in by.values())
    history = any(cell["history"] for by in pruned for cell in by.values())
    reading = tables.how_to_read(data) + (
        " The published counting takes zeros in weight matrices; the actual one the parameters of the network that is "
        "left. Choose one above." if both else ""
    )  # fmt: skip
    # One network and its pruned self are in the headline already.
    compared = len(pruned) > 1 or _paper(data) or any(len(by) > 2 for by in pruned)
    times = tables.latency(data) or '<p class="foot">Latency and memory were not measured here.</p>'
    cost = [tables.costs(data, head) if pruned else "", times, making.energy(data)]
    found = [
        ("curves", "Accuracy and compression", _part("curves") if data["curves"] else ""),
        ("results", "Pruned while training" if not _paper(data) else "Beside the paper",
         tables.beside_the_paper(data) + f'<p class="foot">{reading}</p>' if compared else ""),
        ("layers", "What is left", (_part("history") if history else _part("widths")) if layers else ""),
        ("gates", "Gates and evidence", _part("gates") if data["gates"] else ""),
        ("ranks", "How alike the criteria rank", _part("ranks") if data["correlations"] else ""),
        ("prices", "Prices", _part("prices") + tables.prices(data) if data["prices"] else ""),
        ("bits", "BMRS_U by p₁", _part("bits") if data["bits"] else ""),
        ("cost", "Cost", "".join(cost)),
        ("made", "How it was made", making.how_made(data) + making.missing(data)),
    ]  # fmt: skip
    return [section for section in found if section[2]]


def _which(section: str) -> str:
    """Where the script writes which setting is shown."""
    charts = ("curves", "layers", "gates", "ranks", "prices", "bits")
    return f' <span class="which" data-names-setting="{section}"></span>' if section in charts else ""


def _paper(data: Digest) -> bool:
    return any("paper" in cell for by in data["pruned"].values() for cell in by.values())


def _part(name: str) -> str:
    """The markup of a section's charts, from between its comments in parts.html."""
    text = _asset("parts.html")
    return text.split(f"<!-- {name} -->")[1].split("<!-- end -->")[0].strip()
