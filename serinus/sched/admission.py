"""Who may come in: room by pages, a reserve for those who run, and waiting for a twin that computes the same prefix."""

from __future__ import annotations

from itertools import chain

import numpy as np

from serinus.core.parts import Part
from serinus.sched.batch import Batch
from serinus.sched.request_state import Phase, ReqState
from serinus.sched.seats import Seats
from serinus.sched.settings import SchedSettings

__all__ = ["Admission"]


class Admission:
    """Places a request on pages, or says no and changes nothing."""

    def __init__(self, settings: SchedSettings, seats: Seats, batch: Batch) -> None:
        self._settings = settings
        self._seats = seats
        self._batch = batch
        self._page_size = settings.page_size

    def growth_pages(self) -> int:
        """FULL pages that those who run (or will) may still take: each `growth_tokens` more, or up to its end."""
        running = chain(self._batch, self._batch.transfer.values())
        return sum(self._wanted(state) - state.full.end for state in running)

    def window_growth_pages(self) -> int:
        """SWA pages that they may still take: each up to its window."""
        running = chain(self._batch, self._batch.transfer.values())
        return sum(max(0, self._wanted_window(state) - swa.count) for state in running if (swa := state.swa))

    def place(self, state: ReqState) -> bool:
        """Match its prefix, load back what the host has of it, and give it pages for all its known tokens (of part
        SWA one page, or for a remote prompt those that it will read); False = no room now, nothing changed.

        Room = free and evictable pages, less what those who run may still need. Where nobody else runs there is no
        reserve: then only pages that a peer still reads can stand in the way, and that ends.
        Cost: one probe; if that leaves hope one match and one allocation.
        """
        seats = self._seats
        alone = self._batch.seats_taken == 0
        needed = seats.pages_for(state.known) if alone else self._wanted(state)
        reserve = 0 if alone else self.growth_pages()
        if needed - seats.probe(state).device // self._page_size + reserve > seats.room():
            return False
        seats.match(state)  # locks the prefix: from here on `room` does not count it
        if needed - state.full.end + reserve <= seats.room() and self._fits_window(state, alone):
            seats.load(state)
            if seats.extend(state, seats.pages_for(state.known), self._window_end(state)):
                return True
        seats.leave(state)
        if alone and state.swa is not None and not state.cold:
            state.cold = True  # the prefix it found pins more of part SWA than its own window needs
            return self.place(state)
        return False

    def _fits_window(self, state: ReqState, alone: bool) -> bool:
        swa = state.swa
        if swa is None:
            return True
        seats = self._seats
        reserve = 0 if alone else self.window_growth_pages()
        first = max(swa.first, seats.window_start(state.prompt_len)) if state.phase is Phase.PREALLOC else swa.first
        wanted = self._wanted_window(state) - max(0, swa.end - first)
        return max(0, wanted) + reserve <= seats.room(Part.SWA)

    def _window_end(self, state: ReqState) -> int:
        """Up to where it needs SWA pages at once; those of a remote prompt begin where its window does."""
        swa, seats = state.swa, self._seats
        if swa is None:
            return 0
        if state.phase is not Phase.PREALLOC:
            return state.computed // self._page_size + 1
        seats.advance(state, state.prompt_len)
        return seats.pages_for(state.prompt_len)

    def awaits_storage(self, state: ReqState, now: float) -> bool:
        """Whether the storage may still bring some of its prefix, and it should wait for that. Otherwise what has
        come by now is taken."""
        if not state.prefetching:
            return False
        if not self._seats.prefetch_over(state):
            policy = self._settings.prefetch_policy
            late = now - state.request.arrival >= self._settings.prefetch_s_max
            if policy == "wait_complete" or (policy == "timeout" and not late):
                return True
            self._seats.prefetch_cut(state)
        state.prefetching = False
        return False

    def has_twin(self, state: ReqState) -> bool:
        """Whether somebody is about to publish at least half of what this request would compute.

        Waiting for it costs less than computing (or fetching) the same pages twice: `n` answers to one prompt, or
        many questions about one document. It ends: the other publishes chunk by chunk, or ends, or goes.
        """
        if not self._seats.shares:
            return False
        cached: int | None = None
        for other in chain(self._batch.prefilling, self._batch.transfer.values()):
            if other.request.cache_salt != state.request.cache_salt or other.tokens[0] != state.tokens[0]:
                continue
            shared = self._shared_tokens(state, other)
            if shared < self._page_size:
                continue
            if cached is None:
                cached = self._seats.cached(state)
            gain = shared - cached
            if gain >= self._page_size and 2 * gain >= state.known - cached:
                return True
        return False

    def _shared_tokens(self, state: ReqState, other: ReqState) -> int:
        other_known = other.prompt_len if other.phase is Phase.TRANSFER else other.known
        count = min(self._seats.match_limit(state), other_known)
        differ = state.tokens[:count] != other.tokens[:count]
        first = int(np.argmax(differ)) if count else 0
        shared = first if count and differ[first] else count
        return shared // self._page_size * self._page_size

    def _wanted(self, state: ReqState) -> int:
        tokens = min(state.known + self._settings.growth_tokens, state.limit)
        return max(self._seats.pages_for(tokens), state.full.end)

    def _wanted_window(self, state: ReqState) -> int:
        return min(self._seats.window_pages, self._wanted(state))
