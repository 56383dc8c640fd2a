"""A network for deployment: ONNX and ``torch.export``, for any batch size."""

import contextlib
import inspect
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from bmrs import _checks
from bmrs.checkpoint import unwrapped
from bmrs.structure.capture import ExampleInputs, arguments, first_line, mode, no_cache, no_fast_path, quiet


def export_program(
    model: nn.Module, example_inputs: ExampleInputs, *, dynamic_batch: bool = True
) -> torch.export.ExportedProgram:
    """``torch.export`` of the network in evaluation mode.

    A batch of one in the example is fine: the batch size stays open unless ``dynamic_batch`` is False or the network
    fixes it itself.

    >>> program = export_program(nn.Linear(8, 2), torch.randn(1, 8))
    >>> program.module()(torch.randn(5, 8)).shape
    torch.Size([5, 2])
    """
    model = unwrapped(model)
    _checks.in_one_piece(model, "model", "export the whole network, inside Sharded.gathered() or after its finish()")
    args, kwargs = arguments(example_inputs)
    _check_runs(model, args, kwargs)
    shapes: Any = None
    if dynamic_batch:
        args, kwargs = _at_least_two((args, kwargs))
        shapes = _open_batch(model, args, kwargs)
    with mode(model, training=False), no_fast_path(), no_cache(model), _silence():
        try:
            return torch.export.export(model, args, kwargs or None, dynamic_shapes=shapes, strict=False)
        except Exception as problem:
            raise _explained("torch.export", problem, dynamic_batch) from problem


def export_onnx(
    model: nn.Module, example_inputs: ExampleInputs, path: str | os.PathLike[str], *, dynamic_batch: bool = True
) -> Path:
    """Write the network to an ONNX file and return its path. Needs ``pip install 'bmrs[onnx]'``.

    ``export_onnx(model, torch.randn(1, 3, 224, 224), "small.onnx")`` takes any number of images.
    """
    try:
        import onnxscript  # noqa: F401
    except ImportError as missing:
        raise ImportError(f"ONNX export needs '{missing.name}': install it with  pip install 'bmrs[onnx]'") from missing
    target = Path(path)
    if not target.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {target.parent} to export to: make it first.")
    program = export_program(model, example_inputs, dynamic_batch=dynamic_batch)
    with _silence():
        try:
            made = torch.onnx.export(program, dynamo=True, verbose=False)
        except Exception as problem:
            raise _explained("ONNX", problem, dynamic_batch) from problem
        assert made is not None
        made.save(str(target))
    return target


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Exporters log their progress, and warn of what they use themselves and torch will change: of no use to whoever
    exports. Other warnings, and all errors, come through.
    """
    with quiet(), warnings.catch_warnings():
        for category in (DeprecationWarning, FutureWarning, PendingDeprecationWarning):
            warnings.simplefilter("ignore", category)
        yield


def _check_runs(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    try:
        with mode(model, training=False), torch.no_grad():
            model(*args, **kwargs)
    except Exception as problem:
        raise ValueError(
            f"example_inputs do not fit the model, which fails on them ({first_line(problem)}): give a tensor, a tuple "
            f"of positional arguments or a dict of keyword arguments the model takes, on its device."
        ) from problem


def _explained(target: str, problem: Exception, dynamic_batch: bool) -> RuntimeError:
    hint = ", or keep the batch size fixed with dynamic_batch=False" if dynamic_batch else ""
    cause = problem.__cause__ or problem  # what the exporter met, rather than its report on it
    return RuntimeError(
        f"the model cannot be exported to {target} ({first_line(cause)}): replace that operation{hint}."
    )


def _open_batch(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """By argument, the first dimension of every tensor with as many entries there as the first one."""
    named = dict(inspect.signature(model.forward).bind(*args, **kwargs).arguments)
    size = next((len(leaf) for leaf in _pytree.tree_leaves(named) if _has_rows(leaf)), None)
    return _pytree.tree_map(
        lambda leaf: {0: torch.export.Dim.DYNAMIC} if _has_rows(leaf) and len(leaf) == size else None, named
    )


def _at_least_two(inputs: Any) -> Any:
    """A batch of one would be taken for a constant."""
    first = next((leaf for leaf in _pytree.tree_leaves(inputs) if _has_rows(leaf)), None)
    if first is None or len(first) != 1:
        return inputs
    return _pytree.tree_map(
        lambda leaf: torch.cat([leaf, leaf]) if _has_rows(leaf) and len(leaf) == 1 else leaf, inputs
    )


def _has_rows(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 0
