"""Executor: who does what the scheduler decided. One rank does it at once, in this process: LocalExecutor.

An engine of several ranks has another one, of the same face (ranks/executor.py). Torch-free: runners are given.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from typing import Protocol

from serinus.core.plan import StepPlan, StepResult
from serinus.wire import ZmqChannel

__all__ = ["Executor", "LocalExecutor", "Runs"]


class Runs(Protocol):
    """What a runner is to an executor."""

    def run(self, plan: StepPlan) -> StepResult | None:
        """Do the step; None on a rank that does not sample."""
        ...


class Executor(Protocol):
    """Plans go in, results come out, in the same order."""

    @property
    def depth(self) -> int:
        """Plans that may be under way at once."""
        ...

    @property
    def channels(self) -> Sequence[ZmqChannel]:
        """What to wait on for results."""
        ...

    @property
    def sound(self) -> bool:
        """Whether all who do the work are there, as far as is known."""
        ...

    @property
    def journals(self) -> bool:
        """Whether `record` is to be told where requests go."""
        ...

    def record(self, moves: Sequence[tuple[str, str]], ungranted: Collection[str]) -> None:
        """Where requests went since the last call (rid, queue; "" = gone), and who still waits for a grant."""
        ...

    def submit(self, plan: StepPlan) -> None:
        """Begin a step. Raises InvariantError where `depth` are under way."""
        ...

    def take(self) -> StepResult | None:
        """The result of the oldest step that was submitted; None = it is not there yet. Never blocks."""
        ...

    def flush(self) -> None:
        """The turn is over: whatever was ordered or recorded leaves now."""
        ...

    def pump(self, wait_s: float) -> None:
        """Flush, then take in what ranks said; wait up to so long where nothing has come."""
        ...

    def close(self) -> None:
        """End those who do the work. May be called again."""
        ...


class LocalExecutor:
    """One rank, in this process: `submit` does it all."""

    depth = 1
    sound = True
    journals = False
    channels: Sequence[ZmqChannel] = ()

    def __init__(self, runner: Runs) -> None:
        self._runner = runner
        self._done: deque[StepResult | None] = deque()

    def record(self, moves: Sequence[tuple[str, str]], ungranted: Collection[str]) -> None:
        """Nobody else needs to know."""

    def submit(self, plan: StepPlan) -> None:
        self._done.append(self._runner.run(plan))

    def take(self) -> StepResult | None:
        return self._done.popleft() if self._done else None

    def flush(self) -> None:
        """Nothing is ever left behind."""

    def pump(self, wait_s: float) -> None:
        """Nobody else says anything."""

    def close(self) -> None:
        """Nobody to end."""
