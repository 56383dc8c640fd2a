"""Tasks side by side in this process, a thread each: on a GPU that a single task leaves half idle."""

import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import nullcontext
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

from bmrs.study.recording import free_memory

MOST = 32  # torch has so many streams to give out
_T = TypeVar("_T")


class Stopped(BaseException):
    """Nobody waits for this task any more."""


def side_by_side(
    tasks: Iterable[_T | None],
    number: int,
    device: Callable[[_T], str],
    work: Callable[[_T, Callable[[], None]], dict[str, Any]],
    put_off: Callable[[_T], None] = lambda task: None,
) -> Generator[tuple[_T, dict[str, Any]], None, None]:
    """What each task found, as soon as it is there, with so many of them under way.

    ``tasks`` is asked for the next one when there is room; None: there is none before another result. ``work`` is given
    a function to call now and then, which ends the task when whoever wanted the results has left. What goes wrong in
    a task ends the others and is raised; one for which there was no memory beside others is ``put_off``, which is told,
    and has another chance with fewer of them.
    """
    coming, more, again = iter(tasks), True, list[_T]()
    ended: SimpleQueue[tuple[_T, dict[str, Any] | None, BaseException | None]] = SimpleQueue()
    left = threading.Event()
    running: dict[int, threading.Thread] = {}
    streams: dict[str, list[Any]] = {}

    def go_on() -> None:
        if left.is_set():
            raise Stopped

    def run(task: _T, stream: Any) -> None:
        found, wrong = None, None
        try:
            with torch.cuda.stream(stream) if stream is not None else nullcontext():
                found = work(task, go_on)
        except BaseException as error:
            wrong = error
        ended.put((task, found, wrong))

    def stream_of(task: _T) -> Any:
        """One that no other task uses: what is recorded on a stream must be this task's alone."""
        place = device(task)
        if torch.device(place).type != "cuda":
            return None
        if place not in streams:
            streams[place] = [torch.cuda.Stream(place) for _ in range(number)]
        return streams[place].pop()

    used: dict[int, Any] = {}
    try:
        while True:
            while (again or more) and len(running) < number:
                task = again.pop() if again else next(coming, ...)
                if task is ... or task is None:
                    more = task is None
                    break
                used[id(task)] = stream_of(task)
                running[id(task)] = threading.Thread(target=run, args=(task, used[id(task)]), name="bmrs-task")
                running[id(task)].start()
            if not running:
                return
            task, found, wrong = ended.get()
            running.pop(id(task)).join()
            if (stream := used.pop(id(task))) is not None:
                streams[device(task)].append(stream)
            if isinstance(wrong, torch.OutOfMemoryError) and running:
                again.append(task)
                number, wrong = len(running), None  # with what it held
                free_memory()
                put_off(task)
                continue
            if wrong is not None:
                raise wrong
            assert found is not None
            yield task, found
    finally:
        left.set()
        for thread in running.values():
            thread.join()
