"""Workers: carry out the tasks of a mover or a storage beside the engine's thread.

`ThreadWorkers` are threads; a simulation puts its own in their place, which run tasks when its timeline says so. The
owner's state is guarded by the workers' lock (`with workers:`). Knows nothing of copies or files.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from serinus.core.errors import InvariantError

Task = Callable[[], None]


class Workers(Protocol):
    """What carries out tasks; also the lock of their owner's state. One owner each."""

    def start(
        self, take: Callable[[], Task | None], around: Callable[[], AbstractContextManager[object]] = nullcontext
    ) -> None:
        """Begin. `take` gives the next task, None = there is none now; called with the lock held. Tasks run without
        it, inside of what `around` makes."""

    def __enter__(self) -> object:
        """Take the lock of the owner's state."""

    def __exit__(self, *raised: object) -> None:
        """Give the lock back."""

    def tasks_added(self) -> None:
        """There is something to take. With the lock held."""

    def notify(self) -> None:
        """What a waiting thread waits for may be so now. With the lock held."""

    def wait_for(self, holds: Callable[[], object], timeout_s: float | None = None) -> None:
        """Return once this holds, a worker has broken, or so much time has passed. With the lock held."""

    def check(self) -> None:
        """Raises InvariantError: a task raised, so no further one is carried out."""

    def stop(self) -> None:
        """End: tasks that have not begun never will. Without the lock; may be called again."""


class ThreadWorkers:
    """Workers that are daemon threads."""

    def __init__(self, name: str, count: int = 1) -> None:
        """`name`: of the threads, as errors and debuggers show it."""
        self._name, self._count = name, count
        self._news = threading.Condition()
        self._take: Callable[[], Task | None] = lambda: None
        self._around: Callable[[], AbstractContextManager[object]] = nullcontext
        self._stopping = False
        self._broken: BaseException | None = None
        self._threads: list[threading.Thread] = []

    def start(
        self, take: Callable[[], Task | None], around: Callable[[], AbstractContextManager[object]] = nullcontext
    ) -> None:
        self._take, self._around = take, around
        self._threads = [
            threading.Thread(target=self._run, name=f"{self._name}-{i}", daemon=True) for i in range(self._count)
        ]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> object:
        return self._news.__enter__()

    def __exit__(self, *raised: object) -> None:
        self._news.release()

    def tasks_added(self) -> None:
        self._news.notify_all()

    def notify(self) -> None:
        self._news.notify_all()

    def wait_for(self, holds: Callable[[], object], timeout_s: float | None = None) -> None:
        self._news.wait_for(lambda: self._broken is not None or holds(), timeout_s)

    def check(self) -> None:
        """Raises InvariantError: a task raised."""
        if self._broken is not None:
            raise InvariantError(f"pool: thread {self._name} broke: {self._broken!r}") from self._broken

    def stop(self) -> None:
        with self._news:
            self._stopping = True
            self._news.notify_all()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        try:
            with self._around():
                while (task := self._next()) is not None:
                    task()
        except BaseException as error:
            with self._news:
                self._broken = error
                self._news.notify_all()
            raise

    def _next(self) -> Task | None:
        with self._news:
            while not self._stopping:
                task = self._take()
                if task is not None:
                    return task
                self._news.wait()
        return None
