"""Failed loads: requests whose KV could not be copied from the host to the device are computed again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from serinus.cache import Lease
from serinus.core.errors import InvariantError
from serinus.sched.batch import Batch
from serinus.sched.incoming import Incoming
from serinus.sched.page_allocator import PageAllocator
from serinus.sched.request_state import Phase, ReqState


def begin_again(
    leases: Sequence[Lease], states: Iterable[ReqState], batch: Batch, incoming: Incoming, allocator: PageAllocator
) -> list[ReqState]:
    """Free the pages of the requests with these leases; returns the requests that must now wait to be computed here.

    A load is settled before any result computed on it is committed, and before any page is published behind it. So a
    request with a committed chunk (or with pages that a prefill engine knows; `sure` is set for both) does not read the
    pages that failed to load. It only shares tree nodes with them, as where a window of an old prefix was loaded again.
    Such a request continues, but cannot publish any more.

    Raises InvariantError where a request without a committed chunk is neither prefilling nor in transfer.
    """
    if not leases:
        return []
    bad = {id(lease) for lease in leases}
    waiting = []
    for state in [state for state in states if id(state.lease) in bad and not state.sure]:
        if state.phase is Phase.TRANSFER:
            incoming.wait_again(state)
            continue
        if state.phase is not Phase.PREFILL:
            raise InvariantError(
                f"sched: request {state.rid} is {state.phase.name} on KV that never came from the host"
            )
        batch.remove(state)
        allocator.release(state)
        if state.first_token is None:
            state.started = None
        state.move(Phase.WAITING)
        waiting.append(state)
    return waiting
