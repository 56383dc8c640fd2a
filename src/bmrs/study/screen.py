"""How far a study is, for a person: live on a terminal, a line now and then elsewhere."""

import time
from collections.abc import Sequence
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from bmrs.study.footers import duration


class Screen:
    """One line per setting: live on a terminal, now and then elsewhere."""

    def __init__(self, console: Console, keys: Sequence[str], steps: str = "epochs", every: float = 30.0) -> None:
        self.console, self.steps, self.every = console, steps, every
        self.ended: dict[str, str] = dict.fromkeys(keys, "")
        self.current, self.networks, self.done, self.total, self.first = "", 0, 0, 0, -1
        self.since = self.said = time.monotonic()
        self.live = Live(get_renderable=self.render, console=console, refresh_per_second=4)

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.live.stop()

    def begin(self, key: str, networks: int) -> None:
        self.current, self.networks, self.done, self.total, self.first = key, networks, 0, 0, -1
        self.since = self.said = time.monotonic()
        self._say(f"{key}: {networks} networks side by side")

    def progress(self, done: int, total: int) -> None:
        if self.first < 0:  # what an earlier attempt did says nothing about the speed of this one
            self.first, self.since = done, time.monotonic()
        self.done, self.total = done, total
        if time.monotonic() - self.said >= self.every:
            self.said = time.monotonic()
            self._say(f"{self.current}: {done} of {total} {self.steps}, {self._left() or 'going on'}")

    def end(self, key: str, seconds: float, note: str = "") -> None:
        self.ended[key], self.current = f"{duration(seconds)}{note}", ""
        self._say(f"{key}: {self.ended[key]}")

    def _left(self) -> str:
        if (steps := self.done - self.first) <= 0 or self.first < 0:
            return ""
        return f"{duration((time.monotonic() - self.since) / steps * (self.total - self.done))} left"

    def _say(self, line: str) -> None:
        if not self.console.is_terminal:
            self.console.print(line, highlight=False, soft_wrap=True)

    def render(self) -> Table:
        rows = Table.grid(padding=(0, 2))
        for key, ended in self.ended.items():
            if ended:
                rows.add_row(key, ProgressBar(total=1, completed=1, width=30), "", ended)
            elif key == self.current:
                bar = ProgressBar(total=max(self.total, 1), completed=self.done, width=30)
                steps = f"{self.done}/{self.total} {self.steps}" if self.total else "preparing"
                rows.add_row(f"[bold]{key}[/bold]", bar, steps, f"{self.networks} networks  {self._left()}")
            else:
                rows.add_row(Text(key, style="dim"))
        return rows
