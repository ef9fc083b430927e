"""Uses: which of some files was unused for longest, of those that may go. Knows neither pages nor folders."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable


class Uses:
    """Files by their last use, in a heap that is repaired as it is read. The caller holds a lock."""

    def __init__(self) -> None:
        self._count = 0
        self._used: dict[str, int] = {}
        self._entries: dict[str, int] = {}
        """Of the files in the heap, the use that they are there with; other entries of it are outdated."""
        self._heap: list[tuple[int, str]] = []

    def reset(self, names: Iterable[str]) -> None:
        """There are these files, the longest unused first."""
        self._used = {name: at for at, name in enumerate(names, 1)}
        self._count, self._entries = len(self._used), self._used.copy()
        self._heap = [(at, name) for name, at in self._used.items()]

    def place(self, name: str) -> int:
        """A number that is higher for what was used later; 0 = there is no such file."""
        return self._used.get(name, 0)

    def note(self, name: str) -> None:
        """There is such a file, and it was used just now."""
        self._count += 1
        self._used[name] = self._count
        self.may_go(name)

    def may_go(self, name: str) -> None:
        """Where there is such a file it may be one that `longest_unused` may name, whatever stood against it."""
        used = self._used.get(name)
        if used is not None and name not in self._entries:
            self._entries[name] = used
            heapq.heappush(self._heap, (used, name))

    def forget(self, name: str) -> None:
        """There is no such file any more."""
        self._used.pop(name, None)
        self._entries.pop(name, None)

    def longest_unused(self, stays: Callable[[str], bool]) -> str | None:
        """The longest unused file that does not stay; None = all do. One that stays is not looked at again before
        `may_go` or `note` names it. Cost: O(log files) for each of those calls, once."""
        while self._heap:
            used, name = self._heap[0]
            is_current = self._entries.get(name) == used
            if is_current and self._used[name] == used and not stays(name):
                return name
            heapq.heappop(self._heap)
            if is_current:
                del self._entries[name]
                if self._used[name] != used:
                    self.may_go(name)
        return None
