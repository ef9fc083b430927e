"""Admission: room by pages, a reserve for running requests, and waiting for one that computes the same prefix."""

from __future__ import annotations

from itertools import chain

import numpy as np

from serinus.sched.batch import Batch
from serinus.sched.page_allocator import PageAllocator
from serinus.sched.page_row import PageRow
from serinus.sched.request_state import Phase, ReqState
from serinus.sched.settings import SchedSettings


class Admission:
    """Places a request on pages, or says no and changes nothing."""

    def __init__(self, settings: SchedSettings, allocator: PageAllocator, batch: Batch) -> None:
        self._settings = settings
        self._allocator = allocator
        self._batch = batch
        self._page_size = settings.page_size
        self.still: frozenset[str] = frozenset()
        """Addresses of prefill engines that stand still: no request waits for prompts that they owe."""

    def growth_pages(self, place: int = 0) -> int:
        """Pages of a part (its place among the parts) that running requests, and those in transit, may still take:
        each `growth_tokens` more, or up to its end; of a part with a window up to its window."""
        running = chain(self._batch, self._batch.transfer.values())
        if place == 0:
            return sum(self._wanted(state) - state.full.end for state in running)
        rows = ((state, state.rows[place]) for state in running)
        return sum(max(0, self._wanted_of(state, row) - row.count) for state, row in rows)

    def place(self, state: ReqState) -> bool:
        """Match its prefix, load back what the host has of it, and give it pages for all its known tokens (of a part
        with a window one page, or for a remote prompt those that it will read); False = no room now, nothing changed.

        Room = free and evictable pages, less what running requests may still need. Where no other request runs there
        is no reserve: then only pages that a peer still reads can stand in the way, and that ends.
        Cost: one probe; if that leaves hope one match and one allocation.
        """
        allocator = self._allocator
        alone = self._batch.rows_needed == 0
        needed = allocator.pages_for(state.known) if alone else self._wanted(state)
        reserve = 0 if alone else self.growth_pages()
        if needed - allocator.probe(state).device // self._page_size + reserve > allocator.room():
            return False
        allocator.match(state)  # locks the prefix: from here on `room` does not count it
        if needed - state.full.end + reserve <= allocator.room() and self._fits_others(state, needed, alone=alone):
            allocator.load(state)
            if allocator.extend(state, allocator.pages_for(state.known), self._window_end(state)):
                allocator.placed(state)
                return True
        allocator.unmatch(state)
        if alone and state.windowed and not state.cold:
            state.cold = True  # the prefix it found pins more of a part than its own window needs
            return self.place(state)
        return False

    def _fits_others(self, state: ReqState, needed: int, *, alone: bool) -> bool:
        """Whether there is room for it in the parts beside FULL."""
        for place, row in enumerate(state.rows[1:], 1):
            reserve = 0 if alone else self.growth_pages(place)
            wanted = needed - row.end
            if row.windowed:
                remote = state.phase is Phase.PREALLOC
                first = max(row.first, self._allocator.first_page(row.part, state.prompt_len)) if remote else row.first
                wanted = self._wanted_of(state, row) - max(0, row.end - first)
            if max(0, wanted) + reserve > self._allocator.room(row.part):
                return False
        return True

    def _window_end(self, state: ReqState) -> int:
        """Up to where it needs pages of parts with a window at once; those of a remote prompt begin where its window
        does."""
        if not state.windowed:
            return 0
        if state.phase is not Phase.PREALLOC:
            return state.computed // self._page_size + 1
        self._allocator.advance(state, state.prompt_len)
        return self._allocator.pages_for(state.prompt_len)

    def awaits_storage(self, state: ReqState, now: float, *, ahead: bool) -> bool:
        """Whether the storage may still bring some of its prefix, and it should wait for that. Otherwise what has
        come by now is taken. `ahead`: one before it waits for that too; the first is asked for whatever the others
        keep of the host, so that none waits for ever."""
        if not state.prefetching:
            return False
        policy = self._settings.prefetch_policy
        late = not state.unasked and now - state.asked_at >= self._settings.prefetch_s_max
        if policy == "wait_complete" or (policy == "timeout" and not late):
            if state.unasked and not ahead:
                self._allocator.prefetch(state, now, ahead=False)
            if state.prefetching and not self._allocator.prefetch_over(state):
                return True
        self._allocator.prefetch_cut(state)
        return False

    def has_twin(self, state: ReqState) -> bool:
        """Whether another request is about to publish at least half of what this request would compute.

        Waiting for it costs less than computing (or fetching) the same pages twice: `n` answers to one prompt, or
        many questions about one document. It ends: the other publishes chunk by chunk, or ends, or goes, or its
        prefill engine stands still.
        Cost: a look at the other while it has published nothing more; else one comparison with each request that
        computes, or awaits, a prompt with the same first page. Notes what requests under way publish for it of less
        than that half (`coming`).
        """
        state.coming = 0
        if not self._allocator.shares:
            return False
        twin, state.twin = state.twin, None
        if twin is not None and self._is_coming(twin) and twin.published == state.twin_published:
            state.twin = twin
            return True
        cached: int | None = None
        for other in chain(self._batch.prefilling, self._batch.transfer.values()):
            if other.request.cache_salt != state.request.cache_salt or other.head != state.head:
                continue
            if other.alone or not self._is_coming(other):  # alone: it publishes when it ends
                continue
            shared = self._shared_tokens(state, other)
            if shared < self._page_size:
                continue
            if cached is None:
                cached = self._allocator.cached(state)
            gain = shared - cached
            if gain < self._page_size:
                continue
            if 2 * gain >= state.known - cached:
                state.twin, state.twin_published = other, other.published
                return True
            if other.under_way:
                state.coming = max(state.coming, gain)
        return False

    def _is_coming(self, state: ReqState) -> bool:
        """Whether a request is about to publish what it lacks."""
        if state.phase is Phase.TRANSFER:
            return state.request.prefill_address not in self.still
        return state.phase is Phase.PREFILL

    def may_be_early(self, state: ReqState) -> bool:
        """Whether it may be placed before the result of the plan under way is known (behind `has_twin`): it finds no
        more of its prefix later, as no step that runs publishes any, and neither host nor storage adds to it; and its
        prompt can be computed ahead."""
        if state.coming or state.prefetching or not state.computes_ahead:
            return False
        found = self._allocator.probe(state)
        return found.total == found.device

    def _shared_tokens(self, state: ReqState, other: ReqState) -> int:
        other_known = other.prompt_len if other.phase is Phase.TRANSFER else other.known
        count = min(self._allocator.match_limit(state), other_known)
        differ = state.tokens[:count] != other.tokens[:count]
        first = int(np.argmax(differ)) if count else 0
        shared = first if count and differ[first] else count
        return shared // self._page_size * self._page_size

    def _wanted(self, state: ReqState) -> int:
        tokens = min(state.known + self._settings.growth_tokens, state.limit)
        return max(self._allocator.pages_for(tokens), state.full.end)

    def _wanted_of(self, state: ReqState, row: PageRow) -> int:
        wanted = self._wanted(state)
        return min(self._allocator.window_pages[row.part], wanted) if row.windowed else wanted
