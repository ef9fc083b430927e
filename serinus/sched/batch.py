"""The running requests and their work in the next step: page growth, retraction, decode work, prompt chunks.

Knows nothing of queues: retracted requests are returned, and the scheduler puts them back into the queue.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter

from serinus.core.plan import SeqWork
from serinus.sched.page_allocator import PageAllocator
from serinus.sched.request_state import Phase, ReqState

NONE_BARRED = 1 << 200
"""A `seq` that no request has: all are older."""
_turn = attrgetter("turn")
_seq = attrgetter("seq")


@dataclass(slots=True, kw_only=True)
class Growth:
    """What one round of page growth came to: the requests that decode next, and those retracted for them."""

    decoding: list[ReqState]
    """Requests that decode in the next plan: each has a slot for its token."""
    gone: list[ReqState] = field(default_factory=list)
    """Requests that were retracted: their pages are free, or only cached."""
    barred_seq: int = NONE_BARRED
    """`seq` of the oldest request that lacks a page until a request under way can be retracted: no younger request
    gets a chunk."""

    @property
    def bars(self) -> bool:
        """Whether there is such a request."""
        return self.barred_seq != NONE_BARRED


class Batch:
    """The running requests, and those whose handoff is in transit. Each list is in the order in which requests joined
    it."""

    def __init__(self, allocator: PageAllocator, depth: int, *, verifies: bool = False) -> None:
        """`verifies`: no request is retracted before all of its KV is verified, as what is wrong with it would never be
        found any more."""
        self._verifies = verifies
        self.unverified: dict[str, ReqState] = {}
        """Requests that are to be retracted and wait for that."""
        self._allocator = allocator
        self._depth = depth
        self._turn = 0
        self._page_size = allocator.page_size
        self._windowed = bool(allocator.window_pages)
        self.prefilling: list[ReqState] = []
        self.decoding: list[ReqState] = []
        self.transfer: dict[str, ReqState] = {}
        """Requests that decode here as soon as a prefill engine has filled their pages; they have pages, but no row."""

    @property
    def rows_needed(self) -> int:
        """Requests that need a row now or soon."""
        return len(self.prefilling) + len(self.decoding) + len(self.transfer)

    def __len__(self) -> int:
        return len(self.prefilling) + len(self.decoding)

    def __iter__(self) -> Iterator[ReqState]:
        return chain(self.decoding, self.prefilling)

    def remove(self, state: ReqState) -> None:
        """Take a running request out of its list; its pages stay allocated."""
        (self.decoding if state.phase is Phase.DECODE else self.prefilling).remove(state)

    def grow(self) -> Growth:
        """Choose the requests that decode next and give each the page that its next token needs. The oldest prefilling
        request gets a page of each part with a window.

        Where no page is free or evictable, the youngest running request (`_victim`) is retracted, even if it is the one
        that lacks the page; its full pages stay cached until they are needed. A request that is under way is never
        retracted: while the youngest is, the request that lacks a page is left out of this plan, and no younger request
        gets work that would make it wait longer. The oldest request is never retracted for another one, so at least one
        request makes progress. A request that runs alone lacks a page only while handoffs hold some.
        """
        growth = Growth(decoding=self.decoding if self._depth == 1 else self._share())
        short = [state for state in growth.decoding if state.known > state.full.room]
        if short and not self._allocator.grow(short):
            for state in short:
                self._make_room(state, state.full.end + 1, growth)
        if self._windowed:
            first = next((state for state in self.prefilling if state.wants_chunk), None)
            if first is not None and not first.under_way and any(r.room <= first.planned for r in first.windowed):
                self._make_room(first, first.full.end, growth)
        if growth.gone or growth.bars:
            growth.decoding = [s for s in growth.decoding if s.phase is Phase.DECODE and s.known <= s.full.room]
        if self._depth > 1:
            for turn, state in enumerate(growth.decoding, self._turn + 1):
                state.turn = turn
            self._turn += len(growth.decoding)
        return growth

    def _share(self) -> list[ReqState]:
        """The decoding requests of the next plan: with several plans under way, each plan takes an equal share of them,
        so that no plan is empty. The requests that have waited longest for a token come first."""
        count = -(-len(self.decoding) // self._depth)
        return sorted((state for state in self.decoding if not state.under_way), key=_turn)[:count]

    def _make_room(self, state: ReqState, full_end: int, growth: Growth) -> None:
        """Allocate one more page of each part with a window, and pages of the others up to `full_end`; retract
        others (`_victim`) until that succeeds."""
        while state.running:
            if self._allocator.extend(state, full_end, state.next_window_end):
                return
            victim = self._victim()
            if not self.retract(victim):
                growth.barred_seq = min(growth.barred_seq, state.seq)
                return
            victim.cold = victim is state and self.rows_needed == 0 and bool(state.windowed)
            growth.gone.append(victim)

    def _victim(self) -> ReqState:
        """The running request to retract: of the API key whose running requests hold the most pages for its weight the
        youngest, so that no key pays for the growth of another. The oldest of all is kept, where there is another one:
        it gets on, whatever it holds."""
        held: dict[str, float] = {}
        for state in self:
            share = state.request.share
            held[share.name] = held.get(share.name, 0.0) + state.full.end / share.weight
        if len(held) == 1:
            return max(self, key=_seq)
        oldest = min(self, key=_seq)
        others = (state for state in self if state is not oldest)
        return max(others, key=lambda state: (held[state.request.share.name], state.seq))

    def last_of(self, share: str) -> ReqState | None:
        """The running request of an API key whose turn comes last: the one that gives way to any other of that key."""
        return max((state for state in self if state.request.share.name == share), key=_seq, default=None)

    def retract(self, victim: ReqState) -> bool:
        """Take its row and its pages, which stay cached until they are needed; the caller puts it back in line. False =
        not now: it is under way, or not all of its KV is verified, which `unverified` then asks for."""
        if self._verifies and not victim.under_way and victim.verified < victim.computed:
            self.unverified[victim.rid] = victim
        if victim.under_way or victim.rid in self.unverified:
            return False
        self.remove(victim)
        victim.settle_right()
        self._allocator.release(victim, park=True)
        victim.move(Phase.WAITING)
        victim.retractions += 1
        victim.retracted = True
        return True

    def token_work(self, state: ReqState, known: int) -> SeqWork:
        """The work that computes the last of `known` tokens of a request: all that it has, or one more."""
        start = known - 1
        return SeqWork(
            rid=state.request.rid,
            row=state.row,
            start=start,
            tokens=state.tokens[start:known],
            slots={row.part: row.slots[start:known] for row in state.rows},
            chain=state.chain_at(start),
            sample=state.sample_spec(known),
            whole=state.is_new or known + 1 >= state.limit,
        )

    def chunk_work(self, state: ReqState, budget: int) -> SeqWork | None:
        """The next chunk of a prefilling request, behind what is planned: at most `budget` tokens. It ends at a page
        border unless it is the last one, so that only whole pages are published and handed over before. None = the
        budget does not reach a border, or a part with a window has no page for the chunk now."""
        start = state.planned
        end = state.known
        if end - start > budget:
            end = (start + budget) // self._page_size * self._page_size
            if end <= start:
                return None
        if state.windowed:
            end = self._within_window_room(state, start, end)
            if end <= start:
                return None
        collected = state.prompt_logprobs
        wants_logprobs = collected is not None and len(collected) < state.prompt_len and start < state.prompt_len
        return SeqWork(
            rid=state.rid,
            row=state.row,
            start=start,
            tokens=state.tokens[start:end],
            slots={row.part: row.slots[start:end] for row in state.rows},
            chain=state.chain_at(start),
            sample=state.sample_spec(end) if end == state.known else None,
            whole=True,
            prompt_logprobs=state.request.sampling.prompt_logprobs if wants_logprobs else None,
            next_ids=state.tokens[start + 1 : min(end + 1, state.prompt_len)] if wants_logprobs else None,
            pooled=state.pooled_of(start, end),
        )

    def _within_window_room(self, state: ReqState, start: int, end: int) -> int:
        """The end of the chunk [start, end) that the free pages of parts with a window allow; allocates those pages.
        One page stays free for each decoding request, unless this request could then compute nothing."""
        reach = self._allocator.pages_for(end)
        for row in state.windowed:
            spare = self._allocator.room(row.part) - len(self.decoding)
            least = 1 if row.room <= start else 0
            reach = min(reach, row.end + max(spare, least))
        self._allocator.extend(state, state.full.end, reach)
        return min(end, *(row.room for row in state.windowed))
