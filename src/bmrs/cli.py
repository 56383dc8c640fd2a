"""The command line: ``bmrs demo``, ``bmrs inspect``, ``bmrs study`` and ``bmrs report``, and more to come."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, NoReturn

try:
    import typer
    from rich.console import Console, RenderableType
    from rich.live import Live
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text
except ImportError as missing:
    sys.exit(f"bmrs: the command line needs '{missing.name}': install it with  pip install 'bmrs[demo]'")

import bmrs
from bmrs import report as pages
from bmrs.study.commands import app as study
from bmrs.study.training import Progress, Recipe

if TYPE_CHECKING:
    from bmrs.study.demo import Measured

app = typer.Typer(
    help="Make neural networks smaller and faster without tuning a threshold.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_show_locals=False,
)
app.add_typer(study, name="study")
_DEFAULT = Recipe()


def _version(show: bool) -> None:
    if show:
        print(f"bmrs {bmrs.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    pass


@app.command()
def demo(
    data: Annotated[str, typer.Option(help="Data set: digits (embedded, 1,797 images).")] = "digits",
    network: Annotated[str, typer.Option(help="Network: lenet5 or mlp.")] = "lenet5",
    criterion: Annotated[str, typer.Option(help="What decides: bmrs_n, bmrs_u, snr or mean.")] = "bmrs_n",
    price: Annotated[
        str,
        typer.Option(
            help="Who pays the KL: uniform (all units alike), params or macs (by what a unit costs), layer (as "
            "published), elbo (the exact bound)."
        ),
    ] = _DEFAULT.price,
    strength: Annotated[float, typer.Option(help="Factor on every price: higher removes more.")] = _DEFAULT.strength,
    epochs: Annotated[int, typer.Option(help="Epochs of training, each followed by pruning.")] = _DEFAULT.epochs,
    fine_tune: Annotated[int, typer.Option(help="Epochs of training the small network.")] = _DEFAULT.fine_tune,
    batch: Annotated[int, typer.Option(help="Examples per step.")] = _DEFAULT.batch,
    learning_rate: Annotated[float, typer.Option(help="Adam's learning rate.")] = _DEFAULT.learning_rate,
    phi_rate: Annotated[float, typer.Option(help="Learning rate of the gates, times that of the weights.")] = (
        _DEFAULT.phi_rate
    ),
    seed: Annotated[int, typer.Option(help="Seed of weights, split, order and noise.")] = _DEFAULT.seed,
    out: Annotated[Path, typer.Option(help="Folder for the picture and the JSON result.")] = Path("runs/demo"),
) -> None:
    """Train a network, prune it as it trains, and compare it with the same network left whole.

    Every unit (filter or neuron) gets a random gate whose posterior is learned with the weights. After every
    epoch the units go whose keeping the evidence does not support: they are cut out of the weights for good, and
    training goes on with the smaller network. In the end it is fine-tuned, tested, saved, exported and loaded
    again. No threshold is tuned.

    Example:  [bold]bmrs demo --network mlp --criterion snr[/bold]
    """
    console = Console()
    try:
        from bmrs.study.demo import Demo

        recipe = Recipe(epochs, fine_tune, batch, learning_rate, phi_rate, price, strength, seed)
        job = Demo(data, network, criterion, recipe)
    except ImportError as missing:
        _fail(f"the demo needs '{missing.name}': install it with  pip install 'bmrs[demo]'")
    except ValueError as wrong:
        _fail(str(wrong))
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as wrong:
        _fail(f"--out names a folder that cannot be made, {out} ({wrong.strerror}): choose another.")
    console.print(
        f"[bold]{network}[/bold] on [bold]{data}[/bold]: {len(job.data.train)} training images, pruned by "
        f"{job.criterion} after every epoch.\n",
        highlight=False,
    )
    screen = _Screen(console)
    with screen:
        outcome = job.run(screen.show)
    console.print()
    console.print(_comparison(outcome.before, outcome.after))
    if outcome.before.parameters == outcome.after.parameters:
        console.print(
            "[yellow]No unit was removed:[/yellow] gates need time to forget. Train longer (--epochs), or let them "
            "move faster (--phi-rate) or under more pressure (--strength)."
        )
    else:
        console.print(
            f"An epoch of pruning got {outcome.faster:.1f} times faster as the network shrank.", highlight=False
        )
    picture, result = job.write(outcome, out)
    saved, exported = job.reloaded(outcome, out)
    page = pages.write(pages.load(result), out / "report.html")
    console.print(
        f"All of it as a page: {page}\nPicture of the posteriors: {picture}\n"
        f"Numbers and how they were made: {result}\n"
        f"The small network, loaded again and compared: {saved}, {exported}",
        highlight=False,
    )


@app.command()
def report(
    results: Annotated[list[Path], typer.Argument(help="JSON results of bmrs study or bmrs demo, for one page.")],
    out: Annotated[Path, typer.Option(help="The HTML file to write.")] = Path("report.html"),
) -> None:
    """Show results on one page: a single HTML file that needs no network to be read.

    Where two results hold the same setting and method, the first is shown.

    Example:  [bold]bmrs report runs/demo/result.json --out demo.html[/bold]
    """
    try:
        page = pages.write(pages.load(results), out)
    except ValueError as wrong:
        _fail(str(wrong))
    except OSError as wrong:
        _fail(f"--out names a file that cannot be written, {out} ({wrong.strerror}): choose another.")
    print(page)


@app.command()
def inspect(
    model: Annotated[
        str, typer.Argument(help="What makes the network: [bold]my.module:make_model[/bold] or path/to/file.py:Net.")
    ],
    shapes: Annotated[
        list[str] | None,
        typer.Option(
            "--input", help="Shape of an input, as [bold]1x3x224x224[/bold], or name=1x3 by keyword; once for each."
        ),
    ] = None,
    integers: Annotated[int, typer.Option(help="Inputs named by --integer-input hold numbers below this.")] = 100,
    integer_shapes: Annotated[
        list[str] | None, typer.Option("--integer-input", help="Shape of an input of whole numbers, such as token ids.")
    ] = None,
    verify: Annotated[bool, typer.Option(help="Prove that removal is exact, structure by structure.")] = True,
    places: Annotated[bool, typer.Option("--places", help="List every parameter dimension of each structure.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the table.")] = False,
) -> None:
    """List what can be removed from a network, what each unit costs, and what stays whole and why.

    Example:  [bold]bmrs inspect torchvision.models:resnet18 --input 1x3x224x224[/bold]
    """
    from bmrs.inspection import example_inputs, make_model

    console = Console()
    try:
        network = make_model(model)
        inputs = example_inputs(shapes or [], integer_shapes or [], integers)
        found = bmrs.structures(network, inputs)
        if verify:
            with Console(stderr=True).status("proving that removal is exact ..."):
                found.verify()
    except (ValueError, TypeError, RuntimeError, ImportError) as wrong:
        _fail(str(wrong))
    if as_json:
        print(json.dumps(found.to_json(), indent=2))
        return
    console.print(_structures_table(found, places))
    for line in found.notes():
        console.print(line, highlight=False, soft_wrap=True)


def _structures_table(found: bmrs.Structures, places: bool) -> RenderableType:
    if not len(found):
        return Text(found.heading(), style="yellow")
    heading = found.heading()
    table = Table(
        title=heading, title_justify="left", title_style="bold", caption="Parameters and multiply-adds of one unit."
    )
    table.caption_justify = "left"
    for title, justify in (("structure", "left"), ("kind", "left"), ("units", "right"), ("parameters", "right"),
                          ("multiply-adds", "right"), ("removal", "left")):  # fmt: skip
        table.add_column(title, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for structure in found:
        exact = {"exact": "green", "not verified yet": "dim"}.get(structure.status, "yellow")
        name = Text(structure.name)
        if places:
            name.append("".join(f"\n  {place} dimension {dim}" for place, dim in structure.places), style="dim")
        table.add_row(
            name, structure.kind, str(structure.units), f"{structure.params_per_unit:,.0f}",
            f"{structure.macs_per_unit:,.0f}", Text(structure.status, style=exact),
        )  # fmt: skip
    return table


def _fail(sentence: str) -> NoReturn:
    Console(stderr=True).print(Text.assemble(("bmrs: ", "red"), sentence), soft_wrap=True)
    raise typer.Exit(2)


class _Screen:
    """Live progress on a terminal; a line every few epochs elsewhere."""

    _TITLES: ClassVar = {"whole": "1/3  whole network", "prune": "2/3  pruning", "fine-tune": "3/3  fine-tuning"}

    def __init__(self, console: Console) -> None:
        self.console = console
        self.live = Live(console=console, refresh_per_second=8, transient=False)
        self.latest: dict[str, Progress] = {}
        self.widths: dict[str, int] = {}

    def __enter__(self) -> None:
        if self.console.is_terminal:
            self.live.start()

    def __exit__(self, *_: object) -> None:
        if self.console.is_terminal:
            self.live.stop()

    def show(self, phase: str, progress: Progress) -> None:
        self.latest[phase] = progress
        for layer, left in progress.units_left.items():
            self.widths[layer] = max(left, self.widths.get(layer, 0))
        if self.console.is_terminal:
            self.live.update(self._render())
        elif progress.epoch % 5 == 0 or progress.epoch in (1, progress.epochs):
            self.console.print(self._line(phase, progress), highlight=False, soft_wrap=True)

    def _line(self, phase: str, progress: Progress) -> str:
        units = "  ".join(f"{layer} {left}" for layer, left in progress.units_left.items())
        title = self._TITLES[phase]
        return (
            f"{title:<20} epoch {progress.epoch:>3}/{progress.epochs}  "
            f"validation {progress.accuracy:.1%}  {units}".rstrip()
        )

    def _render(self) -> RenderableType:
        rows = Table.grid(padding=(0, 2))
        for phase, title in self._TITLES.items():
            progress = self.latest.get(phase)
            if progress is None:
                rows.add_row(Text(title, style="dim"))
                continue
            bar = ProgressBar(total=progress.epochs, completed=progress.epoch, width=30)
            accuracy = f"validation accuracy [bold]{progress.accuracy:.1%}[/bold]"
            rows.add_row(title, bar, f"epoch {progress.epoch}/{progress.epochs}", accuracy)
            for layer, left in progress.units_left.items():
                width = self.widths[layer]
                bar = ProgressBar(total=width, completed=left, width=30, complete_style="cyan", finished_style="cyan")
                rows.add_row(f"     {layer}", bar, f"[bold]{left}[/bold] of {width}", "units left")
        return rows


def _comparison(before: "Measured", after: "Measured") -> Table:
    table = Table(title="Before and after", title_justify="left", title_style="bold")
    table.add_column("")
    for title in ("whole network", "pruned network", "change"):
        table.add_column(title, justify="right")
    points = 100 * (after.accuracy - before.accuracy)
    table.add_row("test accuracy", f"{before.accuracy:.1%}", f"{after.accuracy:.1%}", f"{points:+.1f} points")
    for title, b, a in (
        ("parameters", before.parameters, after.parameters),
        ("multiply-adds per image", before.multiply_adds, after.multiply_adds),
    ):
        table.add_row(title, f"{b:,}", f"{a:,}", f"{a / b - 1:+.1%}")
    b_time, a_time = 1000 * before.epoch_seconds, 1000 * after.epoch_seconds
    table.add_row("an epoch of training", f"{b_time:.0f} ms", f"{a_time:.0f} ms", f"{b_time / a_time:.1f} times faster")
    return table


def main() -> None:
    app()
