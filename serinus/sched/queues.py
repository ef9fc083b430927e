"""The waiting line, and in which order its requests are tried. Knows neither pages nor rows.

Between API keys (shares) the order is that of shares.py. Among the requests of one share it is one number of each
(`ReqState.seq`): that of its arrival or, under the policy `priority`, its priority before that. Whatever goes by age
goes by it: which request waits, is barred or is retracted.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heapreplace, merge
from itertools import islice
from operator import attrgetter

from serinus.core.request import Request
from serinus.sched.request_state import ReqState
from serinus.sched.settings import SchedSettings
from serinus.sched.shares import FairShares

_seq = attrgetter("seq")
_ARRIVALS_MAX = 1 << 48
_PRIORITY_MIN = -(1 << 31)
_STRICT_MS = 1 << 48
"""One step of priority where none ever ages: more milliseconds than any clock counts."""


def place_of(request: Request, arrivals: int, deadline: float, settings: SchedSettings) -> int:
    """`seq` of a request: the number of its arrival and, where the policy goes by it, before that the time at which it
    is due, later by `priority_ageing_s` for each step of its priority.

    Due is a request at its deadline, or half a step after its arrival where that is sooner. So of one priority the
    earliest deadline is first, and none waits for one that came later than half a step behind it; nor for one that is
    n steps more important and came later than n and a half steps behind it. Without ageing a step has no end.
    """
    if settings.schedule_policy != "priority":
        return arrivals
    step_ms = math.ceil(1e3 * settings.priority_ageing_s) or _STRICT_MS
    due_ms = int(min(1e3 * deadline, 1e3 * request.arrival + step_ms // 2))
    return ((request.priority - _PRIORITY_MIN) * step_ms + due_ms) * _ARRIVALS_MAX + arrivals


class ReqQueue:
    """Requests in the order of service, wherever they come from.

    A retracted or recomputed request finds its old place again: before everything of its share that comes behind it.
    Cost of a change: a bisection and one move of a list's tail.
    """

    def __init__(self, shares: FairShares) -> None:
        """`shares`: of all queues of the engine."""
        self._shares = shares
        self._lines: dict[str, list[ReqState]] = {}
        """By the name of the share; none is empty."""
        self._priorities: Counter[int] = Counter()

    def __len__(self) -> int:
        return self._priorities.total()

    def __iter__(self) -> Iterator[ReqState]:
        return merge(*self._lines.values(), key=_seq)

    def __contains__(self, state: object) -> bool:
        return isinstance(state, ReqState) and self._at(state) is not None

    def _at(self, state: ReqState) -> int | None:
        line = self._lines.get(state.request.share.name, [])
        at = bisect_left(line, state.seq, key=_seq)
        return at if at < len(line) and line[at] is state else None

    def push(self, state: ReqState) -> None:
        """Put it where its age belongs."""
        assert state not in self, f"sched: request {state.rid} is in the queue already"
        line = self._lines.setdefault(state.request.share.name, [])
        if not line or line[-1].seq < state.seq:
            line.append(state)
        else:
            line.insert(bisect_left(line, state.seq, key=_seq), state)
        self._priorities[state.request.priority] += 1
        self._shares.wait(state.request.share)

    def remove(self, state: ReqState) -> None:
        """Take a request out of the queue."""
        at = self._at(state)
        assert at is not None, f"sched: request {state.rid} is not in the queue"
        line = self._lines[state.request.share.name]
        del line[at]
        if not line:
            del self._lines[state.request.share.name]
        self._priorities[state.request.priority] -= 1
        self._priorities += Counter()  # forgets what is 0
        self._shares.leave(state.request.share)

    def count_of(self, priority: int) -> int:
        """How many there are of this priority."""
        return self._priorities[priority]

    def count_up_to(self, priority: int) -> int:
        """How many are as important, or more."""
        return sum(count for each, count in self._priorities.items() if each <= priority)

    def first(self, count: int) -> list[ReqState]:
        """The oldest, at most `count` of them."""
        return list(islice(self, count))

    def behind(self, seq: int, count: int) -> list[ReqState]:
        """The oldest of those that are younger than `seq`, at most `count` of them."""
        tails = []
        for line in self._lines.values():
            at = bisect_left(line, seq + 1, key=_seq)
            tails.append(line[at : at + count])
        return list(islice(merge(*tails, key=_seq), count))

    def comes_first(self, one: ReqState, other: ReqState) -> bool:
        """Whether `one` is to be served before `other`; each is of any queue that has these shares."""
        due = [(self._shares.time_of(state.request.share.name), state.seq) for state in (one, other)]
        return due[0] < due[1]

    def in_turn(self, count: int) -> list[ReqState]:
        """Those to be served next, at most `count` of them: the next one is of the share that has had the least for its
        weight, what comes before it in this list counted as had. Cost: a slice; with several shares O(count log n)."""
        if len(self._lines) < 2:
            return [state for line in self._lines.values() for state in line[:count]]
        heads = [(self._shares.time_of(name), line[0].seq, 0, name) for name, line in self._lines.items()]
        heapify(heads)
        found: list[ReqState] = []
        while heads and len(found) < count:
            time, _, at, name = heads[0]
            line = self._lines[name]
            state = line[at]
            found.append(state)
            if at + 1 == len(line):
                heappop(heads)
            else:
                heapreplace(heads, (time + state.known / state.request.share.weight, line[at + 1].seq, at + 1, name))
        return found


def admission_order(
    queue: ReqQueue, settings: SchedSettings, cached: Callable[[ReqState], int], count: int
) -> list[ReqState]:
    """The requests to try to admit, in order, at most `count` of them.

    fcfs, priority: in turn. lpm, of all shares alike: the longest cached prefix first, among the oldest
    `lpm_scan_requests`; a request that had run already, or that was passed `lpm_skips_max` times, comes before all
    others. Cost: that of `in_turn`; lpm one cache probe per scanned request.
    """
    if settings.schedule_policy != "lpm" or len(queue) == 1:
        return queue.in_turn(count)
    scanned = queue.first(settings.lpm_scan_requests)

    def rank(state: ReqState) -> tuple[bool, int, int]:
        overdue = state.retracted or state.skips >= settings.lpm_skips_max
        return (not overdue, 0 if overdue else -cached(state), state.seq)

    return sorted(scanned, key=rank)[:count]
