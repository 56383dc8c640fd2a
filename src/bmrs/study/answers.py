"""What every command of the study ends with: files, a short table, and errors in one sentence."""

import contextlib
import importlib
import json
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from bmrs.commands.errors import BAD_INPUT, FAILED, INTERRUPTED, note
from bmrs.commands.screens import say
from bmrs.study.engine import TasksError, explained
from bmrs.study.footers import duration
from bmrs.study.jobs import JOBS, SHARED, Job
from bmrs.study.store import StoreWarning, finite, write_json, write_text

_DIGITS = 7  # of numbers in results: what was computed in float32 has no more


def write(
    job: Job,
    out: Path,
    content: Mapping[str, Any],
    *,
    shown_by: str = "study",
    beside: Sequence[Mapping[str, Any]] = (),
) -> list[Path]:
    """The JSON first, so that the numbers are safe; then table, figure and report.

    ``shown_by``: whose modules ``tables`` and ``plots`` have the job's functions. ``beside``: results that
    the report shows too.
    """
    stem = out / job.name
    files = [stem.with_suffix(".json")]
    write_json(files[0], content, _DIGITS)
    if job.table:
        tables = getattr(module(f"{shown_by}.tables"), job.table)(content)
        for suffix, text in ((".md", tables.markdown), (".tex", tables.latex)):
            write_text(stem.with_suffix(suffix), text)
            files.append(stem.with_suffix(suffix))
    if job.figure:
        try:
            plots = module(f"{shown_by}.plots")
        except ModuleNotFoundError as missing:
            note(f"no figure, since '{missing.name}' is not installed: pip install 'bmrs[study]'")
        else:
            files += plots.save(getattr(plots, job.figure)(content), stem)
    others = [out / f"{name}.json" for name in JOBS if name != job.name]
    there = [json.loads(path.read_text(encoding="utf-8")) for path in others if path.exists()]
    files.append(module("report").write([content, *beside, *there], out / "report.html"))
    return files


def headline(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The few numbers to show at the end: percentages, as means over seeds."""
    summary, kind, runs = module("study.summary"), content["kind"], content["runs"]

    def mean(values: Iterable[float | None]) -> Any:
        return finite(round(100.0 * summary.spread(values).mean, 2))

    if kind == "timing":
        shown, short = ("setting", "method", "mode", "batch"), ("ms", "memory_mib")
        return [{**{n: run[n] for n in shown}, **{n: _short(run.get(n)) for n in short}} for run in runs]
    groups: dict[tuple[str, ...], list[Any]] = {}
    for run in runs:
        price = (summary.price_name(run["price"], run["strength"]),) if kind == "continuous" else ()
        groups.setdefault((run["setting"], run.get("method", ""), *price), []).append(run)
    rows = []
    for names, own in groups.items():
        row: dict[str, Any] = dict(zip(("setting", "method", "price"), names, strict=False))
        if kind in ("continuous", SHARED):  # where a method's own rule stopped, if it has one
            stops = own if kind == "continuous" else [run["boundary"] for run in own if run["boundary"]]
            row["accuracy"] = mean(stop["accuracy"] for stop in stops)
            for count in ("published", "actual"):
                row[count] = mean(stop.get("compression", stop)[count] for stop in stops)
        elif kind == "posteriors":
            row["E[θ] < 0.1"] = mean(float(value < 0.1) for run in own for value in run["mean"])
        elif {"snr", "bmrs_n"} <= set(own[0]["methods"]):
            snr, bmrs_n = (own[0]["methods"].index(method) for method in ("snr", "bmrs_n"))
            row["Spearman of bmrs_n and snr"] = mean(run["spearman"][snr][bmrs_n] for run in own)
        rows.append({**{name: value for name, value in row.items() if value != ""}, "seeds": len(own)})
    return rows


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.3g}")


def answer(
    console: Console, content: Mapping[str, Any], rows: list[dict[str, Any]], files: Sequence[Path], as_json: bool,
    **more: Any,
) -> dict[str, Any]:  # fmt: skip
    """What a command ends with: a short table and the paths; as JSON too where asked, with what else it has to say."""
    table = Table()
    columns = list(dict.fromkeys(name for row in rows for name in row))
    for column in columns:
        table.add_column(column, justify="left" if column in ("setting", "method", "price", "mode") else "right")
    for row in rows:
        table.add_row(*("–" if row.get(column) is None else f"{row[column]}" for column in columns))
    console.print(table)
    energy, seconds = content["energy"], sum(entry["seconds"] for entry in content["settings"].values())
    if energy and energy["kwh"] is not None:
        line = f"{duration(seconds)}, {energy['kwh']:.3g} kWh ({energy['how']}). {energy['note']}"
        say(console, line)
    console.print("\n".join(str(path) for path in files), highlight=False, soft_wrap=True)
    told = {"name": content["name"], "result": str(files[0]), "files": [str(path) for path in files],
              "seconds": round(seconds, 3), "energy": energy, "headline": finite(rows), **more}  # fmt: skip
    if as_json:
        print(json.dumps(told, indent=2, ensure_ascii=False))
    return told


@contextlib.contextmanager
def guard() -> Iterator[None]:
    """Errors and Ctrl-C in one sentence each; warnings about files likewise."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", StoreWarning)
        shown = warnings.showwarning
        warnings.showwarning = lambda message, category, *rest, **more: (
            note(str(message)) if issubclass(category, StoreWarning) else shown(message, category, *rest, **more)
        )
        try:
            yield
        except KeyboardInterrupt:
            note("stopped; give the same command again, and it goes on where it stopped.")
            raise typer.Exit(INTERRUPTED) from None
        except Exception as wrong:
            if (sentence := explained(wrong)) is None:
                raise
            note(sentence)
            # Of what was asked, or of what happened while it was done.
            failed = isinstance(wrong, torch.OutOfMemoryError | TasksError) or getattr(wrong, "errno", None)
            raise typer.Exit(FAILED if failed else BAD_INPUT) from None


def module(name: str) -> Any:
    """A module of the study, imported when it is needed: some are slow to load."""
    return importlib.import_module(f"bmrs.{name}")
