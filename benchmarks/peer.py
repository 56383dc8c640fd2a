"""One architecture of the zoo through Torch-Pruning (PyPI ``torch-pruning``), and whether what it removes is exact.

    python -m benchmarks.peer torchvision/resnet18      # one JSON object on the standard output

The default a user of that library gets: ``tp.pruner.BasePruner`` (what ``MagnitudePruner`` is), 40 % of every group,
the layers that make the network's output ignored, and no hints by hand (no ``num_heads``, no customised pruners, no
unwrapped parameters). The pruner rather than a bare ``DependencyGraph``, because it keeps grouped convolutions and
group norms whole and refuses to empty a layer. The units are drawn at random: which are removed does not matter here.

Exact means: the pruned network computes what the original computes when the removed units are silent. Silent is read
two ways, and the one that suits the pruned network better counts. Either the weights that read the units are zero, or
those and the weights that write them. The second matters in attention, where queries and keys meet without a weight.
"""

import contextlib
import copy
import json
import subprocess
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from benchmarks.architectures import ARCHITECTURES, Inputs, keyword, positional

ROOT = Path(__file__).resolve().parents[1]
RATIO = 0.4
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
WEIGHTED = (nn.modules.conv._ConvNd, nn.Linear)
Ledger = dict[str, set[int]]


@dataclass
class Outcome:
    """What became of one architecture: "exact", "wrong", "crash", "hang" or "nothing" (no parameter removed)."""

    name: str
    verdict: str
    error: float | None = None
    """Largest difference of an output, relative to that output's largest entry."""
    groups: int = 0
    share: float = 0.0
    """Parameters removed, of all parameters."""
    seconds: float = 0.0
    """Time the library took to trace and prune, or the limit it ran into."""
    message: str = ""


class Removed:
    """Which units of which layers are gone, in the numbering of the network before any pruning.

    A layer that reads a concatenation is pruned once per part, each time in the numbering of what was left.
    """

    def __init__(self, model: nn.Module) -> None:
        self.names = {module: name for name, module in model.named_modules()}
        self.read: Ledger = defaultdict(set)
        self.written: Ledger = defaultdict(set)

    def note(self, group: Iterable[Any]) -> None:
        """Take down a group of the library's before it is pruned."""
        for dep, idxs in group:
            module = dep.target.module
            name = self.names.get(module) if isinstance(module, nn.Module) else None
            if name is None:
                continue
            if isinstance(module, nn.MultiheadAttention):
                self._add(self.read, name, idxs, module.embed_dim)
                self._add(self.written, name, idxs, module.embed_dim)
            # layers without an input side of their own (norms, depthwise convolutions) share one handler for both
            elif dep.handler.__name__ == "prune_in_channels":
                self._add(self.read, name, idxs, _inputs_of(module))
            elif isinstance(module, WEIGHTED):
                self._add(self.written, name, idxs, _outputs_of(module))

    @staticmethod
    def _add(ledger: Ledger, name: str, idxs: Iterable[int], left: int) -> None:
        kept = [i for i in range(left + len(ledger[name])) if i not in ledger[name]]
        ledger[name].update([kept[i] for i in idxs])


def _inputs_of(module: nn.Module) -> int:
    for attribute in ("in_channels", "in_features", "input_size"):
        if hasattr(module, attribute):
            return int(getattr(module, attribute))
    raise TypeError(f"{type(module).__name__} reads no units")


def _outputs_of(module: nn.Module) -> int:
    return int(module.out_features if isinstance(module, nn.Linear) else module.out_channels)


def _blocks(module: nn.Module) -> Tensor:
    """A view of the weight as group × output × input × rest, the numbering within a group."""
    weight, groups = module.weight.data, getattr(module, "groups", 1)
    if getattr(module, "transposed", False):
        return weight.view(groups, weight.shape[0] // groups, weight.shape[1], -1).transpose(1, 2)
    return weight.view(groups, weight.shape[0] // groups, weight.shape[1], -1)


def _silence_reading(module: nn.Module, units: Tensor) -> None:
    if isinstance(module, WEIGHTED):
        blocks = _blocks(module)
        blocks[units // blocks.shape[2], :, units % blocks.shape[2]] = 0
        return
    for name, parameter in module.named_parameters():  # attention and recurrent layers keep several weights
        if parameter.dim() == 2 and not name.startswith("weight_hh"):
            parameter.data[:, units] = 0


def _silence_writing(module: nn.Module, units: Tensor) -> None:
    layer = module.out_proj if isinstance(module, nn.MultiheadAttention) else module
    blocks = _blocks(layer)
    blocks[units // blocks.shape[1], units % blocks.shape[1]] = 0
    if layer.bias is not None:
        layer.bias.data[units] = 0


def _silence(model: nn.Module, ledger: Ledger, how: Callable[[nn.Module, Tensor], None]) -> None:
    for name, units in ledger.items():
        if units:
            how(model.get_submodule(name), torch.tensor(sorted(units)))


def randomise(model: nn.Module, inputs: Inputs) -> None:
    """Give parameters that start out constant random values, and batch norms the statistics of these inputs.

    A branch scaled by 0 or 1e-5 or a norm of ones would hide what pruning breaks. So would large offsets: they drown
    the signal layer by layer, until the output is the same whatever the input. Hence small ones, and true statistics.
    """
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        first = parameter.data.flatten()[:1]
        if not parameter.is_floating_point() or not bool((parameter.data == first).all()):
            continue
        values = torch.rand(parameter.shape, generator=generator, dtype=torch.float64) + 0.5
        if first == 0:  # both signs
            values *= torch.randint(0, 2, parameter.shape, generator=generator) * 2 - 1
        parameter.data.copy_(values * (0.1 if name.endswith("bias") else 1.0))
    norms = [m for m in model.modules() if isinstance(getattr(m, "running_var", None), Tensor)]
    hooks = [norm.register_forward_pre_hook(_take_statistics) for norm in norms]
    with torch.no_grad():
        outputs(model, inputs)
    for hook in hooks:
        hook.remove()


def _take_statistics(norm: nn.Module, arguments: tuple[Tensor, ...]) -> None:
    """Before a batch norm (frozen or not) runs in evaluation mode: make the statistics those of what it is given."""
    x = arguments[0]
    others = [d for d in range(x.dim()) if d != 1]
    norm.running_mean.copy_(x.mean(others))
    norm.running_var.copy_(x.var(others, correction=0))


def outputs(model: nn.Module, inputs: Inputs) -> list[Tensor]:
    """All tensors of floating-point numbers a network returns, in order."""
    returned = model(*positional(inputs), **keyword(inputs))
    return [leaf for leaf in pytree.tree_leaves(returned) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def output_layers(model: nn.Module, inputs: Inputs) -> list[nn.Module]:
    """The convolutions and linear layers from which an output is reached without crossing another one."""
    made_by: dict[Any, nn.Module] = {}

    def note(module: nn.Module, _: Any, output: Any) -> None:
        made_by[output.grad_fn] = module

    hooks = [m.register_forward_hook(note) for m in model.modules() if isinstance(m, WEIGHTED)]
    pending: list[Any] = [leaf.grad_fn for leaf in outputs(model, inputs)]
    for hook in hooks:
        hook.remove()
    seen: set[Any] = set()
    found: dict[nn.Module, None] = {}
    while pending:
        step = pending.pop()
        if step is None or step in seen:
            continue
        seen.add(step)
        if step in made_by:
            found[made_by[step]] = None
        else:
            pending.extend(following for following, _ in step.next_functions)
    return list(found)


def difference(mine: list[Tensor], reference: list[Tensor]) -> float:
    """Largest difference of an entry, relative to its tensor's largest entry; not a number counts as infinite."""
    largest = 0.0
    for a, b in zip(mine, reference, strict=True):
        if a.shape != b.shape:
            raise ValueError(f"output of shape {tuple(a.shape)}, not {tuple(b.shape)}")
        if b.numel():
            ratio = float((a - b).abs().max() / b.abs().max().clamp_min(1e-300))
            largest = max(largest, ratio if ratio == ratio else float("inf"))
    return largest


def subject(name: str) -> tuple[nn.Module, Inputs, list[Tensor], torch.dtype]:
    """The network, its inputs and its outputs, in double precision unless its code insists on single."""
    for dtype in (torch.float64, torch.float32):
        model, inputs = ARCHITECTURES[name].build()
        inputs = pytree.tree_map(lambda x, to=dtype: x.to(to) if x.is_floating_point() else x, inputs)
        model = model.to(dtype)
        with torch.no_grad(), contextlib.suppress(RuntimeError):
            outputs(model, inputs)
            randomise(model, inputs)
            for parameter in model.parameters():  # the library traces through autograd
                parameter.requires_grad_(parameter.is_floating_point())
            return model, inputs, outputs(model, inputs), dtype
    raise RuntimeError(f"{name} runs neither in double nor in single precision")


def _prune(model: nn.Module, inputs: Inputs) -> tuple[Removed, int, set[str]]:
    """Prune in place; what was removed, from how many groups, and the kinds of layers and parameters in them."""
    import torch_pruning as tp

    torch.manual_seed(0)
    pruner = tp.pruner.BasePruner(
        model,
        inputs if isinstance(inputs, dict) else positional(inputs),
        importance=tp.importance.RandomImportance(),
        pruning_ratio=RATIO,
        ignored_layers=output_layers(model, inputs),
    )
    removed, groups, kinds = Removed(model), 0, set()
    for group in pruner.step(interactive=True):
        removed.note(group)
        kinds |= {type(dep.target.module).__name__ for dep, _ in group if isinstance(dep.target.module, nn.Module)}
        group.prune()
        groups += 1
    return removed, groups, {kind for kind in kinds if not kind.startswith("_")}


def _size(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _compare(model: nn.Module, masked: nn.Module, inputs: Inputs, removed: Removed) -> tuple[float, list[Tensor]]:
    """The smaller of the two errors, and what the network with silent readers returns."""
    with torch.no_grad():
        pruned = outputs(model, inputs)
        _silence(masked, removed.read, _silence_reading)
        silent = outputs(masked, inputs)
        _silence(masked, removed.written, _silence_writing)
        return min(difference(pruned, silent), difference(pruned, outputs(masked, inputs))), silent


def judge(name: str) -> Outcome:
    """Prune one architecture in this process."""
    model, inputs, original, dtype = subject(name)
    masked, before = copy.deepcopy(model), _size(model)
    outcome = Outcome(name, "crash")
    started = time.perf_counter()
    try:
        removed, outcome.groups, kinds = _prune(model, inputs)
        outcome.seconds = time.perf_counter() - started
        outcome.share = 1 - _size(model) / before
        if not outcome.groups or not outcome.share:
            outcome.verdict = "nothing"
            return outcome
        outcome.error, silent = _compare(model, masked, inputs, removed)
    except Exception as problem:
        outcome.seconds = outcome.seconds or time.perf_counter() - started
        outcome.message = traceback.format_exception_only(problem)[-1].strip().splitlines()[-1]
        return outcome
    outcome.verdict = "exact" if outcome.error <= TOLERANCE[dtype] else "wrong"
    moved, spread = difference(silent, original), difference([o.flip(0) for o in silent], silent)
    # next to nothing in either: the check says nothing
    outcome.message = f"outputs moved by {moved:.1g}, differ by {spread:.1g} over the batch"
    outcome.message += f", removed from {', '.join(sorted(kinds))}"
    if dtype == torch.float32:
        outcome.message += ", in single precision"
    return outcome


def judge_within(name: str, seconds: float) -> Outcome:
    """Prune one architecture in a process of its own, which is ended at the limit."""
    command = [sys.executable, "-m", "benchmarks.peer", name]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return Outcome(name, "hang", seconds=seconds, message=f"still running after {seconds:g} s")
    try:
        return Outcome(**json.loads(done.stdout.splitlines()[-1]))
    except (IndexError, TypeError, ValueError):
        last = (done.stderr.strip().splitlines() or [""])[-1]
        return Outcome(name, "crash", message=f"exit status {done.returncode}: {last}")


def main() -> None:
    """Judge the architecture named on the command line."""
    torch.set_num_threads(1)
    with contextlib.redirect_stdout(sys.stderr):  # the libraries print; the last line must be the outcome
        outcome = judge(sys.argv[1])
    print(json.dumps(asdict(outcome)))


if __name__ == "__main__":
    main()
