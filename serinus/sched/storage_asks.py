"""When the storage is asked for the prefixes of requests that wait: of the first in line, and of those behind it as far
as the host has room for what it brings. Of more the host would give up what was read for the first before these are
served, or have no pages for it."""

from __future__ import annotations

from serinus.sched.page_allocator import PageAllocator
from serinus.sched.queues import ReqQueue
from serinus.sched.request_state import ReqState

_LOOK_REQUESTS = 64
"""Of each queue so many are looked at: no more are asked for at a time."""


class StorageAsks:
    """Asks for requests in the order in which they are served."""

    def __init__(self, allocator: PageAllocator, *queues: ReqQueue) -> None:
        """`queues`: of requests without pages."""
        self._allocator = allocator
        self._queues = queues
        self._unasked = False
        """Whether there may be requests that are asked for later."""

    def enter(self, state: ReqState, now: float) -> None:
        """A newcomer: it is asked for at once unless others wait for that."""
        if self._unasked:
            state.unasked = state.prefetching = self._allocator.lacks(state) > 0
        else:
            self._allocator.prefetch(state, now, ahead=True)
            self._unasked = state.unasked

    def turn(self, now: float) -> None:
        """Ask for those that there is room for now. Cost: nothing where none waits for that; else a look at the first
        in line."""
        if not self._unasked:
            return
        for queue in self._queues:
            for place, state in enumerate(queue.in_turn(_LOOK_REQUESTS)):
                if state.unasked:
                    self._allocator.prefetch(state, now, ahead=place > 0)
                if state.unasked:
                    return
        self._unasked = any(len(queue) > _LOOK_REQUESTS for queue in self._queues)
