"""``bmrs bench``: what a network costs, and what pruning saves."""

import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.utils import _pytree

import bmrs
from bmrs.commands import options
from bmrs.commands.data import applied, moved
from bmrs.commands.errors import device_of, guard, running
from bmrs.commands.screens import comparison, counts
from bmrs.inspection import example_inputs, make_model, where_in
from bmrs.study.provenance import provenance
from bmrs.study.store import finite
from bmrs.study.timing import Turn, race, spread

_MIB = 2**20


@dataclass(frozen=True)
class Variant:
    """What runs: the whole network or the small one, as it is or compiled, on one batch."""

    network: str
    mode: str
    batch: int
    turn: Turn


def bench(
    model: options.Model,
    shapes: options.Shapes = None,
    integers: options.Integers = 100,
    integer_shapes: options.IntegerShapes = None,
    small: Annotated[
        Path | None, typer.Option(help="The same network pruned, as bmrs train, bmrs prune or bmrs.save wrote it.")
    ] = None,
    batch: Annotated[str, typer.Option(help="Batch sizes, as in [bold]1,16,64[/bold]; --input's unless given.")] = "",
    compile_too: Annotated[bool, typer.Option("--compile", help="Measure torch.compile of it too.")] = False,
    threads: Annotated[int | None, typer.Option(min=1, help="Of the processor; torch's own choice else.")] = None,
    device: options.Device = "auto",
    as_json: options.AsJson = False,
) -> None:
    """Measure a network: parameters, multiply-adds, memory, and the time of a forward pass; and of its pruned version.

    The two take turns in one process, so that whatever else the machine does meets both. Times are medians over the
    rounds, with the 10th and 90th percentile.

    Example:  [bold]bmrs bench net.py:make_model --input 1x3x32x32 --small runs/train/small.safetensors[/bold]
    """
    console = Console(stderr=as_json)
    with guard():
        place = device_of(device)
        inputs = example_inputs(shapes or [], integer_shapes or [], integers)
        batches = _sizes(batch, inputs)
        networks = {"whole": make_model(model)}
        if small is not None:
            networks["small"] = _loaded(model, small)
        for name in networks:
            networks[name].to(place)
        one = moved(_of_size(inputs, 1), place)
        try:
            with torch.no_grad():
                applied(networks["whole"], one)
        except Exception as problem:
            raise ValueError(
                f"the network does not take inputs of these shapes and fails on them{where_in(problem)}: "
                f"change --input."
            ) from problem
        before = torch.get_num_threads()
        with running("the measurement"):
            try:
                if threads is not None:
                    torch.set_num_threads(threads)
                sizes = {name: _size(network, one) for name, network in networks.items()}
                with Console(stderr=True).status("measuring ...") as status:
                    rows = []
                    for number in batches:
                        status.update(f"measuring batches of {number} ...")
                        rows += _raced(networks, moved(_of_size(inputs, number), place), number, place, compile_too)
                used = torch.get_num_threads()
            finally:
                torch.set_num_threads(before)
        found = {"model": model, "size": sizes, "times": rows,
                 "provenance": provenance(device=str(place), threads=used, seeds=1)}  # fmt: skip
        if as_json:
            print(json.dumps(finite(found), indent=2))
        else:
            _show(console, found)


def _sizes(text: str, inputs: Any) -> list[int]:
    if not text:
        return [len(_pytree.tree_leaves(inputs)[0])]
    try:
        found = [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise ValueError(f"--batch must be whole numbers of at least 1, as 1,16,64; got '{text}'.")
    return list(dict.fromkeys(found))


def _of_size(inputs: Any, number: int) -> Any:
    """The inputs for this many examples."""
    return _pytree.tree_map(lambda x: x[torch.arange(number) % len(x)], inputs)


def _loaded(model: str, path: Path) -> nn.Module:
    try:
        return bmrs.load(make_model(model), path).eval()
    except (ValueError, OSError) as problem:
        raise ValueError(f"--small: {problem}") from problem


def _size(network: nn.Module, one: Any) -> dict[str, Any]:
    held = [*network.parameters(), *network.buffers()]
    return {
        "parameters": bmrs.cost.parameters(network),
        "multiply_adds": bmrs.cost.multiply_adds(network, one),
        "weights_mib": sum(tensor.nbytes for tensor in held) / _MIB,
    }


def _raced(
    networks: dict[str, nn.Module], x: Any, batch: int, place: torch.device, compile_too: bool
) -> list[dict[str, Any]]:  # fmt: skip
    """One row for each way of running on this batch, small beside whole."""
    variants = [
        Variant(name, mode, batch, _turn(torch.compile(network) if mode == "compiled" else network, x))
        for mode in (("eager", "compiled") if compile_too else ("eager",))
        for name, network in networks.items()
    ]  # fmt: skip
    for variant in variants:
        variant.turn.warm()
    memory = [variant.turn.peak_mib(place) for variant in variants]
    times = race([variant.turn for variant in variants], place)
    rows = []
    for variant, own, mib in zip(variants, times, memory, strict=True):
        row = {"network": variant.network, "mode": variant.mode, "batch": batch, "ms": statistics.median(own),
               "ms_spread": spread(own), "rounds": len(own), "memory_mib": mib}  # fmt: skip
        if variant.network == "small":
            beside = next(o for v, o in zip(variants, times, strict=True)
                          if (v.network, v.mode) == ("whole", variant.mode))  # fmt: skip
            ratios = [a / b for a, b in zip(beside, own, strict=True)]
            row |= {"faster": statistics.median(ratios), "faster_spread": spread(ratios)}
        rows.append(row)
    return rows


def _turn(called: Any, x: Any) -> Turn:
    @torch.no_grad()
    def run() -> None:
        applied(called, x)

    return Turn(lambda: None, run)


def _show(console: Console, found: dict[str, Any]) -> None:
    whole, small = found["size"]["whole"], found["size"].get("small")
    made = found["provenance"]
    if small is None:
        for what, title in (("parameters", "parameters"), ("multiply_adds", "multiply-adds per example")):
            console.print(f"{title}: {whole[what]:,}", highlight=False)
        console.print(f"weights: {whole['weights_mib']:.2f} MiB", highlight=False)
    else:
        rows = [counts(title, whole[what], small[what]) for what, title in
                (("parameters", "parameters"), ("multiply_adds", "multiply-adds per example"))]  # fmt: skip
        a, b = whole["weights_mib"], small["weights_mib"]
        rows.append(("weights", f"{a:.2f} MiB", f"{b:.2f} MiB", f"{b / a - 1:+.1%}" if a else "–"))
        console.print(comparison(("whole network", "pruned", "change"), rows, "Size"))
    table = Table(title="A forward pass", title_justify="left", title_style="bold")
    memory = any(row["memory_mib"] is not None for row in found["times"])
    titles = ["batch", "network", "mode", "median", "10 % to 90 %", *(["memory"] if memory else []),
              *(["faster"] if small else [])]  # fmt: skip
    for title in titles:
        table.add_column(title, justify="left" if title in ("network", "mode") else "right")
    for row in found["times"]:
        low, high = row["ms_spread"]
        cells = [str(row["batch"]), {"small": "pruned"}.get(row["network"], row["network"]), row["mode"],
                 f"{row['ms']:.3g} ms", f"{low:.3g} to {high:.3g}"]  # fmt: skip
        if memory:
            cells.append("–" if row["memory_mib"] is None else f"{row['memory_mib']:,.1f} MiB")
        if small:
            cells.append(f"{row['faster']:.2f}×" if "faster" in row else "")
        table.add_row(*cells)
    console.print(table)
    threads = f", {made['threads']} thread(s)" if made["device"] == "cpu" else ""
    console.print(f"{made['machine']}, {made['device']}{threads}, torch {made['versions']['torch']}", highlight=False)
