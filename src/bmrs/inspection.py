"""A network and its example inputs from what can be typed on a command line."""

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


def make_model(target: str) -> nn.Module:
    """``my.module:make_model`` or ``path/to/file.py:Net``: called without arguments, or a network itself."""
    where, colon, name = target.partition(":")
    if not colon or not name:
        raise ValueError(f"model must read my.module:make_model or file.py:make_model; got '{target}'.")
    module = _from_file(Path(where)) if where.endswith(".py") else _from_name(where)
    made: Any = module
    for part in name.split("."):
        if not hasattr(made, part):
            raise ValueError(f"'{where}' has no '{part}': name a function or class that makes the model.")
        made = getattr(made, part)
    if not isinstance(made, nn.Module):
        if not callable(made):
            raise ValueError(f"'{target}' is neither a network nor something that makes one when called.")
        made = made()
    if not isinstance(made, nn.Module):
        raise ValueError(f"'{target}' made a {type(made).__name__}, not a torch.nn.Module.")
    return made.eval()


def _from_name(name: str) -> Any:
    sys.path.insert(0, "")
    try:
        return importlib.import_module(name)
    except ImportError as problem:
        raise ValueError(
            f"'{name}' cannot be imported ({problem}): check its name, or give the path of a .py file."
        ) from problem
    finally:
        sys.path.remove("")


def _from_file(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ValueError(f"there is no Python file {path}: check the path before the colon.")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def example_inputs(shapes: list[str], integer_shapes: list[str], below: int) -> Any:
    """Random tensors of these shapes: "1x3x224x224" by position, "name=2x12" by keyword."""
    if not shapes and not integer_shapes:
        raise ValueError("--input must give the shape of at least one input, as --input 1x3x224x224.")
    generator = torch.Generator().manual_seed(0)
    positional: list[Tensor] = []
    named: dict[str, Tensor] = {}
    for text, whole in [*((shape, False) for shape in shapes), *((shape, True) for shape in integer_shapes)]:
        name, _, size = text.rpartition("=")
        option = "--integer-input" if whole else "--input"
        try:
            dims = [int(part) for part in size.lower().split("x")]
        except ValueError:
            raise ValueError(f"{option} must read as 1x3x224x224, or name=1x3x224x224; got '{text}'.") from None
        if min(dims) < 1:
            raise ValueError(f"{option} must have sizes of at least 1; got '{text}'.")
        tensor = torch.randint(below, dims, generator=generator) if whole else torch.randn(dims, generator=generator)
        if name:
            named[name] = tensor
        else:
            positional.append(tensor)
    if named and positional:
        raise ValueError("--input must be given by position for all inputs, or by name for all.")
    return named or tuple(positional)
