"""``bmrs train``: prunes a network of one's own while it trains, without a loop to write."""

import contextlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from torch import nn

import bmrs
from bmrs import report
from bmrs.commands import data as sources
from bmrs.commands import options, saving
from bmrs.commands.errors import guard, note, running
from bmrs.commands.folders import writable
from bmrs.commands.inspect import table
from bmrs.commands.loop import Step, Training, inputs_as_options, units_of
from bmrs.commands.losses import Loss
from bmrs.commands.processes import Processes
from bmrs.commands.recipe import Recipe
from bmrs.commands.screens import Screen, comparison, counts, next_command, paths, say
from bmrs.inspection import load_weights, make_model
from bmrs.study.data import NAMES
from bmrs.study.footers import duration
from bmrs.study.store import Store, write_json

_DEFAULT = Recipe()
_STOPPED = "stopped; give the same command again, and it goes on after the last epoch it finished."


def train(
    model: options.MaybeModel = None,
    model_option: options.ModelOption = None,
    data: Annotated[
        str,
        typer.Option(
            help=f"One of {', '.join(NAMES)}; [bold]module:function[/bold] or file.py:function that returns "
            "(train, validation) datasets or data loaders of (x, y); a folder with train/CLASS/*.png and val/CLASS/*; "
            "or .npz or .safetensors with x_train, y_train, x_test, y_test.",
            autocompletion=options.one_of(*NAMES),
        ),
    ] = "",
    weights: options.Weights = None,
    loss: Annotated[
        str,
        typer.Option(
            help="cross_entropy, mse, or module:function of (output, target).",
            autocompletion=options.one_of(*options.LOSSES),
        ),
    ] = _DEFAULT.loss,
    epochs: Annotated[
        int, typer.Option(help="Epochs of training, each followed by pruning; 0: fine-tune alone.")
    ] = _DEFAULT.epochs,
    fine_tune: options.FineTune = _DEFAULT.fine_tune,
    batch: options.Batch = _DEFAULT.batch,
    learning_rate: Annotated[float, typer.Option(help="Of the weights; half of it while fine-tuning.")] = (
        _DEFAULT.learning_rate
    ),
    optimizer: Annotated[
        str, typer.Option(help="adam, adamw or sgd.", autocompletion=options.one_of(*options.OPTIMIZERS))
    ] = _DEFAULT.optimizer,
    criterion: options.CriterionName = _DEFAULT.criterion,
    price: options.Price = _DEFAULT.price,
    strength: options.Strength = _DEFAULT.strength,
    phi_rate: options.PhiRate = _DEFAULT.phi_rate,
    warmup: Annotated[
        int | None, typer.Option(help="Steps over which the KL grows; a quarter of those with gates unless given.")
    ] = None,
    noise: Annotated[
        str,
        typer.Option(
            help="One draw of the gates per example or batch.", autocompletion=options.one_of(*options.NOISES)
        ),
    ] = _DEFAULT.noise,
    round_to: options.RoundTo = _DEFAULT.round_to,
    compare: Annotated[
        bool, typer.Option("--compare", help="Train the same network whole too, for as long, and compare.")
    ] = False,
    precision: Annotated[
        str,
        typer.Option(help="float32, or bf16 by autocast.", autocompletion=options.one_of(*options.PRECISIONS)),
    ] = _DEFAULT.precision,
    size: Annotated[
        int | None, typer.Option(min=1, help="Side of a folder's images; the first one's unless given.")
    ] = (None),
    workers: Annotated[int, typer.Option(min=0, help="Processes that read examples.")] = 0,
    data_dir: options.DataDir = None,
    device: options.Device = "auto",
    seed: options.Seed = _DEFAULT.seed,
    out: Annotated[Path, typer.Option(help="Folder for results; also for what is half done.")] = Path("runs/train"),
    restart: Annotated[bool, typer.Option("--restart", help="Throw away what an earlier run left in --out.")] = False,
    onnx: options.Onnx = False,
    track: Annotated[
        str | None,
        typer.Option(help="Log to tensorboard or wandb too.", autocompletion=options.one_of(*options.TRACKERS)),
    ] = None,
    as_json: options.AsJson = False,
    dry_run: options.DryRun = False,
) -> None:
    """Train a network of yours and prune it as it trains: after every epoch, what the evidence does not support goes.

    A checkpoint is kept after every epoch: stopped or killed, the same command goes on where it was. On several
    processes:  torchrun --nproc-per-node 2 -m bmrs train ...

    Example:  [bold]bmrs train net.py:make_model --data data.py:make_data --epochs 40[/bold]
    """
    with guard(stopped=_STOPPED), Processes(device) as processes:
        recipe = Recipe(
            epochs, fine_tune, batch, learning_rate, phi_rate, price, strength, seed, optimizer, criterion, noise,
            warmup, precision, loss, round_to, compare,
        ).checked()  # fmt: skip
        target = _one(model, model_option)
        saving.check_onnx(onnx)
        if track is not None:
            options.check("tracker", track, options.TRACKERS)
        if not data:
            raise ValueError("--data must say what to train on, as --data digits or --data data.py:make_data.")
        with processes.in_turn():
            found = sources.find(data, seed=seed, data_dir=data_dir, size=size, download=not dry_run)

        def make() -> nn.Module:
            network = make_model(target)
            return network if weights is None else load_weights(network, weights)

        training = Training(make, found, recipe, processes, workers, name=_short(target), trained=weights is not None)
        console = Console(stderr=as_json, quiet=not processes.first)
        if dry_run:
            _dry(training, target, out, console, as_json and processes.first, onnx)
            return
        training.prepare()
        if processes.first:
            writable(out)
        key = {"format": 1, "model": target, "weights": None if weights is None else str(weights), "data": data,
               "size": size, "examples": found.examples, "processes": processes.world, **asdict(recipe)}  # fmt: skip
        with contextlib.ExitStack() as stack:
            store = stack.enter_context(Store(out / saving.PARTS, key, restart=restart)) if processes.first else None
            saved = processes.shared(store.load_checkpoint(saving.PART) if store else None)
            tracking = _tracker(track, out, key) if track and processes.first else None
            if tracking is not None:
                stack.callback(tracking.close)
            result = _run(training, saved, store, console, tracking, target)
            if store is not None:
                _finish(training, result, out, target, weights, console, onnx, as_json)


def _short(target: str) -> str:
    """MODEL without the folder it lies in."""
    where, _, name = target.partition(":")
    return f"{Path(where).name}:{name}"


def _one(model: str | None, option: str | None) -> str:
    if (model is None) == (option is None):
        raise ValueError("MODEL must be given once, as in  bmrs train net.py:make_model --data digits.")
    return model or option or ""


def _tracker(name: str, folder: Path, config: Mapping[str, Any]) -> Any:
    from bmrs.integrations.trackers import tracker

    return tracker(name, folder, dict(config))


def _run(
    training: Training, saved: Mapping[str, Any] | None, store: Store | None, console: Console, tracking: Any,
    target: str,
) -> dict[str, Any]:  # fmt: skip
    recipe, loss = training.recipe, training.loss
    held_out = next(iter(training.held_out))
    how = f"pruned by {training.criterion} after every epoch" if recipe.epochs else "fine-tuned without pruning"
    say(
        console,
        f"[bold]{target}[/bold] on [bold]{training.data.name}[/bold]: {training.data.examples:,} training examples, "
        f"{how}; {_place(training)}.",
    )
    _warn(training)
    if saved:
        done = ", ".join(f"{epochs} of {training.phases[phase]} epochs ({Screen.TITLES[phase]})"
                         for phase, epochs in saved["done"].items())  # fmt: skip
        finished = saved["done"] == training.phases
        console.print(f"{'Done before' if finished else 'Going on where it stopped'}: {done}.", highlight=False)
    screen = Screen(console, training.phases)

    def tell(step: Step) -> None:
        if step.value is None:
            screen.step(step.phase, step.epoch, step.epochs, step.step, step.steps)
        else:
            value = f"{held_out if loss.metric == 'accuracy' else 'loss'} {loss.shown(step.value)}"
            screen.epoch(step.phase, step.epoch, step.epochs, value, step.units)

    keep: Callable[[dict[str, Any]], None] = lambda state: None  # noqa: E731
    if store is not None:
        keep = lambda state: store.save_checkpoint(saving.PART, state)  # noqa: E731
    log = tracking.log if tracking is not None else lambda values, step: None
    with running("the training"), screen:
        result = training.run(saved, keep, tell, log)
    result["provenance"]["recipe"] = asdict(recipe)
    return result


def _warn(training: Training) -> None:
    if training.processes.first and (why := training.recipe.too_short(training.steps)):
        note(why)


def _place(training: Training) -> str:
    world = training.processes.world
    return f"on {training.device}" if world == 1 else f"{world} processes on {training.device.type}"


def _finish(
    training: Training, result: dict[str, Any], out: Path, target: str, weights: Path | None, console: Console,
    onnx: bool, as_json: bool,
) -> None:  # fmt: skip
    """Write what came of it and say so: first what took longest to compute."""
    with running("writing the results"):
        # Without the weights it began with: the file is to load on the network as MODEL makes it.
        files = saving.write(training.network, lambda: make_model(target), training.examples, out, onnx)
        result["files"] = {what: str(path) for what, path in files.items()}
        write_json(out / "result.json", result)
        files["numbers"] = out / "result.json"
        pruned = training.recipe.epochs > 0
        if pruned:  # else there is nothing of gates to show
            files["report"] = report.write(report.load(out / "result.json"), out / "report.html")
    console.print()
    console.print(_table(result, training.loss))
    if pruned and result["before"]["parameters"] == result["after"]["parameters"]:
        console.print(
            "[yellow]No unit was removed:[/yellow] gates need time to forget. Train longer (--epochs), or let them "
            "move faster (--phi-rate) or under more pressure (--strength)."
        )
    console.print(f"Trained for {duration(result['seconds'])}.", highlight=False)
    paths(console, {"Small network": files["network"], **({"ONNX": files["onnx"]} if onnx else {}),
                    "Numbers": files["numbers"], **({"Report": files["report"]} if pruned else {})})  # fmt: skip
    where, _, name = target.partition(":")
    maker = f"{name}()" if where.endswith(".py") else f"{where}.{name}()"
    console.print(f'Load it:  model = bmrs.load({maker}, "{files["network"]}")', highlight=False, soft_wrap=True,
                  markup=False)  # fmt: skip
    console.print()
    shapes = inputs_as_options(training.examples)
    next_command(console, f"bmrs bench {target} {shapes} --small {files['network']}", "How much faster it is:")
    if pruned:
        begun = f" --weights {weights}" if weights else ""
        next_command(
            console, f"bmrs prune {target}{begun} --checkpoint {out} --fraction 0.5 --out {out}-half",
            "Smaller still, by what the gates know:",
        )  # fmt: skip
    if as_json:
        print(json.dumps({**{k: result[k] for k in ("before", "after", "units", "metric", "judged", "seconds")},
                          "files": {what: str(path) for what, path in files.items()}}, indent=2))  # fmt: skip


def _table(result: Mapping[str, Any], loss: Loss) -> Any:
    whole = result["provenance"]["recipe"]["compare"]
    first = result["judged"]["whole" if whole else "start"]
    rows = []
    for name, after in result["judged"]["pruned"].items():
        before = first[name]
        change = f"{100 * (after - before):+.1f} points" if loss.metric == "accuracy" else f"{after - before:+.3g}"
        rows.append((f"{name} {loss.metric}", loss.shown(before), loss.shown(after), change))
    for what, title in (("parameters", "parameters"), ("multiply_adds", "multiply-adds per example")):
        rows.append(counts(title, result["before"][what], result["after"][what]))
    rows.append(counts("units", *units_of(result)))
    now = "pruned" if result["provenance"]["recipe"]["epochs"] else "fine-tuned"
    return comparison(("trained whole" if whole else "at the start", now, "change"), rows)


def _dry(training: Training, target: str, out: Path, console: Console, as_json: bool, onnx: bool) -> None:
    found = bmrs.structures(training.network, training.examples)
    if not len(found):
        raise ValueError("nothing can be removed from this network:  bmrs inspect  says why.")
    _warn(training)
    recipe, epochs = training.recipe, sum(training.phases.values())
    others = ("result.json", "report.html") if recipe.epochs else ("result.json",)
    files = [str(out / name) for name in saving.names(onnx, *others)]
    about = {
        "model": target, "data": training.data.name, "examples": training.data.examples,
        "held_out": list(training.held_out), "parameters": bmrs.cost.parameters(training.network),
        "units": sum(s.units for s in found), "structures": [s.to_json() for s in found], "phases": training.phases,
        "steps": epochs * training.steps, "warmup": recipe.steps_to_warm(training.steps), "recipe": asdict(recipe),
        "device": str(training.device), "processes": training.processes.world, "out": str(out), "files": files,
    }  # fmt: skip
    if as_json:
        print(json.dumps(about, indent=2))
        return
    console.print(table(found))
    phases = ", then ".join(f"{n} epochs of {Screen.TITLES[phase]}" for phase, n in training.phases.items())
    may = "may go" if recipe.epochs else "stay"
    for line in (
        f"{about['units']:,} units in {len(found)} structures {may}.",
        f"{about['examples']:,} examples: {phases}; {training.steps:,} steps each, {about['steps']:,} in all, "
        f"{_place(training)}.",
        f"Files: {', '.join(files)}",
        "Nothing was done: leave out --dry-run to begin.",
    ):
        say(console, line)
