"""The waiting line, and in which order its requests are tried. Knows neither pages nor rows.

The order of service is one number of each request (`ReqState.seq`): that of its arrival or, under the policy
`priority`, its priority before that. Whatever goes by age goes by it: which request waits, is barred or is retracted.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from operator import attrgetter

from serinus.sched.request_state import ReqState
from serinus.sched.settings import SchedSettings

__all__ = ["ReqQueue", "admission_order", "class_end", "place_of"]

_seq = attrgetter("seq")
_ARRIVALS_MAX = 1 << 48
_PRIORITY_MIN = -(1 << 31)


def place_of(priority: int, arrival: int, policy: str) -> int:
    """`seq` of a request: the number of its arrival and, where the policy goes by it, its priority before that."""
    return arrival if policy != "priority" else (priority - _PRIORITY_MIN) * _ARRIVALS_MAX + arrival


def class_end(seq: int) -> int:
    """The first `seq` behind all of the same priority."""
    return (seq // _ARRIVALS_MAX + 1) * _ARRIVALS_MAX


class ReqQueue:
    """Requests in the order of service, wherever they come from.

    A retracted or recomputed request finds its old place again: before everything that comes behind it. Cost of a
    change: a bisection and one move of the list's tail.
    """

    def __init__(self) -> None:
        self._states: list[ReqState] = []

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[ReqState]:
        return iter(self._states)

    def __contains__(self, state: object) -> bool:
        if not isinstance(state, ReqState):
            return False
        at = bisect_left(self._states, state.seq, key=_seq)
        return at < len(self._states) and self._states[at] is state

    def push(self, state: ReqState) -> None:
        """Put it where its age belongs."""
        assert state not in self, f"sched: request {state.rid} is in the queue already"
        if not self._states or self._states[-1].seq < state.seq:
            self._states.append(state)
            return
        self._states.insert(bisect_left(self._states, state.seq, key=_seq), state)

    def remove(self, state: ReqState) -> None:
        """Take a request out of the queue."""
        at = bisect_left(self._states, state.seq, key=_seq)
        found = at < len(self._states) and self._states[at] is state
        assert found, f"sched: request {state.rid} is not in the queue"
        del self._states[at]

    def count_before(self, seq: int) -> int:
        """How many come before this place."""
        return bisect_left(self._states, seq, key=_seq)

    def first(self, count: int) -> list[ReqState]:
        """The oldest, at most `count` of them."""
        return self._states[:count]

    def behind(self, seq: int, count: int) -> list[ReqState]:
        """The oldest of those that are younger than `seq`, at most `count` of them."""
        at = bisect_left(self._states, seq + 1, key=_seq)
        return self._states[at : at + count]


def admission_order(
    queue: ReqQueue, settings: SchedSettings, cached: Callable[[ReqState], int], count: int
) -> list[ReqState]:
    """The requests to try to admit, in order, at most `count` of them.

    fcfs, priority: by `seq`. lpm: the longest cached prefix first, among the oldest `lpm_scan_requests`; a request
    that had run already, or that was passed `lpm_skips_max` times, comes before all others.
    Cost: a slice; lpm one cache probe per scanned request.
    """
    if settings.schedule_policy != "lpm" or len(queue) == 1:
        return queue.first(count)
    scanned = queue.first(settings.lpm_scan_requests)

    def rank(state: ReqState) -> tuple[bool, int, int]:
        overdue = state.retracted or state.skips >= settings.lpm_skips_max
        return (not overdue, 0 if overdue else -cached(state), state.seq)

    return sorted(scanned, key=rank)[:count]
