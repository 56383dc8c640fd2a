"""The page's tables: plain HTML, complete without JavaScript. Everything from the data is escaped here."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from bmrs.report.headline import Headline
from bmrs.report.words import plus_minus, signed
from bmrs.study import published
from bmrs.study.summary import DATA, NETWORKS, POINTS, SDS, price_name

Digest = Mapping[str, Any]
MODES = {"train_forward": "forward, training mode", "inference": "forward, inference mode",
         "train_step": "whole training step", "train_epoch": "an epoch of training"}  # fmt: skip
STATES = {"none": "without gates", "gated": "with gates", "removed": "after removal"}
_MARK = {1: ("▲", "above"), -1: ("▼", "below")}


def boxed(table: str, label: str) -> str:
    """A wide table scrolls inside its own box, also by keyboard."""
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(label)}">{table}</div>'


def unbroken(text: str) -> str:
    """A name that breaks after a comma only, not inside LeNet-5."""
    return " ".join(f'<span class="nb">{escape(part)}</span>' for part in text.replace(", ", ",\0").split("\0"))


def table(head: Iterable[str], rows: Iterable[Sequence[str]], caption: str = "", kind: str = "") -> str:
    """Cells are HTML already; the first of a row is its heading."""
    top = "".join(f'<th scope="col">{cell}</th>' for cell in head)
    body = "".join(
        f'<tr><th scope="row">{first}</th>' + "".join(f"<td>{cell}</td>" for cell in rest) + "</tr>"
        for first, *rest in rows
    )
    title = f"<caption>{caption}</caption>" if caption else ""
    return f'<table class="{kind}">{title}<thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>'


def glance(data: Digest, head: Headline) -> str:
    """One row per setting: how much went, and what became of the accuracy."""
    rows = []
    for row in head.rows:
        size = "" if row.parameters is None else f"{row.parameters[0]:,.0f} → {row.parameters[1]:,.0f}"
        share = 100 * row.removed
        bar = f'<span class="bar" aria-hidden="true"><span style="width:{share:.1f}%"></span></span>'
        rows.append(
            [
                unbroken(data["settings"][row.setting]["name"]),
                f'<span class="with-bar">{bar}<span><b>{share:.1f} %</b>{_sd(row.removed_sd)}</span></span>',
                size or "–",
                "–" if row.whole is None else f"{100 * row.whole:.1f} %{_sd(row.whole_sd)}",
                "–" if row.accuracy is None else f"<b>{100 * row.accuracy:.1f} %</b>{_sd(row.accuracy_sd)}",
                "–" if row.points is None else signed(row.points),
            ]
        )
    name = escape(data["methods"].get(head.method, head.method))
    head_row = ("Setting", "Parameters removed", "before → after", "Accuracy, whole", f"Accuracy, {name}", "Points")
    return boxed(table(head_row, rows, kind="glance"), "What was removed, setting by setting") if rows else ""


def _sd(value: float | None) -> str:
    """Below the mean, in small print."""
    return "" if value is None else f'<span class="paper">± {100 * value:.1f}</span>'


def beside_the_paper(data: Digest) -> str:
    """Methods by data sets, one table per network; the published value below ours."""
    networks: dict[str, list[str]] = {}
    for key in data["settings"]:
        if key in data["pruned"]:
            networks.setdefault(data["settings"][key]["network"], []).append(key)
    return "".join(_of_network(data, network, keys) for network, keys in networks.items())


def _of_network(data: Digest, network: str, keys: list[str]) -> str:
    name = escape(NETWORKS.get(network, network))
    sets = [data["settings"][key]["data"] for key in keys]
    first = "".join(f'<th scope="colgroup" colspan="2">{escape(DATA.get(one, one))}</th>' for one in sets)
    second = '<th scope="col">removed, %</th><th scope="col">accuracy, %</th>' * len(keys)
    methods = [m for m in data["methods"] if any(m in data["pruned"][key] for key in keys)]
    body = ""
    for method in methods:
        cells = [data["pruned"][key].get(method) for key in keys]
        body += f'<tr><th scope="row">{unbroken(data["methods"][method])}</th>'
        body += "".join(f"<td>{_removed(cell)}</td><td>{_value(cell, 'accuracy')}</td>" for cell in cells) + "</tr>"
    seeds = sorted({data["pruned"][key][m]["n"] for key in keys for m in data["pruned"][key]})
    said = f"n = {seeds[0]}" if len(seeds) == 1 else f"n = {seeds[0]} to {seeds[-1]}"
    whole = (
        f'<table class="results"><caption><strong>{name}</strong> <span>{said}</span></caption>'
        f"<colgroup><col></colgroup>{'<colgroup><col><col></colgroup>' * len(keys)}"
        f'<thead><tr><td rowspan="2"></td>{first}</tr><tr>{second}</tr></thead><tbody>{body}</tbody></table>'
    )
    return boxed(whole, f"Results of {NETWORKS.get(network, network)}")


def _removed(cell: Mapping[str, Any] | None) -> str:
    return (
        f'<span class="published">{_value(cell, "published")}</span>'
        f'<span class="actual">{_value(cell, "actual")}</span>'
    )


def _value(cell: Mapping[str, Any] | None, field: str) -> str:
    if cell is None or cell[field] is None:
        return "–"
    mark = _MARK.get(cell.get("differs", {}).get(field, 0))
    sign = f' <abbr class="differs" title="{mark[1]} the paper\'s">{mark[0]}</abbr>' if mark else ""
    text = f'<span class="ours">{_percents(cell[field])}{sign}</span>'
    if field == "accuracy" and cell.get("emptied"):
        text += f'<span class="emptied">a layer emptied in {cell["emptied"]} of {cell["n"]}</span>'
    paper = cell.get("paper", {}).get(field)
    return text + (f'<span class="paper"><span class="hush">paper </span>{_percents(paper)}</span>' if paper else "")


def how_to_read(data: Digest) -> str:
    """The note below, only of what the tables above have."""
    cells = [cell for by in data["pruned"].values() for cell in by.values()]
    said = ["Mean ± standard deviation over the seeds."] if any(cell["n"] > 1 for cell in cells) else []
    if data["price"]:
        said.append(f"Price: {escape(', '.join(data['price']))}.")
    if any(cell.get("paper") for cell in cells):
        said.append(
            'Below ours, in small print, what the paper reports by its own counting. <abbr class="differs" '
            f'title="above">▲</abbr> <abbr class="differs" title="below">▼</abbr> further above or below it '
            f"than {SDS:g} of its standard deviations, or {POINTS:g} point if that is more."
        )
    return " ".join(said)


def prices(data: Digest) -> str:
    """Prices by settings: parameters removed, counted physically, and accuracy."""
    keys = [key for key in data["settings"] if key in data["prices"]]
    names = {
        (cell["price"], cell["strength"], cell["method"]): None for key in keys for cell in data["prices"][key]
    }  # as the settings have them: sorted already
    several = len({method for *_, method in names}) > 1
    rows = []
    for price, strength, method in names:
        row = [unbroken(price_name(price, strength) + (f" ({data['methods'].get(method, method)})" if several else ""))]
        for key in keys:
            found = [
                c for c in data["prices"][key] if (c["price"], c["strength"], c["method"]) == (price, strength, method)
            ]
            row += [_percents(found[0][field]) if found else "–" for field in ("actual", "accuracy")]
        rows.append(row)
    first = "".join(f'<th scope="colgroup" colspan="2">{escape(data["settings"][key]["name"])}</th>' for key in keys)
    second = '<th scope="col">removed, %</th><th scope="col">accuracy, %</th>' * len(keys)
    references = _references(data, keys)
    body = "".join(
        f'<tr><th scope="row">{name}</th>{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>'
        for name, *cells in [*references, *rows]
    )
    whole = f"<table><thead><tr><td rowspan='2'></td>{first}</tr><tr>{second}</tr></thead><tbody>{body}</tbody></table>"
    beside = any("paper" in name for name, *_ in references)
    said = ["Removed by actual counting, the paper's row by its own." if beside else "Removed by actual counting."]
    said += ["Mean ± standard deviation over the seeds."] if "±" in body else []
    return boxed(whole, "Prices") + f'<p class="foot">{" ".join(said)}</p>'


def _references(data: Digest, keys: Sequence[str]) -> list[list[str]]:
    """The whole network, and what the paper prints of BMRS_N; neither where nothing is known of it."""
    whole, paper = ["whole network"], ["paper's BMRS_N"]
    for key in keys:
        cells = data["pruned"].get(key, {})
        mine, theirs = cells.get("none", {}), cells.get("bmrs_n", {}).get("paper", {})
        whole += ["–", _percents(mine.get("accuracy"))]
        paper += [_percents(theirs.get(field)) for field in ("published", "accuracy")]
    return [row for row in (whole, paper) if set(row[1:]) != {"–"}]


def costs(data: Digest, head: Headline) -> str:
    """Parameters and multiply-adds before and after."""
    rows = []
    for row in head.rows:
        cells = [unbroken(data["settings"][row.setting]["name"])]
        for pair in (row.parameters, row.multiply_adds):
            cells += ["–"] * 3 if pair is None else [f"{pair[0]:,.0f}", f"{pair[1]:,.0f}", _change(*pair)]
        rows.append(cells)
    if not any(row.parameters or row.multiply_adds for row in head.rows):
        return ""
    after = escape(data["methods"].get(head.method, "after"))
    names = ("Setting", "Parameters", after, "change", "Multiply-adds", after, "change")
    return boxed(table(names, rows), "Parameters and multiply-adds")


def latency(data: Digest) -> str:
    """Milliseconds and memory, one row per setting and mode; the paper's beside where it has them."""
    timing = data["timing"]
    states = list(dict.fromkeys(t["method"] for key in timing for t in timing[key]))
    states = [s for s in STATES if s in states] + [s for s in states if s not in STATES]
    modes = list(dict.fromkeys(t["mode"] for key in timing for t in timing[key]))
    printed = {key: _printed(data["settings"][key]) or {} for key in timing}
    beside = any(mode in own for own in printed.values() for mode in modes)  # the paper has something to compare with
    columns = 1 + len(states) + beside
    body = ""
    for key in (k for k in data["settings"] if k in timing):
        name = unbroken(data["settings"][key]["name"])
        body += f'<tr><th scope="rowgroup" colspan="{columns}">{name}</th></tr>'
        for mode in (m for m in modes if any(t["mode"] == m for t in timing[key])):
            row = []
            for state in states:
                found = [t for t in timing[key] if t["mode"] == mode and t["method"] == state]
                row.append(_time(found[0]) if found else "–")
            if beside:
                pair = printed[key].get(mode)
                row.append("–" if pair is None else f"{pair[0]:.2f} → {pair[1]:.2f}")
            body += f'<tr><th scope="row">{escape(MODES.get(mode, mode))}</th>'
            body += "".join(f"<td>{cell}</td>" for cell in row) + "</tr>"
    if not body:
        return ""
    batches = sorted({t["batch"] for key in timing for t in timing[key] if t["batch"]})
    batch = f", batches of {', '.join(f'{b:g}' for b in batches)}" if batches else ""
    names = ["", *(escape(STATES.get(s, s)) for s in states)]
    names += ["paper, without → with gates"] if beside else []
    note = " The paper's are from another machine." if beside else ""
    memory = ", and the most memory used" if any(t["memory_mib"] for key in timing for t in timing[key]) else ""
    top = "".join(f'<th scope="col">{name}</th>' if name else "<td></td>" for name in names)
    whole = f'<table class="latency"><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>'
    return boxed(whole, "Times") + f'<p class="foot">Milliseconds{batch}{memory}.{note}</p>'


def _printed(setting: Mapping[str, Any]) -> dict[str, tuple[float, float]] | None:
    plain, gated = (published.runtime(setting["network"], setting["data"], m) for m in ("none", "bmrs_n"))
    if plain is None or gated is None:
        return None
    return {"train_forward": (plain.train_ms, gated.train_ms), "inference": (plain.inference_ms, gated.inference_ms)}


def _time(found: Mapping[str, Any]) -> str:
    if found["ms"] is None:
        return "–"
    memory = f'<span class="paper">{found["memory_mib"][0]:,.0f} MiB</span>' if found["memory_mib"] else ""
    ms = found["ms"][0]
    between = found["spread"]
    title = "" if not between or None in between else f' title="{between[0]:.3g} to {between[1]:.3g} ms"'
    digits = 3 if ms < 1 else 2 if ms < 10 else 1 if ms < 100 else 0
    return f'<span class="ours"{title}>{ms:,.{digits}f}</span>{memory}'


def _percents(pair: Sequence[float | None] | None) -> str:
    if pair is None or pair[0] is None:
        return "–"
    return plus_minus(100 * pair[0], None if pair[1] is None else 100 * pair[1])


def _change(before: float, after: float) -> str:
    return "–" if not before else f"{signed(100 * (after / before - 1))} %"
