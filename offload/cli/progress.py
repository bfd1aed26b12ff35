"""What a run shows while it works: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import typer

from .. import metrics
from ..bytesize import format_bytes
from ..ledger import Ledger
from .loads import settings_text
from .search import Progress

Advance = Callable[[int, int], None]
"""Called with (done, total) of a task."""

PLAIN_SECONDS = 5.0
"""Between two lines about a task that takes long."""


@dataclass(frozen=True, slots=True)
class Figures:
    """One step's numbers; rates are over the steps since the last ones shown."""

    step: int
    steps: int
    loss: float
    tokens_per_second: float
    gb_per_second: dict[str, float]
    rss_bytes: int
    seconds_left: float

    def __str__(self) -> str:
        rates = "".join(f"  {link} {rate:.2f} GB/s" for link, rate in self.gb_per_second.items())
        return (
            f"step {self.step}/{self.steps}  loss {self.loss:.4f}  {self.tokens_per_second:,.0f} tokens/s"
            f"{rates}  rss {format_bytes(self.rss_bytes)}  left {clock(self.seconds_left)}"
        )


class Meter:
    """Turns the ledger and the clock into figures. Reads; waits for nothing and moves nothing."""

    def __init__(self, ledger: Ledger, *, steps: int, tokens_per_step: int, first: int = 0) -> None:
        """
        Args:
            first: steps that other processes have made.
        """
        self._ledger, self._steps, self._tokens_per_step = ledger, steps, tokens_per_step
        self._begin = self._shown_at = time.perf_counter()
        self._first = self._shown_step = first
        self._shown_bytes: Counter[str] = Counter()

    @property
    def seconds(self) -> float:
        """Since the first step began."""
        return time.perf_counter() - self._begin

    def figures(self, step: int, loss: float) -> Figures:
        now = time.perf_counter()
        seconds = max(now - self._shown_at, 1e-9)
        moved = self._ledger.link_bytes()
        rates = {
            link: (size - self._shown_bytes[link]) / seconds / 1e9 for link, size in sorted(moved.items())
        }
        tokens = (step - self._shown_step) * self._tokens_per_step
        self._shown_at, self._shown_step, self._shown_bytes = now, step, moved
        return Figures(
            step=step,
            steps=self._steps,
            loss=loss,
            tokens_per_second=tokens / seconds,
            gb_per_second=rates,
            rss_bytes=metrics.rss_bytes(),
            seconds_left=(now - self._begin) / (step - self._first) * (self._steps - step),
        )


class PlainDisplay:
    """Lines: of a step every so many steps, the first and the last."""

    def __init__(self, steps_per_line: int, *, to_stderr: bool = False) -> None:
        self._steps_per_line, self._to_stderr = steps_per_line, to_stderr

    def say(self, text: str) -> None:
        typer.echo(text, err=self._to_stderr)
        sys.stdout.flush()

    @contextmanager
    def task(self, name: str) -> Iterator[Advance]:
        self.say(f"{name} ...")
        shown_at = time.monotonic()

        def advance(done: int, total: int) -> None:
            nonlocal shown_at
            if time.monotonic() - shown_at >= PLAIN_SECONDS:
                shown_at = time.monotonic()
                self.say(f"{name}: {done / max(total, 1):.0%}")

        yield advance

    @contextmanager
    def training(self, steps: int) -> Iterator[Callable[[Figures], None]]:
        self.say(f"training {steps} steps ...")
        yield lambda figures: self.say(str(figures))

    @contextmanager
    def search(self) -> Iterator[Callable[[Progress], None]]:
        """Progress of a search for the best settings: a line for each round."""
        shown = 0

        def show(progress: Progress) -> None:
            nonlocal shown
            if progress.round > shown:
                shown = progress.round
                self.say(f"  {describe_search(progress)}")

        yield show

    def wants(self, step: int, steps: int) -> bool:
        """Whether the figures of this step will be shown."""
        every = self._steps_per_line
        return every > 0 and (step in (1, steps) or step % every == 0)


class LiveDisplay:
    """One line that is redrawn, by rich; what is said scrolls above it."""

    def __init__(self, *, to_stderr: bool = False) -> None:
        from rich.console import Console

        self._console = Console(highlight=False, stderr=to_stderr)

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)

    @contextmanager
    def task(self, name: str) -> Iterator[Advance]:
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
        with Progress(*columns, console=self._console, transient=True) as progress:
            task = progress.add_task(name, total=None)
            yield lambda done, total: progress.update(task, completed=done, total=total)

    @contextmanager
    def training(self, steps: int) -> Iterator[Callable[[Figures], None]]:
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        columns = (
            SpinnerColumn(),
            BarColumn(bar_width=20),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
        )
        with Progress(*columns, console=self._console, refresh_per_second=4) as progress:
            task = progress.add_task(f"step 1/{steps} runs", total=steps)
            yield lambda figures: progress.update(task, completed=figures.step, description=str(figures))

    @contextmanager
    def search(self) -> Iterator[Callable[[Progress], None]]:
        from rich import progress as bars

        columns = (
            bars.BarColumn(bar_width=12),
            bars.TaskProgressColumn(),
            bars.TextColumn("{task.description}", markup=False),
        )
        with bars.Progress(*columns, console=self._console, transient=True, refresh_per_second=4) as live:
            task = live.add_task("", total=1.0)
            yield lambda progress: live.update(
                task, completed=progress.share, description=describe_search(progress)
            )

    def wants(self, step: int, steps: int) -> bool:
        return True


Display = PlainDisplay | LiveDisplay


def make_display(*, quiet: bool, steps_per_line: int = 0, to_stderr: bool = False) -> Display:
    """Live on a terminal, plain elsewhere and where it should be quiet; beside results for programs on stderr."""
    if quiet or not (sys.stderr if to_stderr else sys.stdout).isatty():
        return PlainDisplay(steps_per_line, to_stderr=to_stderr)
    return LiveDisplay(to_stderr=to_stderr)


def describe_search(progress: Progress) -> str:
    """``round 2/4, 24 settings; best 1.52 GB/s: io_uring 1 MiB x 32``."""
    text = f"round {progress.round}/{progress.rounds}, {progress.settings} settings"
    if progress.best is None:
        return text
    return f"{text}; best {progress.best_rate:.2f} GB/s: {settings_text(progress.best)}"


def clock(seconds: float) -> str:
    """``1:02:03``, or ``2:03`` below an hour."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
