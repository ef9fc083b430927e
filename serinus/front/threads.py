"""Threads for work on long texts (parsing, rendering, tokenizing), so that the event loop is free meanwhile.

Knows nothing of requests.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_T = TypeVar("_T")
_HERE_CHARS = 8192
"""Shorter texts are worked on at once: a millisecond or two, less than a thread costs where many wait."""
_LONG_CHARS = 1 << 20
"""Longer ones wait for each other, and never stand before the others."""
_THREADS = 2
_SWITCH_S = 0.0005
"""A thread that runs Python gives the interpreter back after this long. The event loop takes it again after every
call of the system, twenty times for one step of 16 streams: with CPython's 5 ms, a step would take 100 ms."""


class TextThreads:
    """Two threads for long texts and one for very long ones. Sets the interpreter's switch interval of this process."""

    def __init__(self) -> None:
        self._usual = ThreadPoolExecutor(_THREADS, "texts")
        self._long = ThreadPoolExecutor(1, "long-texts")
        sys.setswitchinterval(_SWITCH_S)

    async def run(self, chars: int, work: Callable[[], _T]) -> _T:
        """The result of `work`, which reads about so many characters (or token ids). What it raises is raised."""
        if chars < _HERE_CHARS:
            return work()
        threads = self._usual if chars < _LONG_CHARS else self._long
        return await asyncio.get_running_loop().run_in_executor(threads, work)

    def stop(self) -> None:
        """Begin nothing more; what runs ends by itself, and its result is dropped."""
        for threads in (self._usual, self._long):
            threads.shutdown(wait=False, cancel_futures=True)
