"""A user's own objects, and inputs for a network, from what can be typed on a command line."""

import hashlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from bmrs.checkpoint import load
from bmrs.structure.capture import first_line

_OURS = (str(Path(__file__).parent), str(Path(torch.__file__).parent), "<frozen", f"{Path(importlib.__file__).parent}")


def named(target: str, what: str = "model") -> Any:
    """What ``my.module:name`` or ``path/to/file.py:name`` stands for."""
    where, colon, name = target.partition(":")
    if not (where and colon and name):
        raise ValueError(f"{what} must read my.module:make_{what} or file.py:make_{what}; got '{target}'.")
    found: Any = _from_file(Path(where)) if where.endswith(".py") else _from_name(where)
    for part in name.split("."):
        if not hasattr(found, part):
            raise ValueError(f"'{where}' has no '{part}': name a function or class that makes the {what}.")
        found = getattr(found, part)
    return found


def called(function: Callable[[], Any], target: str) -> Any:
    """What the user's function returns; its own errors in a sentence that says where."""
    try:
        return function()
    except Exception as problem:
        raise ValueError(f"'{target}' failed when it was called{where_in(problem)}: mend it first.") from problem


def make_model(target: str) -> nn.Module:
    """``my.module:make_model`` or ``path/to/file.py:Net``: called without arguments, or a network itself."""
    made: Any = named(target)
    if not isinstance(made, nn.Module):
        if not callable(made):
            raise ValueError(f"'{target}' is neither a network nor something that makes one when called.")
        made = called(made, target)
    if not isinstance(made, nn.Module):
        raise ValueError(f"'{target}' made a {type(made).__name__}, not a torch.nn.Module.")
    return made.eval()


def load_weights(model: nn.Module, path: Path) -> nn.Module:
    """Fill a network from a safetensors file, one of bmrs.save's too, or a state dict that ``torch.save`` wrote."""
    if not path.is_file():
        raise ValueError(f"--weights: there is no file {path}: check the path.")
    try:
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as file:
                pruned = "bmrs" in (file.metadata() or {})
            if pruned:
                return load(model, path)
            state: Any = load_file(path)
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
    # A damaged file shows as almost any error: of zip, of pickle, of torch itself.
    except (SafetensorError, OSError, RuntimeError, ValueError, EOFError, KeyError) as problem:
        raise ValueError(_unreadable(path, problem)) from problem
    except Exception as problem:
        if type(problem).__name__ != "UnpicklingError":
            raise
        raise ValueError(_unreadable(path, problem)) from problem
    state = state.get("state_dict", state) if isinstance(state, dict) else state
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise ValueError(f"--weights: {path} must hold a state dict, names and tensors: save model.state_dict().")
    try:
        model.load_state_dict(state)
    except RuntimeError as problem:
        detail = next((line.strip() for line in str(problem).splitlines()[1:]), first_line(problem))
        detail = detail if len(detail) < 200 else f"{detail[:200]} ..."
        raise ValueError(
            f"--weights: {path} does not fit the model ({detail.rstrip('. ')}): give the weights of this very network."
        ) from problem
    return model


def _unreadable(path: Path, problem: Exception) -> str:
    return (
        f"--weights: {path} cannot be read ({first_line(problem)[:160].rstrip('. ')}): give a safetensors file, or a "
        f"state dict that torch.load(..., weights_only=True) takes."
    )


def example_inputs(shapes: Sequence[str], integer_shapes: Sequence[str] = (), below: int = 100) -> Any:
    """Random tensors of these shapes: "1x3x224x224" by position, "name=2x12" by keyword."""
    if not shapes and not integer_shapes:
        raise ValueError("--input must give the shape of at least one input, as --input 1x3x224x224.")
    generator = torch.Generator().manual_seed(0)
    positional: list[Tensor] = []
    by_name: dict[str, Tensor] = {}
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
            by_name[name] = tensor
        else:
            positional.append(tensor)
    if by_name and positional:
        raise ValueError("--input must be given by position for all inputs, or by name for all.")
    return by_name or tuple(positional)


def where_in(problem: BaseException) -> str:
    """An exception of the user's own code, with the last line of theirs it passed: " (TypeError: ... at net.py:12)"."""
    frames = [f for f in traceback.extract_tb(problem.__traceback__) if not f.filename.startswith(_OURS)]
    own = [f for f in frames if "site-packages" not in f.filename] or frames
    at = f" at {own[-1].filename}:{own[-1].lineno}" if own else ""
    if isinstance(problem, SyntaxError) and problem.filename:
        at = f" at {problem.filename}:{problem.lineno}"
        return f" (SyntaxError: {problem.msg}{at})"
    return f" ({first_line(problem)}{at})"


def _from_name(name: str) -> Any:
    sys.path.insert(0, "")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as problem:
        if problem.name is not None and (name == problem.name or name.startswith(f"{problem.name}.")):
            raise ValueError(
                f"'{name}' cannot be imported ({problem}): check its name, or give the path of a .py file."
            ) from problem
        raise ValueError(_failed(name, problem)) from problem
    except Exception as problem:
        raise ValueError(_failed(name, problem)) from problem
    finally:
        sys.path.remove("")


def _from_file(path: Path) -> Any:
    """The module in a file, read once; as when Python runs it, it may import what lies beside it."""
    if not path.is_file():
        raise ValueError(f"there is no Python file {path}: check the path before the colon.")
    path = path.resolve()
    # In sys.modules, where pickles of its classes and dataclasses look for it, under a name nobody else has.
    name = f"{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    try:
        spec.loader.exec_module(module)
    except Exception as problem:
        del sys.modules[name]
        raise ValueError(_failed(path, problem)) from problem
    return module


def _failed(where: object, problem: Exception) -> str:
    return f"'{where}' fails when it is imported{where_in(problem)}: mend it first."
