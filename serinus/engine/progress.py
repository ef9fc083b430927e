"""A progress bar for long work: steps or prompts done, tokens per second. Silent where there is no terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress


class Progress:
    """`with Progress("Processed prompts", total=8, show=True) as bar: bar.advance(done=1, tokens=3)`."""

    def __init__(self, title: str, *, total: int, show: bool) -> None:
        self._bar: RichProgress | None = None
        self._tokens = 0
        if show and sys.stderr.isatty():
            self._bar = RichProgress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[rate]}"),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                console=Console(stderr=True),
                refresh_per_second=2,  # the bar shares the cores with the work
            )
            self._task = self._bar.add_task(title, total=total, rate="")

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, *, done: int, tokens: int) -> None:
        """More prompts done, more tokens generated."""
        if self._bar is None:
            return
        self._tokens += tokens
        elapsed = self._bar.tasks[0].elapsed or 0.0
        rate = f"{self._tokens / elapsed:.0f} tok/s" if elapsed and self._tokens else ""
        self._bar.update(self._task, advance=done, rate=rate)


@contextmanager
def counted(title: str, total: int, *, show: bool = True) -> Iterator[Callable[[], None]]:
    """A bar over so many equal steps; calling what it gives says that one is done."""
    with Progress(title, total=total, show=show) as bar:
        yield lambda: bar.advance(done=1, tokens=0)
