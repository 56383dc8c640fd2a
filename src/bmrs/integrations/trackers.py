"""TensorBoard and Weights & Biases: what a training loop of one's own says, and what its gates know.

>>> import tempfile, torch, bmrs
>>> from torch import nn
>>> model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
>>> optimizer = torch.optim.Adam(model.parameters())
>>> pruner = bmrs.Pruner(model, torch.randn(4, 8), optimizer)
>>> with tracker("tensorboard", tempfile.mkdtemp(), {"lr": 1e-3}) as board:  # doctest: +SKIP
...     for epoch in range(2):
...         optimizer.zero_grad()
...         loss = model(torch.randn(4, 8)).sum()
...         loss.backward()
...         optimizer.step()
...         board.log({"loss": float(loss)}, step=epoch)
...         log_pruning(board, pruner, pruner.prune(), step=epoch)

Lightning and the Hugging Face Trainer have loggers of their own, which their ``PruningCallback`` reaches.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from bmrs.evidence import spike
from bmrs.pruner import Pruner
from bmrs.reporting import PruneReport
from bmrs.structure.capture import first_line

STEP = "step"
"""What W&B draws everything over. Its own count of steps would refuse what is logged late, as after a resumption."""


class Tracker(ABC):
    """Where the values of a run go. A context, which closes it."""

    @abstractmethod
    def log(self, values: Mapping[str, float], step: int) -> None:
        """Numbers by name, as they are at this step."""

    @abstractmethod
    def histograms(self, values: Mapping[str, Tensor], step: int) -> None:
        """Many numbers by name: how they are distributed at this step."""

    @abstractmethod
    def close(self) -> None:
        """All that was logged is written."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class TensorBoard(Tracker):
    """Event files in a folder: ``tensorboard --logdir FOLDER`` shows them."""

    def __init__(self, folder: str | os.PathLike[str], config: Mapping[str, Any]) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as missing:
            raise _missing("tensorboard", missing) from missing
        self.writer: Any = SummaryWriter(os.fspath(folder))
        if config:
            rows = [f"| {name} | {value} |" for name, value in config.items()]
            self.writer.add_text("config", "\n".join(["| setting | value |", "|---|---|", *rows]))

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, float(value), step)
        self.writer.flush()  # a run that is killed has shown all it knew

    def histograms(self, values: Mapping[str, Tensor], step: int) -> None:
        for name, numbers in values.items():
            self.writer.add_histogram(name, numbers.detach().float().cpu(), step)
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class WandB(Tracker):
    """A run of Weights & Biases. Project, entity, mode and the rest are the user's: ``WANDB_PROJECT``, ``WANDB_MODE``.

    A run that is going on already (``wandb.init`` was called before) is used, and left open.
    """

    def __init__(self, folder: str | os.PathLike[str], config: Mapping[str, Any]) -> None:
        try:
            import wandb
        except ImportError as missing:
            raise _missing("wandb", missing) from missing
        self._wandb = wandb
        self._own = wandb.run is None
        if self._own:
            os.makedirs(folder, exist_ok=True)
            at = None if "WANDB_DIR" in os.environ else os.fspath(folder)
            try:
                self.run: Any = wandb.init(dir=at, config=dict(config))
            except wandb.Error as problem:
                raise ValueError(
                    f"W&B cannot begin a run ({first_line(problem)}): log in with 'wandb login', or set "
                    f"WANDB_MODE=offline to upload later."
                ) from problem
        else:
            self.run = wandb.run
            self.run.config.update(dict(config), allow_val_change=True)
        self.run.define_metric(STEP)
        self.run.define_metric("*", step_metric=STEP)

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.run.log({**{name: float(value) for name, value in values.items()}, STEP: step})

    def histograms(self, values: Mapping[str, Tensor], step: int) -> None:
        made = {name: self._wandb.Histogram(numbers.detach().cpu().tolist()) for name, numbers in values.items()}
        self.run.log({**made, STEP: step})

    def close(self) -> None:
        if self._own:
            self.run.finish()


class Several(Tracker):
    """All get all."""

    def __init__(self, trackers: Iterable[Tracker]) -> None:
        self.trackers = list(trackers)

    def log(self, values: Mapping[str, float], step: int) -> None:
        for one in self.trackers:
            one.log(values, step)

    def histograms(self, values: Mapping[str, Tensor], step: int) -> None:
        for one in self.trackers:
            one.histograms(values, step)

    def close(self) -> None:
        for one in self.trackers:
            one.close()


TRACKERS: dict[str, type[TensorBoard] | type[WandB]] = {"tensorboard": TensorBoard, "wandb": WandB}


def tracker(
    name: str | Iterable[str], folder: str | os.PathLike[str], config: Mapping[str, Any] | None = None
) -> Tracker:
    """``name``: "tensorboard" or "wandb", or several of them. Needs ``pip install 'bmrs[track]'``.

    ``folder``: where its files go; W&B's go where ``WANDB_DIR`` says, if that is set. ``config``: the settings of the
    run, to be shown with it. With several processes, make it in one of them.
    """
    names = list(dict.fromkeys([name] if isinstance(name, str) else name))
    unknown = [one for one in names if one not in TRACKERS]
    if unknown or not names:
        what = f"unknown tracker '{unknown[0]}'" if unknown else "name holds no tracker"
        raise ValueError(f"{what}: choose from {', '.join(TRACKERS)}.")
    made: list[Tracker] = []
    try:
        for one in names:
            made.append(TRACKERS[one](folder, config or {}))
    except BaseException:
        Several(made).close()
        raise
    return made[0] if len(made) == 1 else Several(made)


@torch.no_grad()
def what_is_known(pruner: Pruner, report: PruneReport) -> dict[str, float]:
    """What there is to see after ``report = pruner.prune()``: numbers by name, of the whole and of each structure.

    ``bmrs/units``, ``bmrs/parameters``: left. ``bmrs/removed``: units that went now. ``bmrs/kl``: as it enters the
    loss now. ``units/NAME``: left in a structure. ``delta_f_min/NAME``, ``delta_f_median/NAME``,
    ``delta_f_max/NAME``: of those, the evidence for switching a unit off; the largest is that of the next to go.
    """
    known = {
        "bmrs/units": float(report.units),
        "bmrs/parameters": float(report.parameters),
        "bmrs/removed": float(report.removed),
        "bmrs/kl": float(pruner.kl()),
    }
    delta_f = spike(pruner.bank.posterior())
    for row in report.structures:
        values = delta_f[pruner.bank.layers.get(row.name, slice(0))]  # none are left of what went with a block
        values = values[values.isfinite()]
        known[f"units/{row.name}"] = float(row.left)
        if len(values):
            known[f"delta_f_min/{row.name}"] = float(values.min())
            known[f"delta_f_median/{row.name}"] = float(values.median())
            known[f"delta_f_max/{row.name}"] = float(values.max())
    return known


@torch.no_grad()
def log_pruning(where: Tracker, pruner: Pruner, report: PruneReport, step: int, *, histograms: bool = False) -> None:
    """Log :func:`what_is_known`; with ``histograms`` also E[θ] of the units of each structure, as ``theta/NAME``.

    Between ``prune()`` and ``finish()``, which takes off the gates that are asked here.
    """
    if pruner.finished:
        raise ValueError("pruner has finished and its gates are gone: call log_pruning(...) before pruner.finish().")
    where.log(what_is_known(pruner, report), step)
    if histograms:
        mean = pruner.bank.mean()
        where.histograms({f"theta/{name}": mean[layer] for name, layer in pruner.bank.layers.items()}, step)


def _missing(package: str, problem: ImportError) -> ImportError:
    return ImportError(f"tracking needs '{problem.name or package}': install it with  pip install 'bmrs[track]'")
