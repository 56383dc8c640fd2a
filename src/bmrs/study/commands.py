"""``bmrs study ...``: the paper's tables and figures, one command each, that go on where they stopped."""

import dataclasses
import inspect
import json
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from bmrs.commands.errors import note
from bmrs.commands.folders import writable
from bmrs.study.answers import answer, guard, headline, module, write
from bmrs.study.computing import compute
from bmrs.study.engine import Engine, chosen
from bmrs.study.jobs import FORMAT, JOBS, ROOT, Job, Plan, settle
from bmrs.study.large import commands as large
from bmrs.study.large.recipe import HUB, Recipe
from bmrs.study.screen import Screen
from bmrs.study.store import Store, write_json

_HELP = "The paper's study, one command per table or figure. A command that was stopped goes on when given again."
app = typer.Typer(help=_HELP, no_args_is_help=True, rich_markup_mode="rich", pretty_exceptions_show_locals=False)


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
Workers = Annotated[int | None, typer.Option(min=1, help="So many tasks at once; unless given, six on a GPU and one on "
                                             "a processor or, with Ray, one per GPU or per core.")]  # fmt: skip
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
        with guard():
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
    if _job.name != "timing":
        _add(_job.name, [_job], _job.about, _job.without)
app.command("table2")(large.table2)


@app.command("timing")
def timing(
    data_dir: DataDir = None, out: Out = None, device: DeviceName = "auto", settings: Settings = "",
    engine: EngineName = "local", address: Address = None, workers: Workers = None,
    of_large: Annotated[bool, typer.Option("--large", help="Of ResNet-50 and ViT instead (Table 4); the options below "
                                           "are about those.")] = False,
    resolution: large.Resolution = 224, batch: large.Batch = 32, precision: large.Precision = "fp32",
    channels_last: large.ChannelsLast = False, step: large.StepOption = "eager", gates: large.Gates = "paper",
    weights: large.Weights = HUB["resnet50"], vit_weights: large.VitWeights = HUB["vit"],
    scratch: large.Scratch = False, vit: large.Vit = "base", patch: large.Patch = 16,
    restart: Restart = False, as_json: AsJson = False, dry_run: DryRun = False,
) -> None:  # fmt: skip
    """Time and memory with gates, without, and after removal (Tables 3 and 4)."""
    with guard():
        if of_large:
            if engine != "local":
                raise ValueError("--large is computed by this process: leave out --engine.")
            recipe = Recipe(
                resolution=resolution, batch=batch, precision=precision, channels_last=channels_last, step=step,
                gates=gates, weights=weights, vit_weights=vit_weights, scratch=scratch, vit=vit, patch=patch,
            )  # fmt: skip
            large.time_large(recipe, settings, device, out, restart, as_json, dry_run)
            return
        by = chosen(engine, address, workers)
        given: dict[str, Any] = {"data_dir": data_dir, "device": device, "settings": settings, "restart": restart}
        plan = settle(JOBS["timing"], out=out, devices=by.device, **given)
        if dry_run:
            _dry([plan], as_json, by)
        else:
            writable(plan.out)
            with by:
                _run([plan], by, None, as_json)


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
        files = write(plan.job, plan.out, contents[-1])
        answers.append(answer(console, contents[-1], headline(contents[-1]), files, as_json and root is None))
    if root is not None:
        page = module("report").write(contents, root / "report.html")
        console.print(f"One report of all: {page}", highlight=False, soft_wrap=True)
        if as_json:
            print(json.dumps({"name": "all", "report": str(page), "parts": answers}, indent=2, ensure_ascii=False))


@app.command("sweep")
def sweep_command(
    data_dir: DataDir = None, out: Out = None, device: DeviceName = "auto", settings: Settings = "",
    epochs: Epochs = None, trials: Trials = 100, seed: Annotated[int, typer.Option(help="Of the search.")] = 0,
    engine: EngineName = "local", address: Address = None, workers: Workers = None, restart: Restart = False,
    as_json: AsJson = False, dry_run: DryRun = False,
) -> None:  # fmt: skip
    """The search for shape, batch and learning rate of the networks without gates."""
    with guard():
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
            content = module("study.sweep").sweep_settings(
                wanted.settings, module("study.protocols").objective, trials, seed, store, by.device(wanted.device),
                screen, data_dir=wanted.data_dir, engine=by,
            )  # fmt: skip
        write_json(wanted.out / "sweep.json", content)
        best = {key: one["best"] or {"parameters": {}, "value": None} for key, one in content["settings"].items()}
        rows = [{"setting": key, **one["parameters"], "validation": one["value"]} for key, one in best.items()]
        answer(console, content, rows, [wanted.out / "sweep.json"], as_json)


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
