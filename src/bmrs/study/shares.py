"""What tasks that run side by side in this process use together, divided equally among them: time, energy.

The shares of all add up to what was used, however they overlap.

>>> clock = iter([10.0, 30.0, 34.0])
>>> first, second = (Share("doctest", lambda: clock, next) for _ in range(2))  # at 0, and at 10
>>> second.used(), first.close()  # at 30, at 34
(10.0, 22.0)
"""

import threading
import time
from collections.abc import Callable, Hashable
from typing import Any


class _Counted:
    """A counter and those who use what it counts."""

    def __init__(self, source: Any, count: Callable[[Any], float]) -> None:
        self.source, self.count, self.last = source, count, 0.0
        self.users: set[Share] = set()

    def read(self) -> None:
        now = self.count(self.source)
        for user in self.users:
            user._own += (now - self.last) / len(self.users)
        self.last = now


_counted: dict[Hashable, _Counted] = {}
_lock = threading.Lock()


class Share:
    """One user's part of what is used from now on, until ``close``.

    ``name``: of what is used. ``make``: makes its counter, for the first of those who use it at a time; ``count``: what
    that has counted since.
    """

    def __init__(self, name: Hashable, make: Callable[[], Any], count: Callable[[Any], float]) -> None:
        self._name, self._own = name, 0.0
        self.divided = False  # whether there ever was another user
        with _lock:
            if (counted := _counted.get(name)) is None:
                counted = _Counted(make(), count)
            else:
                counted.read()
            _counted[name] = self._counted = counted
            counted.users.add(self)
            if len(counted.users) > 1:
                for user in counted.users:
                    user.divided = True

    @property
    def source(self) -> Any:
        """What was made."""
        return self._counted.source

    def used(self) -> float:
        """So far; once closed, in all."""
        with _lock:
            if self in self._counted.users:
                self._counted.read()
            return self._own

    def close(self) -> float:
        """The end; returns what was used in all."""
        try:
            return self.used()
        finally:
            with _lock:
                self._counted.users.discard(self)
                if not self._counted.users:
                    _counted.pop(self._name, None)


def seconds() -> Share:
    """The time of tasks that run side by side: all together, as long as they took."""
    return Share("seconds", time.perf_counter, lambda begun: time.perf_counter() - begun)
