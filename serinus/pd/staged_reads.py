"""Pages of ranks of another layout, read whole into private memory of one rank, which cuts its own bytes out of them.

One-sided operations move pages as they are, and the digest of a page covers all that its source rank has of it. So
nothing that came is used before it was checked as a whole, and a read that goes on after it was given up harms nothing:
rows that it still fills are checked after it or fail. Reads that find no room begin when others have ended.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from serinus.pd.backends.base import SpanAllocator
from serinus.pd.pages import TakeIn

STAGING_BYTES: Final = 64 << 20
"""Of one rank, for all its peers together; memory that is never read into is never touched. Pieces are no larger."""


@dataclass(slots=True, kw_only=True, eq=False)
class StagedRead:
    """One TakeIn of a peer whose pages are to be cut."""

    command: TakeIn
    byte_count: int
    is_wanted: bool = True
    """What comes is used."""
    span: int = 0
    """Of the staging area..."""
    rows: NDArray[np.uint8] | None = None
    """...once there is room."""


class StagedReads:
    """The staging area of one rank, and the reads that wait for room in it, in order."""

    def __init__(self, byte_count: int = STAGING_BYTES) -> None:
        self._byte_count = byte_count
        self._spans = SpanAllocator(byte_count)
        self._area: NDArray[np.uint8] | None = None
        self._reads: list[StagedRead] = []
        self._waiting: deque[StagedRead] = deque()

    @property
    def area(self) -> NDArray[np.uint8]:
        """The memory that backends read into; there from the first call on, until the end of the rank."""
        if self._area is None:
            self._area = np.empty(self._byte_count, np.uint8)
        return self._area

    @property
    def is_waiting(self) -> bool:
        """Whether a read has not begun."""
        return bool(self._waiting)

    def add(self, command: TakeIn, byte_count: int) -> str:
        """Enter a read of so many bytes behind the others; why it can never begin, in words, where that is so."""
        if byte_count > self._byte_count:
            return f"pd: a piece of {byte_count} bytes to be cut, expected at most {self._byte_count}"
        self._waiting.append(StagedRead(command=command, byte_count=byte_count))
        return ""

    def next(self) -> StagedRead | None:
        """The next that may begin, with rows for it; one that is not wanted any more has none. None = no room, or none
        waits."""
        if not self._waiting:
            return None
        read = self._waiting[0]
        if read.is_wanted:
            taken = self._spans.take(read.byte_count)
            if taken is None:
                return None
            read.span, start = taken
            count = len(read.command.sources)
            read.rows = self.area[start : start + read.byte_count].reshape(count, -1)
            self._reads.append(read)
        return self._waiting.popleft()

    def cancel(self, xid: str) -> None:
        """Nothing of what comes for this handoff is used; each read is still ended."""
        for read in (*self._reads, *self._waiting):
            read.is_wanted = read.is_wanted and read.command.xid != xid

    def end(self, read: StagedRead) -> None:
        """It is over, and its rows are not looked at any more. No effect where it had none."""
        if read.rows is not None:
            self._reads.remove(read)
            self._spans.give(read.span)
            read.rows = None
