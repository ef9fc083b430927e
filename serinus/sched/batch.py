"""Who runs, and what each does in the next step: page growth, retraction, decode work, prompt chunks.

Knows nothing of queues: whoever has to go is returned, and the scheduler puts it in line again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter

from serinus.core.parts import Part
from serinus.core.plan import SeqWork
from serinus.sched.request_state import Phase, ReqState
from serinus.sched.seats import Seats

__all__ = ["Batch", "Growth"]

_NOBODY = 1 << 62
_turn = attrgetter("turn")


@dataclass(slots=True, kw_only=True)
class Growth:
    """Who can go on, and what that took."""

    decoding: list[ReqState]
    """Those who decode in the next plan: each has a slot for its token."""
    gone: list[ReqState] = field(default_factory=list)
    """Those who had to give their pages back for it."""
    barred_seq: int = _NOBODY
    """Age of the oldest that lacks a page until somebody who is under way can give one: nobody younger gets a chunk."""


class Batch:
    """The running requests, and those in transit towards it. Lists are in the order in which requests came to them."""

    def __init__(self, seats: Seats, depth: int) -> None:
        self._seats = seats
        self._depth = depth
        self._turn = 0
        self._page_size = seats.page_size
        self.prefilling: list[ReqState] = []
        self.decoding: list[ReqState] = []
        self.transfer: dict[str, ReqState] = {}
        """Requests that will decode here as soon as their prompt has come from elsewhere; they have pages, no row."""

    @property
    def seats_taken(self) -> int:
        """Requests that need a row now or soon."""
        return len(self.prefilling) + len(self.decoding) + len(self.transfer)

    def __len__(self) -> int:
        return len(self.prefilling) + len(self.decoding)

    def __iter__(self) -> Iterator[ReqState]:
        return chain(self.decoding, self.prefilling)

    def remove(self, state: ReqState) -> None:
        """Take it out of its list."""
        (self.decoding if state.phase is Phase.DECODE else self.prefilling).remove(state)

    def grow(self) -> Growth:
        """Choose who decodes next, and give each of them the page its next token needs, and the first of those that
        prefill one of part SWA.

        Where no page can be had, the youngest running request gives up all of its own (its full pages stay cached
        while nobody needs them); one that lacks a page and is itself the youngest goes. Nothing is taken from one that
        is under way: who lacks a page sits this plan out, and nobody younger is given work that would make it wait
        longer. The oldest is never taken from, so something always gets on; one that runs alone lacks a page only
        while handoffs hold some.
        """
        growth = Growth(decoding=self.decoding if self._depth == 1 else self._share())
        for state in [state for state in growth.decoding if state.known > state.full.room]:
            self._make_room(state, state.full.end + 1, growth)
        if self._seats.window is not None:
            first = next((state for state in self.prefilling if state.wants_chunk), None)
            if first is not None and first.swa is not None and first.swa.room <= first.planned and not first.under_way:
                self._make_room(first, first.full.end, growth)
        if growth.gone or growth.barred_seq != _NOBODY:
            growth.decoding = [s for s in growth.decoding if s.phase is Phase.DECODE and s.known <= s.full.room]
        if self._depth > 1:
            for turn, state in enumerate(growth.decoding, self._turn + 1):
                state.turn = turn
            self._turn += len(growth.decoding)
        return growth

    def _share(self) -> list[ReqState]:
        """The decoding requests whose turn it is: with several plans under way each takes a part of them, so that all
        stay busy. Who waits longest for a token comes first."""
        count = -(-len(self.decoding) // self._depth)
        return sorted((state for state in self.decoding if not state.under_way), key=_turn)[:count]

    def _make_room(self, state: ReqState, full_end: int, growth: Growth) -> None:
        """One more page of part SWA (where it has one), and FULL pages up to `full_end`."""
        while state.running:
            if self._seats.extend(state, full_end, 0 if state.swa is None else state.swa.end + 1):
                return
            victim = max(self, key=lambda other: other.seq)
            if victim.under_way:
                growth.barred_seq = min(growth.barred_seq, state.seq)
                return
            self.remove(victim)
            self._seats.leave(victim, park=True)
            victim.cold = victim is state and self.seats_taken == 0 and state.swa is not None
            victim.move(Phase.WAITING)
            victim.retractions += 1
            victim.retracted = True
            growth.gone.append(victim)

    def decode_work(self, decoding: Iterable[ReqState]) -> list[SeqWork]:
        """One token for each of these."""
        work = []
        for state in decoding:
            known = state.known
            start = known - 1
            state.planned = known
            work.append(
                SeqWork(
                    rid=state.request.rid,
                    row=state.row,
                    start=start,
                    tokens=state.tokens[start:known],
                    slots=state.full.slots[start:known],
                    swa_slots=None if state.swa is None else state.swa.slots[start:known],
                    sample=state.sample_spec(),
                )
            )
        return work

    def chunk_work(self, state: ReqState, budget: int) -> SeqWork | None:
        """Hand out the next chunk of a prefilling request: at most `budget` tokens, and up to a page border unless it
        is the last one, so that what is published and handed over is whole. None = the budget does not reach a border,
        or part SWA has no page for it now."""
        start = state.planned
        end = state.known
        if end - start > budget:
            end = (start + budget) // self._page_size * self._page_size
            if end <= start:
                return None
        if state.swa is not None:
            end = self._within_window_room(state, start, end)
            if end <= start:
                return None
        state.planned = end
        collected = state.prompt_logprobs
        wants_logprobs = collected is not None and len(collected) < state.prompt_len and start < state.prompt_len
        return SeqWork(
            rid=state.rid,
            row=state.row,
            start=start,
            tokens=state.tokens[start:end],
            slots=state.full.slots[start:end],
            swa_slots=None if state.swa is None else state.swa.slots[start:end],
            sample=state.sample_spec() if end == state.known else None,
            prompt_logprobs=state.request.sampling.prompt_logprobs if wants_logprobs else None,
            next_ids=state.tokens[start + 1 : min(end + 1, state.prompt_len)] if wants_logprobs else None,
        )

    def _within_window_room(self, state: ReqState, start: int, end: int) -> int:
        """How far a chunk [start, end) can go on the SWA pages there are; it takes them. Those who decode are left a
        page each, unless it could not get on at all."""
        swa, seats = state.swa, self._seats
        assert swa is not None, f"sched: {state.rid} has no part SWA"
        lacking = seats.pages_for(end) - swa.end
        if lacking > 0:
            spare = seats.room(Part.SWA) - len(self.decoding)
            least = 1 if swa.room <= start else 0
            seats.extend(state, state.full.end, swa.end + min(lacking, max(spare, least)))
        return min(end, swa.room)
