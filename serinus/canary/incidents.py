"""Incidents: one record for one slot that is wrong for one reason under one owner, however often that is found.

A damaged byte that a running request reads is found again in every step that has it due. The first violation has the
evidence; of the others the step, the check and the number matter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from serinus.canary.violation import Violation
from serinus.core.parts import Part
from serinus.kernels import Reason

_Key = tuple[str, Part, int, Reason, str]


@dataclass(slots=True, kw_only=True)
class Incident:
    """The first violation of its kind, and what came of the same kind after it."""

    first: Violation
    """With the owner, the users and the history of the page at that moment."""
    last_step: int
    """Step of the latest one."""
    first_time: float
    """Unix seconds of the first violation."""
    last_time: float
    handoff: Mapping[str, str] | None
    """The handoff that moved the page last, as PageTrace.as_json says it; None = no handoff is known to have."""
    count: int = 1
    """How many there were."""
    tags: list[str] = field(default_factory=list)
    """The checks that found it, in the order in which they first did."""

    def again(self, violation: Violation, time: float) -> None:
        """There is one more of them, at this Unix time."""
        self.last_step, self.last_time = violation.step, time
        self.count += 1
        if violation.tag not in self.tags:
            self.tags.append(violation.tag)

    def as_json(self) -> dict[str, Any]:
        """The record as `GET /canary` lists it: the first violation, and how far it went on."""
        return {
            **self.first.as_json(),
            "first_step": self.first.step,
            "last_step": self.last_step,
            "first_time": self.first_time,
            "last_time": self.last_time,
            "handoff": self.handoff,
            "count": self.count,
            "tags": list(self.tags),
        }


class IncidentLog:
    """The incidents of one engine: the first ones and the latest ones. Where a record had to go, its kind is a new
    incident when it is found again."""

    def __init__(self, kept: int = 256) -> None:
        """`kept`: records at most; half of them are the first there were, which lead to the cause."""
        assert kept > 1, f"canary: room for {kept} incidents, expected 2 or more"
        self._kept = kept
        self._records: dict[_Key, Incident] = {}
        self.total = 0
        """How many there ever were, those no longer kept included."""

    def same(self, violation: Violation) -> Incident | None:
        """The incident that this violation belongs to; None = it begins one. Its rank and owner are known."""
        return self._records.get(_key(violation))

    def begin(self, violation: Violation, time: float, handoff: Mapping[str, str] | None) -> Incident:
        """A violation of which there is no incident yet begins one."""
        if len(self._records) == self._kept:
            oldest_late = list(self._records)[self._kept // 2]
            del self._records[oldest_late]
        incident = Incident(
            first=violation, last_step=violation.step, first_time=time, last_time=time, handoff=handoff,
            tags=[violation.tag],
        )  # fmt: skip
        self._records[_key(violation)] = incident
        self.total += 1
        return incident

    def __iter__(self) -> Iterator[Incident]:
        """Those kept, oldest first."""
        return iter(tuple(self._records.values()))

    def __len__(self) -> int:
        return len(self._records)


def _key(violation: Violation) -> _Key:
    return violation.rank, violation.part, violation.slot, violation.reasons, violation.owner
