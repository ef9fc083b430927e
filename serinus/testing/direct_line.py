"""A line to ranks of this thread: a command is obeyed at once, its answers are handed out by the next `pump`.

For tests and benchmarks that drive a handoff port alone, without an engine and its own line.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from serinus.pd import PAGE_ANSWERS, PageAnswer, PageWorker

__all__ = ["DirectLine"]


class DirectLine:
    """A CommandLine (core/line.py) to the page workers of an engine."""

    def __init__(self, workers: Sequence[PageWorker]) -> None:
        """`workers`: one for each rank, in the order of ranks."""
        self.workers = tuple(workers)
        self._answers: list[tuple[int, PageAnswer]] = []
        self._takers: dict[type, Callable[[int, Any], None]] = {}

    @property
    def size(self) -> int:
        return len(self.workers)

    def command(self, command: Any, rank: int | None = None) -> None:
        """See CommandLine; done before it returns."""
        for worker in self.workers if rank is None else (self.workers[rank],):
            answer = worker.obey(command)
            if answer is not None:
                self._answers.append((worker.rank, answer))

    def subscribe(self, answer_type: type, take: Callable[[int, Any], None]) -> None:
        """See CommandLine. Raises AssertionError: page workers do not give such answers."""
        assert answer_type in PAGE_ANSWERS, f"pd: no page worker answers {answer_type.__name__}"
        self._takers[answer_type] = take

    def pump(self, wait_s: float = 0.0) -> None:
        """Hand out the answers; never waits, as none come by themselves."""
        answers, self._answers = self._answers, []
        for rank, answer in answers:
            self._takers[type(answer)](rank, answer)
