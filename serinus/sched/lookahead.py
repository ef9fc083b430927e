"""What goes on behind a plan, said before its result is known: so a device need not wait for its host between steps.

A step of decoding requests alone is followed by one of the same requests, less those that end, each with one token
more. All that is not known of it is which tokens these are; and where a request has a grammar or a penalty, or asks for
log-probabilities, how the tokens behind them are chosen: that comes with the next plan. What comes between (a new
request, one whose pages landed) has to wait for the step behind that. Knows nothing of results: which requests have
ended is found by `take`, when the next plan is made.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from serinus.core.plan import SeqWork, WorkAhead
from serinus.sched.batch import Batch
from serinus.sched.page_allocator import PageAllocator
from serinus.sched.request_state import ReqState
from serinus.sched.settings import SchedSettings


class Lookahead:
    """Makes work ahead, and finds what of it holds one step later."""

    def __init__(self, settings: SchedSettings, allocator: PageAllocator, batch: Batch) -> None:
        self._overlaps = settings.overlaps and settings.depth == 1
        self._allocator = allocator
        self._batch = batch
        self._made: list[ReqState] = []
        """Requests of the latest work ahead."""

    def take(self) -> list[tuple[int, ReqState, SeqWork]]:
        """The latest work ahead that still goes on, in its order and with its number there: of requests that decode, on
        the pages that they had. None of it goes on twice."""
        made, self._made = self._made, []
        holding = []
        for number, state in enumerate(made):
            work, state.ahead = state.ahead, None
            if work is None:
                continue  # it has given its pages back since
            assert work.start == state.known - 1, f"sched: {state.rid} has {state.known} tokens, {work.start} ahead"
            holding.append((number, state, work))
        return holding

    def make(self, states: Sequence[ReqState | None]) -> WorkAhead | None:
        """What goes on behind a plan of these requests; None = that cannot be said, or there is no page for it without
        taking one from a request. Each gets the page of its next token. Cost: some 3 us a request."""
        batch, allocator = self._batch, self._allocator
        if not self._overlaps or batch.prefilling or allocator.open_loads or len(states) != len(batch.decoding):
            return None
        going = [(i, state) for i, state in enumerate(states) if state is not None and state.known + 1 < state.limit]
        if not going:
            return None
        for _, state in going:
            if state.known + 1 > state.full.room:
                window_end = 1 + min((row.end for row in state.windowed), default=0)
                if not allocator.extend(state, state.full.end + 1, window_end):
                    return None
        for _, state in going:
            state.reserve()
            state.ahead = batch.token_work(state, state.known + 1)
        self._made = [state for _, state in going]
        work = tuple([state.ahead for state in self._made if state.ahead is not None])
        follows, chooses = np.array([i for i, _ in going], np.int64), all(state.plain for state in self._made)
        return WorkAhead(work=work, follows=follows, chooses=chooses)
