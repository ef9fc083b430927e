"""Rows and pages of the running requests: the only place where the scheduler touches the cache.

Keeps the host's view of req_to_token (each request's pages, in order) and the writes that the device's table still
needs. Decides nothing: it matches, extends, publishes and gives back when told.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from serinus.cache import PartPages, PrefixCache
from serinus.core.errors import InvariantError
from serinus.core.plan import TableWrite
from serinus.sched.request_state import ReqState
from serinus.sched.settings import SchedSettings

__all__ = ["Seats"]

_TRANSFER = "transfer"


class Seats:
    """Who sits in which row, on which pages."""

    def __init__(self, settings: SchedSettings, cache: PrefixCache) -> None:
        self.cache = cache
        self.page_size = settings.page_size
        self.shares = cache.enable_prefix
        """Whether what one request publishes can be found by another."""
        self.pages_total = cache.page_count - 1
        """Pages of the pool without the padding page."""
        self._context = settings.context_length
        self._rows = list(range(settings.rows - 1, 0, -1))
        self._writes: list[TableWrite] = []

    @property
    def free_rows(self) -> tuple[int, ...]:
        """Rows nobody sits in."""
        return tuple(self._rows)

    def pages_for(self, tokens: int) -> int:
        """Pages that hold so many tokens."""
        return -(-tokens // self.page_size)

    def room(self) -> int:
        """Pages that could be handed out now: free, or cached and used by nobody."""
        return self.cache.available_pages

    def match_limit(self, state: ReqState) -> int:
        """Tokens it may take from the cache: at least one must be computed, to have logits; and every prompt token
        whose log-probability is still wanted needs the one before it computed."""
        collected = state.prompt_logprobs
        if collected is not None and len(collected) < state.prompt_len:
            return len(collected) - 1
        return state.known - 1

    def cached(self, state: ReqState) -> int:
        """Tokens it would find cached now; changes nothing."""
        limit = self.match_limit(state)
        if limit < self.page_size:
            return 0
        return self.cache.probe(state.request.cache_salt, state.tokens[:limit]).device

    def match(self, state: ReqState) -> None:
        """Lock the cached prefix of a request without pages and make it its own."""
        assert state.page_count == 0, f"sched: request {state.rid} has {state.page_count} pages, expected none"
        limit = self.match_limit(state)
        match = self.cache.match_prefix(state.request.cache_salt, state.tokens[:limit], limit)
        state.lease = match.lease
        state.add_pages(match.pages, self.page_size)
        state.computed = state.published = match.length

    def extend(self, state: ReqState, page_total: int) -> bool:
        """Let it have `page_total` pages; False = no room, nothing changed. A seated request's row is written."""
        count = page_total - state.page_count
        if count <= 0:
            return True
        pages = self.cache.allocate(state.rid, count)
        if pages is None:
            return False
        start = state.room
        state.add_pages(pages.full, self.page_size)
        if state.row:
            self._write(state, start, state.room)
        return True

    def sit(self, state: ReqState) -> None:
        """Take a row and write all its pages into it."""
        if not self._rows:
            raise InvariantError(f"sched: no row for request {state.rid}, expected one for each running request")
        state.row = self._rows.pop()
        self._write(state, 0, state.room)

    def give_row(self, state: ReqState) -> None:
        """Give the row back; the pages stay."""
        self._rows.append(state.row)
        state.row = 0

    def publish(self, state: ReqState) -> None:
        """Insert its computed full pages into the tree.

        Where the tree had them already, its own duplicates go back and its row is rewritten to the canonical pages:
        first the row, then the release (a duplicate freed before could be someone else's while the row names it).
        """
        first, end = state.published, state.computed // self.page_size * self.page_size
        if not self.shares or end <= first:
            return
        assert state.lease is not None, f"sched: request {state.rid} publishes without a lease"
        low, high = first // self.page_size, end // self.page_size
        own = PartPages(full=state.pages[low:high])
        insertion = self.cache.insert(state.lease, state.tokens[first:end], own, first)
        if insertion.changed:
            state.put_pages(low, insertion.pages, self.page_size)
            if state.row:
                self._write(state, first, end)
        self.cache.commit_row(insertion)
        state.lease = insertion.lease
        state.published = insertion.end

    def leave(self, state: ReqState) -> None:
        """Give everything back: the only exit for finish, abort, retract and recompute."""
        if state.lease is not None:
            pages = PartPages(full=state.pages[: state.page_count])
            self.cache.finish(state.rid, state.lease, state.tokens[: state.computed], pages)
        if state.row:
            self.give_row(state)
        state.drop_pages()

    def hold(self, pages: NDArray[np.int32]) -> None:
        """A transfer reads these pages: they are not handed out until `unhold`, whoever frees them."""
        self.cache.hold(_TRANSFER, pages)

    def unhold(self, pages: NDArray[np.int32]) -> None:
        """That transfer reads them no more."""
        self.cache.unhold(_TRANSFER, pages)

    def take_writes(self) -> tuple[TableWrite, ...]:
        """The writes the device's table needs before the next forward pass, in order; they are the caller's now."""
        writes = tuple(self._writes)
        self._writes.clear()
        return writes

    def _write(self, state: ReqState, start: int, end: int) -> None:
        end = min(end, self._context)  # the last page may reach beyond the width of a row
        if start < end:
            self._writes.append(TableWrite(row=state.row, start=start, slots=state.slots[start:end]))
