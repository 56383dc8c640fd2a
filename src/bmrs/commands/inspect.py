"""``bmrs inspect``."""

import json
from typing import Annotated

import typer
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

import bmrs
from bmrs.commands import options
from bmrs.commands.errors import guard
from bmrs.commands.screens import say
from bmrs.inspection import example_inputs, make_model


def inspect(
    model: options.Model,
    shapes: options.Shapes = None,
    integers: options.Integers = 100,
    integer_shapes: options.IntegerShapes = None,
    verify: Annotated[bool, typer.Option(help="Prove that removal is exact, structure by structure.")] = True,
    places: Annotated[bool, typer.Option("--places", help="List every parameter dimension of each structure.")] = False,
    as_json: options.AsJson = False,
) -> None:
    """List what can be removed from a network, what each unit costs, and what stays whole and why.

    Example:  [bold]bmrs inspect torchvision.models:resnet18 --input 1x3x224x224[/bold]
    """
    console = Console()
    with guard():
        network = make_model(model)
        found = bmrs.structures(network, example_inputs(shapes or [], integer_shapes or [], integers))
        if verify:
            with Console(stderr=True).status("proving that removal is exact ..."):
                found.verify()
        if as_json:
            print(json.dumps(found.to_json(), indent=2))
            return
        console.print(table(found, places))
        for line in found.notes():
            say(console, line)


def table(found: bmrs.Structures, places: bool = False) -> RenderableType:
    """A listing for people."""
    if not len(found):
        return Text(found.heading(), style="yellow")
    table = Table(
        title=found.heading(), title_justify="left", title_style="bold",
        caption="Parameters and multiply-adds of one unit.", caption_justify="left",
    )  # fmt: skip
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
