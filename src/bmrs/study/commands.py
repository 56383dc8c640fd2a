"""``bmrs study ...``: the paper's tables and figures, one command each, that go on where they stopped."""

import contextlib
import dataclasses
import functools
import importlib
import inspect
import json
import re
import shutil
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import torch
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from bmrs.study.energy import total
from bmrs.study.footers import duration
from bmrs.study.provenance import provenance
from bmrs.study.screen import Screen
from bmrs.study.store import Store, StoreWarning, attempt, finite, state, write_json, write_text

FORMAT = 1  # of the parts: raise it when old ones can no longer be used
P1 = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16)  # figure 4
SHARED = "post-training"  # one computation, and one folder, for figures 1, 2, 3 and the appendix
ROOT = Path("runs/study")

_HELP = "The paper's study, one command per table or figure. A command that was stopped goes on when given again."
app = typer.Typer(help=_HELP, no_args_is_help=True, rich_markup_mode="rich", pretty_exceptions_show_locals=False)


@dataclasses.dataclass(frozen=True)
class Job:
    """One table or figure: what computes it, and what shows it (a function's name in ``tables`` or ``plots``)."""

    name: str
    protocol: str
    kind: str
    about: str
    table: str = ""
    figure: str = ""
    methods: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    without: tuple[str, ...] = ("fractions",)  # options it does not have

    @property
    def folder(self) -> str:
        return SHARED if self.protocol == SHARED else self.name


_AFTER = f"Figures 1 to 3 and the appendix share one computation in {ROOT / SHARED}: the first does it for all."
JOBS = {
    job.name: job
    for job in (
        Job("table1", "continuous", "continuous", "Pruning while training, every method, beside the published numbers: "
            "420 networks.", table="table1"),
        Job("prices", "continuous", "continuous", "The same with fairer prices than the published one.",
            table="prices_table", figure="prices_figure", methods=("none", "bmrs_n")),
        Job("figure1", SHARED, "posteriors", f"Gates after training: posteriors, evidence, what is removed. {_AFTER}",
            figure="figure1", without=()),
        Job("figure2", SHARED, SHARED, f"Accuracy against compression when pruning after training. {_AFTER}",
            figure="figure2", without=()),
        Job("figure3", SHARED, "correlations", f"Rank correlations between the methods. {_AFTER}", figure="figure3",
            without=()),
        Job("figure4", "continuous", "continuous", "Accuracy and compression against p₁ of BMRS_U.", figure="figure4",
            methods=("none", *(f"bmrs_u{p1}" for p1 in P1)), settings=("lenet5-cifar10",)),
        Job("appendix", SHARED, SHARED, f"Figure 2 with the gradient criterion. {_AFTER}", figure="appendix",
            without=()),
        Job("timing", "timing", "timing", "Time and memory with gates, without, and after removal (Table 3).",
            table="timing_table", without=("seeds", "methods", "epochs", "fine_tune", "fractions")),
    )
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Plan:
    """A job with all its options settled."""

    job: Job
    settings: tuple[Any, ...]  # of bmrs.study.settings.Setting
    methods: tuple[str, ...]
    seeds: tuple[int, ...]
    prices: tuple[tuple[str, float], ...]
    fractions: tuple[float, ...]
    device: str
    data_dir: Path | None
    out: Path
    restart: bool

    @property
    def parts(self) -> Path:
        return self.out / "parts"

    @property
    def others(self) -> list[Path]:
        """Where commands of this study that train the same networks keep their parts, under their usual names."""
        alike = [job for job in JOBS.values() if job.protocol == self.job.protocol and job.name != self.job.name]
        beside = [] if self.restart else [self.out.parent / job.folder / self.parts.name for job in alike]
        return [folder for folder in beside if folder != self.parts]

    @property
    def key(self) -> dict[str, Any]:
        """What parts in one folder have in common. The recipe of each setting is kept with its part."""
        shown = {"methods": self.methods, "seeds": len(self.seeds), "prices": self.prices, "fractions": self.fractions}
        return {"format": FORMAT, "protocol": self.job.protocol, **({} if self.job.protocol == "timing" else shown)}

    def networks(self) -> int:
        """Per setting. Without gates no price is paid, so those networks are trained once."""
        if self.job.protocol == "timing":
            return 3  # without gates, with them, and smaller
        if self.job.protocol != "continuous":
            return max(1, len(self.seeds))
        plain = len({"none", "l2"} & set(self.methods))
        return ((len(self.methods) - plain) * len(self.prices) + plain) * len(self.seeds)

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.job.name, "out": str(self.out), "device": self.device, "methods": list(self.methods),
            "seeds": len(self.seeds), "prices": self.prices, "fractions": len(self.fractions),
            "settings": {
                setting.key: {
                    "networks": self.networks(),
                    "epochs": 0 if self.job.protocol == "timing" else setting.epochs,
                    "fine_tune": 0 if self.job.protocol == "timing" else setting.fine_tune,
                    "state": "to do" if self.restart else state(self.parts, setting.key),
                }
                for setting in self.settings
            },
        }  # fmt: skip


def settle(
    job: Job, *, data_dir: Path | None = None, out: Path | None = None, device: str = "auto", seeds: int = 10,
    settings: str = "", methods: str = "", epochs: int | None = None, fine_tune: int | None = None,
    fractions: int = 100, restart: bool = False,
) -> Plan:  # fmt: skip
    """Settle the options; refuses what cannot work before anything is done."""
    known = _module("study.settings")
    keys = tuple(dict.fromkeys(settings.replace(",", " ").split())) or job.settings or tuple(known.PAPER)
    for key in keys:
        if key not in known.SETTINGS:
            raise ValueError(f"--settings: unknown setting '{key}': choose from {', '.join(known.SETTINGS)}.")
    after, gates = job.protocol == SHARED, job.protocol == "continuous"
    allowed = (*known.RANKINGS, "gradient") if after else known.METHODS
    chosen = tuple(dict.fromkeys(methods.replace(",", " ").split())) or job.methods or allowed
    for method in chosen:
        if method not in allowed and not re.fullmatch(r"bmrs_u\d+(\.\d+)?", method):
            raise ValueError(f"--methods: unknown method '{method}': choose from {', '.join(allowed)}.")
    if after and fine_tune is None:
        fine_tune = 1  # the paper fine-tunes what is left by a single epoch
    changed = {name: v for name, v in (("epochs", epochs), ("fine_tune", fine_tune)) if v is not None}
    return Plan(
        job,
        tuple(dataclasses.replace(known.SETTINGS[key], **changed) for key in keys),
        chosen if after or gates else (),
        tuple(range(seeds)) if after or gates else (),
        (tuple(known.PRICES) if job.name == "prices" else (("layer", 1.0),)) if gates else (),
        tuple(n / fractions for n in range(1, fractions + 1)) if after else (),
        _device(device), data_dir, out or ROOT / job.folder, restart,
    )  # fmt: skip


def compute(plan: Plan, screen: Screen) -> dict[str, Any]:
    """All parts of a job, those done before from their files, as the content of its JSON file."""
    parts: dict[str, dict[str, Any]] = {}
    with Store(plan.parts, plan.key, restart=plan.restart) as store:
        for setting in plan.settings:
            recipe, note = dataclasses.asdict(setting), " (done before)"
            part = store.done(setting.key)
            if part is not None and part["recipe"] != finite(recipe):
                _note(f"'{setting.key}' was done with other epochs or another recipe: it is done anew.")
                part = None
            if part is None:
                screen.begin(setting.key, plan.networks())
                part, note = attempt(store, setting.key, recipe, plan.device, _work(plan, setting, screen)), ""
            screen.end(setting.key, part["seconds"], note)
            parts[setting.key] = part
    runs = {"correlations": "correlations", "posteriors": "posteriors"}.get(plan.job.kind, "runs")
    made = provenance(
        seeds=len(plan.seeds), methods=plan.methods, device=plan.device, parts={k: p["made"] for k, p in parts.items()},
        reused=sorted({source for part in parts.values() for source in part.get("reused", ())}),
    )  # fmt: skip
    return {
        "name": plan.job.name,
        "kind": plan.job.kind,
        "provenance": made,
        "settings": {key: {**part["setting"], "seconds": part["seconds"]} for key, part in parts.items()},
        "runs": [
            run for part in parts.values() for run in part[runs]
            if plan.job.name != "figure2" or run["method"] != "gradient"
        ],
        "energy": total(part["energy"] for part in parts.values()),
    }  # fmt: skip


def _work(plan: Plan, setting: Any, screen: Screen) -> Callable[..., dict[str, Any]]:
    """The protocol of one setting, waiting for where to keep its state and what to go on from."""
    common: dict[str, Any] = {"device": plan.device, "data_dir": plan.data_dir, "progress": screen.progress}

    def work(keep: Callable[[Mapping[str, Any]], None], resume: dict[str, Any] | None) -> dict[str, Any]:
        states = {"checkpoint": keep, "resume": resume}
        if plan.job.protocol == "timing":
            found = _module("study.timing").measure(setting, **common)
        elif plan.job.protocol == SHARED:
            protocol = _module("study.post_training").post_training
            found = protocol(setting, plan.methods, plan.seeds, fractions=plan.fractions, **states, **common)
        else:
            found = _continuous(plan, setting, states, common)
        made = provenance()
        return {**found, "made": {name: made[name] for name in ("date", "commit", "machine")}}

    return work


def _continuous(
    plan: Plan, setting: Any, states: Mapping[str, Any], common: Mapping[str, Any]
) -> dict[str, Any]:  # fmt: skip
    """Train what no other command of this study has, on this machine and by this code, and put all together."""
    train = _module("study.protocols").continuous
    there = _module("study.reuse").shared(
        plan.others, setting.key, dataclasses.asdict(setting), FORMAT, provenance(), plan.methods, plan.prices,
        plan.seeds,
    )  # fmt: skip
    if not there.methods:
        entry = {**there.setting, "seconds": 0.0, "networks": 0}
        return {"setting": entry, "runs": list(there.runs), "reused": there.sources}
    mark = finite({"methods": there.methods, "prices": there.prices})
    resume = states["resume"] if states["resume"] and states["resume"].get("trained") == mark else None
    found = train(
        setting, there.methods, plan.seeds, prices=there.prices, resume=resume,
        checkpoint=lambda state: states["checkpoint"]({**state, "trained": mark}), **common,
    )  # fmt: skip
    runs = [*found["runs"], *there.runs]
    runs = [run for run in runs if run["method"] in plan.methods]
    runs.sort(key=lambda run: (plan.methods.index(run["method"]), run["price"], run["strength"], run["seed"]))
    return {**found, "runs": runs, "reused": there.sources}


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
Restart = Annotated[bool, typer.Option("--restart", help="Throw away what an earlier run left in the folder.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print paths and headline numbers as JSON.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and do nothing.")]


def _add(name: str, jobs: Sequence[Job], about: str, without: Iterable[str]) -> None:
    """One signature for all commands, less the options that mean nothing to this one."""

    def command(
        data_dir: DataDir = None, out: Out = None, device: DeviceName = "auto", seeds: Seeds = 10,
        settings: Settings = "", methods: Methods = "", epochs: Epochs = None, fine_tune: FineTune = None,
        fractions: Fractions = 100, restart: Restart = False, as_json: AsJson = False, dry_run: DryRun = False,
    ) -> None:  # fmt: skip
        given: dict[str, Any] = {
            "data_dir": data_dir, "device": device, "seeds": seeds, "settings": settings, "methods": methods,
            "epochs": epochs, "fine_tune": fine_tune, "fractions": fractions, "restart": restart,
        }  # fmt: skip
        with _guard():
            root = (out or ROOT) if len(jobs) > 1 else None
            plans = [settle(job, out=root / job.folder if root else out, **given) for job in jobs]
            _run(plans, root, as_json, dry_run)

    shown = inspect.signature(command)
    keep = [option for option in shown.parameters.values() if option.name not in set(without)]
    command.__signature__ = shown.replace(parameters=keep)  # type: ignore[attr-defined]
    app.command(name, help=about, short_help=about.split(". ")[0].rstrip(".") + ".")(command)


for _job in JOBS.values():
    _add(_job.name, [_job], _job.about, _job.without)
_add("all", list(JOBS.values()), "All of the above, with one report.", ("methods",))


def _run(plans: Sequence[Plan], root: Path | None, as_json: bool, dry_run: bool) -> None:
    if dry_run:
        return _dry(plans, as_json)
    console, contents, answers = Console(stderr=as_json), [], []
    for number, plan in enumerate(plans):
        # Figures that share a folder: the first of them begins anew for all.
        again = plan.restart and plan.out not in {earlier.out for earlier in plans[:number]}
        plan = dataclasses.replace(plan, restart=again)
        console.print(f"[bold]{plan.job.name}[/bold] on {plan.device}, results in {plan.out}", highlight=False)
        steps = "rounds" if plan.job.protocol == "timing" else "epochs"
        with Screen(console, [setting.key for setting in plan.settings], steps) as screen:
            contents.append(compute(plan, screen))
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
        console.print(line, highlight=False, soft_wrap=True)
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
    restart: Restart = False, as_json: AsJson = False, dry_run: DryRun = False,
) -> None:  # fmt: skip
    """The search for shape, batch and learning rate of the networks without gates."""
    with _guard():
        job = Job("sweep", "sweep", "sweep", "")
        wanted = settle(
            job, data_dir=data_dir, out=out, device=device, settings=settings, epochs=epochs, restart=restart
        )
        if dry_run:
            _dry([wanted], as_json)
            return
        console, keys = Console(stderr=as_json), [setting.key for setting in wanted.settings]
        key = {"format": FORMAT, "protocol": "sweep", "seed": seed, "epochs": epochs}
        train = functools.partial(_module("study.protocols").objective, device=wanted.device, data_dir=data_dir)
        with Store(wanted.parts, key, restart=restart) as store, Screen(console, keys, "trials") as screen:
            for trials_of in wanted.parts.glob("*.trials") if restart else ():
                shutil.rmtree(trials_of)
            search = _module("study.sweep").sweep_settings
            content = search(wanted.settings, train, trials, seed, store, wanted.device, screen)
        write_json(wanted.out / "sweep.json", content)
        best = {key: one["best"] or {"parameters": {}, "value": None} for key, one in content["settings"].items()}
        rows = [{"setting": key, **one["parameters"], "validation": one["value"]} for key, one in best.items()]
        _answer(console, content, rows, [wanted.out / "sweep.json"], as_json)


def _dry(plans: Sequence[Plan], as_json: bool) -> None:
    described = [plan.to_json() for plan in plans]
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
        for title in ("setting", "networks", "epochs", "fine-tuning", "state"):
            table.add_column(title, justify="left" if title in ("setting", "state") else "right")
        for key, row in one["settings"].items():
            table.add_row(key, *(str(row[name]) for name in ("networks", "epochs", "fine_tune", "state")))
        console.print(table)
    console.print("Nothing was done: leave out --dry-run to begin.")


@contextlib.contextmanager
def _guard() -> Iterator[None]:
    """Errors and Ctrl-C in one sentence each; warnings about files likewise."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", StoreWarning)
        shown = warnings.showwarning
        warnings.showwarning = lambda message, category, *rest, **more: (
            _note(str(message)) if issubclass(category, StoreWarning) else shown(message, category, *rest, **more)
        )
        try:
            yield
        except KeyboardInterrupt:
            _note("stopped; give the same command again, and it goes on where it stopped.")
            raise typer.Exit(130) from None
        except ImportError as missing:
            _fail(f"the study needs '{missing.name}': install it with  pip install 'bmrs[study]'")
        except torch.OutOfMemoryError:
            _fail("the GPU's memory is too small for all networks at once: give fewer --seeds or --methods.")
        except (ValueError, OSError) as wrong:
            _fail(str(wrong))


def _fail(sentence: str) -> NoReturn:
    _note(sentence)
    raise typer.Exit(2)


def _note(sentence: str) -> None:
    Console(file=sys.stderr).print(Text.assemble(("bmrs: ", "red"), sentence), soft_wrap=True)


def _device(name: str) -> str:
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        kind = torch.device(name).type
    except RuntimeError:
        raise ValueError(f"--device: unknown device '{name}': give cuda, cuda:1, cpu or auto.") from None
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device: there is no GPU that torch can use: give cpu or auto.")
    return name


def _module(name: str) -> Any:
    """A module of the study, imported when it is needed: some are slow to load."""
    return importlib.import_module(f"bmrs.{name}")
