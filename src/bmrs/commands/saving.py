"""What ``train`` and ``prune`` leave: the small network, loaded again and compared, and its ONNX."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree

import bmrs
from bmrs.commands.data import applied, moved
from bmrs.commands.errors import RunError

PARTS, PART = "parts", "train"  # the folder in --out with what is half done, and the name of the training in it
NETWORK, ONNX = "small.safetensors", "small.onnx"


def check_onnx(wanted: bool) -> None:
    """Refuses an export that cannot be made, before anything is computed."""
    if wanted and importlib.util.find_spec("onnxscript") is None:
        raise ImportError("--onnx needs 'onnxscript': install it with  pip install 'bmrs[onnx]'")


def names(onnx: bool, *others: str) -> list[str]:
    """Of the files that will be there."""
    return [NETWORK, *([ONNX] if onnx else []), *others]


def write(
    network: nn.Module, build: Callable[[], nn.Module], examples: Any, out: Path, onnx: bool
) -> dict[str, Path]:  # fmt: skip
    """Save the small network and load it on a new original, which must compute the same."""
    files = {"network": out / NETWORK}
    network.eval()
    bmrs.save(network, files["network"])
    again = bmrs.load(build().to(next(network.parameters()).device), files["network"]).eval()
    with torch.no_grad():
        first, second = (_pytree.tree_leaves(applied(model, examples)) for model in (network, again))
    if any(isinstance(a, torch.Tensor) and not torch.allclose(a, b, 1e-4, 1e-5, True)
           for a, b in zip(first, second, strict=True)):  # fmt: skip
        raise RunError(f"{files['network']} computes something else when it is loaded: does MODEL build the same "
                       "network every time?")  # fmt: skip
    if onnx:
        cpu = torch.device("cpu")
        files["onnx"] = bmrs.export_onnx(network.to(cpu), moved(examples, cpu), out / ONNX)
    return files
