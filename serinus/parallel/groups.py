"""Who carries headers to ranks and reports back: the `Group` protocol, and the one of a single process.

A group delivers every header to every rank once, in order, at a time of its own; reports likewise, per rank. Nothing
else passes between ranks, so that no rank ever waits in a call that another one may not enter.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

from serinus.parallel.decisions import StepHeader
from serinus.parallel.reports import Report

__all__ = ["Group", "LocalGroup"]


class Group(Protocol):
    """The ranks of one engine, the leader (rank 0) included."""

    @property
    def size(self) -> int:
        """How many ranks."""
        ...

    def announce(self, header: StepHeader) -> None:
        """Leader: send to every rank."""
        ...

    def headers(self, rank: int) -> list[StepHeader]:
        """A rank: what has come for it, in order."""
        ...

    def report(self, report: Report) -> None:
        """A rank: tell the leader."""
        ...

    def reports(self) -> list[Report]:
        """Leader: what has come, in order for each rank."""
        ...


class LocalGroup:
    """Ranks of one process. What is sent has come, unless `hold` keeps it back."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._headers: list[deque[StepHeader]] = [deque() for _ in range(size)]
        self._reports: list[deque[Report]] = [deque() for _ in range(size)]
        self.held: set[int] = set()
        """Ranks that nothing reaches, and that nothing comes from, for now."""

    @property
    def size(self) -> int:
        return self._size

    def announce(self, header: StepHeader) -> None:
        for line in self._headers:
            line.append(header)

    def headers(self, rank: int) -> list[StepHeader]:
        if rank in self.held:
            return []
        found = list(self._headers[rank])
        self._headers[rank].clear()
        return found

    def report(self, report: Report) -> None:
        self._reports[report.rank].append(report)

    def reports(self) -> list[Report]:
        found: list[Report] = []
        for rank, line in enumerate(self._reports):
            if rank not in self.held:
                found.extend(line)
                line.clear()
        return found
