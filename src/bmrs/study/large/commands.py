"""``bmrs study table2``: the large networks, each a task of its own, in pieces that fit the time there is."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from bmrs.commands.errors import note
from bmrs.commands.folders import writable
from bmrs.study.answers import answer, guard, headline, module, write
from bmrs.study.jobs import Job
from bmrs.study.large import work
from bmrs.study.large.deadline import Deadline
from bmrs.study.large.recipe import CHOICES, HUB, METHODS, SETTINGS, Recipe
from bmrs.study.screen import Screen
from bmrs.study.store import Store

WAYS = ("eager", "graph", "compiled", "onnxruntime")


def _choice(name: str, about: str) -> Any:
    return typer.Option(help=f"{about}: {', '.join(CHOICES[name])}.", autocompletion=lambda: list(CHOICES[name]))


Resolution = Annotated[int, typer.Option(min=8, help="Height and width, in pixels, at which networks see the images.")]
Batch = Annotated[int, typer.Option(min=1, help="Images in a training step.")]
Precision = Annotated[str, _choice("precision", "Of products, on a GPU")]
ChannelsLast = Annotated[bool, typer.Option("--channels-last/--no-channels-last", help="Images as convolutions on a GPU"
                                            " read them best.")]  # fmt: skip
StepOption = Annotated[str, _choice("step", "How a training step runs")]
Gates = Annotated[str, _choice("gates", "Where there are gates, the paper's places or all that makes it smaller")]
Weights = Annotated[str, typer.Option(help="Folder with a ResNet-50 that transformers loads, or a name on its hub.")]
VitWeights = Annotated[str, typer.Option(help="The same for the ViT.")]
Scratch = Annotated[bool, typer.Option("--scratch", help="Train from scratch, without pretrained weights.")]
Vit = Annotated[str, _choice("vit", "Size of a ViT from scratch")]
Patch = Annotated[int, typer.Option(min=1, help="Pixels of a patch of a ViT from scratch.")]
DataDir = Annotated[Path | None, typer.Option(help="Folder of the data sets; what is missing is downloaded to it.")]
Out = Annotated[Path | None, typer.Option(help="Folder for results, runs/study/NAME unless given.")]
DeviceName = Annotated[str, typer.Option("--device", help="cuda, cuda:1, cpu; auto takes a GPU where there is one.")]
Settings = Annotated[str, typer.Option(help=f"Of {', '.join(SETTINGS)}; all unless given.")]
Restart = Annotated[bool, typer.Option("--restart", help="Throw away what an earlier run left in the folder.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print paths and headline numbers as JSON.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and do nothing.")]


def table2(
    data_dir: DataDir = None,
    out: Out = None,
    device: DeviceName = "auto",
    settings: Settings = "",
    methods: Annotated[str, typer.Option(help=f"Of {', '.join(METHODS)}; all unless given.")] = "",
    seeds: Annotated[int, typer.Option(min=1, help="Networks per method, each with its own split and noise.")] = 3,
    epochs: Annotated[int, typer.Option(min=1, help="Of training, with pruning.")] = 100,
    fine_tune: Annotated[int, typer.Option(min=0, help="Epochs with the structure fixed.")] = 10,
    resolution: Resolution = 224,
    batch: Batch = 32,
    lr: Annotated[float, typer.Option(min=0.0, help="Learning rate.")] = 6.8e-4,
    schedule: Annotated[str, _choice("schedule", "Of the learning rate; the paper's: constant, linear with AdamW for "
                                                 "a ViT")] = "paper",
    augment: Annotated[str, _choice("augment", "Random crops, or shifts by a few pixels, both with flips; the paper's: "
                                               "none, crop for a ViT")] = "paper",
    precision: Precision = "fp32",
    channels_last: ChannelsLast = False,
    step: StepOption = "eager",
    gates: Gates = "paper",
    price: Annotated[str, _choice("price", "Each unit's share of the KL")] = "layer",
    strength: Annotated[float, typer.Option(min=0.0, help="A factor on every price.")] = 1.0,
    noise: Annotated[str, _choice("noise", "Gates are drawn for each")] = "example",
    phi_lr: Annotated[float, typer.Option(min=0.0, help="Learning rate of the gates, times the weights'.")] = 1.0,
    log_sigma: Annotated[float, typer.Option(help="Where the gates begin; higher for short trainings.")] = -5.0,
    warmup: Annotated[int, typer.Option(min=0, help="Steps over which the KL grows to its full weight.")] = 0,
    round_to: Annotated[int | None, typer.Option(min=2, help="Leave widths at multiples of this.")] = None,
    prune_every: Annotated[int, typer.Option(min=1, help="Epochs from one removal to the next.")] = 1,
    fold: Annotated[str, _choice("fold", "When the gates go into the weights, seen from fine-tuning")] = "after",
    weights: Weights = HUB["resnet50"],
    vit_weights: VitWeights = HUB["vit"],
    scratch: Scratch = False,
    vit: Vit = "base",
    patch: Patch = 16,
    images: Annotated[int | None, typer.Option(min=10, help="So many training images only, to try a recipe.")] = None,
    time_limit: Annotated[float | None, typer.Option(min=1.0, help="Seconds after which to stop, at the end of an "
                                                     "epoch; the same command goes on.")] = None,
    measure: Annotated[str, typer.Option(help=f"How the networks left are timed: {', '.join(WAYS)}; or none.")] = "",
    measure_only: Annotated[bool, typer.Option("--measure-only", help="Train nothing: measure again what is there."
                                               )] = False,
    name: Annotated[str, typer.Option(help="Of the files of the result.")] = "table2",
    restart: Restart = False,
    as_json: AsJson = False,
    dry_run: DryRun = False,
) -> None:  # fmt: skip
    """Large networks pruned while training: ResNet-50 and ViT, beside the published numbers, and measured.

    One task for each method and seed; all in a folder are in its table.

    Example:  [bold]bmrs study table2 --settings resnet50-cifar10 --methods bmrs_n --seeds 1 --time-limit 540[/bold]
    """
    deadline = Deadline(time_limit)
    with guard():
        recipe = Recipe(
            resolution=resolution, epochs=epochs, fine_tune=fine_tune, batch=batch, learning_rate=lr,
            precision=precision, channels_last=channels_last, step=step, gates=gates, price=price, strength=strength,
            noise=noise, phi_lr=phi_lr, log_sigma=log_sigma, warmup=warmup, round_to=round_to,
            prune_every=prune_every, fold=fold, schedule=schedule, augment=augment, weights=weights,
            vit_weights=vit_weights, scratch=scratch, vit=vit, patch=patch, images=images,
        )  # fmt: skip
        plan = work.settle(
            name, recipe, settings=settings, methods=methods, seeds=seeds, device=device, data_dir=data_dir, out=out,
            restart=restart, ways=measure, known_ways=WAYS,
        )  # fmt: skip
        if dry_run:
            _dry(plan, as_json)
        else:
            writable(plan.out)
            with _memory():
                _run(plan, deadline, measure_only, as_json)


def _run(plan: work.Plan, deadline: Deadline, measure_only: bool, as_json: bool) -> None:
    console = Console(stderr=as_json)
    console.print(f"[bold]{plan.name}[/bold] on {plan.device}, results in {plan.out}", highlight=False)
    with Store(plan.parts, plan.key, restart=plan.restart) as store:
        with Screen(console, [setting.key for setting in plan.settings]) as screen:

            def tell(line: str) -> None:
                """Below the bars of a terminal; elsewhere every line stays."""
                screen.status(line)
                if not console.is_terminal:
                    console.print(line, highlight=False, soft_wrap=True)

            if measure_only:
                found, up = work.measure_again(plan, store, deadline, tell)
            else:
                found, up = work.compute(plan, store, screen, deadline, tell)
        if up:
            console.print("The time is up; give the same command again, and it goes on.", highlight=False)
        if not found:
            if not up:
                note("there is nothing to show yet: train something first, without --measure-only.")
            if as_json:
                print(json.dumps({"name": plan.name, "finished": False, "files": []}))
            return
        content, tables = work.content(plan, found), module("study.large.tables")
        job = Job(plan.name, "large", "continuous", "", table="table2", figure="table2")
        files = write(job, plan.out, content, shown_by="study.large", beside=tables.as_timing(content))
        answer(console, content, tables.headline(content), files, as_json, finished=not up)


def time_large(
    recipe: Recipe, settings: str, device: str, out: Path | None, restart: bool, as_json: bool, dry_run: bool
) -> None:
    """``bmrs study timing --large``: a part for each setting, and one table of all in the folder."""
    plan = work.settle("timing_large", recipe, settings=settings, seeds=1, methods="none", device=device, out=out,
                       restart=restart, ways="none")  # fmt: skip
    if dry_run:
        _dry(plan, as_json)
        return
    writable(plan.out)
    console = Console(stderr=as_json)
    console.print(f"[bold]{plan.name}[/bold] on {plan.device}, results in {plan.out}", highlight=False)
    key = {**plan.key, "protocol": "timing"}
    with Store(plan.parts, key, restart=restart) as store, _memory():
        with Screen(console, [setting.key for setting in plan.settings], "rounds") as screen:
            work.time_all(plan, store, screen)
        content = work.timing_content(plan, store)
    job = Job(plan.name, "timing", "timing", "", table="timing_table")
    answer(console, content, headline(content), write(job, plan.out, content), as_json)


@contextlib.contextmanager
def _memory() -> Iterator[None]:
    """What a GPU without room for a training step can be told."""
    try:
        yield
    except torch.OutOfMemoryError as problem:
        raise ValueError(
            "the GPU's memory is too small for this step: give a smaller --batch or --resolution."
        ) from problem


def _dry(plan: work.Plan, as_json: bool) -> None:
    described = plan.to_json()
    if as_json:
        print(json.dumps(described, indent=2))
        return
    recipe, console = plan.recipe, Console()
    size = f"{recipe.resolution}×{recipe.resolution}"
    facts = (
        f"{recipe.epochs} epochs and {recipe.fine_tune} of fine-tuning, {size} pixels, batches of {recipe.batch}, "
        f"{recipe.precision}, gates: {recipe.gates}, price: {recipe.price}"
    )
    table = Table(
        title=f"{plan.name} on {plan.device}, results in {plan.out}", title_justify="left", title_style="bold",
        caption=facts, caption_justify="left",
    )  # fmt: skip
    table.add_column("task", no_wrap=True)
    table.add_column("state")
    for task in described["tasks"]:
        table.add_row(task["name"], task["state"])
    console.print(table)
    console.print("Nothing was done: leave out --dry-run to begin.")
