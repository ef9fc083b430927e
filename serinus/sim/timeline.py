"""Virtual time: what happens when, in one heap. Nothing else in the world moves the clock."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any


class Timeline:
    """A clock (core.Clock) and the events to come; equal times keep the order in which they were asked for."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.step = 0
        """Events that have happened."""
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._asked = 0

    def now(self) -> float:
        return self.now_s

    def unix(self) -> float:
        return 1_700_000_000.0 + self.now_s

    def at(self, when: float, act: Callable[..., None], *args: Any) -> None:
        """`act(*args)` happens then (now, where that is past)."""
        self._asked += 1
        heappush(self._heap, (max(when, self.now_s), self._asked, act, args))

    def after(self, seconds: float, act: Callable[..., None], *args: Any) -> None:
        """`act(*args)` happens so much later."""
        self.at(self.now_s + seconds, act, *args)

    def advance(self) -> bool:
        """The next event happens; False = there is none."""
        if not self._heap:
            return False
        self.now_s, _, act, args = heappop(self._heap)
        self.step += 1
        act(*args)
        return True
