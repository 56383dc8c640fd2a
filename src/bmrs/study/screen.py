"""How far a study is, for a person: live on a terminal, a line now and then elsewhere."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from bmrs.study.footers import duration


@dataclass
class _Task:
    """One of those a setting consists of, while it is computed and after."""

    networks: int
    since: float
    done: int = 0
    total: int = 0
    first: int = -1  # what an earlier attempt did says nothing about the speed of this one
    running: bool = True

    def rate(self, now: float) -> float:
        """Steps per second; 0 where it is not known."""
        steps = self.done - self.first
        return (
            steps / (now - self.since) if self.running and self.first >= 0 and steps > 0 and now > self.since else 0.0
        )


@dataclass
class _Setting:
    """A line of the screen."""

    tasks: dict[str, _Task] = field(default_factory=dict)
    expected: int = 1  # tasks
    ended: str = ""
    said: float = 0.0

    def steps(self) -> tuple[int, int]:
        """Done, and in all: tasks that have not begun are as long as those that have."""
        totals = [task.total for task in self.tasks.values() if task.total]
        mean = sum(totals) / len(totals) if totals else 0.0
        return sum(task.done for task in self.tasks.values()), round(mean * max(self.expected, len(self.tasks)))

    def running(self) -> int:
        return sum(task.running for task in self.tasks.values())

    def left(self) -> str:
        now, (done, total) = time.monotonic(), self.steps()
        rate = sum(task.rate(now) for task in self.tasks.values())
        return f"{duration((total - done) / rate)} left" if rate else ""


class Screen:
    """One line per setting, however many tasks it consists of: live on a terminal, now and then elsewhere."""

    def __init__(self, console: Console, keys: Sequence[str], steps: str = "epochs", every: float = 30.0) -> None:
        self.console, self.steps, self.every = console, steps, every
        self.settings = {key: _Setting() for key in keys}
        self.footer = ""
        self.live = Live(get_renderable=lambda: self, console=console, refresh_per_second=4)

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.footer = ""
        self.live.stop()

    def expect(self, key: str, tasks: int) -> None:
        """How many tasks a setting consists of."""
        self.settings[key].expected = tasks

    def begin(self, key: str, networks: int, task: str = "") -> None:
        """A task of a setting begins, or begins again."""
        setting = self.settings[key]
        if (again := setting.tasks.get(task)) is None:
            self._say(f"{task or key}: {'one network' if networks == 1 else f'{networks} networks side by side'}")
        setting.said = time.monotonic()
        setting.tasks[task] = _Task(networks, setting.said, *((again.done, again.total) if again else ()))

    def progress(self, key: str, done: int, total: int, task: str = "") -> None:
        setting, now = self.settings[key], time.monotonic()
        own = setting.tasks[task]
        if own.first < 0:
            own.first, own.since = done, now
        own.done, own.total = done, total
        running = sum(one.running() for one in self.settings.values())
        if now - setting.said >= self.every * max(1, running):  # a line now and then, whoever it is about
            setting.said = now
            self._say(f"{key}: {' of '.join(map(str, setting.steps()))} {self.steps}, {setting.left() or 'going on'}")

    def ended_task(self, key: str, task: str, *, done: bool = True) -> None:
        """A task is not computed any more: it is ``done``, or lost."""
        if (own := self.settings[key].tasks.get(task)) is not None:
            own.running = False
            own.done = own.total if done else own.done

    def end(self, key: str, seconds: float, note: str = "") -> None:
        """A setting is done."""
        setting = self.settings[key]
        setting.ended = f"{duration(seconds)}{note}"
        for task in setting.tasks.values():
            task.running = False
        self._say(f"{key}: {setting.ended}")

    def status(self, line: str) -> None:
        """What an engine has to say about all tasks, below the lines."""
        self.footer = line

    def note(self, about: str, line: str) -> None:
        """Something to read, above the lines."""
        self.console.print(Text.assemble((f"{about}: ", "yellow"), line), soft_wrap=not self.console.is_terminal)

    def _say(self, line: str) -> None:
        if not self.console.is_terminal:
            self.console.print(line, highlight=False, soft_wrap=True)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.render(options.max_width)

    def render(self, width: int = 120) -> Table:
        rows = Table.grid(padding=(0, 2))
        bar = min(30, max(4, width - 72))
        for key, setting in self.settings.items():
            done, total = setting.steps()
            if setting.ended:
                rows.add_row(key, ProgressBar(total=1, completed=1, width=bar), "", setting.ended)
            elif setting.tasks:
                steps = f"{done}/{total} {self.steps}" if total else "preparing"
                networks = sum(task.networks for task in setting.tasks.values())
                what = "one network" if networks == 1 else f"{networks} networks"
                if setting.expected > 1:
                    what = f"{setting.running()} of {setting.expected} running"
                rows.add_row(
                    Text(key, style="bold"), ProgressBar(total=max(total, 1), completed=done, width=bar), steps,
                    f"{what}  {setting.left()}",
                )  # fmt: skip
            else:
                rows.add_row(Text(key, style="dim"))
        if self.footer:
            whole = Table.grid()
            whole.add_row(rows)
            whole.add_row(Text(self.footer, style="dim", overflow="ellipsis", no_wrap=True))
            return whole
        return rows
