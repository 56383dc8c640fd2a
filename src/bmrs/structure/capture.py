"""A network as one flat graph of ATen operations, with shapes, parameter names and the module each came from."""

import contextlib
import io
import logging
import re
import traceback
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import transformer as _transformer

ExampleInputs = Tensor | tuple[Any, ...] | list[Any] | Mapping[str, Any]


@dataclass(frozen=True)
class Captured:
    """``tensors`` maps the graph's placeholders to names of parameters and buffers; other placeholders are inputs."""

    graph: torch.fx.Graph
    module: torch.fx.GraphModule
    tensors: dict[str, str]
    constants: frozenset[str] = frozenset()  # placeholders of plain tensors the model holds
    calls: Mapping[str, "Call | None"] = field(default_factory=dict)  # by module; None: called in several ways


@dataclass(frozen=True)
class Call:
    """How a module was called: the shapes of the first tensor it was given and of the first it returned.

    ``place``: where that is in a tuple it returned, and how long the tuple is; None where it returned the tensor alone.
    """

    given: tuple[int, ...]
    made: tuple[int, ...]
    place: tuple[int, int] | None


def arguments(example_inputs: ExampleInputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments: a tensor, a tuple (positional) or a dict (keyword)."""
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, tuple | list):
        return tuple(example_inputs), {}
    return (example_inputs,), {}


@contextlib.contextmanager
def mode(model: nn.Module, training: bool) -> Iterator[None]:
    """All modules in one mode for a while, each back in its own afterwards."""
    before = [(module, module.training) for module in model.modules()]
    try:
        model.train(training)
        yield
    finally:
        for module, was in before:
            module.training = was


def forked_rng(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Random numbers drawn inside are not missed outside, on the CPU and where the model is."""
    devices = {tensor.device.index for _, tensor in named_tensors(model) if tensor.is_cuda}
    return torch.random.fork_rng(devices=sorted(devices))


@contextlib.contextmanager
def no_fast_path() -> Iterator[None]:
    """torch's transformer layers hide all they do in one operation when they can, and look at the numbers in a mask to
    see whether they can: neither can be captured, and neither changes what is computed.
    """
    enabled, looked = torch.backends.mha.get_fastpath_enabled(), _transformer._detect_is_causal_mask
    torch.backends.mha.set_fastpath_enabled(False)
    _transformer._detect_is_causal_mask = lambda mask, is_causal=None, size=None: is_causal is True
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)
        _transformer._detect_is_causal_mask = looked


@contextlib.contextmanager
def no_cache(model: nn.Module) -> Iterator[None]:
    """Hugging Face decoders return a key-value cache unless told otherwise, and torch.export takes no such object."""
    held: list[Any] = [module.__dict__.get("config") for module in model.modules()]
    configs = {id(config): config for config in held if getattr(config, "use_cache", False) is True}
    try:
        for config in configs.values():
            config.use_cache = False
        yield
    finally:
        for config in configs.values():
            config.use_cache = True


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """What torch.export logs and prints on a failure is said again, shorter, by the exception."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


@contextlib.contextmanager
def _noting_calls(model: nn.Module) -> Iterator[dict[str, Call | None]]:
    paths = {id(module): path for path, module in model.named_modules()}
    calls: dict[str, Call | None] = {}

    def note(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        path = paths.get(id(module))
        given = first_tensor((*args, *kwargs.values()))
        several = isinstance(output, tuple)
        made = first_tensor(output if several else (output,))
        if path is not None and given is not None and made is not None:
            at = next(n for n, one in enumerate(output) if one is made) if several else 0
            call = Call(tuple(given.shape), tuple(made.shape), (at, len(output)) if several else None)
            calls[path] = call if calls.get(path, call) == call else None

    handles = [module.register_forward_hook(note, with_kwargs=True) for module in model.modules()]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def first_tensor(values: Iterable[Any]) -> Tensor | None:
    return next((value for value in values if isinstance(value, Tensor)), None)


def capture(model: nn.Module, example_inputs: ExampleInputs, *, training: bool = False) -> Captured:
    """The graph of one forward pass on these inputs."""
    args, kwargs = arguments(example_inputs)
    settings = mode(model, training), no_fast_path(), no_cache(model), quiet()
    with contextlib.ExitStack() as stack, torch.enable_grad(), forked_rng(model):
        for setting in settings:
            stack.enter_context(setting)
        calls = stack.enter_context(_noting_calls(model))
        try:
            program = torch.export.export(model, args, kwargs, strict=False)
        except Exception as problem:
            raise _explained(model, args, kwargs, problem) from problem
    canonical = canonical_names(model)
    tensors = {}
    for spec in program.graph_signature.input_specs:
        if spec.kind in (
            torch.export.graph_signature.InputKind.PARAMETER,
            torch.export.graph_signature.InputKind.BUFFER,
        ):
            assert isinstance(spec.target, str)
            tensors[spec.arg.name] = canonical[spec.target]
    kind = torch.export.graph_signature.InputKind.CONSTANT_TENSOR
    constants = frozenset(spec.arg.name for spec in program.graph_signature.input_specs if spec.kind == kind)
    return Captured(program.graph, program.graph_module, tensors, constants, calls)


class CannotCaptureError(RuntimeError):
    """The model runs, but its forward pass cannot be written down as one graph."""


def _explained(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], problem: Exception) -> Exception:
    """Whether the inputs are wrong or the model cannot be captured, and what to do."""
    try:
        with torch.no_grad():
            model(*args, **kwargs)
    except Exception as failed:
        return ValueError(
            f"example_inputs do not fit the model, which fails on them ({first_line(failed)}): give a tensor, a tuple "
            f"of positional arguments or a dict of keyword arguments the model takes, on its device."
        )
    own = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
    frames = [f for f in traceback.extract_tb(problem.__traceback__) if not f.filename.startswith(own)]
    at = f" at {frames[-1].filename}:{frames[-1].lineno}, '{frames[-1].line}'," if frames else ""
    return CannotCaptureError(
        f"the model cannot be captured by torch.export{at} ({first_line(problem)}): replace what depends on the "
        f"numbers in a tensor (an if, .item(), .tolist(), a Python loop over values), or list the part of the "
        f"model without it."
    )


def canonical_names(model: nn.Module) -> dict[str, str]:
    """Every name of every parameter and buffer → the first name of the same tensor."""
    first: dict[int, str] = {}
    names = {}
    for name, tensor in named_tensors(model):
        names[name] = first.setdefault(id(tensor), name)
    return names


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers under all their names."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def first_line(problem: BaseException) -> str:
    """An exception in a line."""
    text = next(iter(str(problem).strip().splitlines()), "")
    return f"{type(problem).__name__}: {text}" if text else type(problem).__name__


def module_of(node: torch.fx.Node) -> str:
    """The path of the innermost module this node was computed in."""
    stack = node.meta.get("nn_module_stack")
    return _path(next(reversed(stack.values()))) if stack else ""


def modules_of(node: torch.fx.Node) -> list[str]:
    """The paths of all modules this node was computed in, from the outermost."""
    return [_path(one) for one in (node.meta.get("nn_module_stack") or {}).values()]


def _path(one: tuple[Any, ...]) -> str:
    return re.sub(r"@\d+", "", str(one[0]))
