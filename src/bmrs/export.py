"""A network for deployment: ONNX and ``torch.export``, for any batch size."""

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from bmrs.checkpoint import unwrapped
from bmrs.structure.capture import ExampleInputs, arguments, first_line, mode


def _dynamic_batch(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """The first dimension of every tensor that has as many entries there as the first one."""
    leaves = [leaf for leaf in _pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.dim()]
    size = leaves[0].shape[0] if leaves else None

    def one(leaf: Any) -> Any:
        return (
            {0: torch.export.Dim.DYNAMIC} if isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == size else None
        )

    return _pytree.tree_map(one, args), _pytree.tree_map(one, kwargs)


def export_program(
    model: nn.Module, example_inputs: ExampleInputs, *, dynamic_batch: bool = True
) -> torch.export.ExportedProgram:
    """``torch.export`` of the network in evaluation mode.

    A batch of one or two in the example is fine: the batch size stays open unless ``dynamic_batch`` is False or the
    network fixes it itself.
    """
    model = unwrapped(model)
    args, kwargs = arguments(example_inputs)
    shapes: Any = None
    if dynamic_batch:
        args, kwargs = _at_least_two((args, kwargs))
        of_args, of_kwargs = _dynamic_batch(args, kwargs)
        shapes = _by_name(model, of_args, of_kwargs) if kwargs else of_args
    with mode(model, training=False):
        return torch.export.export(model, args, kwargs or None, dynamic_shapes=shapes, strict=False)


def _by_name(model: nn.Module, of_args: tuple[Any, ...], of_kwargs: dict[str, Any]) -> Any:
    return of_kwargs if not of_args else (*of_args, of_kwargs)


def _at_least_two(inputs: Any) -> Any:
    """A batch of one would be taken for a constant."""
    leaves, spec = _pytree.tree_flatten(inputs)
    sizes = [leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()]
    if sizes and sizes[0] == 1:
        leaves = [
            torch.cat([leaf, leaf]) if isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == 1 else leaf
            for leaf in leaves
        ]
    return _pytree.tree_unflatten(leaves, spec)


def export_onnx(
    model: nn.Module, example_inputs: ExampleInputs, path: str | os.PathLike[str], *, dynamic_batch: bool = True
) -> Path:
    """Write the network to an ONNX file and return its path. Needs ``pip install 'bmrs[onnx]'``."""
    try:
        import onnxscript  # noqa: F401
    except ImportError as missing:
        raise ImportError(f"ONNX export needs '{missing.name}': install it with  pip install 'bmrs[onnx]'") from missing
    try:
        program = export_program(model, example_inputs, dynamic_batch=dynamic_batch)
        made = torch.onnx.export(program, dynamo=True, verbose=False)
    except Exception as problem:
        hint = ", or keep the batch size fixed with dynamic_batch=False" if dynamic_batch else ""
        raise RuntimeError(
            f"the model cannot be exported to ONNX ({first_line(problem)}): replace that operation{hint}."
        ) from problem
    assert made is not None
    target = Path(path)
    made.save(str(target))
    return target
