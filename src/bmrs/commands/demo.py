"""``bmrs demo``."""

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from bmrs import report
from bmrs.commands import options
from bmrs.commands.errors import guard, running
from bmrs.commands.folders import writable
from bmrs.commands.screens import Screen, comparison, counts, paths
from bmrs.study.training import Progress, Recipe

if TYPE_CHECKING:
    from bmrs.study.demo import Measured, Outcome

_DEFAULT = Recipe()


def demo(
    data: options.DemoData = "digits",
    network: options.Network = "lenet5",
    criterion: options.CriterionName = "bmrs_n",
    price: options.Price = _DEFAULT.price,
    strength: options.Strength = _DEFAULT.strength,
    epochs: options.Epochs = _DEFAULT.epochs,
    fine_tune: options.FineTune = _DEFAULT.fine_tune,
    batch: options.Batch = _DEFAULT.batch,
    learning_rate: Annotated[float, typer.Option(help="Adam's learning rate.")] = _DEFAULT.learning_rate,
    phi_rate: options.PhiRate = _DEFAULT.phi_rate,
    seed: options.Seed = _DEFAULT.seed,
    data_dir: options.DataDir = None,
    out: Annotated[Path, typer.Option(help="Folder for the picture and the JSON result.")] = Path("runs/demo"),
    as_json: options.AsJson = False,
    dry_run: options.DryRun = False,
) -> None:
    """Train a network, prune it as it trains, and compare it with the same network left whole.

    Every unit (filter or neuron) gets a random gate whose posterior is learned with the weights. After every
    epoch the units go whose keeping the evidence does not support: they are cut out of the weights for good, and
    training goes on with the smaller network. In the end it is fine-tuned, tested, saved, exported and loaded
    again. No threshold is tuned.

    Example:  [bold]bmrs demo --network mlp --criterion snr[/bold]
    """
    console = Console(stderr=as_json)
    with guard():
        try:
            from bmrs.study.demo import Demo

            recipe = Recipe(epochs, fine_tune, batch, learning_rate, phi_rate, price, strength, seed)
            job = Demo(data, network, criterion, recipe, data_dir=data_dir)
        except ImportError as missing:
            raise ValueError(f"the demo needs '{missing.name}': install it with  pip install 'bmrs[demo]'") from missing
        about = {"network": network, "data": data, "criterion": str(job.criterion), **dataclasses.asdict(recipe),
                 "examples": len(job.data.train), "out": str(out)}  # fmt: skip
        if dry_run:
            lines = [f"{name.replace('_', ' ')}: {value}" for name, value in about.items()]
            print(json.dumps(about, indent=2) if as_json else "\n".join(lines))
            if not as_json:
                print("Nothing was done: leave out --dry-run to begin.")
            return
        writable(out)
        console.print(
            f"[bold]{network}[/bold] on [bold]{data}[/bold]: {len(job.data.train)} training images, pruned by "
            f"{job.criterion} after every epoch.\n",
            highlight=False,
        )
        with running("the demo"):
            with Screen(console, ("whole", "prune", "fine-tune") if fine_tune else ("whole", "prune")) as screen:

                def tell(phase: str, progress: Progress) -> None:
                    value = f"validation {progress.accuracy:.1%}"
                    screen.epoch(phase, progress.epoch, progress.epochs, value, progress.units_left)

                outcome = job.run(tell)
            console.print()
            console.print(_comparison(outcome.before, outcome.after))
            _said(console, outcome)
            picture, result = job.write(outcome, out)
            saved, exported = job.reloaded(outcome, out)
            page = report.write(report.load(result), out / "report.html")
        files = {
            "All of it as a page": page,
            "Picture of the posteriors": picture,
            "Numbers and how they were made": result,
            "The small network, loaded again and compared": f"{saved}, {exported}",
        }
        paths(console, files)
        if as_json:
            print(json.dumps({**json.loads(result.read_text()), "files": [*map(str, (page, picture, result, saved,
                              exported))]}, indent=2))  # fmt: skip


def _said(console: Console, outcome: "Outcome") -> None:
    if outcome.before.parameters == outcome.after.parameters:
        console.print(
            "[yellow]No unit was removed:[/yellow] gates need time to forget. Train longer (--epochs), or let them "
            "move faster (--phi-rate) or under more pressure (--strength)."
        )
    else:
        console.print(
            f"An epoch of pruning got {outcome.faster:.1f} times faster as the network shrank.", highlight=False
        )


def _comparison(before: "Measured", after: "Measured") -> Table:
    points = 100 * (after.accuracy - before.accuracy)
    b_time, a_time = 1000 * before.epoch_seconds, 1000 * after.epoch_seconds
    return comparison(
        ("whole network", "pruned network", "change"),
        [
            ("test accuracy", f"{before.accuracy:.1%}", f"{after.accuracy:.1%}", f"{points:+.1f} points"),
            counts("parameters", before.parameters, after.parameters),
            counts("multiply-adds per image", before.multiply_adds, after.multiply_adds),
            ("an epoch of training", f"{b_time:.0f} ms", f"{a_time:.0f} ms", f"{b_time / a_time:.1f} times faster"),
        ],
    )
