"""What runs on the workers of a Ray cluster, and the mailbox through which they tell how far they are."""

import contextlib
import functools
import hashlib
import io
import logging
import os
import pickle
import platform
import socket
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
import torch

import bmrs
from bmrs.study.engine import Task, explained
from bmrs.study.provenance import provenance


@dataclass
class Word:
    """What a worker has to say about one attempt at a task."""

    task: str
    attempt: int
    where: tuple[str, str] = ("", "")  # host and Ray's name of the node, when it begins
    progress: tuple[int, int] | None = None
    lines: tuple[str, ...] = ()
    state: bytes | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Outcome:
    """What became of an attempt. ``again``: whether another one may do better."""

    content: dict[str, Any] | None = None
    sentence: str = ""
    again: bool = False
    trace: str = ""


class Mailbox:
    """On the driver's machine. Of states only the newest waits: a slow driver gets fewer, and memory is bounded."""

    def __init__(self) -> None:
        self._words: dict[tuple[str, int], Word] = {}

    def tell(self, word: Word) -> None:
        known = self._words.setdefault((word.task, word.attempt), Word(word.task, word.attempt))
        known.where = word.where if any(word.where) else known.where
        known.progress = word.progress or known.progress
        known.lines += word.lines
        known.state = word.state or known.state

    def take(self) -> list[Word]:
        words, self._words = list(self._words.values()), {}
        return words


@functools.cache
def code() -> dict[str, str]:
    """What must be the same on all machines: this package file by file, and torch."""
    digest, root = hashlib.sha256(), Path(bmrs.__file__).parent
    for path in sorted((*root.rglob("*.py"), *root.rglob("*.c"))):
        digest.update(f"{path.relative_to(root).as_posix()}\0".encode() + path.read_bytes())
    return {
        "bmrs": f"{bmrs.__version__} ({digest.hexdigest()[:8]})",
        "torch": torch.__version__.split("+")[0],
        "python": ".".join(platform.python_version_tuple()[:2]),
    }


def difference(theirs: Mapping[str, str]) -> str:
    """How the code on this machine differs from that of the machine where the command was given; or nothing."""
    ours = code()
    names = [name for name in theirs if ours.get(name) != theirs[name]]
    if not names:
        return ""
    return (
        f"{socket.gethostname()} has {' and '.join(f'{name} {ours.get(name)}' for name in names)}, the command "
        f"{' and '.join(f'{name} {theirs[name]}' for name in names)}: install the same on every machine."
    )


def look(theirs: Mapping[str, str], kind: str) -> tuple[str, str]:
    """At this machine, without taking anything of it: what it is, and what is wrong with its code."""
    if kind == "GPU":
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # Ray hides them from a task that asks for none
    return provenance()["machine"], difference(theirs)


def perform(
    mailbox: Any,
    every: float,
    attempt: int,
    theirs: Mapping[str, str],
    commit: str,
    task: bytes,
    saved: dict[str, Any] | None,
) -> Outcome:
    """An attempt at a task, which says how far it is, at most ``every`` so many seconds.

    What is wrong comes back as a value: not every exception survives the way.
    """
    if wrong := difference(theirs):
        return Outcome(sentence=wrong)
    os.environ["BMRS_COMMIT"] = commit  # the same code, maybe without its history
    own: Task = pickle.loads(task)
    post = _Post(mailbox, own.name, attempt, every)
    post.send(where=(socket.gethostname(), ray.get_runtime_context().get_node_id()))
    threads = torch.get_num_threads()
    if own.device == "cpu":
        torch.set_num_threads(1)  # one core is what the task was given
    try:
        with _heard(post.say):
            return Outcome(own.attempt(saved, post.state, post.progress, alone=False))
    except Exception as error:
        sentence, trace = explained(error), traceback.format_exc()
        if sentence is not None:
            return Outcome(sentence=f"{sentence} ({_whereabouts(error)})", trace=trace)
        first = next(iter(str(error).splitlines()), "")
        return Outcome(sentence=f"{type(error).__name__}: {first} (on {socket.gethostname()})", again=True, trace=trace)
    finally:
        torch.set_num_threads(threads)


def _whereabouts(error: Exception) -> str:
    from bmrs.study.files import DataError

    host = f"on {socket.gethostname()}"
    if isinstance(error, DataError):
        return f"{host}; every machine of the cluster reads the data there: best a --data-dir on a disk they share"
    return host


class _Post:
    """The way of one attempt to the mailbox. A word that gets lost is no harm."""

    def __init__(self, mailbox: Any, task: str, attempt: int, every: float) -> None:
        self._mailbox, self._task, self._attempt, self._every = mailbox, task, attempt, every
        self._told = -every

    def send(self, **what: Any) -> Any:
        with contextlib.suppress(ray.exceptions.RayError):
            return self._mailbox.tell.remote(Word(self._task, self._attempt, **what))

    def progress(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self._told >= self._every or done == total:
            self._told = now
            self.send(progress=(done, total))

    def state(self, state: Mapping[str, Any]) -> None:
        packed = io.BytesIO()
        torch.save(dict(state), packed)
        with contextlib.suppress(ray.exceptions.RayError):
            ray.get(self.send(state=packed.getvalue()))  # waits: how long it takes decides how often it is done

    def say(self, line: str) -> None:
        self.send(lines=(line,))


@contextlib.contextmanager
def _heard(say: Callable[[str], None]) -> Iterator[None]:
    """What would be printed, warned about or logged here is said there."""
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: say(record.getMessage())  # type: ignore[method-assign]
    root, out = logging.getLogger(), _Lines(say)
    root.addHandler(handler)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            warnings.showwarning = lambda message, *_, **__: say(" ".join(str(message).split()))
            yield
    finally:
        root.removeHandler(handler)
        out.end()


class _Lines(io.TextIOBase):
    """A file whose whole lines are said."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say, self._rest = say, ""

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            if line.strip():
                self._say(line.rstrip().split("\r")[-1])
        return len(text)

    def end(self) -> None:
        self.write("\n")
