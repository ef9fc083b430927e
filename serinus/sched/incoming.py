"""Decode side of a handoff: pages are reserved in order of arrival, filled by a prefill engine, then taken over."""

from __future__ import annotations

from collections.abc import Callable

from serinus.core.handoff import Reservation
from serinus.sched.admission import Admission
from serinus.sched.batch import Batch
from serinus.sched.page_allocator import PageAllocator
from serinus.sched.queues import ReqQueue
from serinus.sched.request_state import Phase, ReqState
from serinus.sched.settings import SchedSettings

__all__ = ["Incoming"]


class Incoming:
    """Requests whose prompt a prefill engine is to compute."""

    def __init__(self, settings: SchedSettings, allocator: PageAllocator, batch: Batch, admission: Admission) -> None:
        self._settings = settings
        self._allocator = allocator
        self._batch = batch
        self._admission = admission
        self.prealloc = ReqQueue()
        self._blocked: ReqState | None = None

    @property
    def blocked_seq(self) -> int | None:
        """`seq` of the request that found no room at the last try: younger local requests must not overtake it."""
        blocked = self._blocked
        return blocked.seq if blocked is not None and blocked.phase is Phase.PREALLOC else None

    def reserve(
        self, now: float, older_seq: int | None, go_local: Callable[[ReqState, str], None]
    ) -> list[Reservation]:
        """Reserve pages for as many requests as there is room for, oldest first. `older_seq` is the age of a local
        request that waits for room and must not be overtaken. A request that lacks less than `min_remote_tokens` is
        passed to `go_local`."""
        reservations = self._granted(now)
        self._blocked = None
        for state in list(self.prealloc):
            if self._batch.rows_needed >= self._settings.max_running_requests:
                break
            if self._admission.has_twin(state) or self._admission.awaits_storage(state, now):
                continue
            if state.prompt_len - self._allocator.cached(state) < self._settings.min_remote_tokens:
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
            state.awaited = frozenset(self._allocator.open_loads)
            if not state.awaited:
                reservations.append(self._grant(state, now))
        return reservations

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
        if state.started is None:
            state.started = now
        state.cached_tokens = {tier: count for tier, count in state.found.items() if count}
        spans = self._allocator.spans(state, state.held // self._allocator.page_size, state.full.end)
        return Reservation(rid=state.rid, request=state.request, held=state.held, spans=spans)

    def load_failed(self, state: ReqState) -> None:
        """The load of its prefix from the host failed before a prefill engine was told: it waits for pages again."""
        del self._batch.transfer[state.rid]
        self._allocator.release(state)
        state.move(Phase.PREALLOC)
        self.prealloc.push(state)

    def take_over(self, state: ReqState) -> None:
        """The pages of a request are filled: publish them, give the request a row, and let it decode."""
        del self._batch.transfer[state.rid]
        state.computed = state.planned = state.prompt_len
        state.handoff_tokens = state.prompt_len - state.held
        state.handoff_pages = state.full.end - state.held // self._allocator.page_size
        self._allocator.take_row(state)
        self._allocator.publish(state)
        self._allocator.advance(state, state.known)
        state.move(Phase.DECODE)
        self._batch.decoding.append(state)

    def withdraw(self, state: ReqState) -> None:
        """Take a request out of its queue and free its pages; the caller decides its next state."""
        if state.phase is Phase.PREALLOC:
            self.prealloc.remove(state)
        else:
            del self._batch.transfer[state.rid]
            self._allocator.release(state)
