"""Decode side of a handoff: pages reserved in order of arrival, filled elsewhere, taken over when they have landed."""

from __future__ import annotations

from collections.abc import Callable

from serinus.core.handoff import Reservation
from serinus.sched.admission import Admission
from serinus.sched.batch import Batch
from serinus.sched.queues import ReqQueue
from serinus.sched.request_state import Phase, ReqState
from serinus.sched.seats import Seats
from serinus.sched.settings import SchedSettings

__all__ = ["Incoming"]


class Incoming:
    """Requests whose prompt is wanted from a prefill engine."""

    def __init__(self, settings: SchedSettings, seats: Seats, batch: Batch, admission: Admission) -> None:
        self._settings = settings
        self._seats = seats
        self._batch = batch
        self._admission = admission
        self.prealloc = ReqQueue()
        self._blocked: ReqState | None = None

    @property
    def blocked_seq(self) -> int | None:
        """Age of the request that found no room at the last try: younger local ones must not overtake it."""
        blocked = self._blocked
        return blocked.seq if blocked is not None and blocked.phase is Phase.PREALLOC else None

    def reserve(
        self, now: float, older_seq: int | None, go_local: Callable[[ReqState, str], None]
    ) -> list[Reservation]:
        """Give pages to as many as there is room for, oldest first; `older_seq` = age of a local request that waits
        for room and must not be overtaken. One that lacks less than `min_remote_tokens` goes to `go_local`."""
        reservations = self._granted(now)
        self._blocked = None
        for state in list(self.prealloc):
            if self._batch.seats_taken >= self._settings.max_running_requests:
                break
            if self._admission.has_twin(state) or self._admission.awaits_storage(state, now):
                continue
            if state.prompt_len - self._seats.cached(state) < self._settings.min_remote_tokens:
                go_local(state, "short")
                continue
            if older_seq is not None and older_seq < state.seq:
                break
            if not self._admission.place(state):
                self._blocked = state
                break
            self.prealloc.remove(state)
            state.move(Phase.TRANSFER)
            self._batch.transfer[state.rid] = state
            state.awaited = frozenset(self._seats.open_loads)
            if not state.awaited:
                reservations.append(self._grant(state, now))
        return reservations

    def _granted(self, now: float) -> list[Reservation]:
        """Reservations of those whose loads have ended by now: what the host had counts as held only then."""
        if not self._loading:
            return []
        open_loads = self._seats.open_loads
        ready = [state for state in self._loading if not state.awaited & open_loads]
        return [self._grant(state, now) for state in ready]

    @property
    def _loading(self) -> list[ReqState]:
        return [state for state in self._batch.transfer.values() if not state.granted]

    def _grant(self, state: ReqState, now: float) -> Reservation:
        state.granted = state.sure = True
        state.held = state.computed
        if state.started is None:
            state.started = now
        state.cached_tokens = {tier: count for tier, count in state.found.items() if count}
        spans = self._seats.spans(state, state.held // self._seats.page_size, state.full.end)
        return Reservation(rid=state.rid, request=state.request, held=state.held, spans=spans)

    def load_failed(self, state: ReqState) -> None:
        """What the host had of it never came, before anybody was told: it waits for pages once more."""
        del self._batch.transfer[state.rid]
        self._seats.leave(state)
        state.move(Phase.PREALLOC)
        self.prealloc.push(state)

    def take_over(self, state: ReqState) -> None:
        """Its pages are filled: publish them, give it a row, let it decode."""
        del self._batch.transfer[state.rid]
        state.computed = state.planned = state.prompt_len
        state.handoff_tokens = state.prompt_len - state.held
        state.handoff_pages = state.full.end - state.held // self._seats.page_size
        self._seats.sit(state)
        self._seats.publish(state)
        self._seats.advance(state, state.known)
        state.move(Phase.DECODE)
        self._batch.decoding.append(state)

    def withdraw(self, state: ReqState) -> None:
        """Take it out of its queue and give its pages back; the caller says where it goes."""
        if state.phase is Phase.PREALLOC:
            self.prealloc.remove(state)
        else:
            del self._batch.transfer[state.rid]
            self._seats.leave(state)
