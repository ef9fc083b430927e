"""The decision log: what the leader decided, numbered, applied once and in order by every rank. Pure.

Only the leader decides. Its decisions travel in the header of the next step; a rolling digest of all of them goes
along, so that a rank that has applied anything else stops the engine before it runs a batch of its own. Knows nothing
of transport (groups.py) or of what the decisions mean (ranks.py).
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

import xxhash

from serinus.core.errors import InvariantError

__all__ = ["Decision", "DecisionFollower", "DecisionKind", "DecisionLog", "OrderTo", "StepHeader"]

_JSON: Final = json.JSONEncoder(sort_keys=True, separators=(",", ":"))
_TAIL: Final = 64
"""Decisions kept as evidence."""


class DecisionKind(Enum):
    """What can be decided about one request."""

    PLACE = "place"
    """It is in this queue now (payload `queue`); a new request appears with its first PLACE."""
    RUN = "run"
    """A batch runs (no rid; payload `batch`: the requests of it, in order)."""
    DROP = "drop"
    """It is over: let go of everything that is kept for it (payload `code`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One line of the log."""

    number: int
    """1, 2, 3... within one incarnation of the engine."""
    kind: DecisionKind
    rid: str = ""
    payload: Mapping[str, object] = field(default_factory=dict)
    """Plain values (what JSON can say)."""

    def folded(self, digest: int) -> int:
        """The rolling digest with this decision. Cost: a few microseconds."""
        text = _JSON.encode([self.number, self.kind.value, self.rid, self.payload])
        return xxhash.xxh3_64_intdigest(text.encode(), digest)

    def __str__(self) -> str:
        payload = "".join(f" {name}={value}" for name, value in self.payload.items())
        return f"{self.number}:{self.kind.value}{' ' + self.rid if self.rid else ''}{payload}"


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderTo:
    """An order that one rank obeys alone."""

    rank: int
    order: object


@dataclass(frozen=True, slots=True, kw_only=True)
class StepHeader:
    """What the leader sends to every rank ahead of a step."""

    step: int
    """Number of the header, rising."""
    decisions: tuple[Decision, ...]
    """Those since the last header."""
    digest: int
    """Of all decisions up to and with these."""
    orders: tuple[object, ...] = ()
    """What to do once these are applied, in this order; every rank does all but the OrderTo of others."""

    def orders_of(self, rank: int) -> tuple[object, ...]:
        """What one rank does."""
        own = (order for order in self.orders if not isinstance(order, OrderTo) or order.rank == rank)
        return tuple(order.order if isinstance(order, OrderTo) else order for order in own)


def _show(decisions: tuple[Decision, ...]) -> str:
    return ", ".join(map(str, decisions)) or "nothing"


class DecisionLog:
    """The leader's end."""

    def __init__(self) -> None:
        self._last = 0
        self._digest = 0
        self._new: list[Decision] = []
        self._tail: deque[Decision] = deque(maxlen=_TAIL)

    @property
    def last(self) -> int:
        """Number of the last decision."""
        return self._last

    @property
    def digest(self) -> int:
        """Of all decisions."""
        return self._digest

    @property
    def tail(self) -> tuple[Decision, ...]:
        """The last few, as evidence."""
        return tuple(self._tail)

    @property
    def pending(self) -> bool:
        """Whether there are decisions that no header has carried yet."""
        return bool(self._new)

    def decide(self, kind: DecisionKind, rid: str = "", **payload: object) -> Decision:
        """Append one; it travels with the next header."""
        self._last += 1
        decision = Decision(number=self._last, kind=kind, rid=rid, payload=payload)
        self._digest = decision.folded(self._digest)
        self._new.append(decision)
        self._tail.append(decision)
        return decision

    def header(self, step: int, orders: tuple[object, ...] = ()) -> StepHeader:
        """Everything decided since the last header, and what is to be done then."""
        decisions, self._new = tuple(self._new), []
        return StepHeader(step=step, decisions=decisions, digest=self._digest, orders=orders)


class DecisionFollower:
    """A rank's end (the leader's own rank included: it lives by the same log)."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._last = 0
        self._digest = 0
        self._step = 0
        self._tail: deque[Decision] = deque(maxlen=_TAIL)

    @property
    def last(self) -> int:
        """Number of the last decision that was applied."""
        return self._last

    @property
    def digest(self) -> int:
        """Of all that were applied."""
        return self._digest

    @property
    def step(self) -> int:
        """Number of the last header."""
        return self._step

    @property
    def tail(self) -> tuple[Decision, ...]:
        """The last few, as evidence."""
        return tuple(self._tail)

    def apply(self, header: StepHeader) -> tuple[Decision, ...]:
        """The decisions to act on now: each exactly once, in order. A header that came before brings none.

        Raises InvariantError where one is missing, or where the digest is not that of the leader: this rank has lived
        by another log. Nothing is applied then, and the engine must stop.
        """
        if header.step <= self._step:
            return ()
        digest = self._digest
        for number, decision in enumerate(header.decisions, self._last + 1):
            if decision.number != number:
                raise self._diverged(header, f"decision {decision.number} came, expected {number}")
            digest = decision.folded(digest)
        if digest != header.digest:
            raise self._diverged(header, f"digest {digest:016x}, expected the leader's {header.digest:016x}")
        self._digest, self._step = digest, header.step
        self._last += len(header.decisions)
        self._tail.extend(header.decisions)
        return header.decisions

    def _diverged(self, header: StepHeader, what: str) -> InvariantError:
        return InvariantError(
            f"parallel: rank {self.rank} has another log than its leader at step {header.step}: {what};"
            f" log of rank {self.rank}: {_show(tuple(self._tail))}; from the leader: {_show(header.decisions)}"
        )
