"""What goes on behind a plan, said before its result is known: so a device need not wait for its host between steps.

A request that decodes, or ends its prompt in the plan, goes on by one token, unless it ends. All that is not known of
it is which token that is; and where it has a grammar or a penalty, or asks for log-probabilities, how the token behind
it is chosen: that comes with the next plan. Of prompts all is known: which chunks go on, the planner decides. What
comes between (a new request, one whose pages landed) has to wait for the step behind that. Knows nothing of results:
which requests have ended is found by `take`, when the next plan is made.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from serinus.core.plan import SeqWork, WorkAhead
from serinus.sched.batch import Batch
from serinus.sched.page_allocator import PageAllocator
from serinus.sched.request_state import Phase, ReqState
from serinus.sched.settings import SchedSettings


class Lookahead:
    """Makes work ahead, and finds what of it holds one step later."""

    def __init__(self, settings: SchedSettings, allocator: PageAllocator, batch: Batch) -> None:
        self.on = settings.overlaps and settings.depth == 1
        """Whether any is made."""
        self._allocator = allocator
        self._batch = batch
        self._made: Sequence[ReqState] = ()
        """Requests of the latest work ahead."""

    def take(self) -> list[tuple[int, ReqState, SeqWork]]:
        """The latest work ahead that still goes on, in its order and with its number there: of requests that have the
        pages that they had. None of it goes on twice."""
        made, self._made = self._made, ()
        holding = []
        for number, state in enumerate(made):
            work, state.ahead = state.ahead, None
            if work is None:
                continue  # it has given its pages back since
            assert work.start == state.planned == state.computed, (
                f"sched: {state.rid} has computed {state.computed} tokens, planned {state.planned}, {work.start} ahead"
            )
            holding.append((number, state, work))
        return holding

    def tokens(self, states: Sequence[ReqState]) -> dict[int, SeqWork] | None:
        """What goes on by one token behind a plan of these, by its number there. None = that cannot be said, nor
        anything else: a load is under way, a request that decodes is not in the plan, a peer waits for pages that this
        plan computes, or there is no page for a token without taking one from a request. Each gets the page of its next
        token. Cost: some 3 us a request."""
        batch, allocator = self._batch, self._allocator
        decoding = sum(state.phase is Phase.DECODE for state in states)
        if allocator.open_loads or decoding != len(batch.decoding) or any(state.handoff for state in states):
            return None
        going = {i: state for i, state in enumerate(states) if state.planned == state.known < state.limit - 1}
        short = [state for state in going.values() if state.known + 1 > state.full.room]
        if short and not allocator.grow(short):
            return None
        for state in going.values():
            state.reserve()
        return {i: batch.token_work(state, state.known + 1) for i, state in going.items()}

    def make(self, follows: Sequence[int], states: Sequence[ReqState], work: Sequence[SeqWork]) -> WorkAhead | None:
        """Work ahead of these: first those that go on by a token, behind numbers `follows` of the plan, then chunks.
        None = it is empty."""
        if not work:
            return None
        for state, each in zip(states, work, strict=True):
            state.ahead = each
        self._made = states
        chooses = all(state.plain for state in states)
        return WorkAhead(work=tuple(work), follows=np.array(follows, np.int64), chooses=chooses)
