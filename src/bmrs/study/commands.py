"""``bmrs study ...``: the paper's tables and figures, one command each, that go on where they stopped."""

import contextlib
import dataclasses
import importlib
import inspect
import json
import shutil
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from bmrs.commands.errors import BAD_INPUT, FAILED, INTERRUPTED, note
from bmrs.commands.folders import writable
from bmrs.commands.screens import say
from bmrs.study.computing import compute
from bmrs.study.engine import Engine, TasksError, chosen, explained
from bmrs.study.footers import duration
from bmrs.study.jobs import FORMAT, JOBS, ROOT, SHARED, Job, Plan, settle
from bmrs.study.screen import Screen
from bmrs.study.store import Store, StoreWarning, finite, write_json, write_text

_HELP = "The paper's study, one command per table or figure. A command that was stopped goes on when given again."
app = typer.Typer(help=_HELP, no_args_is_help=True, rich_markup_mode="rich", pretty_exceptions_show_locals=False)


def write(plan: Plan, content: Mapping[str, Any]) -> list[Path]:
    """The JSON first, so that the numbers are safe; then table, figure and report."""
    stem = plan.out / plan.job.name
    files = [stem.with_suffix(".json")]
    write_json(files[0], content)
    if plan.job.table:
        tables = getattr(_module("study.tables"), plan.job.table)(content)
        for suffix, text in ((".md", tables.markdown), (".tex", tables.latex)):
            write_text(stem.with_suffix(suffix), text)
            files.append(stem.with_suffix(suffix))
    if plan.job.figure:
        plots = _module("study.plots")
        files += plots.save(getattr(plots, plan.job.figure)(content), stem)
    others = [plan.out / f"{name}.json" for name in JOBS if name != plan.job.name]
    there = [json.loads(path.read_text(encoding="utf-8")) for path in others if path.exists()]
    files.append(_module("report").write([content, *there], plan.out / "report.html"))
    return files


def headline(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The few numbers to show at the end: percentages, as means over seeds."""
    summary, kind, runs = _module("study.summary"), content["kind"], content["runs"]

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


DataDir = Annotated[Path | None, typer.Option(help="Folder of the data sets; what is missing is downloaded to it.")]
Out = Annotated[Path | None, typer.Option(help=f"Folder for results, {ROOT}/... unless given; also what is half done.")]
DeviceName = Annotated[str, typer.Option("--device", help="cuda, cuda:1, cpu; auto takes a GPU where there is one.")]
Seeds = Annotated[int, typer.Option(min=1, help="Networks per method, each with its own weights, split and noise.")]
Settings = Annotated[str, typer.Option(help="As in [bold]mlp-mnist,lenet5-cifar10[/bold]; mlp-digits,lenet5-digits "
                                       "need no download. All of the paper's unless given.")]  # fmt: skip
Methods = Annotated[str, typer.Option(help="As in [bold]snr,bmrs_n,bmrs_u8[/bold]; all unless given.")]
Epochs = Annotated[int | None, typer.Option(min=1, help="Of training; the paper's unless given.")]
FineTune = Annotated[int | None, typer.Option(min=0, help="Epochs with the structure fixed; the paper's unless given.")]
Fractions = Annotated[int, typer.Option(min=2, help="How many fractions of units are removed, evenly from 0 to 1.")]
Trials = Annotated[int, typer.Option(min=1, help="Per setting, counting those of earlier runs.")]
SeedsPerTask = Annotated[int | None, typer.Option(min=1, help="Split a setting: so many of its seeds side by side, for "
                                                  "more workers or less memory. All unless given.")]  # fmt: skip
EngineName = Annotated[str, typer.Option("--engine", help="Who computes: this process, [bold]local[/bold], or the "
                                         "workers of a [bold]ray[/bold] cluster.")]  # fmt: skip
Address = Annotated[str | None, typer.Option(help="Ray: of a cluster that runs, as in [bold]10.0.0.1:6379[/bold], or "
                                             "auto; unless given, one is started here.")]  # fmt: skip
Workers = Annotated[int | None, typer.Option(min=1, help="Ray: so many tasks at once; unless given, one per GPU, or "
                                             "per core where there is none.")]  # fmt: skip
Restart = Annotated[bool, typer.Option("--restart", help="Throw away what an earlier run left in the folder.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print paths and headline numbers as JSON.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and do nothing.")]


def _add(name: str, jobs: Sequence[Job], about: str, without: Iterable[str]) -> None:
    """One signature for all commands, less the options that mean nothing to this one."""

    def command(
        data_dir: DataDir = None, out: Out = None, device: DeviceName = "auto", seeds: Seeds = 10,
        settings: Settings = "", methods: Methods = "", epochs: Epochs = None, fine_tune: FineTune = None,
        fractions: Fractions = 100, seeds_per_task: SeedsPerTask = None, engine: EngineName = "local",
        address: Address = None, workers: Workers = None, restart: Restart = False, as_json: AsJson = False,
        dry_run: DryRun = False,
    ) -> None:  # fmt: skip
        given: dict[str, Any] = {
            "data_dir": data_dir, "device": device, "seeds": seeds, "settings": settings, "methods": methods,
            "epochs": epochs, "fine_tune": fine_tune, "fractions": fractions, "restart": restart,
            "seeds_per_task": seeds_per_task,
        }  # fmt: skip
        with _guard():
            by = chosen(engine, address, workers)
            given["devices"] = by.device
            root = (out or ROOT) if len(jobs) > 1 else None
            plans = [settle(job, out=root / job.folder if root else out, **given) for job in jobs]
            if dry_run:
                _dry(plans, as_json, by)
            else:
                for plan in plans:
                    writable(plan.out)
                with by:
                    _run(plans, by, root, as_json)

    shown = inspect.signature(command)
    keep = [option for option in shown.parameters.values() if option.name not in set(without)]
    command.__signature__ = shown.replace(parameters=keep)  # type: ignore[attr-defined]
    app.command(name, help=about, short_help=about.split(". ")[0].rstrip(".") + ".")(command)


for _job in JOBS.values():
    _add(_job.name, [_job], _job.about, _job.without)
_add("all", list(JOBS.values()), "All of the above, with one report.", ("methods",))


def _run(plans: Sequence[Plan], engine: Engine, root: Path | None, as_json: bool) -> None:
    console, contents, answers = Console(stderr=as_json), [], []
    for number, plan in enumerate(plans):
        # Figures that share a folder: the first of them begins anew for all.
        again = plan.restart and plan.out not in {earlier.out for earlier in plans[:number]}
        plan = dataclasses.replace(plan, restart=again, device=engine.device(plan.device))
        console.print(f"[bold]{plan.job.name}[/bold] on {plan.device}, results in {plan.out}", highlight=False)
        steps = "rounds" if plan.job.protocol == "timing" else "epochs"
        with Screen(console, [setting.key for setting in plan.settings], steps) as screen:
            contents.append(compute(plan, screen, engine, note))
        files = write(plan, contents[-1])
        answers.append(_answer(console, contents[-1], headline(contents[-1]), files, as_json and root is None))
    if root is not None:
        page = _module("report").write(contents, root / "report.html")
        console.print(f"One report of all: {page}", highlight=False, soft_wrap=True)
        if as_json:
            print(json.dumps({"name": "all", "report": str(page), "parts": answers}, indent=2, ensure_ascii=False))


def _answer(
    console: Console, content: Mapping[str, Any], rows: list[dict[str, Any]], files: Sequence[Path], as_json: bool
) -> dict[str, Any]:
    """What a command ends with: a short table and the paths; as JSON too where asked."""
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
    answer = {"name": content["name"], "result": str(files[0]), "files": [str(path) for path in files],
              "seconds": round(seconds, 3), "energy": energy, "headline": finite(rows)}  # fmt: skip
    if as_json:
        print(json.dumps(answer, indent=2, ensure_ascii=False))
    return answer


@app.command("sweep")
def sweep_command(
    data_dir: DataDir = None, out: Out = None, device: DeviceName = "auto", settings: Settings = "",
    epochs: Epochs = None, trials: Trials = 100, seed: Annotated[int, typer.Option(help="Of the search.")] = 0,
    engine: EngineName = "local", address: Address = None, workers: Workers = None, restart: Restart = False,
    as_json: AsJson = False, dry_run: DryRun = False,
) -> None:  # fmt: skip
    """The search for shape, batch and learning rate of the networks without gates."""
    with _guard():
        by = chosen(engine, address, workers)
        wanted = settle(
            Job("sweep", "sweep", "sweep", ""), data_dir=data_dir, out=out, device=device, settings=settings,
            epochs=epochs, restart=restart, devices=by.device,
        )  # fmt: skip
        if dry_run:
            _dry([wanted], as_json, by)
            return
        writable(wanted.out)
        console, keys = Console(stderr=as_json), [setting.key for setting in wanted.settings]
        key = {"format": FORMAT, "protocol": "sweep", "seed": seed, "epochs": epochs}
        with by, Store(wanted.parts, key, restart=restart) as store, Screen(console, keys, "trials") as screen:
            for trials_of in wanted.parts.glob("*.trials") if restart else ():
                shutil.rmtree(trials_of)
            content = _module("study.sweep").sweep_settings(
                wanted.settings, _module("study.protocols").objective, trials, seed, store, by.device(wanted.device),
                screen, data_dir=wanted.data_dir, engine=by,
            )  # fmt: skip
        write_json(wanted.out / "sweep.json", content)
        best = {key: one["best"] or {"parameters": {}, "value": None} for key, one in content["settings"].items()}
        rows = [{"setting": key, **one["parameters"], "validation": one["value"]} for key, one in best.items()]
        _answer(console, content, rows, [wanted.out / "sweep.json"], as_json)


def _dry(plans: Sequence[Plan], as_json: bool, engine: Engine) -> None:
    described = [{**plan.to_json(), "engine": engine.about()} for plan in plans]
    if as_json:
        print(json.dumps(described[0] if len(plans) == 1 else {"name": "all", "parts": described}, indent=2))
        return
    console = Console()
    for one in described:
        facts = f"{one['seeds']} seeds of {', '.join(one['methods'])}" if one["seeds"] else ""
        facts += f"; {one['fractions']} fractions of units" if one["fractions"] else ""
        facts += f"; prices {', '.join(f'{p} × {s:g}' for p, s in one['prices'])}" if len(one["prices"]) > 1 else ""
        table = Table(title=f"{one['name']} on {one['device']}, results in {one['out']}", title_justify="left",
                      title_style="bold", caption=facts, caption_justify="left")  # fmt: skip
        for title in ("task", "networks", "epochs", "fine-tuning", "state"):
            table.add_column(title, justify="left" if title in ("task", "state") else "right")
        for task in one["tasks"]:
            setting = one["settings"][task["setting"]]
            row = (task["networks"], setting["epochs"], setting["fine_tune"], task["state"])
            table.add_row(task["name"], *(str(value) for value in row))
        console.print(table)
    console.print(f"Computed by {engine.about()}.", highlight=False)
    console.print("Nothing was done: leave out --dry-run to begin.")


@contextlib.contextmanager
def _guard() -> Iterator[None]:
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


def _module(name: str) -> Any:
    """A module of the study, imported when it is needed: some are slow to load."""
    return importlib.import_module(f"bmrs.{name}")
