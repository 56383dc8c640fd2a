"""A step on a GPU, recorded once as a CUDA graph and replayed: one launch, whatever the step consists of.

Several threads may do so at once, each on a stream of its own: what is small then no longer leaves the GPU idle.
"""

import gc
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

_FIRST = 3  # steps taken as they are, which set up all that is set up once
_APART = 32  # replays between two marks
_MARKS = 2  # that may be ahead of the GPU: a full queue of one thread would keep the others waiting

# Held by whoever records or launches operations one by one: compilers and a recording want no company.
launching = threading.RLock()
_switch = threading.Lock()
_users, _before = 0, ""


@contextmanager
def fast_products(on: bool) -> Iterator[None]:
    """Matrix products in TF32, several times faster on a GPU and far more precise than the noise of the gates.

    It is one switch for the whole process: on for as long as any thread needs it.
    """
    global _users, _before
    if not on:
        yield
        return
    with _switch:
        if not _users:
            _before = torch.get_float32_matmul_precision()
            torch.set_float32_matmul_precision("high")
        _users += 1
    try:
        yield
    finally:
        with _switch:
            _users -= 1
            if not _users:
                torch.set_float32_matmul_precision(_before)


def free_memory() -> None:
    """Give back what nobody holds."""
    with launching:
        gc.collect()
        torch.cuda.empty_cache()


class Recording:
    """Of one step, which changes tensors that stay where they are."""

    def __init__(self) -> None:
        self._graph: Any = None
        self._last: Any = None  # whose memory the next one takes over
        self._stream: Any = None

    def forget(self) -> None:
        """The tensors are others now."""
        if self._graph is not None:
            self._graph, self._last = None, self._graph

    def run(self, step: Callable[[], None], times: int, device: torch.device) -> None:
        """Take so many steps."""
        with self._aside(device):
            if self._graph is None:
                first = min(_FIRST, times)
                with launching:
                    for _ in range(first):
                        step()
                    self._record(step)
                times -= first
            self._replay(times)

    @contextmanager
    def _aside(self, device: torch.device) -> Iterator[None]:
        """On a stream other than the default one, where nothing can be recorded: the caller's, or always the same."""
        current = torch.cuda.current_stream(device)
        if current != torch.cuda.default_stream(device):
            yield
            return
        self._stream = self._stream or torch.cuda.Stream(device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            yield
        current.wait_stream(self._stream)

    def _record(self, step: Callable[[], None]) -> None:
        graph = torch.cuda.CUDAGraph()
        # Without torch.cuda.graph, which waits for the whole GPU and gives all memory back first.
        pool = None if self._last is None else self._last.pool()
        graph.capture_begin(pool, capture_error_mode="thread_local")  # other threads may do as they like
        try:
            step()
        except BaseException:
            with suppress(RuntimeError):  # that it broke off
                graph.capture_end()
            raise
        graph.capture_end()
        self._graph, self._last = graph, None

    def _replay(self, times: int) -> None:
        marks: deque[Any] = deque()
        for number in range(times):
            self._graph.replay()
            if number % _APART == _APART - 1:
                marks.append(torch.cuda.Event(blocking=True))
                marks[-1].record()
                if len(marks) > _MARKS:
                    marks.popleft().synchronize()
