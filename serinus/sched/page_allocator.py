"""Rows and pages of the running requests: the only place where the scheduler touches the cache.

Keeps the host's view of req_to_token (each request's pages, part by part) and the writes that the device's tables still
need. Decides nothing: it matches, loads back, extends, publishes and gives back when told.
"""

from __future__ import annotations

from collections.abc import Sequence

from serinus.cache import CacheNews, Lease, PrefixCache, Probe
from serinus.core.errors import ConfigError, InvariantError
from serinus.core.parts import PageSpan, Part
from serinus.core.plan import TableWrite
from serinus.sched.page_row import PageRow, slots_of
from serinus.sched.request_state import ReqState
from serinus.sched.settings import SchedSettings

_NOTHING = Probe(device=0, total=0)


class PageAllocator:
    """Gives requests rows and pages, and takes them back."""

    def __init__(self, settings: SchedSettings, cache: PrefixCache) -> None:
        """Raises ConfigError where a part with a window has not the pages that one request needs to get on."""
        self.cache = cache
        self.page_size = settings.page_size
        self.shares = cache.enable_prefix
        """Whether what one request publishes can be found by another."""
        self.windows = {part: shape.window for part, shape in cache.geometry.parts.items()}
        """The parts, FULL first: how many positions a token sees, itself included; None = all before it."""
        self.pages_total = min(s.pages for s in cache.geometry.parts.values() if s.window is None) - 1
        """Pages without the padding page, of the smallest part that covers whole sequences."""
        self.tiered = cache.geometry.tiered
        """Whether there is a host tier."""
        self.window_pages = {part: cache.pin_pages_max(part) + 1 for part, window in self.windows.items() if window}
        """By part with a window, the pages that one request needs at most: what its lease may pin, and the page it
        writes."""
        self.open_loads: set[int] = set()
        """Copies from the host that have not been seen to end: what was computed on them is not sure yet."""
        for part, most in self.window_pages.items():
            pages = cache.geometry.parts[part].pages - 1
            if pages < min(most, self.pages_for(settings.context_length)):
                raise ConfigError(
                    f"sched: part {part.name} has {pages} pages of {self.page_size} tokens for a window of"
                    f" {self.windows[part]}, expected at least {most}; raise --max-total-tokens or"
                    " --swa-full-tokens-ratio"
                )
        self._context = settings.context_length
        self._rows = list(range(settings.rows - 1, 0, -1))
        self._writes: list[TableWrite] = []
        self._failed: list[Lease] = []

    @property
    def free_rows(self) -> tuple[int, ...]:
        """Rows that no request has."""
        return tuple(self._rows)

    def pages_for(self, tokens: int) -> int:
        """Pages that hold so many tokens."""
        return -(-tokens // self.page_size)

    def first_page(self, part: Part, position: int) -> int:
        """Index of the first page of a part that computing `position` reads."""
        return self.cache.first_page(part, position)

    def room(self, part: Part = Part.FULL) -> int:
        """Pages that could be handed out now: free, or cached and not in use."""
        return self.cache.available(part)

    # What is cached

    def match_limit(self, state: ReqState) -> int:
        """Tokens it may take from the cache: at least one must be computed, to have logits; a prompt token with a
        wanted log-probability needs the one before it computed; and where hidden states of the prompt are pooled, all
        of it is computed."""
        if state.cold or state.alone or state.pools:
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
        match = self.cache.match_prefix(request.cache_salt, state.tokens[:limit], limit, priority=-request.priority)
        state.lease, state.load = match.lease, match.load
        for row, span in zip(state.rows, match.spans, strict=True):
            row.join(span)
        state.go_on_from(match.length)
        state.found = {"device": match.length}

    def unmatch(self, state: ReqState) -> None:
        """Give a match back, of which nothing was used: the request waits on, and its prefetch is kept."""
        assert state.lease is not None, f"sched: request {state.rid} gives back a match, expected it to have one"
        self.cache.release(state.lease)
        state.drop_pages()

    def placed(self, state: ReqState) -> None:
        """The request has its pages: its match was a hit."""
        assert state.lease is not None, f"sched: request {state.rid} is placed without a match"
        self.cache.used(state.lease, state.found["device"])
        self.forget_prefetch(state)

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
        for row, span in zip(state.rows, loaded.spans, strict=True):
            row.join(span)
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
        """Leases whose KV never came from the host, since they were last taken."""
        failed, self._failed = tuple(self._failed), []
        return failed

    def _take_news(self, news: CacheNews) -> int:
        self.open_loads.difference_update(news.ended_loads)
        self._failed.extend(news.failed_loads)
        return news.in_flight

    # The storage

    def lacks(self, state: ReqState) -> int:
        """Tokens of whole pages that neither device nor host have of its prefix."""
        limit = self.match_limit(state)
        return limit - limit % self.page_size - self.probe(state).total

    def prefetch(self, state: ReqState, now: float, *, ahead: bool) -> None:
        """Ask the storage for what neither device nor host have of its prefix; later, where it is asked for too many
        already, or where it is `ahead` of its turn and there is no room on the host for it now."""
        limit, lacks, request = self.match_limit(state), self.lacks(state), state.request
        state.unasked = state.prefetching = lacks > 0 and self.cache.prefetches_full(lacks if ahead else 0)
        if lacks > 0 and not state.unasked:
            state.asked_at = now
            state.prefetched = state.prefetching = self.cache.prefetch(
                state.rid, request.cache_salt, state.tokens[:limit], priority=-request.priority
            )

    def prefetch_over(self, state: ReqState) -> bool:
        """Whether nothing more comes from the storage."""
        return not state.unasked and self.cache.prefetch_state(state.rid).over

    def prefetch_cut(self, state: ReqState) -> None:
        """Take what has come from the storage, and wait no more."""
        state.prefetching = state.unasked = False
        self.cache.prefetch_cut(state.rid)

    def forget_prefetch(self, state: ReqState) -> None:
        """The request ends or is computed: the storage need not bring anything for it."""
        if state.prefetched:
            state.prefetching = state.prefetched = False
            self.cache.release_aborted_request(state.rid)

    # Pages

    def extend(self, state: ReqState, end: int, window_end: int = 0) -> bool:
        """Let its pages reach up to page index `end`, of parts with a window up to `window_end`; False = no room,
        nothing changed. The table rows of a running request are written."""
        return self._extend([(state, end, window_end)])

    def grow(self, states: Sequence[ReqState]) -> bool:
        """`extend` each by a page, of parts with a window those that reach least far; False = no room for all, nothing
        changed. Cost: some 3 us a request, many at once."""
        return self._extend([(state, state.full.end + 1, state.next_window_end) for state in states])

    def _extend(self, wanted: Sequence[tuple[ReqState, int, int]]) -> bool:
        """Each request, with its `end` and `window_end`."""
        counts = []
        for place in range(len(self.windows)):
            rows = [(state.rows[place], end, window_end) for state, end, window_end in wanted]
            counts.append([max(0, (window_end if row.windowed else end) - row.end) for row, end, window_end in rows])
        if not any(map(any, counts)):
            return True
        given = self.cache.allocate_each([state.rid for state, *_ in wanted], counts)
        if given is None:
            return False
        size = self.page_size
        for place, (each, pages) in enumerate(zip(counts, given, strict=True)):
            slots, begin = slots_of(pages, size), 0
            for (state, *_), count in zip(wanted, each, strict=True):
                if not count:
                    continue
                row, end = state.rows[place], begin + count
                start = row.room
                row.add(pages[begin:end], slots[begin * size : end * size])
                begin = end
                if state.row:
                    self._write(state.row, row, start, row.room)
        return True

    def take_row(self, state: ReqState) -> None:
        """Take a row and write all its pages into it. Raises InvariantError where no row is free."""
        if not self._rows:
            raise InvariantError(f"sched: no row for request {state.rid}, expected one for each running request")
        state.row = self._rows.pop()
        for row in state.rows:
            self._write(state.row, row, row.first * self.page_size, row.room)

    def give_row(self, state: ReqState) -> None:
        """Give the row back; the pages stay."""
        self._rows.append(state.row)
        state.row = 0

    def publish(self, state: ReqState) -> None:
        """Insert its full pages into the tree, as far as they are verified; none while it is to read its own alone.

        Where the tree had them already, its own duplicates go back and its rows are rewritten to the canonical pages:
        first the rows, then the release (a duplicate freed before could be another request's while a row names it).
        What lies behind a window is published by itself, so that its lease can leave it. Where a load for another
        request brings the same pages from the host, that load is settled first: what was computed never comes to lie
        on KV that may not come.
        """
        size, end = self.page_size, state.verified // self.page_size * self.page_size
        if not self.shares or end <= state.published or state.alone:
            return
        if self.open_loads and state.lease is not None:
            self.settle(self.cache.loads_over(state.lease, state.tokens[state.published : end]))
        for behind in sorted({self.first_page(row.part, end) * size for row in state.windowed}):
            if state.published < behind < end:
                self._insert(state, behind)
        self._insert(state, end)

    def _insert(self, state: ReqState, end: int) -> None:
        lease, size, first = state.lease, self.page_size, state.published
        assert lease is not None, f"sched: request {state.rid} publishes without a lease"
        low, high = first // size, end // size
        own = tuple([row.cut(low, high) for row in state.rows])
        insertion = self.cache.insert(lease, state.tokens[first:end], own)
        if insertion.changed:
            for row, span in zip(state.rows, insertion.spans, strict=True):
                if len(span.pages):
                    row.put(span.first, span.pages)
                    if state.row:
                        self._write(state.row, row, span.first * size, end)
        self.cache.commit_row(insertion)
        state.lease = insertion.lease
        state.published = insertion.end

    def advance(self, state: ReqState, position: int) -> None:
        """It computes `position` next: what lies behind its windows goes back."""
        if state.lease is None:
            return
        passed = [(row, self.first_page(row.part, position)) for row in state.windowed]
        passed = [(row, first) for row, first in passed if first > row.first]
        if not passed:
            return
        published = state.published // self.page_size
        own = [row.cut(published, max(published, row.first, min(first, row.end))) for row, first in passed]
        self.cache.advance(state.rid, state.lease, position, own)
        for row, first in passed:
            row.drop_before(first)

    def release(self, state: ReqState, *, park: bool = False, trusted: bool = True) -> None:
        """Give everything back: the only exit for finish, abort, retract and recompute. `park`: it will come again,
        so what it published goes to the host at once, where there is one. What is not verified is not published; of an
        untrusted one, and where what it has now is not `trusted`, nothing more is."""
        if state.lease is not None:
            tokens = state.tokens[: state.published if state.untrusted or not trusted else state.verified]
            spans = tuple([row.span() for row in state.rows])
            self.cache.finish(state.rid, state.lease, tokens, spans, park=park)
        if state.row:
            self.give_row(state)
        state.drop_pages()

    # Pages that others read or write

    def spans(self, state: ReqState, first: int, end: int) -> tuple[PageSpan, ...]:
        """Its pages [first, end) of the prompt; of a part with a window those that decoding behind the prompt reads,
        and no span where it reads none of them."""
        spans = []
        for row in state.rows:
            low = max(first, self.first_page(row.part, state.prompt_len))
            if low < end or row is state.full:
                spans.append(PageSpan(part=row.part, first=low, pages=row.pages[low:end].copy()))
        return tuple(spans)

    def hold(self, name: str, spans: Sequence[PageSpan]) -> None:
        """What `name` says is at these pages: they are not handed out until `unhold`, even if they are freed."""
        for span in spans:
            self.cache.hold(name, span.pages, span.part)

    def unhold(self, name: str, spans: Sequence[PageSpan]) -> None:
        """It is at them no more."""
        for span in spans:
            self.cache.unhold(name, span.pages, span.part)

    # Tables

    def take_writes(self) -> tuple[TableWrite, ...]:
        """The writes the device's tables need before the next forward pass, in order; they are the caller's now."""
        writes = tuple(self._writes)
        self._writes.clear()
        return writes

    def _write(self, table_row: int, row: PageRow, start: int, end: int) -> None:
        end = min(end, self._context)  # the last page may reach beyond the width of a row
        if start < end:
            self._writes.append(TableWrite(row=table_row, start=start, slots=row.slots[start:end], part=row.part))
