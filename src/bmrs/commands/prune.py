"""``bmrs prune``: cuts a network that is trained already."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from torch import nn

import bmrs
from bmrs.commands import options, saving
from bmrs.commands.cutting import Cut, Cutting, checkpoint_of
from bmrs.commands.data import moved, some
from bmrs.commands.errors import device_of, guard, running
from bmrs.commands.folders import writable
from bmrs.commands.loop import inputs_as_options
from bmrs.commands.screens import comparison, counts, next_command, paths, say, structures
from bmrs.inspection import example_inputs, load_weights, make_model
from bmrs.study.provenance import provenance
from bmrs.study.store import write_json


def prune(
    model: options.Model,
    shapes: options.Shapes = None,
    integers: options.Integers = 100,
    integer_shapes: options.IntegerShapes = None,
    weights: options.Weights = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="The --out of a bmrs train, whose gates know what units are worth.")
    ] = None,
    criterion: Annotated[
        str | None,
        typer.Option(
            help=f"What decides: l2, the norm of a unit's weights; with --checkpoint {', '.join(options.GATED)}, "
            "what trained gates say.",
            autocompletion=options.one_of(*options.CRITERIA),
        ),
    ] = None,
    fraction: Annotated[
        float | None,
        typer.Option(help="Share of all units to remove, the least worth first; the criterion's own boundary else."),
    ] = None,
    per_structure: Annotated[
        bool, typer.Option("--per-structure", help="Take --fraction of every structure, rather than of all units.")
    ] = False,
    round_to: options.RoundTo = 1,
    device: options.Device = "auto",
    out: Annotated[Path, typer.Option(help="Folder for results.")] = Path("runs/prune"),
    onnx: options.Onnx = False,
    as_json: options.AsJson = False,
    dry_run: options.DryRun = False,
) -> None:
    """Cut a network that is trained already, without training it: units go by their weights, or by what gates know.

    With --weights the units with the smallest weights go. With --checkpoint those go whose gates, trained by
    bmrs train, say they are worth least; --weights is then what that training began with, if anything. Fine-tune
    what is left with bmrs train --weights.

    Example:  [bold]bmrs prune net.py:make_model --weights net.safetensors --input 1x3x32x32 --fraction 0.5[/bold]
    """
    console = Console(stderr=as_json)
    with guard():
        place = device_of(device)
        chosen = options.check("criterion", criterion or ("bmrs_n" if checkpoint else "l2"), options.CRITERIA)
        _check(chosen, fraction, per_structure, checkpoint)
        saving.check_onnx(onnx)
        state = None if checkpoint is None else checkpoint_of(checkpoint)
        network = make_model(model)
        if weights is not None:
            load_weights(network, weights)
        if shapes or integer_shapes or state is None:
            examples = example_inputs(shapes or [], integer_shapes or [], integers)
        else:
            examples = state["examples"]
        network, examples = network.to(place), moved(examples, place)
        rule = bmrs.L2(fraction) if chosen == "l2" and fraction is not None else bmrs.criteria.by_name(chosen)
        cutting = Cutting(
            network, examples, rule, fraction, per_structure=per_structure, round_to=round_to, state=state,
        )  # fmt: skip
        cuts = cutting.cuts
        if dry_run:
            _dry(cuts, str(rule), console, as_json, [str(out / name) for name in saving.names(onnx, "result.json")])
            return
        writable(out)
        with running("the pruning"):
            result = _cut(cutting, model, state, examples, str(rule), place.type)
            files = saving.write(network, lambda: make_model(model), examples, out, onnx)
            result["files"] = {what: str(path) for what, path in files.items()}
            files["numbers"] = out / "result.json"
            write_json(files["numbers"], result)
        _show(console, cuts, result, weights is None and state is None)
        paths(console, {"Small network": files["network"], **({"ONNX": files["onnx"]} if onnx else {}),
                        "Numbers": files["numbers"]})  # fmt: skip
        console.print()
        size = inputs_as_options(examples)
        next_command(console, f"bmrs bench {model} {size} --small {files['network']}", "How much faster it is:")
        next_command(
            console,
            f"bmrs train {model} --weights {files['network']} --data ... --epochs 0 --fine-tune 20 --out {out}-tuned",
            "Train what is left:",
        )  # fmt: skip
        if as_json:
            print(json.dumps({**{name: result[name] for name in ("before", "after", "units", "removed")},
                              "files": {what: str(path) for what, path in files.items()}}, indent=2))  # fmt: skip


def _check(criterion: str, fraction: float | None, per_structure: bool, checkpoint: Path | None) -> None:
    if fraction is not None and not 0.0 <= fraction <= 1.0:
        raise ValueError(f"--fraction must be between 0 and 1, the share of units to remove; got {fraction:g}.")
    if checkpoint is None and criterion != "l2":
        raise ValueError(
            f"--criterion {criterion} asks gates, which only training gives: give --checkpoint with the --out of a "
            f"bmrs train, or --criterion l2."
        )
    if fraction is None and (criterion == "l2" or per_structure):
        what = "--per-structure" if per_structure else "--criterion l2"
        raise ValueError(f"{what} needs --fraction, the share of units to remove, as --fraction 0.5.")


def _cut(
    cutting: Cutting, target: str, state: dict[str, Any] | None, examples: Any, rule: str, device: str
) -> dict[str, Any]:
    """Remove the units; returns what it changed, as a report reads it."""
    one = some(examples, 1)
    before = _cost(cutting.plain(), one)
    cuts = cutting.cuts
    after = _cost(cutting.done(), one)
    return {
        "before": before,
        "after": after,
        "units": {cut.structure: {"before": cut.before, "after": cut.after} for cut in cuts},
        "removed": {cut.structure: cut.gone for cut in cuts},
        "provenance": provenance(
            network=target, worth="of weights" if state is None else "of trained gates", criterion=rule, device=device,
        ),
    }  # fmt: skip


def _cost(network: nn.Module, one: Any) -> dict[str, Any]:
    return {
        "accuracy": None,
        "parameters": bmrs.cost.parameters(network),
        "multiply_adds": bmrs.cost.multiply_adds(network, one),
    }


def _show(console: Console, cuts: list[Cut], result: dict[str, Any], untrained: bool) -> None:
    before, after = result["before"], result["after"]
    console.print(structures((cut.structure, cut.kind, cut.before, cut.after) for cut in cuts))
    rows = [counts(title, before[what], after[what]) for what, title in
            (("parameters", "parameters"), ("multiply_adds", "multiply-adds per example"))]  # fmt: skip
    rows.append(counts("units", sum(cut.before for cut in cuts), sum(cut.after for cut in cuts)))
    console.print(comparison(("before", "pruned", "change"), rows))
    if not any(cut.gone for cut in cuts):
        console.print("[yellow]No unit was removed:[/yellow] all are worth keeping; --fraction removes regardless.")
    if untrained:
        console.print("[yellow]Without --weights[/yellow] the units were ranked by the weights MODEL is made with.")


def _dry(cuts: list[Cut], rule: str, console: Console, as_json: bool, files: list[str]) -> None:
    if as_json:
        about = {cut.structure: {"kind": cut.kind, "before": cut.before, "gone": cut.gone} for cut in cuts}
        print(json.dumps({"criterion": rule, "units": about, "files": files}, indent=2))
        return
    console.print(structures((cut.structure, cut.kind, cut.before, cut.after) for cut in cuts))
    for cut in cuts:
        if cut.gone:
            say(console, f"{cut.structure}: {spans(cut.gone)}")
    say(console, f"Decided by {rule}. Files: {', '.join(files)}")
    console.print("Nothing was done: leave out --dry-run to begin.")


def spans(numbers: list[int]) -> str:
    """
    >>> spans([0, 1, 2, 5, 7, 8])
    '0-2, 5, 7-8'
    """
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else f"{part[0]}" for part in parts)
