"""QueuedStorage: the PageStorage of an engine: workers that take pages from and to a shelf, in parallel.

Calls return at once; what ended is taken by `poll`. Questions and reads go before writes: a request waits for them.
Every failure of the shelf is a page that is missing, or that is not stored, and a line in the log; never more.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from serinus.core.clock import Clock
from serinus.core.errors import InvariantError
from serinus.core.log import get_logger
from serinus.core.moves import StorageDone
from serinus.core.parts import Part
from serinus.pool.host import HostPool
from serinus.pool.workers import Task, ThreadWorkers, Workers

__all__ = ["PageShelf", "QueuedStorage", "RareWarning", "ShelfCounts"]

_log = get_logger("pool.storage")
_THREADS = 2
_TASK_BYTES = 1 << 20
"""A worker takes so many bytes of an operation at a time."""
_TASK_KEYS = 512
"""...or so many keys of a question."""
_WARN_EVERY_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ShelfCounts:
    """What a shelf holds, and what happened to it since the start."""

    pages: int = 0
    byte_count: int = 0
    removed: int = 0
    """Pages removed to keep to the size bound."""
    bad: int = 0
    """Pages that were there, but torn, foreign or of another namespace."""


class PageShelf(Protocol):
    """Holds pages by part and key. Called from several threads at once."""

    def has(self, part: Part, key: bytes) -> bool:
        """Whether it is (probably) there; `load` may still find it missing or bad."""
        ...

    def load(self, part: Part, key: bytes, into: NDArray[np.uint8]) -> bool:
        """Fill `into` with the very bytes that were saved, or return False; then `into` may hold anything.

        Raises OSError where the medium fails: the page counts as missing.
        """
        ...

    def save(self, part: Part, key: bytes, data: NDArray[np.uint8]) -> None:
        """Store the bytes; cheap where they are stored already. Raises OSError: they are not stored."""
        ...

    def counts(self) -> ShelfCounts:
        """What is there now."""
        ...

    def close(self) -> None:
        """Nothing is asked any more."""
        ...


class RareWarning:
    """A warning that can come a thousand times a second, said twice a minute with how often it came."""

    def __init__(self, clock: Clock, every_s: float = _WARN_EVERY_S) -> None:
        self._clock, self._every_s = clock, every_s
        self._lock = threading.Lock()
        self._last: float | None = None
        self._silent = 0

    def say(self, text: str) -> None:
        """Log it, unless one was logged a moment ago."""
        with self._lock:
            now = self._clock.now()
            if self._last is not None and now - self._last < self._every_s:
                self._silent += 1
                return
            more = f" ({self._silent} more since the last such line)" if self._silent else ""
            self._last, self._silent = now, 0
        _log.warning("%s%s", text, more)


@dataclass(eq=False, slots=True)
class _Op:
    """One operation under way."""

    op: int
    what: str
    """query, read or write."""
    parts: tuple[Part, ...]
    keys: Sequence[bytes]
    pages: NDArray[np.int32]
    begin: float
    present: tuple[NDArray[np.bool_], ...]
    good: int
    """Leading keys of which nothing bad is known."""
    tasks: int = 0
    """Tasks that have not ended."""
    cancelled: bool = False
    error: str = ""
    byte_count: int = 0


@dataclass(frozen=True, slots=True)
class _Share:
    op: _Op
    start: int
    end: int


class QueuedStorage:
    """See the port PageStorage of `cache`. Belongs to the engine's thread; the shelf is used by its workers."""

    def __init__(
        self,
        shelf: PageShelf,
        *,
        host: Mapping[Part, HostPool],
        clock: Clock,
        workers: Workers | None = None,
        queued_pages_max: int = 1 << 16,
    ) -> None:
        """
        Args:
            shelf: where pages are kept; closed with this.
            host: the host pool of each part: where reads go and writes come from.
            clock: measures operations, and spaces warnings.
            workers: what carries operations out; None = two threads.
            queued_pages_max: of reads, and of writes; what comes beyond ends at once, as missing or not stored.
        """
        self.shelf = shelf
        self._host, self._clock, self._queued_max = host, clock, queued_pages_max
        self._warning = RareWarning(clock)
        self._soon: deque[_Share] = deque()
        self._later: deque[_Share] = deque()
        self._waiting = {"query": 0, "read": 0, "write": 0}
        self._open: dict[int, _Op] = {}
        self._ended: list[StorageDone] = []
        self._closing = False
        self._workers: Workers = workers or ThreadWorkers("serinus-storage", _THREADS)
        self._workers.start(self._take)

    # ---- the engine's side --------------------------------------------------------------------------------------

    def query(self, op: int, keys: Sequence[bytes], parts: Sequence[Part]) -> None:
        """Ask which keys are stored, for each part. What follows the first key that the first part lacks is of no
        use: it is not looked for and counts as missing. Of a prompt that is not stored one key is looked for.
        """
        self._submit(op, "query", tuple(parts), keys, np.zeros(0, np.int32), _TASK_KEYS)

    def read(self, op: int, part: Part, keys: Sequence[bytes], pages: NDArray[np.int32]) -> None:
        """Fill host pages, in order, up to the first that is missing, torn or foreign."""
        self._submit(op, "read", (part,), keys, pages, self._task_pages(part))

    def write(self, op: int, part: Part, keys: Sequence[bytes], pages: NDArray[np.int32]) -> None:
        """Store host pages, in order, up to the first that fails; what is stored already costs nothing."""
        self._submit(op, "write", (part,), keys, pages, self._task_pages(part))

    def cancel(self, op: int) -> None:
        """The answer is not needed any more; its StorageDone still comes, sooner."""
        with self._workers:
            if op in self._open:
                self._open[op].cancelled = True

    def poll(self) -> list[StorageDone]:
        """The operations that ended since the last poll."""
        with self._workers:
            self._workers.check()
            ended, self._ended = self._ended, []
        return ended

    def wait(self) -> list[StorageDone]:
        """Block until every operation has ended; what `poll` would return then. For tests and for shutting down."""
        with self._workers:
            self._workers.wait_for(lambda: not self._open)
        return self.poll()

    @property
    def open_count(self) -> int:
        """Operations that have not ended."""
        with self._workers:
            return len(self._open)

    def close(self, drain_s_max: float = 5.0) -> None:
        """Write what is queued, as far as that takes `drain_s_max` seconds; then end the threads."""
        with self._workers:
            self._workers.wait_for(lambda: not self._open, drain_s_max)
            self._closing = True
        self._workers.stop()
        self.shelf.close()

    def _task_pages(self, part: Part) -> int:
        return max(1, _TASK_BYTES // max(1, self._host[part].page_bytes))

    def _submit(
        self, op: int, what: str, parts: tuple[Part, ...], keys: Sequence[bytes], pages: NDArray[np.int32], step: int
    ) -> None:
        if what != "query" and (len(pages) != len(keys) or not _inside(pages, self._host[parts[0]].page_count)):
            raise InvariantError(
                f"pool: storage {what} {op} of {len(keys)} keys and {len(pages)} host pages, "
                f"expected as many, each inside of its pool"
            )
        present = tuple(np.zeros(len(keys), np.bool_) for _ in parts) if what == "query" else ()
        made = _Op(
            op=op, what=what, parts=parts, keys=keys, pages=pages, begin=self._clock.now(),
            present=present, good=len(keys),
        )  # fmt: skip
        tasks = [_Share(made, at, min(at + step, len(keys))) for at in range(0, len(keys), step)]
        full = False
        with self._workers:
            self._workers.check()
            if op in self._open or self._closing:
                raise InvariantError(f"pool: storage operation {op} submitted twice or after close, expected neither")
            full = self._waiting[what] + len(keys) > self._queued_max
            if full:
                made.good, made.error = 0, f"{self._waiting[what]} keys wait for a {what} already"
            self._open[op] = made
            if full or not tasks:
                self._end(made)
                self._workers.notify()
            else:
                made.tasks = len(tasks)
                self._waiting[what] += len(keys)
                (self._later if what == "write" else self._soon).extend(tasks)
                self._workers.tasks_added()
        if full:
            self._warning.say(f"pool: dropped a storage {what} of {len(keys)} keys: {made.error}")

    # ---- the workers --------------------------------------------------------------------------------------------

    def _take(self) -> Task | None:
        """Questions and reads go before writes. With the lock held."""
        if not self._soon and not self._later:
            return None
        task = self._soon.popleft() if self._soon else self._later.popleft()
        return lambda: self._carry(task)

    def _carry(self, task: _Share) -> None:
        op = task.op
        good, error, moved = task.start, "", 0
        try:
            if op.what == "query":
                good = self._look(task)
            else:
                page_bytes = self._host[op.parts[0]].page_bytes
                for good in range(task.start, task.end + 1):
                    if good == task.end or op.cancelled or op.good < task.start or not self._one(op, good):
                        break
                    moved += page_bytes
        except (OSError, MemoryError) as failure:
            error = f"{type(failure).__name__}: {failure}"
            self._warning.say(f"pool: storage {op.what} failed and counts as missing: {error}")
        with self._workers:
            self._waiting[op.what] -= task.end - task.start
            op.byte_count += moved
            op.error = op.error or error
            if good < task.end:
                op.good = min(op.good, good)
            op.tasks -= 1
            if not op.tasks:
                self._end(op)
            self._workers.notify()

    def _look(self, task: _Share) -> int:
        """Look for the keys of a share; index of the first one that was not looked for or that the first part lacks."""
        op, end = task.op, task.end
        for part, present in zip(op.parts, op.present, strict=True):
            for i in range(task.start, end):
                if op.cancelled or i >= op.good:
                    return i
                present[i] = self.shelf.has(part, op.keys[i])
                if not present[i] and part is op.parts[0]:
                    end = i
                    break
        return end

    def _one(self, op: _Op, index: int) -> bool:
        """Move one page; False: it is missing."""
        part = op.parts[0]
        page = self._host[part].data_PY[int(op.pages[index])]
        if op.what == "read":
            return self.shelf.load(part, op.keys[index], page)
        self.shelf.save(part, op.keys[index], page)
        return True

    def _end(self, op: _Op) -> None:
        """With the lock held: no worker touches its pages any more."""
        del self._open[op.op]
        self._ended.append(
            StorageDone(
                op=op.op,
                present=op.present,
                good=0 if op.what == "query" else op.good,
                error=op.error,
                seconds=self._clock.now() - op.begin,
                byte_count=op.byte_count,
            )
        )


def _inside(pages: NDArray[np.int32], page_count: int) -> bool:
    return not len(pages) or 0 < int(pages.min()) <= int(pages.max()) < page_count
