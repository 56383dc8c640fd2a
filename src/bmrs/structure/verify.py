"""The proof: a network with gates, some exactly zero, computes what the physically reduced one does.

All runs are on the network itself, its tensors replaced by float64 copies for the while, so nothing needs to be copied
that cannot be. What fails as it stands is tried again with its integers mended, and what still fails is left alone.
"""

import contextlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

from bmrs.structure.capture import first_line, named_tensors
from bmrs.structure.listing import Structure, Structures
from bmrs.structure.mend import is_builtin
from bmrs.structure.plan import Mend, new_value, record
from bmrs.structure.removal import apply, drop_caches
from bmrs.structure.sandbox import difference, outputs, paused, randomise, sandbox, trial_inputs
from bmrs.structure.standin import module_at

TOLERANCE = 1e-6
"""Largest relative difference allowed. Roundings are below 1e-7, mistakes seen were 2e-3 and more."""

CLEARLY_EXACT = 1e-5
"""The same in float32."""

_MOST_TRIALS = 24


class Trial:
    """Random gates on some structures, some of them zero, and the difference removal makes."""

    def __init__(self, owner: Structures) -> None:
        self.owner = owner
        self.problem = ""
        self._inputs: dict[Any, Any] = {}

    def gates(self, structures: Sequence[Structure], draw: int = 0) -> tuple[dict[int, float], set[int]]:
        """θ per variable, and those that are zero. Fractions are unequal, so that no two widths agree by chance."""
        generator = torch.Generator().manual_seed(3 + draw)
        theta: dict[int, float] = {}
        gone: set[int] = set()
        for structure in structures:
            present = [v for v in structure.variables if v not in self.owner.gone]
            count = len(present)
            share = float(torch.empty(()).uniform_(0.2, 0.6, generator=generator))
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
        if quick == float("inf") or quick < CLEARLY_EXACT:
            return quick < CLEARLY_EXACT
        try:
            return self.error(structures, mends, training=training) <= TOLERANCE
        except CannotRunError:
            return quick < 10 * CLEARLY_EXACT

    def error(self, structures: Sequence[Structure], mends: set[Mend], *, training: bool = False,
              dtype: torch.dtype = torch.float64) -> float:  # fmt: skip
        """Largest relative difference between the gated and the reduced network; an exception counts as infinite."""
        theta, gone = self.gates(structures, draw=int(training))  # other units in each mode: two proofs for one
        return self.compare(theta, gone, mends, training, dtype)

    def compare(
        self, theta: Mapping[int, float], gone: set[int], mends: set[Mend], training: bool, dtype: torch.dtype
    ) -> float:
        """With these gates, and without these variables."""
        owner = self.owner
        with sandbox(owner.model, dtype), paused(owner), torch.no_grad():
            drop_caches(owner.model)
            randomise(owner.model)
            scale_consumers(owner, theta)
            inputs, gated = self.reference(training, dtype)
            try:
                apply(owner.model, record(owner, owner.gone | gone, mends))
                reduced = outputs(owner.model, inputs, training=training)
            except Exception as problem:
                self.problem = f"its own code fails on the smaller shape ({first_line(problem)})"
                return float("inf")
        self.problem = "the smaller network computes something else"
        return difference(gated, reduced)

    def reference(self, training: bool, dtype: torch.dtype) -> tuple[Any, list[Tensor]]:
        """Inputs the network takes, for twice the examples if it can, and its outputs."""
        known = self._inputs.get((training, dtype))
        for twice in (True, False):
            if known is None or known == twice:
                inputs = trial_inputs(self.owner.example_inputs, dtype, twice=twice)
                try:
                    made = outputs(self.owner.model, inputs, training=training)
                    self._inputs[training, dtype] = twice
                    return inputs, made
                except Exception as failed:
                    problem = failed
        raise CannotRunError(f"the network cannot be run in {dtype}: {first_line(problem)}") from problem


class CannotRunError(RuntimeError):
    """The network as it is does not run on its example inputs in this form."""


@torch.no_grad()
def scale_consumers(owner: Structures, theta: Mapping[int, float]) -> None:
    """Multiply gates into the weights that consume their units."""
    tensors = dict(named_tensors(owner.model))
    for (name, dim), variables in owner.findings.consumed.items():
        labels = owner.findings.places.get((name, dim)) if name in tensors else None  # it may be gone with a block
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
    # A block takes along what lies in it, which would then be tried in vain: blocks come last.
    others, blocks = ([s for s in pending if (s.kind == "block") == block] for block in (False, True))
    if others:
        _prove(owner, trial, others, [])
    if blocks:
        known = [s for s, status in owner.status.items() if status == "exact" and s.units > 1]
        _prove(owner, trial, blocks, known)


def _prove(owner: Structures, trial: Trial, pending: list[Structure], known: list[Structure]) -> None:
    """``known``: structures proved before, which are tried along."""
    if not _holds(owner, trial, [*known, *pending]):
        pending = _isolate(owner, trial, pending, known)
    unseen = _unseen(owner, trial, pending)
    for structure in pending:
        owner.status[structure] = (
            "kept: the output does not depend on it, so nothing is proved" if structure in unseen else "exact"
        )


def _unseen(owner: Structures, trial: Trial, structures: list[Structure]) -> set[Structure]:
    """Structures no output depends on, in either mode: for them any removal would seem exact.

    One backward pass tells: a gate's derivative is the sum of its columns' weights times their derivatives.
    """
    unseen, judged = set(structures), False
    for training in (False, True):
        # A network without derivatives is not judged by them.
        with contextlib.suppress(Exception), sandbox(owner.model, torch.float32), paused(owner), torch.enable_grad():
            drop_caches(owner.model)
            randomise(owner.model)
            tensors = dict(named_tensors(owner.model))
            places = list(dict.fromkeys(place for structure in structures for place in structure.consumers))
            places = [place for place in places if place[0] in tensors]
            weights = [tensors[name].requires_grad_() for name, _ in places]
            _, made = trial.reference(training, torch.float32)
            total = torch.stack([(one * _mixed(one)).sum() for one in made if one.requires_grad]).sum()
            slopes = torch.autograd.grad(total, weights, allow_unused=True)
            judged = True
            for (name, dim), weight, slope in zip(places, weights, slopes, strict=True):
                if slope is not None:
                    seen = (weight * slope).detach().movedim(dim, 0).reshape(weight.shape[dim], -1).abs().sum(1) > 0
                    columns = [label for label in owner.findings.places[name, dim] if owner.gone.isdisjoint(label)]
                    moving = {v for label, moves in zip(columns, seen.tolist(), strict=True) if moves for v in label}
                    unseen = {s for s in unseen if moving.isdisjoint(s.variables)}
    return unseen if judged else set()


def _mixed(like: Tensor) -> Tensor:
    """Random factors, so that outputs that always add up to the same number still show what moves them."""
    return torch.rand(like.shape, generator=torch.Generator().manual_seed(5)).to(like)


def _holds(owner: Structures, trial: Trial, structures: list[Structure]) -> bool:
    """All of them at once: quickly as it trains, then strictly as it is used."""
    if not structures:
        return True
    with contextlib.suppress(CannotRunError):  # some networks train on other inputs only
        if not trial.passes(structures, owner.mends, training=True):
            return False
    try:
        return trial.error(structures, owner.mends) <= TOLERANCE
    except CannotRunError:  # some networks compute in float32 whatever they are given
        return trial.error(structures, owner.mends, dtype=torch.float32) <= 10 * CLEARLY_EXACT


def _isolate(owner: Structures, trial: Trial, pending: list[Structure], known: list[Structure]) -> list[Structure]:
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
    if _holds(owner, trial, [*known, *good]):
        return good
    together: list[Structure] = []
    for structure in good:
        candidate = [*together, structure]
        if _holds(owner, trial, [*known, *candidate]):
            together = candidate
        else:
            owner.status[structure] = f"kept: {trial.problem}"
    return together


def _pattern(owner: Structures, structure: Structure) -> Any:
    """Structures of one pattern sit in modules of the same classes in the same way."""
    spots = set()
    for name, dim in structure.places:
        path, _, leaf = name.rpartition(".")
        around = module_at(owner.model, path.rpartition(".")[0])
        spots.add((type(module_at(owner.model, path)), type(around), path.rpartition(".")[2], leaf, dim))
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
        module = module_at(owner.model, path)
        if not touched or is_builtin(module):
            continue
        if path in owner.findings.requests or isinstance(module, nn.MultiheadAttention):
            sizes[Mend(type(module), None)] = None
        for name, value in owner.integers(path).items():
            for dim in range(len(owner.dims_of(path))):
                if new_value(value, owner.dims_of(path), dim, variables) is not None:
                    attributes[Mend(type(module), name, dim)] = None
                    if isinstance(value, list | tuple):
                        break
    return list(sizes), list(attributes)
