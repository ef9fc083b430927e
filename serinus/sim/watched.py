"""The product's own objects, watched: what the scheduler granted, what the leader tells its ranks to read and write.

I2: a page is written only while a request that is being filled from outside has it. I4: a page is read only while it
is held for a transfer. Both are held against the scheduler and the ledger when the command is given: then the leader
knows that the pages may be read or filled. That they still may when the rank comes to it follows from the order of the
line, and nothing checks that but the tokens. I6: what has landed is the KV of the prompt, on every rank. I21: no
request waits behind a less important one, by the rule of docs/KEYS.md. I22: none lives on after the turn that its
deadline has come before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serinus.cache import Pages, PrefixCache
from serinus.cache.node import Tier
from serinus.core.handoff import HandoffSpec, PageTrace, Reservation
from serinus.core.parts import Part
from serinus.core.plan import StepPlan
from serinus.core.request import Request, TokenDelta
from serinus.pd import DigestPiece, Mode, MovePiece, TakeIn
from serinus.ranks import LeaderLine
from serinus.sched import Scheduler
from serinus.sched.request_state import Phase, ReqState

_ORDER_S = 0.002
"""Requests that were due closer together than this may be served in any order: the product counts milliseconds."""


class FlakyCache(PrefixCache):
    """A cache that sometimes has no room, though it has."""

    refuse: Callable[[], bool] = staticmethod(lambda: False)
    traced: Callable[[Sequence[PageTrace]], None] = staticmethod(lambda traces: None)
    """Told of pages that a handoff has filled, or been sent."""

    def trace(self, traces: Iterable[PageTrace]) -> None:
        traces = tuple(traces)
        self.traced(traces)
        super().trace(traces)

    def allocate_each(self, rids: Sequence[str], counts: Sequence[Sequence[int]]) -> tuple[Pages, ...] | None:
        return None if self.refuse() else super().allocate_each(rids, counts)


class WatchedScheduler(Scheduler):
    """Remembers which pages others may fill, and looks at what has landed before it is used."""

    landing: Callable[[Reservation], None] = staticmethod(lambda reservation: None)
    """Told of each prompt that is about to be published as landed."""

    def watch(self, landing: Callable[[Reservation], None], note: Callable[..., None]) -> None:
        """Begin; `landing` is told of each prompt that is about to be taken for landed, `note` of what happens to
        requests."""
        self.note = note
        self.chunks_ahead = 0
        """Prompt chunks so far that were said before the plan that they are in."""
        self.came: dict[str, int] = {}
        """By request: how many came before it."""
        self.reserved: dict[str, Reservation] = {}
        """By request: pages that a prefill engine may fill now."""
        self.landing = landing

    def add(self, request: Request, *, handoff: HandoffSpec | None = None, **more: Any) -> None:
        super().add(request, handoff=handoff, **more)
        self.came[request.rid] = self._totals.requests
        self.note("asked" if handoff is None else "handoff", rid=self.client_of(request.rid))

    def handoff_ended(self, rid: str) -> bool:
        if rid in self:
            self.note("sent", rid=self.client_of(rid))
        return super().handoff_ended(rid)

    def take_reservations(self, now: float, *peers: Any) -> tuple[Reservation, ...]:
        found = super().take_reservations(now, *peers)
        for reservation in found:
            self.note("granted", rid=reservation.rid)
        self.reserved.update({reservation.rid: reservation for reservation in found})
        return found

    def landed(self, rid: str, *args: Any, **more: Any) -> TokenDelta | None:
        reservation = self.reserved.pop(rid, None)
        if reservation is not None:
            self.landing(reservation)
            self.note("landed", rid=rid)
        return super().landed(rid, *args, **more)

    def recompute(self, rid: str, reason: str) -> bool:
        self.reserved.pop(rid, None)
        self.note("recomputed", rid=rid, words=reason)
        return super().recompute(rid, reason)

    def abort(self, rid: str, *args: Any, **more: Any) -> TokenDelta | None:
        self.reserved.pop(rid, None)
        return super().abort(rid, *args, **more)

    def plan(self, now: float) -> StepPlan | None:
        waiting = list(self._waiting)
        plan = super().plan(now)
        if plan is not None and plan.takes is not None:
            self.chunks_ahead += sum(len(work.tokens) > 1 for work in plan.work)
        taken = [state for state in waiting if state.phase is Phase.PREFILL]
        passed = [state for state in waiting if state.phase is Phase.WAITING and not self._may_be_passed(state)]
        for state, other in product(taken, passed):
            assert self._before(state, other), (
                f"sim: I21: {state.rid} (due {self.due(state)}) is served before {other.rid} (due {self.due(other)})"
            )
        return plan

    def _may_be_passed(self, state: ReqState) -> bool:
        """It waits for another one of the same prefix, for the storage, or is about to end as too late."""
        return state.twin is not None or state.prefetching or state.rid in self._planner._late

    def _before(self, state: ReqState, other: ReqState) -> bool:
        (step, due), (other_step, other_due) = self.due(state), self.due(other)
        return step < other_step or (step == other_step and due < other_due + _ORDER_S)

    def due(self, state: ReqState) -> tuple[float, float]:
        """What the order of service goes by, as docs/KEYS.md has it: one that is less important is due so much later,
        or without ageing after all that are more."""
        request, settings = state.request, self.settings
        if settings.schedule_policy != "priority":
            return 0.0, self.came[request.rid]
        deadline = request.arrival + request.timeout_s if request.timeout_s else math.inf
        if not settings.priority_ageing_s:
            return request.priority, min(deadline, request.arrival + 1e9)
        due = min(deadline, request.arrival + settings.priority_ageing_s / 2)
        return 0.0, due + request.priority * settings.priority_ageing_s

    def check_deadlines(self, now: float) -> None:
        """I22, after a turn at this time. Raises AssertionError."""
        for state in self._states.values():
            request = state.request
            if state.aborting or state.handoff is not None or not request.timeout_s:
                continue
            over_s = now - request.arrival - request.timeout_s
            assert over_s < 0, f"sim: I22: {state.rid} lives on, {over_s:.3f} s after its deadline ({state.phase})"

    def fillable_pages(self, part: Part) -> set[int]:
        """Pages of a part that a peer may write now."""
        filled = [each for rid, each in self.reserved.items() if rid in self._batch.transfer]
        spans = (span for each in filled for span in each.spans if span.part is part)
        return {page for span in spans for page in span.pages.tolist()}


class PageWatch:
    """Which pages of one engine may be read and written at this moment."""

    def __init__(self, name: str, cache: PrefixCache, scheduler: WatchedScheduler) -> None:
        """`name`: of the engine."""
        self._name, self._cache, self._scheduler = name, cache, scheduler

    def check_read(self, part: Part, pages: NDArray[np.integer]) -> None:
        """I4: these pages may be read now. Raises AssertionError."""
        ledger = self._cache.ledgers[Tier.DEVICE, part]
        loose = [page for page in pages.tolist() if not ledger.holds_of(page).get("transfer")]
        assert not loose, f"sim: I4: pages {loose} of {self._name} ({part.name}) are read, but not held for that"

    def check_write(self, part: Part, pages: NDArray[np.integer]) -> None:
        """I2: these pages may be written now. Raises AssertionError."""
        wild = set(pages.tolist()) - self._scheduler.fillable_pages(part)
        if wild:
            ledger = self._cache.ledgers[Tier.DEVICE, part]
            wild = {page for page in wild if not ledger.holds_of(page).get("quarantine")}
        assert not wild, f"sim: I2: pages {sorted(wild)} of {self._name} ({part.name}) are written without a grant"


class WatchedLine(LeaderLine):
    """The leader's line; its commands about pages are checked as they are given."""

    watch: PageWatch | None = None

    def command(self, command: object, rank: int | None = None) -> None:
        if self.watch is not None:
            match command:
                case MovePiece(part=part, pages=pages) | DigestPiece(part=part, pages=pages):
                    self.watch.check_read(part, pages)
                case TakeIn(part=part, pages=pages, mode=Mode.RECEIVER_CHECKED):
                    self.watch.check_write(part, pages)
        super().command(command, rank)
