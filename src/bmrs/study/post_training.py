"""Pruning after training: every method's ranking, any fraction of units, one epoch of fine-tuning, and the test.

All networks are trained once, with gates and whole. Each fraction of each method is then a network of its own that
begins as the trained one; those that keep about equally many units are fine-tuned side by side.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import bmrs
from bmrs.criteria import Criterion, Units
from bmrs.study.ensemble import Ensemble
from bmrs.study.protocols import Member, Save, Stage, Tell, row_norms
from bmrs.study.settings import Setting, criterion

_TOGETHER = 512  # networks fine-tuned side by side
_EXAMPLES = 1024  # whose mean loss the gradient criterion differentiates
_DIGITS = 6  # of what is kept of posteriors


def post_training(
    setting: Setting,
    methods: Sequence[str],
    seeds: Sequence[int],
    *,
    fractions: Sequence[float],
    device: str = "cpu",
    data_dir: Path | None = None,
    checkpoint: Save | None = None,
    resume: dict[str, Any] | None = None,
    progress: Tell = lambda done, total: None,
    together: int = _TOGETHER,
) -> dict[str, Any]:
    """Curves of accuracy against compression, and where each method's own rule stops.

    Returns {"setting", "runs", "correlations", "posteriors"}. A run is a method and a seed: at each of ``fractions``
    its compression and accuracy, None beyond the boundary of a BMRS, which has nothing to say there. ``checkpoint`` is
    given a state after every epoch, ``resume`` takes one; ``progress`` is told epochs done and in all.
    """
    begun = time.perf_counter()
    stage = Stage(setting, device, data_dir)
    members = [Member("none", seed) for seed in seeds]
    trained = stage.ensemble(members, noisy=True)
    state = resume or {"done": 0, "ensemble": None, "accuracies": [], "seconds": 0.0}
    accuracies: list[list[float]] = list(state["accuracies"])
    if state["ensemble"] is not None:
        trained.load_state_dict(state["ensemble"])
    rough = setting.epochs + setting.fine_tune * math.ceil(len(methods) * len(seeds) * len(fractions) / together)

    def keep(done: int, total: int) -> None:
        progress(done, total)
        if checkpoint is not None:
            spent = state["seconds"] + time.perf_counter() - begun
            checkpoint(
                {"done": done, "ensemble": trained.state_dict(), "accuracies": accuracies, "seconds": spent}
            )  # fmt: skip

    for epoch in range(state["done"] + 1, setting.epochs + 1):
        trained.train_epoch(stage.order(seeds, epoch))
        keep(epoch, rough)
    scores = _scores(stage, trained, methods, seeds)
    plans = {
        (method, n): _Plan.of(_rule(method), worth[n], fractions)
        for method, worth in scores.items()
        for n in range(len(seeds))
    }
    jobs = _jobs(plans)
    chunks = [jobs[start : start + together] for start in range(0, len(jobs), together)]
    total = setting.epochs + setting.fine_tune * len(chunks)
    ensemble: Ensemble | None = None
    for number, chunk in enumerate(chunks):
        if number < len(accuracies):
            continue
        if ensemble is None or ensemble.members != len(chunk):
            ensemble = stage.ensemble([members[job.member] for job in chunk], noisy=True)
        accuracies.append(_fine_tuned(stage, trained, ensemble, [seeds[job.member] for job in chunk], chunk))
        keep(setting.epochs + setting.fine_tune * (number + 1), total)
    found = {job: value for chunk, values in zip(chunks, accuracies, strict=True)
             for job, value in zip(chunk, values, strict=True)}  # fmt: skip
    seconds = state["seconds"] + time.perf_counter() - begun
    return {
        "setting": stage.entry(seconds, len(seeds)),
        "runs": [
            _run(stage, method, seeds[n], plan, fractions, {job: v for job, v in found.items() if job.member == n})
            for (method, n), plan in plans.items()
        ],
        "correlations": [
            {
                "setting": setting.key,
                "seed": seed,
                "methods": list(scores),
                "spearman": spearman(torch.stack([worth[n] for worth in scores.values()])).tolist(),
            }
            for n, seed in enumerate(seeds)
        ],
        "posteriors": _posteriors(stage, trained, seeds),
    }


@dataclass(frozen=True)
class _Job:
    """A network to fine-tune: the number of the trained one, and which of its units are left."""

    member: int
    alive: tuple[bool, ...]


@dataclass(frozen=True)
class _Plan:
    """What a method removes from one network: the order in which units go, and how many at each fraction."""

    order: tuple[int, ...]
    counts: tuple[int, ...]
    boundary: int | None  # units that the method's own rule removes
    stops: bool  # whether the method has nothing to say beyond

    @classmethod
    def of(cls, rule: Criterion, worth: Tensor, fractions: Sequence[float]) -> "_Plan":
        order = tuple(rule.rank(worth).tolist())
        counts = tuple(math.floor(fraction * len(order) + 1e-9) for fraction in fractions)
        own = None if isinstance(rule, bmrs.L2 | bmrs.Gradient) else int(rule.remove(worth).sum())
        return cls(order, counts, own, isinstance(rule, bmrs.BMRS_N | bmrs.BMRS_U))

    def wanted(self) -> list[int]:
        """How many units to remove in all the networks of this plan: none, those of the curve, those of the rule."""
        return sorted({0, *(count for count in self.counts if self.says(count)), self.boundary or 0})

    def says(self, count: int) -> bool:
        return not self.stops or self.boundary is None or count <= self.boundary

    def job(self, member: int, count: int) -> _Job:
        alive = [True] * len(self.order)
        for unit in self.order[:count]:
            alive[unit] = False
        return _Job(member, tuple(alive))


def _jobs(plans: dict[tuple[str, int], _Plan]) -> list[_Job]:
    """Every network once, though several methods may ask for it; the fullest first."""
    jobs = {plan.job(member, count) for (_, member), plan in plans.items() for count in plan.wanted()}
    return sorted(jobs, key=lambda job: (-sum(job.alive), job.member, job.alive))


def _rule(method: str) -> Criterion:
    """What ranks the units; of L2 and the gradient only the ranking counts."""
    if method == "l2":
        return bmrs.L2(0.0)
    return bmrs.Gradient(1.0, 1.0) if method == "gradient" else criterion(method)


def _scores(stage: Stage, trained: Ensemble, methods: Sequence[str], seeds: Sequence[int]) -> dict[str, Tensor]:
    """What each unit of each network is worth to each method, [members, units]."""
    norm = row_norms(trained, stage.structures)
    if "gradient" in methods:
        trained.differentiate(stage.order(seeds, 0)[:, :_EXAMPLES])
        slope = row_norms(trained, stage.structures, gradients=True)
        # Each norm in units of its median, so that neither of the two thresholds decides alone.
        norm_each, slope_each = (part / part.median(1, keepdim=True).values for part in (norm, slope))
    q = _posterior(trained)
    scores = {}
    for method in methods:
        needed = Units(q, norm)
        if method == "gradient":
            needed = Units(q, norm_each, slope_each)
        scores[method] = _rule(method).scores(needed).double()
    return scores


def _posterior(trained: Ensemble) -> bmrs.TruncatedLogNormal:
    gates = trained.gates
    mu, log_sigma = (gates.of_units(part, missing=0.0) for part in (gates.mu, gates.log_sigma))
    return bmrs.TruncatedLogNormal(mu, log_sigma, validate=False)


def _fine_tuned(
    stage: Stage, trained: Ensemble, ensemble: Ensemble, seeds: Sequence[int], jobs: Sequence[_Job]
) -> list[float]:
    """Accuracy of each on the test images. ``ensemble``: of as many members, whatever it was before."""
    setting = stage.setting
    ensemble.take(trained, [job.member for job in jobs])
    ensemble.gates.keep(torch.tensor([job.alive for job in jobs]))
    ensemble.close_ranks()
    for epoch in range(setting.epochs + 1, setting.epochs + setting.fine_tune + 1):
        ensemble.train_epoch(stage.order(seeds, epoch))
    accuracy: list[float] = ensemble.accuracy(stage.test_x, stage.test_y).tolist()
    return accuracy


def _run(
    stage: Stage, method: str, seed: int, plan: _Plan, fractions: Sequence[float], found: dict[_Job, float]
) -> dict[str, Any]:
    """``found``: the accuracies of this seed's networks."""
    member = next(iter(found)).member
    counts = plan.wanted()
    jobs = [plan.job(member, count) for count in counts]
    left = stage.counting.left(torch.tensor([job.alive for job in jobs]))
    at = {
        count: {"published": float(left["published"][n]), "actual": float(left["actual"][n]), "accuracy": found[job]}
        for n, (count, job) in enumerate(zip(counts, jobs, strict=True))
    }
    points = [at[count] if plan.says(count) else {} for count in plan.counts]
    boundary = None
    if plan.boundary is not None:
        boundary = {"fraction": plan.boundary / len(plan.order), **at[plan.boundary]}
    return {
        "setting": stage.setting.key,
        "method": method,
        "seed": seed,
        "fractions": list(fractions),
        "compression": {name: [point.get(name) for point in points] for name in ("published", "actual")},
        "accuracy": [point.get("accuracy") for point in points],
        "whole": at[0]["accuracy"],
        "boundary": boundary,
    }


def _posteriors(stage: Stage, trained: Ensemble, seeds: Sequence[int]) -> list[dict[str, Any]]:
    """The gates after training, seed by seed."""
    q = _posterior(trained)
    values = {
        "mu": q.mu,
        "log_sigma": q.log_sigma,
        "mean": q.mean(),
        "snr": q.snr(),
        **{f"delta_f.{m}": -criterion(m).scores(q) for m in ("bmrs_n", "bmrs_u8", "bmrs_u4")},
    }
    layer = [name for name, own in stage.counting.layers.items() for _ in range(own.stop - own.start)]
    entries = []
    for n, seed in enumerate(seeds):
        entry: dict[str, Any] = {"setting": stage.setting.key, "seed": seed, "delta_f": {}, "layer": layer}
        for name, value in values.items():
            outer, _, inner = name.partition(".")
            rounded = [float(f"{number:.{_DIGITS}g}") for number in value[n].tolist()]
            if inner:
                entry[outer][inner] = rounded
            else:
                entry[outer] = rounded
        entries.append(entry)
    return entries


def spearman(scores: Tensor) -> Tensor:
    """Rank correlations between rows, [rows, rows]; equal scores share the mean of their ranks.

    >>> spearman(torch.tensor([[1.0, 2.0, 3.0, 4.0], [10.0, 20.0, 40.0, 30.0]]))[0, 1]
    tensor(0.8000, dtype=torch.float64)
    """
    worth = torch.where(torch.isfinite(scores), scores, math.inf).double()  # what is not finite stays, as in a ranking
    below = (worth[:, :, None] > worth[:, None, :]).sum(2)
    equal = (worth[:, :, None] == worth[:, None, :]).sum(2)
    ranks = (below + (equal + 1) / 2).double()
    ranks = ranks - ranks.mean(1, keepdim=True)
    length = ranks.norm(dim=1)
    correlations: Tensor = (ranks @ ranks.T) / (length[:, None] * length[None, :])
    return correlations
