"""Whether a prefill engine still holds what it offered, read by decode from memory that both share: no CONFIRM, which
takes two messages and a turn of an engine that may be busy.

A word for each connection. Prefill gives none of the pages up that a peer may read while their connection is there and
the peer has not said that it reads them no more; so the word is cleared when the connection is given up, before any of
these pages is. Decode looks when its reads have ended: where the word is still set, the pages were held until then.
"""

from __future__ import annotations

import re
from typing import Final

import numpy as np
from numpy.typing import NDArray

from serinus.core.errors import TransferFailed
from serinus.pd.backends.shm import Opened, Segments, attach, segment_name, shm_works

_WORDS: Final = 512
"""Connections with a hold at a time: a page of memory."""
_MAPPED_MAX: Final = 64
"""Segments of others that stay mapped."""
_HOLD: Final = re.compile(r"(.{1,64})/([0-9]{1,4})/([1-9][0-9]{0,18})")
"""Segment, word, number; a word that says 0 is free."""


class SharedHolds:
    """pd's Holds, between the processes of one machine."""

    def __init__(self, segments: Segments | None = None) -> None:
        """`segments`: None = those of the operating system."""
        self._segments = Segments() if segments is None else segments
        self._own: Opened | None = None
        self._words = np.zeros(0, np.uint64)
        self._last = 0
        """Number of holds begun so far: no word ever says the same twice."""
        self._mapped: dict[str, NDArray[np.uint64]] = {}

    def begin(self) -> str:
        """For a new connection, until `end`: where its peer finds it; empty = there is none, and the peer asks."""
        if self._own is None:
            if not shm_works():
                return ""
            try:
                self._own = self._segments.create(8 * _WORDS)
            except OSError:
                return ""
            self._words = self._own.area.view(np.uint64)
        free = np.flatnonzero(self._words == 0)
        if not len(free):
            return ""
        self._last += 1
        self._words[free[0]] = self._last
        return f"{segment_name(self._segments.pid, self._own)}/{free[0]}/{self._last}"

    def end(self, hold: str) -> None:
        """It is over: to be called before anything is given up that its peer may read. An empty one changes nothing."""
        if hold and self._own is not None:
            self._words[int(hold.split("/")[1])] = 0

    def lasts(self, hold: str) -> bool:
        """Whether a hold of another process is not over. False too where that cannot be read."""
        match = _HOLD.fullmatch(hold)
        if match is None:
            return False
        segment, place, number = match[1], int(match[2]), int(match[3])
        words = self._mapped.get(segment)
        if words is None:
            try:
                area = attach(self._segments, segment)
            except TransferFailed:
                return False
            words = area[: len(area) // 8 * 8].view(np.uint64)
            if len(self._mapped) >= _MAPPED_MAX:
                self._mapped.clear()
            self._mapped[segment] = words
        return place < len(words) and int(words[place]) == number

    def close(self) -> None:
        """Give own memory back, and that of others."""
        if self._own is not None:
            self._words[:] = 0
            self._segments.close(self._own.fd)
            self._own, self._words = None, np.zeros(0, np.uint64)
        self._mapped.clear()
