"""What ranks observe, folded into what the leader may decide on. Pure.

A rank never acts on what it sees: it reports. Ready is what all ranks have reported, failed what any has, released
what all have drained.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import Enum

__all__ = ["Report", "ReportFold", "ReportKind"]


class ReportKind(Enum):
    """What a rank can see of one request or handoff."""

    GRANTED = "granted"
    """Its pages of a grant are known there."""
    SENT = "sent"
    """Its bytes of a piece are on their way."""
    LANDED = "landed"
    """Its bytes of a piece are in place and checked."""
    DRAINED = "drained"
    """Nothing of it is kept or under way there any more."""
    FAILED = "failed"
    """Something went wrong there."""
    PREFETCH_READY = "prefetch_ready"
    """What its storage had is there."""
    STEP = "step"
    """A step ended there; `body` is its result."""
    ANSWER = "answer"
    """An order was obeyed; `body` says what came of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One observation of one rank."""

    rank: int
    kind: ReportKind
    key: str = ""
    """Request, handoff or piece."""
    reason: str = ""
    """With FAILED."""
    step: int = 0
    """With STEP and ANSWER: number of the last header that was obeyed."""
    body: object | None = None
    """With STEP and ANSWER: plain data, as the order's owner defines it."""


@dataclass(slots=True)
class _Seen:
    ranks: dict[ReportKind, set[int]]
    reason: str = ""


class ReportFold:
    """The leader's view of all ranks. A key is followed from `expect` until `forget`; others change only a counter."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._seen: dict[str, _Seen] = {}
        self.rejects: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._seen)

    def expect(self, key: str) -> None:
        """From now on reports about it count."""
        self._seen.setdefault(key, _Seen({}))

    def take(self, report: Report) -> bool:
        """File a report; False = about nothing that is expected, or from a rank that there is not. Repeats are fine."""
        seen = self._seen.get(report.key)
        if seen is None or not 0 <= report.rank < self._ranks:
            self.rejects["unknown_rank" if seen is not None else "unknown_key"] += 1
            return False
        seen.ranks.setdefault(report.kind, set()).add(report.rank)
        if report.kind is ReportKind.FAILED and not seen.reason:
            seen.reason = report.reason or f"rank {report.rank} failed"
        return True

    def everywhere(self, key: str, kind: ReportKind) -> bool:
        """Whether all ranks have said so."""
        seen = self._seen.get(key)
        return seen is not None and len(seen.ranks.get(kind, ())) == self._ranks

    def failed(self, key: str) -> str:
        """What the first rank that failed said; empty = none has."""
        seen = self._seen.get(key)
        return seen.reason if seen is not None else ""

    def forget(self, key: str) -> None:
        """It is over. Unknown keys change nothing."""
        self._seen.pop(key, None)
