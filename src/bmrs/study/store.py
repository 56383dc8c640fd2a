"""Results that survive: the finished parts of a long job, as files in a folder.

Every file is written beside its place and moved there in one step, so a job killed at any moment leaves whole files
and goes on where it stopped.

>>> import tempfile
>>> folder = tempfile.mkdtemp()
>>> with Store(folder, {"epochs": 50}) as store:
...     store.finish("mlp-mnist", {"accuracy": 0.97})
>>> with Store(folder, {"epochs": 50}) as store:
...     print(store.done("mlp-mnist"), store.done("mlp-cifar10"))
{'accuracy': 0.97} None
"""

import errno
import hashlib
import json
import math
import os
import re
import socket
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from filelock import FileLock, Timeout

from bmrs.study import shares
from bmrs.study.energy import measured, total

SAVING = 0.03  # at most this share of the time goes into checkpoints: those of large ensembles take seconds
_KEY, _LOCK, _WORKER = "key.json", "lock", "worker.json"
_SUFFIXES = {"done": ".part.json", "begun": ".checkpoint.pt"}
_INNERMOST = re.compile(r"[\[{]\n[^\[\]{}]*[\]}]")  # lists and objects of plain values, over several lines
_NUMBERS = re.compile(r"\[[\dnul\s.,eE+-]*\]")  # a list of nothing else
_LINE = 120
_KEPT = tuple(f"*{suffix}" for suffix in _SUFFIXES.values())


class FolderError(ValueError):
    """A folder that belongs to other results, or in which another process works."""


class StoreWarning(UserWarning):
    """A file that cannot be used: what it held is done anew."""


class Store:
    """A folder of finished parts, held by one process at a time.

    ``key`` says what makes results comparable (epochs, seeds, methods): a folder with another key is refused.
    ``restart`` throws away what is there. Use it in a ``with`` statement, or call :meth:`close`.
    """

    def __init__(self, folder: str | os.PathLike[str], key: Mapping[str, Any], *, restart: bool = False) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(self.folder / _LOCK)
        try:
            # The system drops the lock of a process that died, however it died: no lock is ever stale.
            self._lock.acquire(timeout=0)
        except Timeout:
            raise FolderError(
                f"{_worker(self.folder)} is working in {self.folder}: wait for it, stop it, or choose another --out."
            ) from None
        try:
            for partial in self.folder.glob("*.partial"):  # a killed process left it
                partial.unlink(missing_ok=True)
            if restart:
                self._clear()
            self._check(json.loads(_text(key)))
            write_text(self.folder / _WORKER, _text({"process": os.getpid(), "host": socket.gethostname()}))
        except BaseException:
            self._lock.release()
            raise

    def done(self, part: str) -> dict[str, Any] | None:
        """What the part left when it was finished; None when it is still to do."""
        return content_of(self.folder, part)

    def finish(self, part: str, content: Mapping[str, Any]) -> None:
        """Keep what the part found; its checkpoint goes."""
        plain = finite(content)
        write_text(self._path(part), _text({"part": part, "sha256": _digest(plain), "content": plain}))
        self.checkpoint(part).unlink(missing_ok=True)

    def drop(self, part: str) -> None:
        """Forget a part that is contained in another by now."""
        for kind in _SUFFIXES:
            self._path(part, kind).unlink(missing_ok=True)

    def checkpoint(self, part: str) -> Path:
        """Where the part keeps its middle."""
        return self._path(part, "begun")

    def save_checkpoint(self, part: str, state: Mapping[str, Any] | bytes) -> None:
        """Keep tensors and plain values: what ``torch.load(..., weights_only=True)`` can read.

        Bytes are what ``torch.save`` made of them, in another process.
        """
        if isinstance(state, bytes):
            _replace(self.checkpoint(part), lambda path: path.write_bytes(state))
        else:
            _replace(self.checkpoint(part), lambda path: torch.save(dict(state), path))

    def load_checkpoint(self, part: str, device: str | torch.device = "cpu") -> dict[str, Any] | None:
        """The state saved last, with its tensors on ``device``; None when there is none that can be read."""
        path = self.checkpoint(part)
        if not path.exists():
            return None
        try:
            state = torch.load(path, map_location=device, weights_only=True)
            if not isinstance(state, dict):
                raise TypeError("it holds no dictionary")
        # Damage shows as almost any error: of zip, of pickle, of torch itself.
        except Exception as wrong:
            _warn(f"{path} cannot be read ({_reason(wrong)}): '{part}' begins anew.")
            return None
        return state

    def close(self) -> None:
        """Let others work in the folder."""
        if self._lock.is_locked:
            (self.folder / _WORKER).unlink(missing_ok=True)
            self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _path(self, part: str, state: str = "done") -> Path:
        return _path(self.folder, part, state)

    def _check(self, key: dict[str, Any]) -> None:
        path = self.folder / _KEY
        try:
            there = json.loads(path.read_bytes())
            if not isinstance(there, dict):
                raise TypeError("it holds no object")
        except FileNotFoundError:
            there = None
        except (OSError, ValueError, TypeError) as wrong:
            raise FolderError(
                f"{path} cannot be read ({_reason(wrong)}), so nobody knows what its results are: "
                "choose another --out, or throw them away with --restart."
            ) from None
        if (
            there is not None
            and there != key
            and not any(path for pattern in _KEPT for path in self.folder.glob(pattern))
        ):
            there = None  # a command that failed at once left its key and nothing else
        if there is None:
            if any(self.folder.glob("*.part.json")):
                raise FolderError(
                    f"{self.folder} holds results but not what they are results of ({_KEY} is missing): "
                    "choose another --out, or throw them away with --restart."
                )
            write_text(path, _text(key))
        elif there != key:
            raise FolderError(
                f"{self.folder} holds results of another kind ({_differences(there, key)}): "
                "choose another --out, or throw them away with --restart."
            )

    def _clear(self) -> None:
        # Only what this class writes: a folder may hold files of the user's. The key goes last, so that whatever a
        # kill in between leaves is still known by the old key.
        for pattern in (*_KEPT, _KEY):
            for path in self.folder.glob(pattern):
                path.unlink(missing_ok=True)


def attempt(
    saved: Mapping[str, Any] | None,
    recipe: Mapping[str, Any],
    device: str,
    save: Callable[[Mapping[str, Any]], None],
    work: Callable[[Callable[..., None], dict[str, Any] | None], Mapping[str, Any]],
    *,
    alone: bool = True,
) -> dict[str, Any]:
    """Do ``work(keep, resume)`` from what an earlier attempt ``saved``: the content of a part.

    ``work`` hands its state to ``keep`` as often as it likes and is given the last one as ``resume``, on the processor;
    now and then, or ``at_once``, ``save`` gets it, with what is needed to go on. A state left by another ``recipe`` is
    not used. To what ``work`` returns come "recipe", and "seconds" and "energy", in which all attempts add up, and
    which tasks that run side by side divide among them (:mod:`bmrs.study.shares`).
    ``alone``: as in :func:`bmrs.study.energy.measured`.
    """
    plain = finite(recipe)
    saved = saved if saved and saved.get("recipe") == plain else {}
    before, own = float(saved.get("seconds", 0.0)), shares.seconds()
    written, cost = time.perf_counter(), 0.0
    with closing(own), measured(device, alone=alone) as energy:

        def spent() -> dict[str, Any]:
            seconds = before + own.used()
            return {"recipe": plain, "seconds": seconds, "energy": total([saved.get("energy"), energy.result()])}

        def keep(state: Mapping[str, Any], *, at_once: bool = False) -> None:
            nonlocal written, cost
            now = time.perf_counter()
            if at_once or SAVING * (now - written) >= cost:
                save({"state": dict(state), **spent()})
                written = time.perf_counter()
                cost = written - now

        return dict(finite({**work(keep, saved.get("state")), **spent()}))


def content_of(folder: str | os.PathLike[str], part: str) -> dict[str, Any] | None:
    """What a finished part left, whoever works in the folder; None when it is still to do."""
    path = _path(Path(folder), part, "done")
    try:
        stored = json.loads(path.read_bytes())
        content = stored["content"]
        if stored["sha256"] != _digest(content):
            raise ValueError("its checksum is wrong")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as wrong:
        _warn(f"{path} cannot be used ({_reason(wrong)}): '{part}' is done anew.")
        return None
    return dict(content)


def state(folder: str | os.PathLike[str], part: str) -> str:
    """How far a part seems to be, without opening the store: "done", "begun" or "to do"."""
    there = {name: (Path(folder) / f"{part}{suffix}").exists() for name, suffix in _SUFFIXES.items()}
    return "done" if there["done"] else "begun" if there["begun"] else "to do"


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    _replace(path, lambda partial: partial.write_text(text, encoding="utf-8"))


def write_json(path: Path, content: Mapping[str, Any], digits: int | None = None) -> None:
    """Write JSON that every reader takes, and people too: what is not finite becomes null, what is short one line.

    ``digits``: that numbers are rounded to, unless all are to be kept.
    """

    def on_a_line(found: re.Match[str]) -> str:
        line = re.sub(r"\n\s*", " ", found[0])
        return (
            f"{line[0]}{line[1:-1].strip()}{line[-1]}" if len(line) <= _LINE or _NUMBERS.fullmatch(line) else found[0]
        )

    text = json.dumps(_rounded(finite(content), digits), indent=1, ensure_ascii=False, allow_nan=False)
    write_text(path, _INNERMOST.sub(on_a_line, text) + "\n")


def finite(value: Any) -> Any:
    """Plain JSON values: tuples as lists, tensors and numpy values as numbers, what is not finite as None."""
    if isinstance(value, Mapping):
        return {str(name): finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if hasattr(value, "tolist"):
        return finite(value.tolist())
    return value


def _rounded(value: Any, digits: int | None) -> Any:
    if digits is None:
        return value
    if isinstance(value, dict):
        return {name: _rounded(item, digits) for name, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item, digits) for item in value]
    return float(f"{value:.{digits}g}") if isinstance(value, float) else value


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    """Have ``write`` fill a file beside ``path``, bring it to the disk, and move it there in one step."""
    partial = path.with_name(path.name + ".partial")
    try:
        write(partial)
        with open(partial, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(partial, path)
    except RuntimeError as wrong:
        partial.unlink(missing_ok=True)
        if "inline_container" in str(wrong):  # torch's word for a disk that takes no more
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from wrong
        raise
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    if os.name == "posix":  # the new name must reach the disk too; Windows opens no folders
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _path(folder: Path, part: str, state: str) -> Path:
    if not re.fullmatch(r"\w[\w.-]*", part):
        raise ValueError(f"part must be letters, digits, '.', '_' or '-', to name a file; got '{part}'.")
    return folder / f"{part}{_SUFFIXES[state]}"


def _text(value: Any) -> str:
    return json.dumps(finite(value), ensure_ascii=False, allow_nan=False)


def _digest(content: Any) -> str:
    return hashlib.sha256(_text(content).encode()).hexdigest()


def _differences(there: Mapping[str, Any], key: Mapping[str, Any]) -> str:
    def short(values: Mapping[str, Any], name: str) -> str:
        text = json.dumps(values[name], ensure_ascii=False) if name in values else "nothing"
        return text if len(text) <= 60 else f"{text[:57]}..."

    names = [name for name in sorted({*there, *key}) if there.get(name, ...) != key.get(name, ...)]
    return "; ".join(f"{name} {short(there, name)} there, {short(key, name)} now" for name in names)


def _worker(folder: Path) -> str:
    try:
        worker = json.loads((folder / _WORKER).read_bytes())
        return f"another process ({worker['process']} on {worker['host']})"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"


def _reason(wrong: Exception) -> str:
    lines = str(wrong).strip().splitlines()
    return f"{type(wrong).__name__}: {lines[0][:120].rstrip('.')}" if lines else type(wrong).__name__


def _warn(sentence: str) -> None:
    warnings.warn(sentence, StoreWarning, stacklevel=3)
