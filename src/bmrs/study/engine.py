"""Where the tasks of a study are computed: in this process, or by the workers of a Ray cluster.

A task is what can be computed by itself. An engine is given tasks and hands back what they found, in any order; the
caller records it. States go to the caller's store on the way, so that a task cut off goes on from its last one.
"""

import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Protocol, Self

import torch

from bmrs.study.jobs import device_named
from bmrs.study.memory import keep_freed
from bmrs.study.provenance import provenance
from bmrs.study.store import Store, attempt
from bmrs.study.threads import MOST, side_by_side

ENGINES = ("local", "ray")
SIDE_BY_SIDE = 6  # tasks on a GPU: as many as the paper has settings
_SWITCH = 5e-5  # seconds a thread may go on while another waits


@dataclass(frozen=True)
class Task:
    """What can be computed by itself, in whatever process.

    ``work(checkpoint=..., resume=..., progress=...)`` is a function of a module with its arguments
    (``functools.partial``), since it travels. ``checkpoint`` takes a state and ``resume`` is one, or None; ``progress``
    is told steps done and in all. A state left by another ``recipe`` is not gone on from.
    """

    name: str  # of its part in the store
    setting: str  # whose line on the screen it moves
    networks: int
    recipe: Mapping[str, Any]
    device: str
    work: Callable[..., dict[str, Any]]

    def attempt(
        self,
        saved: Mapping[str, Any] | None,
        save: Callable[[Mapping[str, Any]], None],
        progress: Callable[[int, int], None],
        *,
        alone: bool = True,
    ) -> dict[str, Any]:
        """Do it here and now, from what an earlier attempt ``saved``; see :func:`bmrs.study.store.attempt`."""
        if torch.device(self.device).type == "cpu":
            keep_freed()
        return attempt(
            saved, self.recipe, self.device, save, alone=alone,
            work=lambda keep, resume: self.work(checkpoint=keep, resume=resume, progress=progress),
        )  # fmt: skip


class TasksError(ValueError):
    """Tasks that failed, when all others are done."""


class Told(Protocol):
    """Who is told how far tasks are: a :class:`bmrs.study.screen.Screen`, or what stands in for it."""

    def begin(self, key: str, networks: int, task: str = "") -> None: ...
    def progress(self, key: str, done: int, total: int, task: str = "") -> None: ...
    def ended_task(self, key: str, task: str, *, done: bool = True) -> None: ...
    def note(self, about: str, line: str) -> None: ...
    def status(self, line: str) -> None: ...


class Engine(Protocol):
    """``with engine:`` for as long as it is to work."""

    name: str

    def about(self) -> str:
        """Who computes, for a person."""

    @property
    def slots(self) -> int:
        """How many tasks are computed at once."""

    def device(self, name: str) -> str:
        """The device of that name, "auto" included, that tasks have."""

    def machines(self) -> set[str]:
        """What tasks are computed on, as :mod:`bmrs.study.provenance` says it."""

    def run(
        self, tasks: Iterable[Task | None], store: Store, screen: Told, *, one_at_a_time: bool = False
    ) -> Generator[tuple[Task, dict[str, Any]], None, None]:
        """What each task found, once, as soon as it is there; states are kept in the ``store``.

        ``tasks`` is asked for the next one when there is room for it. None: there is none before another result.
        Closed, it ends what is under way.
        """

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Local:
    """This process: one task after the other or, on a GPU, several at once. What goes wrong in a task is raised.

    ``workers``: how many at once; None: as many as pay.
    """

    name = "local"

    def __init__(self, workers: int | None = 1) -> None:
        self.workers = workers
        self._device = "cpu"

    def about(self) -> str:
        return f"this process, {'one task after the other' if self.slots == 1 else f'{self.slots} tasks at once'}"

    @property
    def slots(self) -> int:
        return self.workers or (SIDE_BY_SIDE if torch.device(self._device).type == "cuda" else 1)

    def device(self, name: str) -> str:
        self._device = device_named(name)
        return self._device

    def machines(self) -> set[str]:
        return {provenance()["machine"]}

    def run(
        self, tasks: Iterable[Task | None], store: Store, screen: Told, *, one_at_a_time: bool = False
    ) -> Generator[tuple[Task, dict[str, Any]], None, None]:
        def found(task: Task, go_on: Callable[[], None] = lambda: None) -> dict[str, Any]:
            def progress(done: int, total: int) -> None:
                go_on()
                screen.progress(task.setting, done, total, task=task.name)

            return task.attempt(
                store.load_checkpoint(task.name), partial(store.save_checkpoint, task.name), progress
            )  # fmt: skip

        def put_off(task: Task) -> None:
            screen.note(task.name, "no memory is left for it beside the others: it goes on when one of them is done.")

        def begun() -> Iterator[Task | None]:
            for task in tasks:
                if task is not None:
                    screen.begin(task.setting, task.networks, task.name)
                yield task

        if self.slots == 1 or one_at_a_time:
            for task in begun():
                if task is None:
                    return  # nothing is under way that could bring another result
                yield task, found(task)
            return
        # Threads wait for each other when they hand their GPU's next step over: let none keep the others waiting long.
        before = sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH)
        try:
            yield from side_by_side(begun(), self.slots, lambda task: task.device, found, put_off)
        finally:
            sys.setswitchinterval(before)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


def chosen(name: str, address: str | None = None, workers: int | None = None) -> Engine:
    """The engine of that name, not yet at work."""
    if name not in ENGINES:
        raise ValueError(f"--engine: unknown engine '{name}': choose from {', '.join(ENGINES)}.")
    if name == "local":
        if address is not None:
            raise ValueError("--address says something about a Ray cluster: add --engine ray.")
        if workers is not None and workers > MOST:
            raise ValueError(f"--workers: this process computes {MOST} tasks at once at most, got {workers}.")
        return Local(workers)
    from bmrs.study.engine_ray import Ray

    return Ray(address, workers)


def explained(error: Exception) -> str | None:
    """One sentence about an error that is the user's to mend; None where it is not."""
    if isinstance(error, ImportError):
        return f"the study needs '{error.name}': install it with  pip install 'bmrs[study]'"
    if isinstance(error, torch.OutOfMemoryError):
        return (
            "the GPU's memory is too small for all networks at once: give fewer --seeds or --methods, "
            "or --seeds-per-task."
        )
    if isinstance(error, OSError) and error.errno:  # the system's
        return f"the study failed ({error}): make room or choose another --out, and give the same command again."
    return str(error) if isinstance(error, ValueError | OSError) else None
