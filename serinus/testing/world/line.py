"""The one ordered line from a leader to one of its ranks: what comes down it is done in the order it was put there."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

__all__ = ["RankLine"]


class RankLine:
    """Work on its way to a rank, and to be done there."""

    def __init__(self) -> None:
        self.works: deque[tuple[int, Callable[[], None]]] = deque()
        """Numbered from 1 on."""
        self.last = 0
        self._free_at = 0.0

    def put(self, work: Callable[[], None], at: float, cost_s: float) -> tuple[float, int]:
        """Append work that comes no earlier than `at`, and takes some time: when it is done, and its number."""
        self.last += 1
        self.works.append((self.last, work))
        self._free_at = max(self._free_at, at) + cost_s
        return self._free_at, self.last

    def work_off(self, number: int) -> None:
        """Do all work up to this number that is not yet done."""
        while self.works and self.works[0][0] <= number:
            self.works.popleft()[1]()
