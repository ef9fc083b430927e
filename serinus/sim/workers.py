"""SimWorkers: what stands in for the threads of a mover or a storage (pool.Workers), on the timeline of the simulation.

A task is carried out some time after it was added, or at once where the engine's thread waits for it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from serinus.core.errors import InvariantError
from serinus.pool import Task


class SimWorkers:
    """Runs the tasks of one mover or storage of one rank, one after the other."""

    def __init__(self, later: Callable[[Callable[[], None]], None], ended: Callable[[], None]) -> None:
        """
        Args:
            later: calls this some time later, unless the engine was killed meanwhile.
            ended: a task was carried out.
        """
        self._later, self._ended = later, ended
        self._take: Callable[[], Task | None] = lambda: None
        self._around: Callable[[], AbstractContextManager[object]] = nullcontext
        self._due = False

    def start(
        self, take: Callable[[], Task | None], around: Callable[[], AbstractContextManager[object]] = nullcontext
    ) -> None:
        self._take, self._around = take, around

    def __enter__(self) -> object:
        return self

    def __exit__(self, *raised: object) -> None:
        """One thread needs no lock."""

    def tasks_added(self) -> None:
        if not self._due:
            self._due = True
            self._later(self._work)

    def notify(self) -> None:
        """Nothing waits outside of `wait_for`."""

    def wait_for(self, holds: Callable[[], object], timeout_s: float | None = None) -> None:
        """Raises InvariantError: it would never hold."""
        while not holds():
            if not self._one():
                if timeout_s is not None:
                    return
                raise InvariantError("sim: a wait for copies that nothing will ever end")

    def check(self) -> None:
        """Nothing is broken: a task that raises ends the run."""

    def stop(self) -> None:
        self._take = lambda: None

    def _work(self) -> None:
        self._due = False
        if self._one():
            self._ended()
            self.tasks_added()

    def _one(self) -> bool:
        task = self._take()
        if task is None:
            return False
        with self._around():
            task()
        return True
