"""Decode side of a handoff: pages are reserved in order of arrival, filled by a prefill engine, then taken over."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from serinus.core.handoff import Reservation
from serinus.core.parts import PageSpan
from serinus.sched.admission import Admission
from serinus.sched.batch import Batch
from serinus.sched.handoff_choice import HandoffChoice, Paces
from serinus.sched.page_allocator import PageAllocator
from serinus.sched.queues import ReqQueue
from serinus.sched.request_state import Phase, ReqState
from serinus.sched.settings import SchedSettings
from serinus.sched.shares import FairShares
from serinus.sched.stats import Totals

_QUARANTINE = "quarantine"
"""Name of the holds on pages that a peer may still write."""
_LOOK_REQUESTS = 32
"""Of the oldest requests without pages, and of the others, as many are looked at in one turn."""


class Incoming:
    """Requests whose prompt a prefill engine is to compute."""

    def __init__(
        self, settings: SchedSettings, allocator: PageAllocator, batch: Batch, admission: Admission, shares: FairShares
    ) -> None:
        self._settings = settings
        self._allocator = allocator
        self._batch = batch
        self._admission = admission
        self._shares = shares
        self.prealloc = ReqQueue(shares)
        self._blocked: ReqState | None = None
        self._looked_seq = 0
        """`seq` of the last request beyond the oldest that was looked at; the next turn goes on behind it."""
        self._kept: list[tuple[str, str]] = []
        self.choice = HandoffChoice(settings.local_gain)
        """Whether a prompt is handed over at all: to be told how late handoffs come."""

    @property
    def blocked(self) -> ReqState | None:
        """The request that found no room, or no row, at the last try: local requests that come behind it must not
        overtake it."""
        blocked = self._blocked
        return blocked if blocked is not None and blocked.phase is Phase.PREALLOC else None

    def reserve(
        self, now: float, blocked: ReqState | None, go_local: Callable[[ReqState, str], None], paces: Paces
    ) -> list[Reservation]:
        """Reserve pages for as many requests as there is room for, in turn. `blocked` is a local request that waits
        for room and must not be overtaken by those that come behind it. A request that lacks less than
        `min_remote_tokens`, or gets its first token sooner from here, is passed to `go_local`. Cost: a bounded number
        of requests is looked at, however many wait: the first, and behind them some others, so that requests that
        wait for their twins do not keep others from being seen."""
        reservations = self._granted(now)
        self._blocked = None
        first = self.prealloc.in_turn(_LOOK_REQUESTS)
        reach = max((state.seq for state in first), default=0)
        others = self.prealloc.behind(max(reach, self._looked_seq), _LOOK_REQUESTS)
        looked_seq = others[-1].seq if len(others) == _LOOK_REQUESTS else 0
        awaits_storage = False
        for state in (*first, *others):
            goes_on = self._try(state, now, blocked, go_local, paces, ahead=awaits_storage)
            awaits_storage |= state.prefetching
            if not goes_on:
                looked_seq = state.seq - 1 if state.seq > reach else self._looked_seq
                break
            if state.phase is Phase.TRANSFER and not state.awaited:
                reservations.append(self._grant(state, now))
        self._looked_seq = looked_seq
        return reservations

    def _try(
        self, state: ReqState, now: float, blocked: ReqState | None, go_local: Callable[[ReqState, str], None],
        paces: Paces, *, ahead: bool,
    ) -> bool:  # fmt: skip
        """Reserve pages for one request, unless it waits for its prefix or goes local; False = there is no room, for
        those behind it neither. `ahead`: see Admission.awaits_storage."""
        if self._batch.rows_needed >= self._settings.max_running_requests:
            self._blocked = state
            return False
        if self._admission.has_twin(state) or self._admission.awaits_storage(state, now, ahead=ahead):
            return True
        lacking = state.prompt_len - self._allocator.cached(state)
        reason = self._local_reason(state, lacking, paces)
        if reason:
            go_local(state, reason)
            self._kept.append((state.rid, reason))
            return True
        if blocked is not None and self.prealloc.comes_first(blocked, state):
            return False
        if not self._admission.place(state):
            self._blocked = state
            return False
        self.prealloc.remove(state)
        self._shares.serve(state.request.share)
        state.move(Phase.TRANSFER)
        self._batch.transfer[state.rid] = state
        state.awaited = frozenset(self._allocator.open_loads)
        if (pace := paces.there.get(state.request.prefill_address)) is not None:
            paces.there[state.request.prefill_address] = pace.behind(lacking)
        return True

    def _local_reason(self, state: ReqState, lacking: int, paces: Paces) -> str:
        """Why a request that lacks so many prompt tokens is computed here; empty = it is not."""
        if lacking < max(1, self._settings.min_remote_tokens):
            return "short"
        there = paces.there.get(state.request.prefill_address)
        if there is None:
            return ""
        streams = bool(self._batch.decoding)
        return "sooner_here" if self.choice.stays(lacking, paces.here(), there, streams=streams) else ""

    def take_kept(self) -> list[tuple[str, str]]:
        """Requests that `reserve` decided to compute here since the last call, and why."""
        kept, self._kept = self._kept, []
        return kept

    def _granted(self, now: float) -> list[Reservation]:
        """Reservations of requests whose loads have ended by now: tokens that the host had count as held only then."""
        if not self._loading:
            return []
        open_loads = self._allocator.open_loads
        ready = [state for state in self._loading if not state.awaited & open_loads]
        return [self._grant(state, now) for state in ready]

    @property
    def _loading(self) -> list[ReqState]:
        return [state for state in self._batch.transfer.values() if not state.granted]

    def _grant(self, state: ReqState, now: float) -> Reservation:
        state.granted = state.sure = True
        state.held = state.computed
        self._shares.charge(state.request.share, state.prompt_len - state.held)
        if state.started is None:
            state.started = now
        state.cached_tokens = {tier: count for tier, count in state.found.items() if count}
        end = self._allocator.pages_for(state.prompt_len)  # more where it is asked for again, for what it knows already
        spans = self._allocator.spans(state, state.held // self._allocator.page_size, end)
        return Reservation(rid=state.rid, request=state.request, held=state.held, spans=spans)

    def in_transfer(self, rid: str) -> ReqState:
        """A request that has pages for its prompt. Raises KeyError where it has none."""
        return self._batch.transfer[rid]

    def is_granted(self, rid: str) -> bool:
        """Whether a request has pages that a prefill engine may fill: all that the host adds to its prefix has come."""
        state = self._batch.transfer.get(rid)
        return state is not None and state.granted

    def wait_again(self, state: ReqState) -> None:
        """The load of its prefix from the host failed before a prefill engine was told, or what that one sent is wrong:
        it waits for pages again."""
        del self._batch.transfer[state.rid]
        self._allocator.release(state)
        state.move(Phase.PREALLOC)
        self.prealloc.push(state)

    def take_over(self, state: ReqState, totals: Totals, slots_checked: int) -> None:
        """The pages of a request are filled, and so many slots of them were verified: publish them, give the request a
        row, and let it decode; one that knows some of its answer, as it was healed, computes that first."""
        del self._batch.transfer[state.rid]
        state.computed = state.verified = state.planned = state.prompt_len
        state.is_new = True
        state.handoff_tokens = state.landed = state.prompt_len - state.held
        state.rows_checked(state.prompt_len, slots_checked)
        state.handoff_pages = self._allocator.pages_for(state.prompt_len) - state.held // self._allocator.page_size
        totals.healed_tokens += state.repaired()
        self._allocator.take_row(state)
        self._allocator.publish(state)
        self._allocator.advance(state, state.prompt_len)
        goes_on = state.known > state.prompt_len
        state.move(Phase.PREFILL if goes_on else Phase.DECODE)
        (self._batch.prefilling if goes_on else self._batch.decoding).append(state)

    def quarantine(self, spans: Sequence[PageSpan]) -> None:
        """A peer may still write these pages of a request that is about to end or to be computed here: they are not
        allocated before `quarantine_over`, even if they are freed. Called before the request ends or goes local."""
        self._allocator.hold(_QUARANTINE, spans)

    def quarantine_over(self, spans: Sequence[PageSpan]) -> None:
        """No peer writes these pages any more: they may be allocated."""
        self._allocator.unhold(_QUARANTINE, spans)

    def withdraw(self, state: ReqState) -> None:
        """Take a request out of its queue and free its pages; the caller decides its next state."""
        if state.phase is Phase.PREALLOC:
            self.prealloc.remove(state)
        else:
            del self._batch.transfer[state.rid]
            self._allocator.release(state)
