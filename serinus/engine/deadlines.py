"""The deadlines of an engine's requests: which of them are over. Pure; knows a request by its id alone."""

from __future__ import annotations

import heapq
import math
from collections.abc import Container

_KEPT_MIN = 1024
"""Below it, deadlines of requests that have ended are not worth a sweep."""


class Deadlines:
    """Takes requests with their deadlines, gives those that are over."""

    def __init__(self) -> None:
        self._at: dict[str, float] = {}
        """The deadline of each request that has one, or had when it ended."""
        self._heap: list[tuple[float, str]] = []
        self._sweep_at = _KEPT_MIN

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, rid: str, at: float, live: Container[str]) -> None:
        """A request that must end by `at` (inf = it has no deadline). `live`: the requests there are; those that ended
        in time are forgotten now and then, so that no more are kept than twice as many as there are.
        Cost: O(log n), and O(1) for the sweeps."""
        self._at.pop(rid, None)  # an earlier request of this id has ended
        if at == math.inf:
            return
        self._at[rid] = at
        heapq.heappush(self._heap, (at, rid))
        if len(self._heap) >= self._sweep_at:
            self._at = {each: when for each, when in self._at.items() if each in live or each == rid}
            self._heap = [(when, each) for each, when in self._at.items()]
            heapq.heapify(self._heap)
            self._sweep_at = max(_KEPT_MIN, 2 * len(self._heap))

    def over(self, now: float) -> list[str]:
        """Requests whose deadline has come, the earliest first; each once."""
        found = []
        while self._heap and self._heap[0][0] <= now:
            at, rid = heapq.heappop(self._heap)
            if self._at.get(rid) == at:
                del self._at[rid]
                found.append(rid)
        return found
