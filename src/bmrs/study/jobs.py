"""The study's tables and figures as jobs, and a job with all its options settled as a plan."""

import dataclasses
import importlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bmrs.study.store import state

FORMAT = 2  # of the parts: raise it when old ones can no longer be used
P1 = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16)  # figure 4
SHARED = "post-training"  # one computation, and one folder, for figures 1, 2, 3 and the appendix
ROOT = Path("runs/study")


@dataclasses.dataclass(frozen=True)
class Job:
    """One table or figure: what computes it, and what shows it (a function's name in ``tables`` or ``plots``)."""

    name: str
    protocol: str
    kind: str
    about: str
    table: str = ""
    figure: str = ""
    methods: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    without: tuple[str, ...] = ("fractions",)  # options it does not have

    @property
    def folder(self) -> str:
        return SHARED if self.protocol == SHARED else self.name


_AFTER = f"Figures 1 to 3 and the appendix share one computation in {ROOT / SHARED}: the first does it for all."
JOBS = {
    job.name: job
    for job in (
        Job("table1", "continuous", "continuous", "Pruning while training, every method, beside the published numbers: "
            "420 networks.", table="table1"),
        Job("prices", "continuous", "continuous", "The same with fairer prices than the published one.",
            table="prices_table", figure="prices_figure", methods=("none", "bmrs_n")),
        Job("figure1", SHARED, "posteriors", f"Gates after training: posteriors, evidence, what is removed. {_AFTER}",
            figure="figure1", without=()),
        Job("figure2", SHARED, SHARED, f"Accuracy against compression when pruning after training. {_AFTER}",
            figure="figure2", without=()),
        Job("figure3", SHARED, "correlations", f"Rank correlations between the methods. {_AFTER}", figure="figure3",
            without=()),
        Job("figure4", "continuous", "continuous", "Accuracy and compression against p₁ of BMRS_U.", figure="figure4",
            methods=("none", *(f"bmrs_u{p1}" for p1 in P1)), settings=("lenet5-cifar10",)),
        Job("appendix", SHARED, SHARED, f"Figure 2 with the gradient criterion. {_AFTER}", figure="appendix",
            without=()),
        Job("timing", "timing", "timing", "Time and memory with gates, without, and after removal (Table 3).",
            table="timing_table",
            without=("seeds", "seeds_per_task", "methods", "epochs", "fine_tune", "fractions")),
    )
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Plan:
    """A job with all its options settled."""

    job: Job
    settings: tuple[Any, ...]  # of bmrs.study.settings.Setting
    methods: tuple[str, ...]
    seeds: tuple[int, ...]
    prices: tuple[tuple[str, float], ...]
    fractions: tuple[float, ...]
    device: str
    data_dir: Path | None
    out: Path
    restart: bool
    seeds_per_task: int | None = None

    @property
    def parts(self) -> Path:
        return self.out / "parts"

    @property
    def others(self) -> list[Path]:
        """Where commands of this study that train the same networks keep their parts, under their usual names."""
        alike = [job for job in JOBS.values() if job.protocol == self.job.protocol and job.name != self.job.name]
        beside = [] if self.restart else [self.out.parent / job.folder / self.parts.name for job in alike]
        return [folder for folder in beside if folder != self.parts]

    @property
    def blocks(self) -> list[tuple[int, ...]]:
        """Seeds that are computed together, in one task."""
        size = self.seeds_per_task or len(self.seeds)
        return [self.seeds[start : start + size] for start in range(0, len(self.seeds), max(1, size))] or [()]

    @property
    def key(self) -> dict[str, Any]:
        """What parts in one folder have in common. The recipe of each setting is kept with its part."""
        shown = {"methods": self.methods, "seeds": len(self.seeds), "prices": self.prices, "fractions": self.fractions}
        split = {"seeds_per_task": self.seeds_per_task} if len(self.blocks) > 1 else {}
        return {"format": FORMAT, "protocol": self.job.protocol,
                **({} if self.job.protocol == "timing" else {**shown, **split})}  # fmt: skip

    def networks(self, seeds: int | None = None) -> int:
        """Per setting, or of so many of its seeds. Without gates no price is paid, so those are trained once."""
        seeds = len(self.seeds) if seeds is None else seeds
        if self.job.protocol == "timing":
            return 3  # without gates, with them, and smaller
        if self.job.protocol != "continuous":
            return max(1, seeds)
        plain = int("none" in self.methods)
        return ((len(self.methods) - plain) * len(self.prices) + plain) * seeds

    def task_name(self, setting: str, block: tuple[int, ...]) -> str:
        """Of the task, and of its part in the store: a setting, or some of its seeds."""
        return setting if len(self.blocks) == 1 else f"{setting}.seeds{block[0]}-{block[-1]}"

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.job.name, "out": str(self.out), "device": self.device, "methods": list(self.methods),
            "seeds": len(self.seeds), "prices": self.prices, "fractions": len(self.fractions),
            "settings": {
                setting.key: {
                    "networks": self.networks(),
                    "epochs": 0 if self.job.protocol == "timing" else setting.epochs,
                    "fine_tune": 0 if self.job.protocol == "timing" else setting.fine_tune,
                    "state": self._state(setting.key, [self.task_name(setting.key, block) for block in self.blocks]),
                }
                for setting in self.settings
            },
            "tasks": [
                {
                    "name": name, "setting": setting.key, "seeds": list(block), "networks": self.networks(len(block)),
                    "state": self._state(setting.key, [name]),
                }
                for setting in self.settings for block in self.blocks
                for name in [self.task_name(setting.key, block)]
            ],
        }  # fmt: skip

    def _state(self, setting: str, tasks: list[str]) -> str:
        """How far a setting is whose tasks are these, or some of its tasks."""
        if self.restart:
            return "to do"
        whole = state(self.parts, setting)
        if whole == "done":
            return whole
        of_tasks = {state(self.parts, name) for name in tasks}
        return of_tasks.pop() if len(of_tasks) == 1 else "begun"


def settle(
    job: Job, *, data_dir: Path | None = None, out: Path | None = None, device: str = "auto", seeds: int = 10,
    settings: str = "", methods: str = "", epochs: int | None = None, fine_tune: int | None = None,
    fractions: int = 100, restart: bool = False, seeds_per_task: int | None = None,
    devices: Callable[[str], str] | None = None,
) -> Plan:  # fmt: skip
    """Settle the options; refuses what cannot work before anything is done.

    ``devices``: says which device is meant by a name, one of this machine's unless given.
    """
    known = importlib.import_module("bmrs.study.settings")
    keys = tuple(dict.fromkeys(settings.replace(",", " ").split())) or job.settings or tuple(known.PAPER)
    for key in keys:
        if key not in known.SETTINGS:
            raise ValueError(f"--settings: unknown setting '{key}': choose from {', '.join(known.SETTINGS)}.")
    after, gates = job.protocol == SHARED, job.protocol == "continuous"
    allowed = (*known.RANKINGS, "gradient") if after else known.METHODS
    chosen = tuple(dict.fromkeys(methods.replace(",", " ").split())) or job.methods or allowed
    for method in chosen:
        if method not in allowed and not re.fullmatch(r"bmrs_u\d+(\.\d+)?", method):
            raise ValueError(f"--methods: unknown method '{method}': choose from {', '.join(allowed)}.")
    if after and fine_tune is None:
        fine_tune = 1  # the paper fine-tunes what is left by a single epoch
    changed = {name: v for name, v in (("epochs", epochs), ("fine_tune", fine_tune)) if v is not None}
    return Plan(
        job,
        tuple(dataclasses.replace(known.SETTINGS[key], **changed) for key in keys),
        chosen if after or gates else (),
        tuple(range(seeds)) if after or gates else (),
        (tuple(known.PRICES) if job.name == "prices" else (("layer", 1.0),)) if gates else (),
        tuple(n / fractions for n in range(1, fractions + 1)) if after else (),
        (devices or device_named)(device), data_dir and data_dir.absolute(), out or ROOT / job.folder, restart,
        seeds_per_task,
    )  # fmt: skip


def device_named(name: str) -> str:
    """The device of that name on this machine; "auto" is a GPU where there is one."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        kind = torch.device(name).type
    except RuntimeError:
        raise ValueError(f"--device: unknown device '{name}': give cuda, cuda:1, cpu or auto.") from None
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device: there is no GPU that torch can use: give cpu or auto.")
    return name
