"""QueuedStorage: the PageStorage of an engine: workers that take pages from and to a shelf, in parallel.

Calls return at once; what ended is taken by `poll`. Questions, reads and removals go before writes: a request waits for
them. Every failure of the shelf is a page that is missing, or that is not stored, and a line in the log; never more.
Pages are checked on the host before they are stored and after they were read, where there is something to check them
by: a damaged page would get a file with a sound header.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from serinus.core.clock import Clock
from serinus.core.errors import InvariantError
from serinus.core.log import get_logger
from serinus.core.moves import PageOrigin, StorageDone
from serinus.core.parts import Part
from serinus.pool.host import HostPool
from serinus.pool.workers import Task, ThreadWorkers, Workers

_log = get_logger("pool.storage")
_THREADS = 2
_TASK_BYTES = 1 << 20
"""A worker takes so many bytes of an operation at a time."""
_TASK_KEYS = 512
"""...or so many keys of a question."""
_WARN_EVERY_S = 30.0
_DRAIN_S_MAX = 5.0
_LOOK_EVERY_S = 1.0
"""Seconds between two looks at what other engines removed; before a question there is one in any case."""
_NO_PAGES = np.zeros(0, np.int32)
_NO_KEY = bytes(16)
"""Of a page before that is not known."""


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

    def load(self, part: Part, key: bytes, into: NDArray[np.uint8]) -> bool:
        """Fill `into` with the very bytes that were saved, or return False; then `into` may hold anything.

        Raises OSError where the medium fails: the page counts as missing.
        """

    def save(self, part: Part, key: bytes, data: NDArray[np.uint8], before: bytes) -> None:
        """Store the bytes; cheap where they are stored already. `before`: key of the page that this one continues.
        Raises OSError: they are not stored."""

    def remove(self, keys: Collection[bytes]) -> int:
        """Delete these pages, of every part, and all that continue them; how many there were. Other users of the
        medium learn it. Raises OSError: some may be there still."""

    def recalled(self) -> Sequence[bytes]:
        """Keys of pages that other users of the medium removed since the last call. From one thread at a time."""

    def counts(self) -> ShelfCounts:
        """What is there now."""

    def close(self) -> None:
        """Nothing is asked any more."""


class PageCheck(Protocol):
    """Holds host pages against what vouches for them. Called from several threads at once."""

    def __call__(
        self, part: Part, pages: NDArray[np.int32], origin: PageOrigin | None, first: int, /
    ) -> NDArray[np.bool_]:
        """Which of these host pages are sound. They are the pages `first`, `first` + 1, ... of what `origin` says."""


class RareWarning:
    """A warning that can come a thousand times a second, said twice a minute with how often it came."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._last: float | None = None
        self._silent = 0

    def say(self, text: str) -> None:
        """Log it, unless one was logged a moment ago."""
        with self._lock:
            now = self._clock.now()
            if self._last is not None and now - self._last < _WARN_EVERY_S:
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
    """query, read, write or removal."""
    parts: tuple[Part, ...]
    keys: Sequence[bytes]
    pages: NDArray[np.int32]
    origin: PageOrigin | None
    begin: float
    present: tuple[NDArray[np.bool_], ...]
    good: int
    """Leading keys of which nothing bad is known; of a removal, pages that went."""
    bad: list[int] = field(default_factory=list)
    """Pages that are not what their stamps vouch for."""
    writes: set[int] = field(default_factory=set)
    """Of a removal: writes that were under way when it was asked for. It is done again once they have ended."""
    tasks: int = 0
    """Tasks that have not ended."""
    cancelled: bool = False
    error: str = ""
    byte_count: int = 0


@dataclass(eq=False, slots=True)
class _Share:
    """The keys of an operation that one worker takes at a time."""

    op: _Op
    start: int
    end: int
    good: int = -1
    """The first of them that is not done, or not known to be; set while it is carried out."""


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
        self._waiting = {"query": 0, "read": 0, "write": 0, "removal": 0}
        self._open: dict[int, _Op] = {}
        self._ended: list[StorageDone] = []
        self._recalled: list[bytes] = []
        self._looked_at, self._look = clock.now(), threading.Lock()
        self._is_due = False
        self._repeated: list[_Op] = []
        """Removals that wait for writes."""
        self.check: PageCheck | None = None
        """What vouches for pages; None = nothing does."""
        self._closing = False
        self._workers: Workers = workers or ThreadWorkers("serinus-storage", _THREADS)
        self._workers.start(self._take)

    # ---- the engine's side --------------------------------------------------------------------------------------

    def query(self, op: int, keys: Sequence[bytes], parts: Sequence[Part]) -> None:
        """Ask which keys are stored, for each part. What follows the first key that the first part lacks is of no
        use: it is not looked for and counts as missing. Of a prompt that is not stored one key is looked for.
        """
        self._submit(op, "query", tuple(parts), keys, _NO_PAGES, None, _TASK_KEYS)

    def read(
        self, op: int, part: Part, keys: Sequence[bytes], pages: NDArray[np.int32], origin: PageOrigin | None = None
    ) -> None:
        """Fill host pages, in order, up to the first that is missing, torn or foreign, or that is not what its stamps
        vouch for: that one is removed from the shelf."""
        self._submit(op, "read", (part,), keys, pages, origin, self._task_pages(part))

    def write(
        self, op: int, part: Part, keys: Sequence[bytes], pages: NDArray[np.int32], origin: PageOrigin | None = None
    ) -> None:
        """Store host pages, in order, up to the first that fails or that is not what its stamps vouch for; what is
        stored already costs nothing."""
        self._submit(op, "write", (part,), keys, pages, origin, self._task_pages(part))

    def remove(self, op: int, keys: Sequence[bytes]) -> None:
        """Delete pages of every part, and all that continue them. What of them is being written now is deleted when it
        is there."""
        self._submit(op, "removal", tuple(self._host), keys, _NO_PAGES, None, max(1, len(keys)))

    def recalled(self) -> list[bytes]:
        """Keys of pages that other engines removed since the last call. They are looked for before each question, and
        about once in a second in which this is called."""
        with self._workers:
            found, self._recalled = self._recalled, []
            if self._clock.now() - self._looked_at >= _LOOK_EVERY_S and not self._closing:
                self._looked_at = self._clock.now()
                self._is_due = True
                self._workers.tasks_added()
        return found

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

    def close(self) -> None:
        """Write what is queued, as far as that takes five seconds; then end the threads."""
        with self._workers:
            self._workers.wait_for(lambda: not self._open, _DRAIN_S_MAX)
            self._closing = True
        self._workers.stop()
        self.shelf.close()

    def _task_pages(self, part: Part) -> int:
        return max(1, _TASK_BYTES // max(1, self._host[part].page_bytes))

    def _submit(
        self, op: int, what: str, parts: tuple[Part, ...], keys: Sequence[bytes], pages: NDArray[np.int32],
        origin: PageOrigin | None, step: int,
    ) -> None:  # fmt: skip
        if what in ("read", "write") and (
            len(pages) != len(keys) or not _inside(pages, self._host[parts[0]].page_count)
        ):
            raise InvariantError(
                f"pool: storage {what} {op} of {len(keys)} keys and {len(pages)} host pages, "
                f"expected as many, each inside of its pool"
            )
        present = tuple(np.zeros(len(keys), np.bool_) for _ in parts) if what == "query" else ()
        made = _Op(
            op=op, what=what, parts=parts, keys=keys, pages=pages, origin=origin, begin=self._clock.now(),
            present=present, good=0 if what == "removal" else len(keys),
        )  # fmt: skip
        tasks = [_Share(made, at, min(at + step, len(keys))) for at in range(0, len(keys), step)]
        full = False
        with self._workers:
            self._workers.check()
            if op in self._open or self._closing:
                raise InvariantError(f"pool: storage operation {op} submitted twice or after close, expected neither")
            if what == "removal":
                self._call_off(made)
            else:
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

    def _call_off(self, removal: _Op) -> None:
        """Writes of what is to be removed go no further. With the lock held."""
        keys = set(removal.keys)
        for op in self._open.values():
            if op.what == "write":
                removal.writes.add(op.op)
                op.cancelled = op.cancelled or not keys.isdisjoint(op.keys)

    # ---- the workers --------------------------------------------------------------------------------------------

    def _take(self) -> Task | None:
        """Questions, reads and removals go before writes. With the lock held."""
        if self._is_due:
            self._is_due = False
            return self._look_around
        if not self._soon and not self._later:
            return None
        task = self._soon.popleft() if self._soon else self._later.popleft()
        return lambda: self._carry(task)

    def _carry(self, task: _Share) -> None:
        op, error = task.op, ""
        task.good = task.start
        try:
            match op.what:
                case "query":
                    self._look_around()
                    self._look_up(task)
                case "removal":
                    op.good += self.shelf.remove(op.keys)
                    task.good = task.end
                case "read":
                    self._read(task)
                case _:
                    self._write(task)
        except (OSError, MemoryError) as failure:
            error = f"{type(failure).__name__}: {failure}"
            then = "is not complete" if op.what == "removal" else "counts as missing"
            self._warning.say(f"pool: storage {op.what} failed and {then}: {error}")
        with self._workers:
            self._waiting[op.what] -= task.end - task.start
            op.error = op.error or error
            if op.what in ("read", "write"):
                op.byte_count += (task.good - task.start) * self._host[op.parts[0]].page_bytes
            if task.good < task.end and op.what != "removal":
                op.good = min(op.good, task.good)
            op.tasks -= 1
            if not op.tasks:
                self._end(op)
            self._workers.notify()

    def _look_around(self) -> None:
        """Learn what other engines removed."""
        with self._look:
            try:
                found = self.shelf.recalled()
            except OSError as failure:
                self._warning.say(f"pool: what was removed from the storage cannot be read: {failure}")
                return
        if found:
            with self._workers:
                self._recalled += found

    def _look_up(self, task: _Share) -> None:
        """Look for the keys of a share, up to the first that the first part lacks."""
        op, end = task.op, task.end
        for part, present in zip(op.parts, op.present, strict=True):
            for i in range(task.start, end):
                if op.cancelled or i >= op.good:
                    task.good = i
                    return
                present[i] = self.shelf.has(part, op.keys[i])
                if not present[i] and part is op.parts[0]:
                    end = i
                    break
        task.good = end

    def _read(self, task: _Share) -> None:
        """Fill the pages of a share, and check what came, also where the medium failed midway."""
        op, part = task.op, task.op.parts[0]
        data_PY, came = self._host[part].data_PY, task.start
        try:
            while came < task.end and not op.cancelled and op.good >= task.start:
                if not self.shelf.load(part, op.keys[came], data_PY[int(op.pages[came])]):
                    break
                came += 1
        finally:
            task.good = self._sound_end(op, task.start, came)
        if task.good < came:
            self.shelf.remove([op.keys[task.good]])

    def _write(self, task: _Share) -> None:
        """Store the pages of a share that are sound."""
        op, part = task.op, task.op.parts[0]
        if op.cancelled or op.good < task.start:
            return
        data_PY, end = self._host[part].data_PY, self._sound_end(op, task.start, task.end)
        while task.good < end and not op.cancelled and op.good >= task.start:
            at, before = task.good, _NO_KEY
            if op.origin is not None:
                before = op.keys[at - 1] if at else op.origin.before
            self.shelf.save(part, op.keys[at], data_PY[int(op.pages[at])], before)
            task.good += 1

    def _sound_end(self, op: _Op, start: int, end: int) -> int:
        """Where these pages of an operation stop being what their stamps vouch for, as far as that is known; the first
        one that is not is noted."""
        if self.check is None or start == end:
            return end
        sound = self.check(op.parts[0], op.pages[start:end], op.origin, start)
        if sound.all():
            return end
        first = start + int(sound.argmin())
        op.bad.append(first)
        return first

    def _end(self, op: _Op) -> None:
        """With the lock held: no worker touches its pages any more. A removal begins anew where writes that it found
        under way have ended since: what they stored must go too."""
        if op.what == "removal" and op.writes:
            op.writes &= self._open.keys()
            if op.writes:
                self._repeated.append(op)
            else:
                self._again(op)
            return
        del self._open[op.op]
        if op.what == "write":
            for removal in [each for each in self._repeated if op.op in each.writes]:
                removal.writes.discard(op.op)
                if not removal.writes:
                    self._repeated.remove(removal)
                    self._again(removal)
        self._ended.append(
            StorageDone(
                op=op.op,
                present=op.present,
                good=0 if op.what == "query" else op.good,
                bad=tuple(sorted(op.bad)),
                error=op.error,
                seconds=self._clock.now() - op.begin,
                byte_count=op.byte_count,
            )
        )

    def _again(self, removal: _Op) -> None:
        removal.tasks = 1
        self._waiting["removal"] += len(removal.keys)
        self._soon.append(_Share(removal, 0, len(removal.keys)))
        self._workers.tasks_added()


def _inside(pages: NDArray[np.int32], page_count: int) -> bool:
    return not len(pages) or 0 < int(pages.min()) <= int(pages.max()) < page_count
