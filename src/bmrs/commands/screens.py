"""What a person sees: progress, live on a terminal and a line now and then elsewhere, and tables."""

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar, Self

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from bmrs.study.footers import duration


class Screen:
    """Phases of a training, one below the other, and the units left while it prunes."""

    TITLES: ClassVar = {"whole": "whole network", "prune": "pruning", "fine-tune": "fine-tuning"}
    MOST = 6  # structures that have a line each; more share one

    def __init__(self, console: Console, phases: Iterable[str], *, every: float = 30.0) -> None:
        self.console, self.every = console, every
        names = list(phases)
        self.titles = {name: f"{n}/{len(names)}  {self.TITLES[name]}" for n, name in enumerate(names, start=1)}
        self.done: dict[str, tuple[float, int]] = {}  # epochs done, with the share of the one that runs, and in all
        self.values: dict[str, str] = {}
        self.units: dict[str, int] = {}
        self.widths: dict[str, int] = {}
        self.begun: dict[str, tuple[float, float]] = {}  # when a phase was first heard of, and where it was then
        self.said = time.monotonic()
        self.live = Live(get_renderable=self.render, console=console, refresh_per_second=4)

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.console.is_terminal:
            self.live.stop()

    def step(self, phase: str, epoch: int, epochs: int, step: int, steps: int) -> None:
        """In an epoch; ``epoch`` of them are done."""
        self._at(phase, epoch + step / max(steps, 1), epochs)
        if time.monotonic() - self.said >= self.every:
            self._say(f"{self._head(phase)}  step {step} of {steps}  {self._left(phase)}")

    def epoch(self, phase: str, epoch: int, epochs: int, value: str, units: Mapping[str, int] | None = None) -> None:
        """At the end of an epoch; ``value``: how good the network is by now."""
        self._at(phase, epoch, epochs)
        self.values[phase] = value
        if units:
            self.units = dict(units)
            self.widths = {name: max(left, self.widths.get(name, 0)) for name, left in units.items()}
        if epoch % 5 == 0 or epoch in (1, epochs) or time.monotonic() - self.said >= self.every:
            shown = "  ".join(f"{name} {left}" for name, left in self._shown().items()) if units else ""
            self._say(f"{self._head(phase)}  {value}  {shown}".rstrip())

    def _at(self, phase: str, done: float, epochs: int) -> None:
        self.begun.setdefault(phase, (time.monotonic(), int(done)))
        self.done[phase] = done, epochs

    def _head(self, phase: str) -> str:
        done, epochs = self.done[phase]
        return f"{self.titles[phase]:<20} epoch {int(done):>3}/{epochs}"

    def _say(self, line: str) -> None:
        self.said = time.monotonic()
        if not self.console.is_terminal:
            self.console.print(line, highlight=False, soft_wrap=True)

    def _left(self, phase: str) -> str:
        (since, first), (done, epochs) = self.begun[phase], self.done[phase]
        if done <= first or done >= epochs:
            return ""
        return f"{duration((time.monotonic() - since) / (done - first) * (epochs - done))} left"

    def _shown(self) -> dict[str, int]:
        return self.units if len(self.units) <= self.MOST else {"units": sum(self.units.values())}

    def render(self) -> RenderableType:
        rows = Table.grid(padding=(0, 2))
        for _ in range(5):
            rows.add_column(no_wrap=True)
        width = max(6, min(30, self.console.width - 74))  # what is beside the bar needs the rest
        for phase, title in self.titles.items():
            if phase not in self.done:
                rows.add_row(Text(title, style="dim"))
                continue
            done, epochs = self.done[phase]
            rows.add_row(
                title, ProgressBar(total=epochs, completed=done, width=width), f"epoch {int(done)}/{epochs}",
                f"[bold]{self.values.get(phase, '')}[/bold]", self._left(phase),
            )  # fmt: skip
            if phase != "prune":
                continue
            widths = self.widths if len(self.units) <= self.MOST else {"units": sum(self.widths.values())}
            for name, left in self._shown().items():
                most = widths[name]
                bar = ProgressBar(total=most, completed=left, width=width, complete_style="cyan", finished_style="cyan")
                label = Text(f"     {name}", overflow="ellipsis", no_wrap=True)
                rows.add_row(label, bar, f"[bold]{left:,}[/bold] of {most:,}", "units left")
        return rows


def comparison(columns: Sequence[str], rows: Iterable[Sequence[str]], title: str = "Before and after") -> Table:
    """What was, what is, and what became of it: words to the left, numbers to the right."""
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("")
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*row)
    return table


def fewer(before: float, after: float) -> str:
    """
    >>> fewer(61_706, 2_738)
    '-95.6%'
    """
    return f"{after / before - 1:+.1%}" if before else "–"


def counts(title: str, before: int, after: int) -> tuple[str, str, str, str]:
    """A row of :func:`comparison`."""
    return title, f"{before:,}", f"{after:,}", fewer(before, after)


def structures(rows: Iterable[tuple[str, str, int, int]]) -> Table:
    """Name, kind, units before and after."""
    table = Table(title="Units", title_justify="left", title_style="bold")
    table.add_column("structure", overflow="fold")
    table.add_column("kind")
    for title in ("before", "after", "removed"):
        table.add_column(title, justify="right")
    for name, kind, before, after in rows:
        table.add_row(name, kind, f"{before:,}", f"{after:,}", f"{1 - after / before:.0%}" if before else "–")
    return table


def say(console: Console, prose: RenderableType) -> None:
    """Broken between words on a terminal, and in one line elsewhere."""
    console.print(prose, highlight=False, soft_wrap=not console.is_terminal)


def paths(console: Console, files: Mapping[str, object]) -> None:
    """What was written, one line each."""
    for what, path in files.items():
        console.print(f"{what}: {path}", highlight=False, soft_wrap=True)


def next_command(console: Console, command: str, why: str) -> None:
    console.print(f"[dim]{why}[/dim]\n  {command}", highlight=False, soft_wrap=True, markup=True)
