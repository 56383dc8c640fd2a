"""The proof: a network with gates, some exactly zero, computes what the physically reduced one does.

All runs are on the network itself, its tensors replaced by float64 copies for the while, so nothing needs to be copied
that cannot be. What fails as it stands is tried again with its integers mended, and what still fails is left alone.
"""

import contextlib
import random
import sys
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree

from bmrs.structure.capture import arguments, first_line, mode, named_tensors
from bmrs.structure.discover import Label
from bmrs.structure.mend import Correction, is_builtin
from bmrs.structure.remove import Removed, apply, drop_caches
from bmrs.structure.structures import Structure, Structures, alive

TOLERANCE = 1e-6
"""Largest relative difference allowed. Roundings are below 1e-7, mistakes seen were 2e-3 and more."""

_CLEARLY_EXACT = 1e-5  # in float32
_MOST_TRIALS = 24


@dataclass(frozen=True)
class Mend:
    """One way to mend all modules of a class: set an attribute, or correct the sizes its code asks for."""

    cls: type
    attribute: str | None  # None: correct sizes
    dim: int = 0  # which of the dimensions the module handles the attribute is the size of


# --- from removed variables to a record -------------------------------------------------------------------------------


def record(owner: Structures, gone: set[int], mends: set[Mend]) -> Removed:
    """What the network's record is when these variables are gone."""
    findings, base = owner.findings, owner.base
    now = Removed.from_json(base.to_json())
    for (name, dim), labels in findings.places.items():
        stays = [index for index, label in enumerate(labels) if gone.isdisjoint(label)]
        if len(stays) < len(labels):
            before = base.kept.get(name, {}).get(dim)
            now.kept.setdefault(name, {})[dim] = [before[i] for i in stays] if before else stays
            now.shapes.setdefault(name, list(owner.shapes[name]))
    for path, groups in findings.groups.items():
        if is_builtin(owner.model.get_submodule(path)) and alive(groups, gone) < len(groups):
            now.groups[path] = alive(groups, gone)
    for branch, variables in findings.branches.items():
        if branch.path in base.widened or not gone.isdisjoint(variables):
            # Present indices of the stream, and which of them this branch still computes.
            stream = [own for own, label in zip(variables, findings.streams[branch.path], strict=True) if gone.isdisjoint(label)]
            at = [index for index, own in enumerate(stream) if own not in gone]
            now.widened[branch.path] = _widened(base.widened.get(branch.path), branch.dim, len(stream), at)
    if mends:
        for path in findings.sizes:
            module = owner.model.get_submodule(path)
            for mend in mends:
                if mend.cls is type(module):
                    _mend(owner, gone, now, path, module, mend)
    return now


def _widened(before: Any, dim: int, size: int, at: list[int]) -> tuple[int, int, list[int]]:
    """A branch that was narrow already names the indices of its stream, not its own."""
    if before is None:
        return dim, size, at
    return before[0], before[1], [before[2][index] for index in at]


def _mend(owner: Structures, gone: set[int], now: Removed, path: str, module: nn.Module, mend: Mend) -> None:
    findings = owner.findings
    if mend.attribute is None:
        base = {(c.kind, c.count, c.position, c.new): c for c in owner.base.corrections.get(path, [])}
        corrections = dict(base)
        for (kind, count, position), request in findings.requests.get(path, {}).items():
            for labels in request.dims:
                size, left = len(labels), alive(labels, gone)
                if left < size or (kind, count, position, size) in base:
                    before = base.get((kind, count, position, size))
                    made = Correction(kind, count, position, before.old if before else size, left, request.sure)
                    corrections[kind, count, position, size] = made
        if corrections or _shrinks(findings.sizes.get(path, []), gone):
            now.corrections[path] = list(corrections.values())
        return
    value = _new_value(owner.integers(path).get(mend.attribute), owner.dims_of(path), mend.dim, gone)
    if value is not None:
        now.integers.setdefault(path, {})[mend.attribute] = value


def _shrinks(sizes: list[list[Label]], gone: set[int]) -> bool:
    return any(alive(labels, gone) < len(labels) for labels in sizes)


def _new_value(value: Any, dims: list[list[Label]], dim: int, gone: set[int]) -> Any:
    """What an integer becomes when it is the size of this dimension, which shrinks; None if it stays.

    In a sequence of integers each is the size of the first dimension that has it, from this one on.
    """
    if isinstance(value, list | tuple):
        changed = []
        for one in value:
            labels = next((labels for labels in dims[dim:] if len(labels) == one), None)
            changed.append(one if labels is None else alive(labels, gone))
        return type(value)(changed) if changed != list(value) else None
    if dim < len(dims) and len(dims[dim]) == value and (left := alive(dims[dim], gone)) < value:
        return left
    return None


# --- running ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def sandbox(model: nn.Module, dtype: torch.dtype | None) -> Iterator[None]:
    """Whatever happens to tensors and attributes inside, the network is as it was afterwards."""
    tensors = list({id(tensor): tensor for _, tensor in named_tensors(model)}.values())
    before = [(tensor, tensor.data, tensor.grad, tensor.requires_grad) for tensor in tensors]
    attributes = [(module, dict(module.__dict__)) for module in model.modules()]
    caches = [(v, dict(v)) for _, values in attributes for v in values.values() if type(v) in (dict, OrderedDict)]
    default = torch.get_default_dtype()
    try:
        for tensor in tensors:
            tensor.grad = None
            # Always copies: what happens inside must not reach the real numbers.
            tensor.data = tensor.data.to(dtype or tensor.dtype, copy=True) if tensor.is_floating_point() else tensor.data.clone()
        if dtype is not None:
            torch.set_default_dtype(dtype)
            for module in model.modules():
                for name, value in list(module.__dict__.items()):
                    if type(value) is Tensor and value.is_floating_point():
                        module.__dict__[name] = value.to(dtype)
        yield
    finally:
        torch.set_default_dtype(default)
        for tensor, data, grad, requires_grad in before:
            tensor.grad = None
            tensor.data = data
            tensor.requires_grad_(requires_grad)
            tensor.grad = grad
        for module, values in attributes:
            module.__dict__.clear()
            module.__dict__.update(values)
        for cache, content in caches:
            cache.clear()
            cache.update(content)


@contextlib.contextmanager
def paused(owner: Structures) -> Iterator[None]:
    """Gates on the network stand aside."""
    before = [(follower, follower.paused) for follower in owner.followers]
    for follower in owner.followers:
        follower.paused = True
    try:
        yield
    finally:
        for follower, was in before:
            follower.paused = was


class _NoDropout(TorchFunctionMode):
    """Training mode without what draws a number per index, which two networks of different width cannot share."""

    _NAMES = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
    _SKIPPED = {getattr(F, name) for name in _NAMES} | {torch.dropout, torch.dropout_, torch.alpha_dropout}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in self._SKIPPED:
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention:
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            kwargs = {**kwargs, "dropout_p": 0.0} if "dropout_p" in kwargs else kwargs
        return func(*args, **kwargs)


@contextlib.contextmanager
def _same_chance() -> Iterator[None]:
    """The same random numbers each time, whoever draws them, and nobody else's disturbed."""
    numpy = sys.modules.get("numpy")
    plain, array = random.getstate(), numpy.random.get_state() if numpy else None
    with torch.random.fork_rng():
        torch.manual_seed(0)
        random.seed(0)
        if numpy:
            numpy.random.seed(0)
        try:
            yield
        finally:
            random.setstate(plain)
            if numpy:
                numpy.random.set_state(array)


def outputs(model: nn.Module, inputs: Any, *, training: bool) -> list[Tensor]:
    """All tensors a call returns, with the same random numbers each time."""
    args, kwargs = arguments(inputs)
    with mode(model, training), _same_chance(), _NoDropout():
        made = model(*args, **kwargs)
    return [tensor for tensor in _pytree.tree_leaves(made) if isinstance(tensor, Tensor)]


def difference(first: Sequence[Tensor], second: Sequence[Tensor]) -> float:
    """Largest relative difference; infinite where shapes or not-a-numbers disagree."""
    if [tuple(a.shape) for a in first] != [tuple(b.shape) for b in second]:
        return float("inf")
    worst = 0.0
    for a, b in zip(first, second, strict=True):
        a, b = a.detach().double(), b.detach().double()
        good = torch.isfinite(a)
        if not torch.equal(good, torch.isfinite(b)):
            return float("inf")
        if good.any():
            a, b = a[good], b[good]
            worst = max(worst, float((a - b).abs().max() / a.abs().max().clamp_min(1e-12)))
    return worst


@torch.no_grad()
def _randomise(model: nn.Module) -> None:
    """Give numbers to what starts as a constant, such as a layer scale: a test through zeros shows nothing."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.numel() > 1 and parameter.is_floating_point():
            constant = bool((parameter == parameter.flatten()[0]).all())
            if constant or float(parameter.abs().max()) < 1e-3:
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter)
                scale = 0.3 if parameter.dim() < 2 else (parameter[0].numel()) ** -0.5
                parameter.data = (parameter if constant else 0) + scale * noise


def _test_inputs(inputs: Any, dtype: torch.dtype | None, *, twice: bool) -> Any:
    """The example inputs, with numbers where they are constant, in this type, and for twice the examples."""
    leaves, spec = _pytree.tree_flatten(inputs)
    first = next((leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()), None)
    generator = torch.Generator().manual_seed(2)
    made = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            if leaf.is_floating_point():
                constant = leaf.numel() > 1 and bool((leaf == leaf.flatten()[0]).all())
                noise = torch.randn(leaf.shape, generator=generator).to(leaf)
                leaf = noise if constant else leaf
                leaf = leaf.to(dtype) if dtype is not None else leaf
            if twice and first is not None and leaf.dim() and leaf.shape[0] == first.shape[0]:
                leaf = torch.cat([leaf, leaf.flip(0) * (0.9 if leaf.is_floating_point() else 1)])
        made.append(leaf)
    return _pytree.tree_unflatten(made, spec)


# --- trials -----------------------------------------------------------------------------------------------------------


class Trial:
    """Random gates on some structures, some of them zero, and the difference removal makes."""

    def __init__(self, owner: Structures) -> None:
        self.owner = owner
        self.problem = ""
        self._inputs: dict[Any, Any] = {}
        self._dtypes: tuple[torch.dtype | None, ...] = (torch.float64, torch.float32, None)

    def gates(self, structures: Sequence[Structure], fraction: float | None = None) -> tuple[dict[int, float], set[int]]:
        """θ per variable, and those that are zero. Fractions are unequal, so that no two widths agree by chance."""
        generator = torch.Generator().manual_seed(3)
        theta: dict[int, float] = {}
        gone: set[int] = set()
        for structure in structures:
            present = [v for v in structure.variables if v not in self.owner.gone]
            count = len(present)
            share = fraction or float(torch.empty(()).uniform_(0.2, 0.6, generator=generator))
            out = min(count - 1, max(1, round(share * count)))
            chosen = torch.randperm(count, generator=generator)[:out].tolist()
            values = torch.empty(count).uniform_(0.5, 1.5, generator=generator).tolist()
            for variable, value in zip(present, values, strict=True):
                theta[variable] = value if structure.foldable else 1.0
            for unit in chosen:
                theta[present[unit]] = 0.0
                gone.add(present[unit])
        return theta, gone

    def passes(self, structures: Sequence[Structure], mends: set[Mend], *, training: bool = False) -> bool:
        """A quick look in float32; only where that cannot tell, in float64."""
        quick = self.error(structures, mends, training=training, dtype=torch.float32)
        if quick == float("inf") or quick < _CLEARLY_EXACT:
            return quick < _CLEARLY_EXACT
        try:
            return self.error(structures, mends, training=training) <= TOLERANCE
        except CannotRun:
            return quick < 10 * _CLEARLY_EXACT

    def error(self, structures: Sequence[Structure], mends: set[Mend], *, training: bool = False,
              dtype: torch.dtype = torch.float64, fraction: float | None = None) -> float:  # fmt: skip
        """Largest relative difference between the gated and the reduced network; an exception counts as infinite."""
        theta, gone = self.gates(structures, fraction)
        return self.compare(theta, gone, mends, training, dtype)

    def compare(self, theta: Mapping[int, float], gone: set[int], mends: set[Mend], training: bool, dtype: torch.dtype) -> float:
        """With these gates, and without these variables."""
        owner = self.owner
        with sandbox(owner.model, dtype), paused(owner), torch.no_grad():
            drop_caches(owner.model)
            _randomise(owner.model)
            scale_consumers(owner, theta)
            inputs, gated = self._reference(training, dtype)
            try:
                apply(owner.model, record(owner, owner.gone | gone, mends))
                reduced = outputs(owner.model, inputs, training=training)
            except Exception as problem:
                self.problem = f"its own code fails on the smaller shape ({first_line(problem)})"
                return float("inf")
        self.problem = "the smaller network computes something else"
        return difference(gated, reduced)

    def _reference(self, training: bool, dtype: torch.dtype) -> tuple[Any, list[Tensor]]:
        """Inputs the network takes, for twice the examples if it can, and its outputs."""
        known = self._inputs.get((training, dtype))
        for twice in (True, False):
            if known is None or known == twice:
                inputs = _test_inputs(self.owner.example_inputs, dtype, twice=twice)
                try:
                    made = outputs(self.owner.model, inputs, training=training)
                    self._inputs[training, dtype] = twice
                    return inputs, made
                except Exception as failed:
                    problem = failed
        raise CannotRun(f"the network cannot be run in {dtype}: {first_line(problem)}") from problem


class CannotRun(RuntimeError):
    """The network as it is does not run on its example inputs in this form."""


@torch.no_grad()
def scale_consumers(owner: Structures, theta: Mapping[int, float]) -> None:
    """Multiply gates into the weights that consume their units."""
    tensors = dict(named_tensors(owner.model))
    for (name, dim), variables in owner.findings.consumed.items():
        labels = owner.findings.places.get((name, dim))
        if labels is None or variables.isdisjoint(theta.keys()):
            continue
        factors = []
        for label in labels:
            if owner.gone.isdisjoint(label):
                factor = 1.0
                for variable in label & variables:
                    factor *= theta.get(variable, 1.0)
                factors.append(factor)
        tensor = tensors[name]
        shape = [-1 if d == dim else 1 for d in range(tensor.dim())]
        tensor.data = tensor.data * torch.tensor(factors, dtype=torch.float64).to(tensor).reshape(shape)


def prove(owner: Structures, structures: list[Structure]) -> None:
    """Sets ``owner.status`` for these structures, and ``owner.mends`` to what their removal needs."""
    pending = [s for s in structures if s not in owner.status and s.units > 1]
    if not pending:
        return
    trial = Trial(owner)
    if not _holds(owner, trial, pending):
        pending = _isolate(owner, trial, pending)
    for structure in pending:
        owner.status[structure] = "exact"


def _holds(owner: Structures, trial: Trial, structures: list[Structure]) -> bool:
    """All of them at once: quickly as it trains, then strictly as it is used."""
    if not structures:
        return True
    with contextlib.suppress(CannotRun):  # some networks train on other inputs only
        if not trial.passes(structures, owner.mends, training=True):
            return False
    try:
        return trial.error(structures, owner.mends) <= TOLERANCE
    except CannotRun:  # some networks compute in float32 whatever they are given
        return trial.error(structures, owner.mends, dtype=torch.float32) <= 10 * _CLEARLY_EXACT


def _isolate(owner: Structures, trial: Trial, pending: list[Structure]) -> list[Structure]:
    """Those of the structures that can be removed, after mending; the others get their reason."""
    patterns: dict[Any, list[Structure]] = defaultdict(list)
    for structure in pending:
        patterns[_pattern(owner, structure)].append(structure)
    good: list[Structure] = []
    for alike in patterns.values():
        mends = _mends_for(owner, trial, alike)
        if mends is not None:
            owner.mends |= mends
            good += alike
            continue
        for structure in alike:  # not all of them may be at fault
            if len(alike) > 1 and (mends := _mends_for(owner, trial, [structure])) is not None:
                owner.mends |= mends
                good.append(structure)
            else:
                owner.status[structure] = f"kept: {trial.problem}"
    # All together once more, in both modes; if they disturb each other, add them one by one.
    if _holds(owner, trial, good):
        return good
    together: list[Structure] = []
    for structure in good:
        candidate = [*together, structure]
        if _holds(owner, trial, candidate):
            together = candidate
        else:
            owner.status[structure] = f"kept: {trial.problem}"
    return together


def _pattern(owner: Structures, structure: Structure) -> Any:
    """Structures of one pattern sit in modules of the same classes in the same way."""
    spots = set()
    for name, dim in structure.places:
        path, _, leaf = name.rpartition(".")
        around = owner.model.get_submodule(path.rpartition(".")[0])
        spots.add((type(owner.model.get_submodule(path)), type(around), path.rpartition(".")[2], leaf, dim))
    return structure.kind, frozenset(spots)


def _mends_for(owner: Structures, trial: Trial, alike: list[Structure]) -> set[Mend] | None:
    """The smallest set of mends with which these structures can be removed; None if there is none."""
    known = set(owner.mends)
    if trial.passes(alike, known):
        return set()
    sizes, attributes = _candidates(owner, alike)
    every = [set(c) for n in (1, 2) for c in combinations(attributes, n)]
    if len(attributes) > 2:
        every.insert(len(attributes), set(attributes))
    attempts = [*every[: len(attributes) + 1], set(sizes), *every[len(attributes) + 1 :]]
    attempts += [set(sizes) | set(c) for n in (1, 2) for c in combinations(attributes, n)]
    for attempt in [a for a in attempts if a][:_MOST_TRIALS]:
        if trial.passes(alike, known | attempt):
            for mend in sorted(attempt, key=lambda m: m.attribute is None):
                if len(attempt) > 1 and trial.passes(alike, known | (attempt - {mend})):
                    attempt = attempt - {mend}
            return attempt
    return None


def _candidates(owner: Structures, alike: list[Structure]) -> tuple[list[Mend], list[Mend]]:
    """Ways to mend the modules that handle these structures: corrections of sizes, and attributes."""
    variables = {variable for structure in alike for variable in structure.variables}
    sizes: dict[Mend, None] = {}
    attributes: dict[Mend, None] = {}
    for path, dims in owner.findings.sizes.items():
        touched = [labels for labels in dims if any(not variables.isdisjoint(label) for label in labels)]
        module = owner.model.get_submodule(path)
        if not touched or is_builtin(module):
            continue
        if path in owner.findings.requests or isinstance(module, nn.MultiheadAttention):
            sizes[Mend(type(module), None)] = None
        for name, value in owner.integers(path).items():
            for dim in range(len(owner.dims_of(path))):
                if _new_value(value, owner.dims_of(path), dim, variables) is not None:
                    attributes[Mend(type(module), name, dim)] = None
                    if isinstance(value, list | tuple):
                        break
    return list(sizes), list(attributes)


# --- the removal itself -----------------------------------------------------------------------------------------------


def remove_units(model: nn.Module, units: Any, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    chosen = {structure: _checked(structure, model, indices) for structure, indices in units.items()}
    chosen = {structure: indices for structure, indices in chosen.items() if indices}
    if not chosen:
        return
    owners = {id(structure.owner): structure.owner for structure in chosen}
    if len(owners) > 1:
        raise ValueError("units must name structures of one listing: call bmrs.structures(model, ...) once and use its structures.")
    (owner,) = owners.values()
    owner.verify([structure for structure in chosen if structure.status == "not verified yet"])
    for structure in chosen:
        if structure.status != "exact":
            warnings.warn(f"'{structure.name}' is left alone: {structure.status}.", stacklevel=4)
    going: set[int] = set()
    for structure, indices in chosen.items():
        if structure.status == "exact":
            present = [v for v in structure.variables if v not in owner.gone]
            going.update(present[index] for index in indices)
    if not going:
        return
    _check_this(owner, going)
    apply(model, record(owner, owner.gone | going, owner.mends), optimizers)
    owner.gone |= going
    for follower in owner.followers:
        follower.shrink(owner.everything, optimizers)


def _check_this(owner: Structures, going: set[int]) -> None:
    """The very units about to go, tried once before anything changes."""
    trial = Trial(owner)
    gates = dict.fromkeys(going, 0.0)
    error = trial.compare(gates, going, owner.mends, False, torch.float32)
    if error > _CLEARLY_EXACT:
        with contextlib.suppress(CannotRun):
            error = trial.compare(gates, going, owner.mends, False, torch.float64)
        if error > 10 * _CLEARLY_EXACT:
            raise RuntimeError(f"nothing was removed, since these units cannot go exactly: {trial.problem} (difference {error:.1g}).")


def _checked(structure: Structure, model: nn.Module, indices: Any) -> list[int]:
    if not isinstance(structure, Structure):
        raise TypeError(f"units must map structures to indices; got a key of type {type(structure).__name__}.")
    if structure.owner.model is not model:
        raise ValueError(f"'{structure.name}' belongs to another model: list this one with bmrs.structures(model, ...).")
    wanted = sorted({int(index) for index in indices})
    if wanted and not (0 <= wanted[0] and wanted[-1] < structure.units):
        raise ValueError(
            f"units['{structure.name}'] must be between 0 and {structure.units - 1}, one for each unit left; got {wanted[0]} to {wanted[-1]}."
        )
    if len(wanted) >= structure.units:
        raise ValueError(
            f"units['{structure.name}'] would remove all {structure.units} units: at least one must stay, so name fewer."
        )
    return wanted
