"""Rows and pages of the running requests: the only place where the scheduler touches the cache.

Keeps the host's view of req_to_token (each request's pages, part by part) and the writes that the device's tables still
need. Decides nothing: it matches, loads back, extends, publishes and gives back when told.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from serinus.cache import CacheNews, Lease, PartPages, PrefetchState, PrefixCache, Probe
from serinus.core.errors import ConfigError, InvariantError
from serinus.core.parts import PageSpan, Part
from serinus.core.plan import TableWrite
from serinus.sched.page_row import PageRow
from serinus.sched.request_state import ReqState
from serinus.sched.settings import SchedSettings

__all__ = ["Seats"]

_TRANSFER = "transfer"
_QUARANTINE = "quarantine"
_NOTHING = Probe(device=0, total=0)


class Seats:
    """Who sits in which row, on which pages."""

    def __init__(self, settings: SchedSettings, cache: PrefixCache) -> None:
        """Raises ConfigError where part SWA has not the pages that one request needs to get on."""
        geometry = cache.geometry
        self.cache = cache
        self.page_size = settings.page_size
        self.shares = cache.enable_prefix
        """Whether what one request publishes can be found by another."""
        self.pages_total = cache.page_count - 1
        """Pages of part FULL without the padding page."""
        self.window = geometry.window
        """Positions that a token of part SWA sees, itself included; None = there is no such part."""
        self.tiered = geometry.host_full_pages > 0
        """Whether there is a host tier."""
        self.window_pages = 0 if self.window is None else cache.swa_pin_pages_max + 1
        """SWA pages that one request needs at most: what its lease may pin for a window, and the page it writes."""
        self.open_loads: set[int] = set()
        """Copies from the host that nobody has seen the end of: what was computed on them is not sure yet."""
        if self.window is not None and geometry.swa_pages - 1 < min(
            self.window_pages, self.pages_for(settings.context_length)
        ):
            raise ConfigError(
                f"sched: part SWA has {geometry.swa_pages - 1} pages of {self.page_size} tokens for a window of"
                f" {self.window}, expected at least {self.window_pages}; raise --max-total-tokens or"
                " --swa-full-tokens-ratio"
            )
        self._context = settings.context_length
        self._rows = list(range(settings.rows - 1, 0, -1))
        self._writes: list[TableWrite] = []
        self._failed: list[Lease] = []

    @property
    def free_rows(self) -> tuple[int, ...]:
        """Rows nobody sits in."""
        return tuple(self._rows)

    def pages_for(self, tokens: int) -> int:
        """Pages that hold so many tokens."""
        return -(-tokens // self.page_size)

    def window_start(self, position: int) -> int:
        """Index of the first SWA page that computing `position` reads."""
        assert self.window is not None, "sched: a window without part SWA"
        return self.cache.swa_first_page(position)

    def room(self, part: Part = Part.FULL) -> int:
        """Pages that could be handed out now: free, or cached and used by nobody."""
        return self.cache.available_pages if part is Part.FULL else self.cache.available(part)

    # What is cached

    def match_limit(self, state: ReqState) -> int:
        """Tokens it may take from the cache: at least one must be computed, to have logits; and every prompt token
        whose log-probability is still wanted needs the one before it computed."""
        if state.cold:
            return 0
        collected = state.prompt_logprobs
        if collected is not None and len(collected) < state.prompt_len:
            return len(collected) - 1
        return state.known - 1

    def probe(self, state: ReqState) -> Probe:
        """Tokens it would find cached now; changes nothing."""
        limit = self.match_limit(state)
        if limit < self.page_size:
            return _NOTHING
        return self.cache.probe(state.request.cache_salt, state.tokens[:limit])

    def cached(self, state: ReqState) -> int:
        """Tokens it would not have to compute, on whatever tier they are."""
        return self.probe(state).total

    def match(self, state: ReqState) -> None:
        """Lock the cached prefix of a request without pages and make it its own."""
        assert state.full.end == 0, f"sched: request {state.rid} has {state.full.end} pages, expected none"
        limit = self.match_limit(state)
        request = state.request
        match = self.cache.match_prefix(request.cache_salt, state.tokens[:limit], limit, priority=request.priority)
        state.lease, state.load = match.lease, match.load
        state.full.add(match.pages)
        if state.swa is not None:
            state.swa.begin_at(match.swa_first)
            state.swa.add(match.swa_pages)
        state.go_on_from(match.length)
        state.found = {"device": match.length}

    def load(self, state: ReqState) -> None:
        """Bring what the host adds to its match to the device, as far as there is room: forward passes that begin
        from now on wait for it, layer by layer. Nothing changes where there is none."""
        plan, lease = state.load, state.lease
        if plan is None or lease is None:
            return
        state.load = None
        loaded = self.cache.load_back(state.rid, lease, plan)
        if loaded is None:
            self.cache.drop_load(lease)
            return
        state.full.add(loaded.pages)
        if state.swa is not None:
            state.swa.begin_at(loaded.swa_first)
            state.swa.add(loaded.swa_pages)
        host = loaded.length - state.computed
        stored = min(host, self.cache.prefetched_tokens(state.rid)) if state.prefetched else 0
        state.found |= {"host": host - stored, "storage": stored}
        state.go_on_from(loaded.length)
        if loaded.op:
            self.open_loads.add(loaded.op)

    def poll(self) -> int:
        """Take what ended; how many copies and storage operations are left."""
        return self._take_news(self.cache.poll())

    def settle(self, loads: frozenset[int]) -> None:
        """A forward pass has ended, and with it every load it waited for."""
        due = loads & self.open_loads
        if due:
            self.open_loads -= due
            self._take_news(self.cache.poll(settle=due))

    def take_failed(self) -> tuple[Lease, ...]:
        """Leases whose KV never came from the host, since the last time somebody asked."""
        failed, self._failed = tuple(self._failed), []
        return failed

    def _take_news(self, news: CacheNews) -> int:
        self.open_loads.difference_update(news.ended_loads)
        self._failed.extend(news.failed_loads)
        return news.in_flight

    # The storage

    def prefetch(self, state: ReqState) -> None:
        """Ask the storage for what neither device nor host have of its prefix."""
        limit = self.match_limit(state)
        if limit >= self.page_size:
            state.prefetching = self.cache.prefetch(state.rid, state.request.cache_salt, state.tokens[:limit])
            state.prefetched = state.prefetching

    def prefetch_over(self, state: ReqState) -> bool:
        """Whether nothing more comes from the storage."""
        return self.cache.prefetch_state(state.rid) not in (PrefetchState.QUERY, PrefetchState.READ)

    def prefetch_cut(self, state: ReqState) -> None:
        """Take what has come from the storage, and wait no more."""
        self.cache.prefetch_cut(state.rid)

    def forget_prefetch(self, state: ReqState) -> None:
        """The request ends or is computed: the storage need not bring anything for it."""
        if state.prefetched:
            state.prefetching = state.prefetched = False
            self.cache.release_aborted_request(state.rid)

    # Pages

    def extend(self, state: ReqState, full_end: int, swa_end: int = 0) -> bool:
        """Let its pages reach up to these page indices; False = no room, nothing changed. A seated request's rows are
        written."""
        full, swa = state.full, state.swa
        full_count = full_end - full.end
        swa_count = 0 if swa is None else max(0, swa_end - swa.end)
        if full_count <= 0 and not swa_count:
            return True
        pages = self.cache.allocate(state.rid, max(0, full_count), swa_count)
        if pages is None:
            return False
        if full_count > 0:
            self._append(state, full, Part.FULL, pages.full)
        if swa is not None and swa_count:
            self._append(state, swa, Part.SWA, pages.swa)
        return True

    def _append(self, state: ReqState, row: PageRow, part: Part, pages: NDArray[np.int32]) -> None:
        start = row.room
        row.add(pages)
        if state.row:
            self._write(state.row, row, part, start, row.room)

    def sit(self, state: ReqState) -> None:
        """Take a row and write all its pages into it."""
        if not self._rows:
            raise InvariantError(f"sched: no row for request {state.rid}, expected one for each running request")
        state.row = self._rows.pop()
        self._write(state.row, state.full, Part.FULL, 0, state.full.room)
        if state.swa is not None:
            self._write(state.row, state.swa, Part.SWA, state.swa.first * self.page_size, state.swa.room)

    def give_row(self, state: ReqState) -> None:
        """Give the row back; the pages stay."""
        self._rows.append(state.row)
        state.row = 0

    def publish(self, state: ReqState) -> None:
        """Insert its computed full pages into the tree.

        Where the tree had them already, its own duplicates go back and its rows are rewritten to the canonical pages:
        first the rows, then the release (a duplicate freed before could be someone else's while a row names it). Where
        layers slide, what lies behind its window is published by itself, so that its lease can leave it. Where somebody
        else is loading the same pages from the host, that load is settled first: what was computed never comes to lie
        on KV that may not come.
        """
        size, end = self.page_size, state.computed // self.page_size * self.page_size
        if not self.shares or end <= state.published:
            return
        if self.open_loads and state.lease is not None:
            self.settle(self.cache.loads_over(state.lease, state.tokens[state.published : end]))
        if state.swa is not None:
            behind = self.window_start(end) * size
            if state.published < behind < end:
                self._insert(state, behind)
        self._insert(state, end)

    def _insert(self, state: ReqState, end: int) -> None:
        lease, size, first, swa = state.lease, self.page_size, state.published, state.swa
        assert lease is not None, f"sched: request {state.rid} publishes without a lease"
        low, high = first // size, end // size
        if swa is None:
            own = PartPages(full=state.full.pages[low:high])
            insertion = self.cache.insert(lease, state.tokens[first:end], own, first)
        else:
            swa_low = min(max(low, swa.first), high)
            own = PartPages(full=state.full.pages[low:high], swa=swa.pages[swa_low:high])
            insertion = self.cache.insert(lease, state.tokens[first:end], own, first, swa_low)
        if insertion.changed:
            state.full.put(low, insertion.pages)
            if state.row:
                self._write(state.row, state.full, Part.FULL, first, end)
            if swa is not None and len(insertion.swa_pages):
                swa.put(insertion.swa_first, insertion.swa_pages)
                if state.row:
                    self._write(state.row, swa, Part.SWA, insertion.swa_first * size, end)
        self.cache.commit_row(insertion)
        state.lease = insertion.lease
        state.published = insertion.end

    def advance(self, state: ReqState, position: int) -> None:
        """It computes `position` next: what lies behind that one's window goes back."""
        swa = state.swa
        if swa is None or state.lease is None:
            return
        first = self.window_start(position)
        if first <= swa.first:
            return
        own_first = max(swa.first, state.published // self.page_size)
        own = swa.pages[own_first : max(own_first, min(first, swa.end))].copy()
        self.cache.advance(state.rid, state.lease, position, own)
        swa.drop_before(first)

    def leave(self, state: ReqState, *, park: bool = False) -> None:
        """Give everything back: the only exit for finish, abort, retract and recompute. `park`: it will come again,
        so what it published goes to the host at once, where there is one. A condemned one publishes nothing more."""
        if state.lease is not None:
            swa = state.swa
            if swa is None:
                pages, swa_first = PartPages(full=state.full.named()), 0
            else:
                pages, swa_first = PartPages(full=state.full.named(), swa=swa.named()), swa.first
            tokens = state.tokens[: state.published if state.condemned else state.computed]
            self.cache.finish(state.rid, state.lease, tokens, pages, swa_first, park=park)
        if state.row:
            self.give_row(state)
        state.drop_pages()

    # Pages that others read or write

    def spans(self, state: ReqState, first: int, end: int) -> tuple[PageSpan, ...]:
        """Its pages [first, end) of the prompt; of part SWA those that decoding behind the prompt reads."""
        full = PageSpan(part=Part.FULL, first=first, pages=state.full.pages[first:end].copy())
        if state.swa is None:
            return (full,)
        swa_first = max(first, self.window_start(state.prompt_len))
        if swa_first >= end:
            return (full,)
        return full, PageSpan(part=Part.SWA, first=swa_first, pages=state.swa.pages[swa_first:end].copy())

    def hold(self, spans: Sequence[PageSpan]) -> None:
        """A transfer reads these pages: they are not handed out until `unhold`, whoever frees them."""
        for span in spans:
            self.cache.hold(_TRANSFER, span.pages, span.part)

    def unhold(self, spans: Sequence[PageSpan]) -> None:
        """That transfer reads them no more."""
        for span in spans:
            self.cache.unhold(_TRANSFER, span.pages, span.part)

    def quarantine(self, spans: Sequence[PageSpan]) -> None:
        """A peer may still write these pages: they are not handed out until `quarantine_over`, whoever frees them."""
        for span in spans:
            self.cache.hold(_QUARANTINE, span.pages, span.part)

    def quarantine_over(self, spans: Sequence[PageSpan]) -> None:
        """Nobody writes them any more."""
        for span in spans:
            self.cache.unhold(_QUARANTINE, span.pages, span.part)

    # Tables

    def take_writes(self) -> tuple[TableWrite, ...]:
        """The writes the device's tables need before the next forward pass, in order; they are the caller's now."""
        writes = tuple(self._writes)
        self._writes.clear()
        return writes

    def _write(self, table_row: int, row: PageRow, part: Part, start: int, end: int) -> None:
        end = min(end, self._context)  # the last page may reach beyond the width of a row
        if start < end:
            self._writes.append(TableWrite(row=table_row, start=start, slots=row.slots[start:end], part=part))
