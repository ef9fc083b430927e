"""What follows from violations: which pages are condemned, and which requests must not go on.

A violation of any reason condemns the page, all that was computed behind it, and touches every request that uses it.
Where a stamp differs and no byte, the slot that was reported need not be the one at fault, as each stamp is held
against the one before it, and the device's table may be what is damaged: then all pages of the request are verified
once more, in the order of the leader's rows, with its own tokens. What that finds is condemned; where it finds nothing
the pages are innocent, and the request alone is touched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from serinus.cache import CheckedCopies, Condemned, PageState, PrefixCache, Tier
from serinus.canary.violation import Violation, reason_names
from serinus.core.errors import KvViolation
from serinus.core.parts import OwnPages, Part
from serinus.kernels import Reason

_WRITTEN: Final = Reason.WRITE_TOKEN | Reason.WRITE_POSITION
_STEPS_KEPT: Final = 64
_USED: Final = (PageState.REQUEST, PageState.TREE, PageState.COPY)
_STATE_MASK: Final = 7
Place = tuple[Part, int]
"""A page of a part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A request that must not go on, and why, in words."""

    rid: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsVerdict:
    """What follows from a check of requests' rows."""

    verdicts: Sequence[Verdict]
    """Requests that must not go on."""
    slots: Mapping[str, int]
    """Slots of each request that were verified."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrivalVerdict:
    """What follows from a check of pages that came by handoff."""

    reason: str = ""
    """Why they must not be used; empty = they may."""
    slots: int = 0
    """Slots that were verified of them."""


class Requests(Protocol):
    """What the leader's half asks about requests; sched.Scheduler."""

    def users_of(self, part: Part, pages: int | NDArray[np.int32]) -> tuple[str, ...]:
        """The requests whose rows name a page, or one of some."""

    def rows_of(self, rids: Iterable[str]) -> Mapping[Part, NDArray[np.int32]]:
        """The pages that rows of these requests name, by part."""

    def client_of(self, rid: str) -> str:
        """What its client calls a request, where this engine calls it by the handoff."""

    def computed_pages(self, rid: str) -> OwnPages | None:
        """Its tokens whose KV is computed, and its pages; None = unknown."""

    def dropped(self) -> frozenset[str]:
        """Requests that began again since the oldest step under way was planned: what it found of them is of KV
        that is not used any more."""

    def unloaded(self) -> frozenset[str]:
        """Those of them whose KV never came from the host: what it found of them is no fault."""


class Judge:
    """Condemns, and names the requests that are touched."""

    def __init__(
        self,
        cache: PrefixCache,
        requests: Requests,
        verify: Callable[[Mapping[str, OwnPages]], Sequence[Violation]],
        copies: Callable[[Part, int], CheckedCopies | None],
        condemned: Callable[[Violation, Condemned], None],
    ) -> None:
        """`verify`: has all ranks verify these pages of requests (by id) as their tokens say; returns what they found.
        `copies`: the same for what the host has of a page and of what is behind it. `condemned`: is told of each page
        that is condemned, with what goes with it."""
        self._cache = cache
        self._requests = requests
        self._verify, self._copies = verify, copies
        self._condemned = condemned
        self._operations: dict[int, dict[Part, int]] = {}
        """By step, the operations of the ledgers when it began; the latest steps."""

    def begin(self, step: int, parts: Iterable[Part]) -> None:
        """A step begins: what is handed out from here on is not what it reads."""
        ledgers = self._cache.ledgers
        self._operations[step] = {part: ledgers[Tier.DEVICE, part].operation for part in parts}
        self._operations.pop(step - _STEPS_KEPT, None)

    def step(self, violations: Sequence[Violation]) -> list[Verdict]:
        """What follows from the findings of a step or a sweep. Raises KvViolation: nothing can be named."""
        dropped = self._requests.dropped() if violations else frozenset()
        verdicts: dict[str, Verdict] = {}
        followed: set[Place] = set()
        case = _Case(self._cache, self._requests, self._verify)
        for violation in sorted(violations, key=lambda each: Reason.VERIFY_REAL_KV_HASH not in each.reasons):
            if violation.rid in dropped:
                continue
            is_known = bool(violation.owner) and not self._is_stale(violation)
            self._follow(violation, case.guilty(violation) if is_known else (), verdicts, followed)
        return list(verdicts.values())

    def rows(self, violations: Sequence[Violation], *, is_arrival: bool) -> list[Verdict]:
        """What follows from the findings of a check of requests' own pages. At arrival every page is in its place, and
        what is wrong came wrong: that is no failure of the page. Later the slots are those that the device's table
        names, as in a step."""
        verdicts: dict[str, Verdict] = {}
        followed: set[Place] = set()
        case = _Case(self._cache, self._requests, self._verify)
        for violation in violations:
            guilty = ((violation.part, violation.page),) if is_arrival else case.guilty(violation)
            self._follow(violation, guilty, verdicts, followed, counts=not is_arrival)
        return list(verdicts.values())

    def _follow(
        self, violation: Violation, guilty: Iterable[Place], verdicts: dict[str, Verdict], followed: set[Place], *,
        counts: bool = True,
    ) -> None:  # fmt: skip
        """`followed`: pages that violations before this one condemned; a wrong page has many wrong slots."""
        touched = dict.fromkeys([violation.rid] if violation.rid else [])
        for part, page in [place for place in guilty if place[1]]:  # page 0 is where rows name no slot at all
            if (part, page) in followed:
                continue
            followed.add((part, page))
            touched |= dict.fromkeys(self._requests.users_of(part, page))
            checked, pages = self._copies(part, page), np.array([page], np.int32)
            self._condemned(violation, self._cache.condemn(part, pages, counts=counts, checked=checked))
        if not touched and not violation.owner:
            raise KvViolation(f"canary: {reason_of(violation)}, and nobody owns the page")
        for rid in touched:
            verdicts.setdefault(rid, Verdict(rid=rid, reason=reason_of(violation)))

    def _is_stale(self, violation: Violation) -> bool:
        """Whether the page was handed out again since the step that found it began: what was wrong is overwritten."""
        began = self._operations.get(violation.step, {}).get(violation.part)
        taken = self._cache.ledgers[Tier.DEVICE, violation.part].taken_at(violation.page)
        return began is not None and taken >= began


class _Case:
    """The violations that are judged together: the pages of a request are verified once more at most once."""

    def __init__(
        self, cache: PrefixCache, requests: Requests, verify: Callable[[Mapping[str, OwnPages]], Sequence[Violation]]
    ) -> None:
        self._cache = cache
        self._requests = requests
        self._verify = verify
        self._verified: dict[str, tuple[Place, ...]] = {}
        """By request, what was found when its pages were verified once more..."""
        self._ends: dict[str, int] = {}
        """...up to this position."""

    def guilty(self, violation: Violation) -> tuple[Place, ...]:
        """The pages that are to be condemned for a violation; none where the request's table row alone was wrong."""
        part, page, rid = violation.part, violation.page, violation.rid
        if Reason.VERIFY_REAL_KV_HASH in violation.reasons:
            return ((part, page),)
        state = int(self._cache.ledgers[Tier.DEVICE, part].owner_P[page]) & _STATE_MASK
        if state not in _USED or not violation.reasons & ~_WRITTEN:
            return ()  # condemned already, or a wrong input, which its own request alone has written
        if not rid:
            return ((part, page), *self._before(violation))
        if rid not in self._verified:
            row = self._requests.computed_pages(rid)
            self._ends[rid] = 0 if row is None else len(row.tokens)
            found = () if row is None or not len(row.tokens) else self._verify({rid: replace(row, row=0)})
            self._verified[rid] = tuple(dict.fromkeys((each.part, each.page) for each in found))
        return self._verified[rid] if violation.position < self._ends[rid] else ((part, page),)

    def _before(self, violation: Violation) -> tuple[Place, ...]:
        """The cached page before it: the last stamp there may be what is wrong."""
        is_first = violation.slot % self._cache.page_size == 0
        if not is_first or Reason.VERIFY_CHAIN_HASH not in violation.reasons:
            return ()
        page = int(self._cache.pools.device[violation.part].sweep.previous_P[violation.page])
        return ((violation.part, page),) if page else ()


def reason_of(violation: Violation) -> str:
    """What the client is told."""
    where = f" of rank {violation.rank}" if violation.rank else ""
    return (
        f"KV integrity: {'|'.join(reason_names(violation.reasons))} at slot {violation.slot}, position"
        f" {violation.position}{where} ({violation.tag}, step {violation.step})"
    )
