"""Tasks on a Ray cluster: one per GPU, or per core. This process alone records what they find.

A task whose worker or machine dies is given to another, which goes on from the last state that reached this process.
Each attempt has a number, and only the newest one of a task counts: what is done twice is recorded once.
"""

import contextlib
import logging
import math
import os
import pickle
import socket
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from bmrs.study.engine import Task, TasksError, Told
from bmrs.study.jobs import device_named
from bmrs.study.provenance import provenance
from bmrs.study.store import Store, write_text

try:
    # Ray reads these when it is imported.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "1")  # without it a warning at every start
    import ray
except ImportError as missing:
    raise ValueError("--engine ray needs Ray: install it with  pip install 'bmrs[ray]'") from missing

from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from bmrs.study import engine_worker

RETRIES = 3  # of a task whose worker died, or that raised what may not be its own fault
EVERY = 0.25  # seconds between two words about a task's progress, and between two looks into the mailbox
_INSTALL = "install 'bmrs[ray]' of this version on every machine."
_LOOK = 120.0  # seconds a machine may take to answer at first
_CONNECT = 10.0  # seconds until there must be a connection to it


@dataclass
class _Attempt:
    """The newest one at a task."""

    task: Task
    number: int  # from 1
    ref: Any
    where: str = ""  # host, once it has begun
    node: str = ""  # as Ray calls it


class Ray:
    """A cluster on this machine, or the one at ``address``; ``workers``: how many tasks at once at most."""

    name = "ray"

    def __init__(
        self, address: str | None = None, workers: int | None = None, *, retries: int = RETRIES, every: float = EVERY
    ) -> None:
        if address is not None and address.startswith("ray://"):  # such a client is on no machine of the cluster
            raise ValueError(
                "--address: give the command on a machine of the cluster, with its own address, as in "
                f"10.0.0.1:6379 or auto; got '{address}'."
            )
        self.address, self.workers, self.retries, self.every = address, workers, retries, every
        self.running: dict[str, _Attempt] = {}
        self._kind = ""  # "GPU" or "CPU", what a task takes one of
        self._machines: set[str] | None = None
        self._started = False
        self._mailbox: Any = None

    # --- the cluster --------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        if ray.is_initialized():
            raise ValueError("--engine ray: this process is connected to a Ray cluster already: ray.shutdown() first.")
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.CRITICAL}
        try:
            if self.address is None:
                more: dict[str, Any] = {"num_cpus": self.workers} if (self.workers or 0) > (os.cpu_count() or 1) else {}
                ray.init(address="local", include_dashboard=False, **more, **options)
            else:
                _reached(self.address)  # Ray itself tries for minutes
                ray.init(address=self.address, **options)
        except (OSError, OverflowError, RuntimeError, ValueError) as wrong:
            first = next(iter(str(wrong).splitlines()), type(wrong).__name__)
            at = "on this machine" if self.address is None else f"at --address {self.address}"
            raise ValueError(f"no Ray cluster {at}: {first}") from wrong
        self._started = True
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        self._mailbox = ray.remote(engine_worker.Mailbox).options(
            num_cpus=0, max_restarts=-1, max_task_retries=-1, scheduling_strategy=here
        ).remote()  # fmt: skip
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._started:
            self._started = False
            ray.shutdown()

    def about(self) -> str:
        where = "a Ray cluster on this machine" if self.address is None else f"the Ray cluster at {self.address}"
        return f"{where}, {f'{self.workers} at once' if self.workers else 'one task per GPU or core'}"

    @property
    def slots(self) -> int:
        there = max(1, int(ray.cluster_resources().get(self._kind or "CPU", 1)))
        return min(there, self.workers or there)

    def device(self, name: str) -> str:
        """Before the cluster is known, "auto" stays where the cluster is elsewhere."""
        if name not in ("auto", "cpu", "cuda"):
            raise ValueError(
                f"--device: with --engine ray give cuda, cpu or auto, since Ray deals out GPUs; got '{name}'."
            )
        if not self._started:
            return device_named(name) if self.address is None else name
        there = ray.cluster_resources().get("GPU", 0) >= 1
        if name == "cuda" and not there:
            raise ValueError("--device: the Ray cluster has no GPU: give cpu or auto.")
        found = "cuda" if name == "cuda" or (name == "auto" and there) else "cpu"
        self._kind = "GPU" if found == "cuda" else "CPU"
        return found

    def machines(self) -> set[str]:
        """Every machine that may be given a task is asked once what it is, and whether it has the same code."""
        if self._machines is None:
            # A process that looked at a GPU is not used again: it would keep some of its memory.
            look = ray.remote(max_calls=int(self._kind == "GPU"), max_retries=0)(engine_worker.look)
            nodes = [n["NodeID"] for n in ray.nodes() if n["Alive"] and n["Resources"].get(self._kind or "CPU", 0) >= 1]
            asked = [
                look.options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False))
                .remote(engine_worker.code(), self._kind)
                for node in nodes
            ]  # fmt: skip
            answers = [answer for ref in asked if (answer := _answer(ref)) is not None]
            for _, wrong in answers:
                if wrong:
                    raise ValueError(f"--engine ray: {wrong}")
            self._machines = {machine for machine, _ in answers}
        return self._machines

    # --- tasks --------------------------------------------------------------------------------------------------------

    def run(
        self, tasks: Iterable[Task | None], store: Store, screen: Told, *, one_at_a_time: bool = False
    ) -> Generator[tuple[Task, dict[str, Any]], None, None]:
        """Without ``workers`` Ray is given all tasks at once: clusters that grow by themselves see what is wanted."""
        self.machines()
        limit = 1 if one_at_a_time else self.workers or math.inf
        coming = iter(tasks)
        failed: dict[str, str] = {}
        try:
            while True:
                while len(self.running) < limit and (task := next(coming, None)) is not None:
                    self._begin(task, 1, store)
                if not self.running:
                    break
                by_ref = {attempt.ref: attempt for attempt in self.running.values()}
                ready, _ = ray.wait(list(by_ref), num_returns=len(by_ref), timeout=self.every)
                self._listen(store, screen)
                for attempt in (by_ref[ref] for ref in ready):
                    task, outcome = attempt.task, self._outcome(attempt)
                    del self.running[task.name]
                    if outcome.content is not None:
                        yield task, outcome.content
                        continue
                    screen.ended_task(task.setting, task.name, done=False)
                    if outcome.again and attempt.number <= self.retries:
                        screen.note(task.name, f"{outcome.sentence}; tried again ({attempt.number} of {self.retries}).")
                        self._begin(task, attempt.number + 1, store)
                        continue
                    if outcome.sentence not in failed.values():
                        screen.note(task.name, outcome.sentence)
                    failed[task.name] = outcome.sentence
                    if outcome.trace:
                        write_text(store.folder / f"{task.name}.error.txt", outcome.trace)
        finally:
            self._stop(store, screen)
        if failed:
            raise TasksError(_all(failed, self.retries))

    def _begin(self, task: Task, number: int, store: Store) -> None:
        takes = {"num_gpus": 1} if task.device == "cuda" else {}
        perform = ray.remote(engine_worker.perform).options(num_cpus=1, max_retries=0, name=task.name, **takes)
        ref = perform.remote(
            self._mailbox, self.every, number, engine_worker.code(), provenance()["commit"], pickle.dumps(task),
            store.load_checkpoint(task.name),
        )  # fmt: skip
        self.running[task.name] = _Attempt(task, number, ref)

    def _listen(self, store: Store, screen: Told) -> None:
        """What the workers have told since; what former attempts still say is not listened to."""
        try:
            words = ray.get(self._mailbox.take.remote())
        except RayError:  # it is made anew; states come again
            return
        for word in words:
            attempt = self.running.get(word.task)
            if attempt is None or attempt.number != word.attempt:
                continue
            task = attempt.task
            if any(word.where):
                attempt.where, attempt.node = word.where
                screen.begin(task.setting, task.networks, task.name)
            for line in word.lines:
                screen.note(task.name, line)
            if word.progress:
                done, total = word.progress
                screen.progress(task.setting, done, total, task.name)
            if word.state is not None:
                store.save_checkpoint(task.name, word.state)
        begun = [attempt for attempt in self.running.values() if attempt.node]
        where = len({attempt.node for attempt in begun})
        waiting = len(self.running) - len(begun)
        wait = f", {waiting} waiting" if waiting else ""
        screen.status(f"Ray: {_count(len(begun), 'task')} on {_count(where, 'machine')}{wait}")

    def _outcome(self, attempt: _Attempt) -> engine_worker.Outcome:
        try:
            outcome: engine_worker.Outcome = ray.get(attempt.ref)
            return outcome
        except RayTaskError as error:  # what its own code raises comes as a value: the worker cannot run that code
            return engine_worker.Outcome(sentence=f"a worker cannot run bmrs ({_first(error.cause)}): {_INSTALL}")
        except RayError as error:
            where = f" on {attempt.where}" if attempt.where else ""
            return engine_worker.Outcome(sentence=f"its worker{where} died ({type(error).__name__})", again=True)

    def _stop(self, store: Store, screen: Told) -> None:
        """Whatever still runs; the states that came last are kept."""
        screen.status("")
        if not self.running:
            return
        with contextlib.suppress(RayError):
            self._listen(store, screen)
            for attempt in self.running.values():
                ray.cancel(attempt.ref, force=True)
        self.running.clear()


def _reached(address: str) -> None:
    """Refuse an address where nobody listens."""
    host, _, port = address.rpartition(":")
    if address == "auto":
        return
    if not host or not port.isdecimal():
        raise ValueError("it must read host:port, as 10.0.0.1:6379, or auto.")
    with socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT):
        pass


def _answer(ref: Any) -> tuple[str, str] | None:
    try:
        answer: tuple[str, str] = ray.get(ref, timeout=_LOOK)
        return answer
    except RayTaskError as error:
        raise ValueError(
            f"--engine ray: a machine of the cluster cannot run bmrs ({_first(error.cause)}): {_INSTALL}"
        ) from error
    except RayError:  # it died or is too busy: what it is will be seen when it is given a task
        return None


def _first(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _all(failed: dict[str, str], retries: int) -> str:
    names = ", ".join(failed)
    reasons = "; ".join(dict.fromkeys(sentence.rstrip(".") for sentence in failed.values()))
    return (
        f"{_count(len(failed), 'task')} failed ({names}): {reasons}. The results of all others are kept: "
        "mend it, and give the same command again."
    )
