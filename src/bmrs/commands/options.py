"""Options that several commands have, with the same names, and what a shell completes them to."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from bmrs.price import KINDS
from bmrs.study.data import NAMES
from bmrs.study.networks import NAMES as NETWORKS

GATED = ("bmrs_n", "bmrs_u", "snr", "mean")  # criteria that ask the gates
CRITERIA = (*GATED, "l2")
OPTIMIZERS = ("adam", "adamw", "sgd")
PRECISIONS = ("float32", "bf16")
LOSSES = ("cross_entropy", "mse")
NOISES = ("example", "batch")
TRACKERS = ("tensorboard", "wandb")
DEVICES = ("auto", "cpu", "cuda")


def one_of(*choices: str) -> Callable[[str], list[str]]:
    """What a shell completes a value to.

    >>> one_of("adam", "adamw", "sgd")("ad")
    ['adam', 'adamw']
    """
    return lambda incomplete: [choice for choice in choices if choice.startswith(incomplete)]


def check(name: str, value: str, choices: tuple[str, ...]) -> str:
    if value not in choices:
        raise ValueError(f"unknown {name} '{value}': choose one of {', '.join(choices)}.")
    return value


_MODEL = "What makes the network: [bold]my.module:make_model[/bold] or path/to/file.py:Net."

Model = Annotated[str, typer.Argument(help=_MODEL)]
MaybeModel = Annotated[str | None, typer.Argument(help=_MODEL)]
ModelOption = Annotated[str | None, typer.Option("--model", help="The same as the argument MODEL.")]
Shapes = Annotated[
    list[str] | None,
    typer.Option("--input", help="Shape of an input, as [bold]1x3x224x224[/bold], or name=1x3 by keyword; once for "
                                 "each."),
]  # fmt: skip
IntegerShapes = Annotated[
    list[str] | None,
    typer.Option("--integer-input", help="Shape of an input of whole numbers, such as token ids."),
]
Integers = Annotated[int, typer.Option(min=1, help="Inputs named by --integer-input hold numbers below this.")]
Weights = Annotated[
    Path | None, typer.Option(help="The network's trained weights: safetensors, or a state dict by torch.save.")
]
DataDir = Annotated[
    Path | None,
    typer.Option(help="Where the official files of a named data set lie or are downloaded to; else BMRS_DATA."),
]
Network = Annotated[
    str, typer.Option(help=f"Network: {' or '.join(NETWORKS)}.", autocompletion=one_of(*NETWORKS))
]  # fmt: skip
DemoData = Annotated[
    str, typer.Option(help="Data set: digits (embedded, 1,797 images).", autocompletion=one_of(*NAMES))
]
CriterionName = Annotated[
    str, typer.Option("--criterion", help=f"What decides: {', '.join(GATED)}.", autocompletion=one_of(*GATED))
]
Price = Annotated[
    str,
    typer.Option(
        help="Who pays the KL: uniform (all units alike), params, macs or time (by what a unit costs), layer (as "
        "published), elbo (the exact bound).",
        autocompletion=one_of(*KINDS),
    ),
]
Strength = Annotated[float, typer.Option(help="Factor on every price: higher removes more.")]
RoundTo = Annotated[
    int, typer.Option(min=1, help="Leave widths that are multiples of this number, as a GPU likes 8 or 16.")
]
Epochs = Annotated[int, typer.Option(help="Epochs of training, each followed by pruning.")]
FineTune = Annotated[int, typer.Option(help="Epochs of training the small network.")]
Batch = Annotated[int, typer.Option(help="Examples per step.")]
PhiRate = Annotated[float, typer.Option(help="Learning rate of the gates, times that of the weights.")]
Seed = Annotated[int, typer.Option(help="Seed of weights, split, order and noise.")]
Device = Annotated[
    str, typer.Option(help="cuda, cuda:1, cpu; auto takes a GPU where there is one.", autocompletion=one_of(*DEVICES))
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the outcome as JSON; all else goes to stderr.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and do nothing.")]
Onnx = Annotated[bool, typer.Option("--onnx", help="Write the small network as ONNX too.")]
