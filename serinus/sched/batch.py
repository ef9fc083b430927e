"""Who runs, and what each does in the next step: page growth, retraction, decode work, prompt chunks.

Knows nothing of queues: whoever has to go is returned, and the scheduler puts it in line again.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from serinus.core.plan import SeqWork
from serinus.sched.request_state import Phase, ReqState
from serinus.sched.seats import Seats

__all__ = ["Batch"]


class Batch:
    """The running requests, and those in transit towards it. Lists are in the order in which requests came to them."""

    def __init__(self, seats: Seats) -> None:
        self._seats = seats
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

    def grow(self) -> list[ReqState]:
        """Give every decoding request the page its next token needs; returns those who had to go for it.

        Where no page can be had, the youngest running request gives up all of its own (its full pages stay cached
        while nobody needs them); one that lacks a page and is itself the youngest goes. The oldest is never taken
        from, so something always gets on; one that runs alone lacks a page only while handoffs hold some.
        """
        needy = [state for state in self.decoding if state.known > state.room]
        if not needy:
            return []
        gone: list[ReqState] = []
        for state in needy:
            while state.phase is Phase.DECODE and not self._seats.extend(state, state.page_count + 1):
                victim = max(self, key=lambda other: other.seq)
                self.remove(victim)
                self._seats.leave(victim)
                victim.move(Phase.WAITING)
                victim.retractions += 1
                victim.retracted = True
                gone.append(victim)
        return gone

    def decode_work(self) -> list[SeqWork]:
        """One token for each decoding request."""
        work = []
        for state in self.decoding:
            known = state.known
            start = known - 1
            work.append(
                SeqWork(
                    rid=state.request.rid,
                    row=state.row,
                    start=start,
                    tokens=state.tokens[start:known],
                    slots=state.slots[start:known],
                    sample=state.sample_spec(),
                )
            )
        return work

    def chunk_work(self, state: ReqState, budget: int) -> SeqWork | None:
        """The next chunk of a prefilling request: at most `budget` tokens, and up to a page border unless it is the
        last one, so that what is published and handed over is whole. None = the budget does not reach a border."""
        start = state.computed
        end = state.known
        if end - start > budget:
            end = (start + budget) // self._page_size * self._page_size
            if end <= start:
                return None
        collected = state.prompt_logprobs
        wants_logprobs = collected is not None and len(collected) < state.prompt_len and start < state.prompt_len
        return SeqWork(
            rid=state.rid,
            row=state.row,
            start=start,
            tokens=state.tokens[start:end],
            slots=state.slots[start:end],
            sample=state.sample_spec() if end == state.known else None,
            prompt_logprobs=state.request.sampling.prompt_logprobs if wants_logprobs else None,
            next_ids=state.tokens[start + 1 : min(end + 1, state.prompt_len)] if wants_logprobs else None,
        )
