"""How much time a command has, and what it does when that is used up."""

import math
import time


class TimeUpError(Exception):
    """The time is used up; what was done is kept."""


class Deadline:
    """``seconds`` from when it is made; no end without them."""

    MARGIN = 5.0  # seconds for checkpoints, files and the way out

    def __init__(self, seconds: float | None = None) -> None:
        self._end = math.inf if seconds is None else time.monotonic() + seconds
        self.longest = 0.0  # seconds of the longest epoch so far: another network's first will not be much longer

    def left(self) -> float:
        return self._end - time.monotonic() - self.MARGIN

    def allows(self, seconds: float) -> bool:
        """Whether something that takes so long, or a tenth more, would end in time."""
        return 1.1 * seconds <= self.left()
