"""Every request of one engine, in the queue of its phase: how one comes in, goes back in line, and goes for good.

Knows nothing of steps: what is planned for a request is step_planner.py's, what came of it step_commit.py's.
"""

from __future__ import annotations

from collections.abc import Sequence

from serinus.cache import Lease
from serinus.core.errors import CapacityError, RateLimited
from serinus.core.request import Request
from serinus.sched.batch import Batch
from serinus.sched.incoming import Incoming
from serinus.sched.loads import begin_again
from serinus.sched.outgoing import Outgoing
from serinus.sched.page_allocator import PageAllocator
from serinus.sched.queues import ReqQueue
from serinus.sched.request_state import Phase, ReqState
from serinus.sched.settings import SchedSettings
from serinus.sched.shares import FairShares

_QUEUES_MAX = 8
"""Requests of all priorities that may wait, as a multiple of those that may wait of one."""


class RequestQueues:
    """The requests by id, and the moves between queues that touch more than one of them."""

    def __init__(
        self, allocator: PageAllocator, batch: Batch, incoming: Incoming, outgoing: Outgoing, shares: FairShares
    ) -> None:
        self._allocator = allocator
        self._batch = batch
        self._incoming = incoming
        self._outgoing = outgoing
        self.states: dict[str, ReqState] = {}
        """All requests by id, in any state."""
        self.shares = shares
        """Which API key is due."""
        self.waiting = ReqQueue(shares)
        """Those that want to be computed here and have no pages."""

    def check_room(self, request: Request, settings: SchedSettings) -> None:
        """Raise CapacityError where too many wait for a newcomer: under the policy `priority` of its own priority or a
        more important one, so that a flood of others does not keep it out, and eight times as many altogether; or of
        its own priority alone. Raise RateLimited where too many of its share wait."""
        queues = (self.waiting, self._incoming.prealloc)
        most, priority, share = settings.max_queued_requests, request.priority, request.share
        queued = sum(map(len, queues))
        by_priority = settings.schedule_policy == "priority"
        ahead = sum(queue.count_up_to(priority) for queue in queues) if by_priority else queued
        if ahead >= most:
            raise CapacityError(
                f"sched: {ahead} requests wait already, expected less than max_queued_requests = {most}"
            )
        if queued >= _QUEUES_MAX * most:
            raise CapacityError(
                f"sched: {queued} requests of all priorities wait already, expected less than {_QUEUES_MAX} times"
                f" max_queued_requests = {most}"
            )
        own, own_max = sum(queue.count_of(priority) for queue in queues), settings.queued_max_of.get(priority)
        if own_max is not None and own >= own_max:
            raise CapacityError(
                f"sched: {own} requests of priority {priority} wait already, expected less than {own_max}"
                " (--max-queued-by-priority)"
            )
        of_share = self.shares.waiting_of(share.name)
        if 0 < share.queued_max <= of_share:
            raise RateLimited(
                f"sched: {of_share} requests of the API key {share.name!r} wait already, expected less than"
                f" max_queued_requests = {share.queued_max}"
            )

    def enter(self, state: ReqState) -> None:
        """A new one: in line for being computed here, or elsewhere."""
        self.states[state.rid] = state
        (self._incoming.prealloc if state.phase is Phase.PREALLOC else self.waiting).push(state)

    def wait(self, states: Sequence[ReqState]) -> None:
        """These gave their pages back: each waits at the place of its age."""
        for state in states:
            self.waiting.push(state)

    def go_local(self, state: ReqState, reason: str) -> None:
        """One whose prompt was wanted from elsewhere is computed here after all."""
        self._incoming.withdraw(state)
        state.move(Phase.WAITING)
        state.remote = False
        state.local_reason = reason
        state.started = None
        self.waiting.push(state)

    def go_back(self, state: ReqState, *, asks: bool) -> None:
        """A running one read wrong KV: it forgets what may have come of that, publishes nothing of what it has, and is
        computed again when its turn comes by its age. `asks`: its prompt is wanted from elsewhere once more."""
        self._batch.remove(state)
        state.lost = state.computed
        state.rewind()
        self._allocator.release(state, trusted=False)
        state.move(Phase.PREALLOC if asks else Phase.WAITING)
        (self._incoming.prealloc if asks else self.waiting).push(state)

    def begin_again(self, leases: Sequence[Lease]) -> list[ReqState]:
        """The KV of these leases never came from the host: their requests begin once more, or end where they were
        aborting. Returns those that may be in plans under way."""
        again = begin_again(leases, self.states.values(), self._batch, self._incoming, self._allocator)
        for state in again:
            self.waiting.push(state)
            if state.aborting:
                self.end(state)
        return again

    def end(self, state: ReqState) -> None:
        """Out of its queue, everything given back; held pages alone keep it known until they are drained."""
        self._allocator.forget_prefetch(state)
        if state.running:
            self._batch.remove(state)
            self._allocator.release(state)
        elif state.phase is Phase.WAITING:
            self.waiting.remove(state)
        else:
            self._incoming.withdraw(state)
        if state.holds:
            state.move(Phase.INFLIGHT)
            state.aborting = True
            self._outgoing.inflight[state.rid] = state
            return
        state.move(Phase.ENDED)
        del self.states[state.rid]

    def release_inflight(self, state: ReqState) -> None:
        """Give the lease of a request in flight back; forget it when its last hold is gone."""
        self._allocator.release(state)
        if state.holds:
            return
        del self._outgoing.inflight[state.rid]
        state.move(Phase.ENDED)
        del self.states[state.rid]
