"""One table of plain text cells, as Markdown that reads well unrendered too, and as LaTeX with booktabs."""

import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_LATEX = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "_": r"\_", "%": r"\%", "&": r"\&", "#": r"\#", "$": r"\$",
    "^": r"\textasciicircum{}", "~": r"\textasciitilde{}", "<": "$<$", ">": "$>$", "±": r"$\pm$", "×": r"$\times$",
    "θ": r"$\theta$", "τ": r"$\tau$", "↑": r"$\uparrow$", "↓": r"$\downarrow$", "–": "--", "−": "$-$", "₂": "$_2$",
    "½": r"$\frac{1}{2}$", "·": r"$\cdot$", "→": r"$\rightarrow$", "…": r"\dots{}", "’": "'", '"': "''",
    "|": r"\textbar{}",
}  # fmt: skip
_TOKENS = re.compile(r"BMRS_(?P<kind>[NU])|`(?P<code>[^`]*)`|(?P<one>.)", re.DOTALL)


@dataclass(frozen=True)
class Group:
    """Neighbouring columns under one heading; an empty heading puts none above them."""

    heading: str
    columns: tuple[str, ...]


@dataclass(frozen=True)
class Grid:
    """``labels`` head columns of words, then come the groups' columns of numbers. ``blocks`` of rows stand apart."""

    title: str
    labels: tuple[str, ...]
    groups: tuple[Group, ...]
    blocks: tuple[tuple[tuple[str, ...], ...], ...]


def markdown(grids: Sequence[Grid], notes: Iterable[str]) -> str:
    """The tables under headings, then the notes as paragraphs."""
    parts = [f"### {grid.title}\n\n{_markdown_table(grid)}" for grid in grids]
    return "\n\n".join([*parts, *notes]) + "\n"


def latex(grids: Sequence[Grid], notes: Iterable[str], each: Iterable[str] = ()) -> str:
    """One ``table*`` for each grid, as wide as two columns, and the notes under the last.

    ``each``: those of the notes that belong under every table, since each floats to a page of its own.
    """
    below, always = [latex_text(note) for note in notes], [latex_text(note) for note in each]
    tables = [_latex_table(grid, below if grid is grids[-1] else always) for grid in grids]
    return "\n".join(["% \\usepackage{booktabs}", *tables])


def latex_text(text: str) -> str:
    """The same words, safe in LaTeX; in `backquotes` as typed, and the methods set as in the paper."""

    def replaced(found: re.Match[str]) -> str:
        if found["kind"]:
            return rf"BMRS$_{{\mathcal{{{found['kind']}}}}}$"
        if found["code"] is not None:
            return rf"\texttt{{{latex_text(found['code']).replace('--', '-{}-')}}}" if found["code"] else ""
        one = found["one"] or "`"
        if one in _LATEX or one.isascii():
            return _LATEX.get(one, one)
        return unicodedata.normalize("NFKD", one).encode("ascii", "ignore").decode() or "?"

    return _TOKENS.sub(replaced, text)


def _markdown_table(grid: Grid) -> str:
    """Every column padded to its widest cell, so that the source is a table as well."""
    names = [f"{group.heading} {name}".strip() for group in grid.groups for name in group.columns]
    words = len(grid.labels)
    rows = [[*grid.labels, *names], *([_cell(text) for text in row] for block in grid.blocks for row in block)]
    widths = [max(3, *(len(row[i]) for row in rows)) for i in range(len(rows[0]))]

    def line(row: Sequence[str]) -> str:
        padded = (
            text.ljust(width) if i < words else text.rjust(width)
            for i, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        return f"| {' | '.join(padded)} |"

    rule = ["-" * width if i < words else "-" * (width - 1) + ":" for i, width in enumerate(widths)]
    return "\n".join([line(rows[0]), line(rule), *map(line, rows[1:])])


def _cell(text: str) -> str:
    """Its spaces become such that no browser breaks a number from its spread."""
    return "\u00a0".join(text.split()).replace("|", r"\|")


def _latex_table(grid: Grid, notes: Sequence[str]) -> str:
    words = len(grid.labels)
    spec = "l" * words + "".join("r" * len(group.columns) for group in grid.groups)
    columns = [name for group in grid.groups for name in group.columns]
    lines = [
        r"\begin{table*}[t]",
        r"\centering\footnotesize\setlength{\tabcolsep}{4pt}",
        rf"\caption{{{latex_text(grid.title)}}}",
        rf"\begin{{tabular}}{{{spec}}}",
        r"\toprule",
    ]
    if any(group.heading for group in grid.groups):
        above, rules, first = [""] * words, [], words + 1
        for group in grid.groups:
            last = first + len(group.columns) - 1
            above.append(rf"\multicolumn{{{len(group.columns)}}}{{c}}{{{latex_text(group.heading)}}}")
            rules += [rf"\cmidrule(lr){{{first}-{last}}}"] if group.heading else []
            first = last + 1
        lines += [f"{' & '.join(above)} \\\\", "".join(rules)]
    lines += [_latex_row([*grid.labels, *columns]), r"\midrule"]
    for i, block in enumerate(grid.blocks):
        lines += [r"\addlinespace"] if i else []
        lines += [_latex_row(row) for row in block]
    lines += [r"\bottomrule", r"\end{tabular}"]
    if notes:
        lines += [r"\par\smallskip\raggedright\scriptsize", "\\par\n".join(notes)]
    return "\n".join([*lines, r"\end{table*}", ""])


def _latex_row(row: Sequence[str]) -> str:
    return f"{' & '.join(latex_text(text) for text in row)} \\\\"
