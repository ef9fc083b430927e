"""Loads that failed: whose KV never came from the host, and where those requests go. Nothing is lost but time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from serinus.cache import Lease
from serinus.core.errors import InvariantError
from serinus.sched.batch import Batch
from serinus.sched.incoming import Incoming
from serinus.sched.request_state import Phase, ReqState
from serinus.sched.seats import Seats

__all__ = ["begin_again"]


def begin_again(
    leases: Sequence[Lease], states: Iterable[ReqState], batch: Batch, incoming: Incoming, seats: Seats
) -> list[ReqState]:
    """Take the requests of these leases off their pages; returns those that must wait to be computed here.

    A load is settled before anything computed on it is committed, and before anybody publishes onto it. So whoever has
    a chunk committed (or pages that a prefill engine knows) reads none of what did not come: it only shares nodes with
    it, as where a window of an old prefix was fetched once more. It goes on; it cannot publish any more.
    """
    if not leases:
        return []
    bad = {id(lease) for lease in leases}
    waiting = []
    for state in [state for state in states if id(state.lease) in bad and not state.sure]:
        if state.phase is Phase.TRANSFER:
            incoming.load_failed(state)
            continue
        if state.phase is not Phase.PREFILL:
            raise InvariantError(
                f"sched: request {state.rid} is {state.phase.name} on KV that never came from the host"
            )
        batch.remove(state)
        seats.leave(state)
        if state.first_token is None:
            state.started = None
        state.move(Phase.WAITING)
        waiting.append(state)
    return waiting
