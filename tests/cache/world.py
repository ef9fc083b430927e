"""A tiny engine around a PrefixCache; the state machine, the driver and the mutants drive it. Oracles: base.py.

Before each fake forward every page that a row names, as far as the part's window reads it, must hold its own prefix's
hash, whatever request owned the page before.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from serinus.core.errors import InvariantError
from serinus.core.parts import PageSpan, Part
from serinus.testing.fake_mover import POISON
from tests.cache.base import DEVICE_GAINS, EVICTION, Base, Req
from tests.cache.model import DEVICE_FULL, Prefix, Snapshot, chain, prefixes, words


class World(Base):
    """The life of requests in one tier; tiers.py adds what the other tiers do."""

    # The life of a request

    def arrive(self, namespace: str, tokens: list[int], *, priority: int = 0, lazy: bool = False) -> None:
        """A new prompt waits; of too many the oldest gives up."""
        self.arrived += 1
        if len(self.waiting) >= 6:
            self.give_up(0)
        self.waiting.append(
            Req(rid=f"r{self.arrived}", namespace=namespace, tokens=list(tokens), prompt_len=len(tokens),
                priority=priority, lazy=lazy)
        )  # fmt: skip

    def give_up(self, which: int) -> None:
        """A waiting request is aborted, at whatever point its prefetch is."""
        req = self.waiting.pop(which % len(self.waiting))
        self.cache.release_aborted_request(req.rid)
        self.cache.release_aborted_request(req.rid)
        assert self.cache.prefetch_state(req.rid) is self.room.PrefetchState.NONE, "an aborted prefetch lives on"
        self.changed().only()

    def admit(self, which: int, *, load: bool = True, drop: bool = True) -> None:
        """Match, lock, load back and allocate for all known tokens, or leave it waiting."""
        req = self.waiting[which % len(self.waiting)]
        limit = len(req.tokens) - 1
        path = self.path(req, limit)
        device = self.seen.usable(self.shape, path)
        total = self.seen.usable(self.shape, path, ("device", "host"))
        probe = self.cache.probe(req.namespace, req.ids[:limit])
        assert (probe.device, probe.total) == (device, total), f"{probe}, the model says {device} and {total}"
        match = self.cache.match_prefix(req.namespace, req.ids, limit, priority=req.priority)
        self.changed().only()
        self.check_match(req, match, device, total)
        self.order.touch(path[: match.length // self.size], priority=req.priority)
        if match.load is None or not load or not self.load_back(req, match):
            req.rows = {span.part: span for span in match.spans}
            req.computed = match.length
            req.plan_end = match.load.end if match.load is not None else 0
            if drop:
                self.cache.drop_load(match.lease)
                req.plan_end = 0
        need = -(-len(req.tokens) // self.size) - len(req.row)
        leased = path[: max(req.plan_end, match.lease.end) // self.size]
        windowed = 0 if req.lazy else need
        counts = {part: windowed if part in self.shape.windows else need for part in self.shape.parts}
        given = self.allocate(req.rid, counts, leased, path[: match.lease.end // self.size])
        if given is None:
            self.cache.release(match.lease)
            self.changed().only()
            self.order.touch(path[: match.length // self.size], priority=req.priority)
            return
        self.cache.used(match.lease, match.length)
        self.order.hit(path[: match.length // self.size])
        self.cache.release_aborted_request(req.rid)
        self.waiting.remove(req)
        self.running.append(req)
        req.lease = match.lease
        for part, pages in given.items():
            req.extend(part, pages)

    def listed(self, part: Part, path: list[Prefix], position: int) -> PageSpan:
        """The pages of a path that computing `position` reads, as the tree lists them."""
        first = self.shape.first(part, position)
        pages = [self.seen.where["device", part][p] for p in path[first:]]
        return PageSpan(part=part, first=first, pages=np.array(pages, np.int32))

    def check_spans(self, given: tuple[PageSpan, ...], path: list[Prefix], position: int) -> None:
        """One span for each part: what the tree lists there, from where computing `position` reads it."""
        assert [span.part for span in given] == list(self.shape.parts), f"spans {given} of parts {self.shape.parts}"
        for span in given:
            listed = self.listed(span.part, path, position)
            assert span.first == listed.first, f"{span}, expected it from page {listed.first} on"
            assert span.pages.tolist() == listed.pages.tolist(), f"{span}, the tree lists {listed.pages}"

    def check_match(self, req: Req, match: Any, device: int, total: int) -> None:
        """A match against the snapshot before it: lengths, pages and the plan of a load."""
        assert match.length == device == match.lease.end, f"match of {match.length} tokens, expected {device}"
        self.check_spans(match.spans, self.path(req, device), device)
        load = match.load
        assert (load is None) == (total == device), f"{load} for {total} tokens of which {device} are on the device"
        if load is not None:
            path = self.path(req, total)
            assert (load.end, load.tokens) == (total, total - device), f"{load} for {total} behind {device}"
            for (part, shape), count in zip(self.shape.parts.items(), load.pages, strict=True):
                there = self.seen.where["device", part]
                lack = sum(p not in there for p in path[self.shape.first(part, total) :])
                good = count == lack if shape.window is None else count >= lack
                assert good, f"{load}: {lack} pages of {part.name} lack"

    def load_back(self, req: Req, match: Any) -> bool:
        """The host's part comes to the device, or nothing changes but what eviction does."""
        load, first = match.load, match.length // self.size
        room = [self.cache.available(part) for part in self.shape.parts]
        before = self.seen
        loaded = self.cache.load_back(req.rid, match.lease, load)
        change = self.changed()
        fits = all(count <= there for count, there in zip(load.pages, room, strict=True))
        assert (loaded is not None) == fits or self.untold, f"{load} with room {room} gives {loaded}"
        path = self.path(req, load.end)
        if loaded is None:
            change.only(*(EVICTION if self.untold else ()))
            assert match.lease.end == match.length, "a refused load moved the lease"
            return False
        change.only(*EVICTION, *DEVICE_GAINS)
        for part, shape in self.shape.parts.items():
            came = change.gained["device", part].keys()
            lacked = {p for p in path if p not in before.where["device", part]}
            assert came <= lacked, f"a load brought {part.name} of others: {words(came - lacked)}"
            assert shape.window is not None or came == lacked, f"a load left out {part.name}: {words(lacked - came)}"
        assert any(change.gained[pool] for _, pool in DEVICE_GAINS), f"{load} brought nothing"
        assert loaded.length == load.end == match.lease.end, f"{loaded} of {load}"
        rows = {}
        for span, old in zip(loaded.spans, match.spans, strict=True):
            if self.shape.parts[span.part].window is None:
                assert span.first == first, f"{span}, expected pages from {first}"
                span = PageSpan(part=span.part, first=0, pages=np.concatenate((old.pages, span.pages)))
            rows[span.part] = span
        self.check_spans(tuple(rows.values()), path, load.end)
        for _, pool in DEVICE_GAINS:
            change.gained[pool] = {}
        self.check_eviction(change, None, path, path)
        req.rows, req.computed, req.plan_end = rows, load.end, 0
        return True

    def allocate(
        self, rid: str, wanted: dict[Part, int], pins: list[Prefix] | None = None,
        window_pins: list[Prefix] | None = None,
    ) -> dict[Part, NDArray[np.int32]] | None:  # fmt: skip
        """Ask for pages: None if and only if there is no room. Pins: of a lease whose request does not run yet."""
        parts = self.shape.parts
        wanted = {part: wanted.get(part, 0) for part in parts}
        room = {part: self.cache.available(part) for part in parts}
        free = {part: self.ledger(("device", part)).free_pages for part in parts}
        given = self.cache.allocate(rid, *wanted.values())
        change = self.changed()
        fits = all(wanted[part] <= room[part] for part in room)
        assert (given is not None) == fits or self.untold, f"{wanted} pages asked, room for {room}, got {given}"
        if given is None:
            change.only(*(EVICTION if self.untold else ()))
            return None
        lacks = {part: wanted[part] - free[part] for part in parts}
        others = [part for part in parts if part not in self.shape.windows and part is not Part.FULL]
        enough = None if any(lacks[part] > 0 for part in others) else max(0, lacks[Part.FULL])
        self.check_eviction(change, enough, pins, window_pins)
        for part in self.shape.windows:
            if lacks[part] <= 0:
                alone = change.lost["device", part].keys() - change.lost[DEVICE_FULL].keys()
                assert not alone, f"{part.name} went although {free} pages were free for {wanted}: {words(alone)}"
        for part, pages in zip(parts, given, strict=True):
            assert len(pages) == wanted[part], f"{len(pages)} pages of {part.name}, expected {wanted[part]}"
            if not len(pages):
                continue
            stale = set(pages.tolist()) & (self.held(part) | self.mover.use.of("device", part))
            assert not stale, f"I1 pages {stale} of {part.name} were handed out while a hold or a copy needs them"
            self.pool[part][pages] = 0
        return dict(zip(parts, given, strict=True))

    # Computing

    def forward(self, req: Req, count: int) -> bool:
        """Compute `count` tokens: read what the parts reach, write theirs. False: no page for a window, retracted."""
        end = req.computed + count
        short = {part: -(-end // self.size) - req.rows[part].end for part in self.shape.windows}
        short = {part: lack for part, lack in short.items() if lack > 0}
        if short:
            given = self.allocate(req.rid, short)
            if given is None:
                self.leave(req, retract=True)
                return False
            for part, pages in given.items():
                req.extend(part, pages)
        self.mover.gate()
        for part, span in req.rows.items():
            window = self.shape.parts[part].window
            low = 0 if window is None else max(0, req.computed - window + 1)
            assert span.first * self.size <= low, f"testing: {req} lost {part.name} pages that it reads from {low} on"
            self.read(req, part, span.pages, span.first, low)
        for part, span in req.rows.items():
            content = chain(self.engine, part, req.namespace, req.tokens[:end], self.size)
            for at in range(req.computed, end):
                value = content[at] | np.uint64(POISON if req.bad else 0)
                self.pool[part][span.pages[at // self.size - span.first], at % self.size] = value
        req.computed = end
        return True

    def read(self, req: Req, part: Part, row: NDArray[np.int32], first: int, low: int) -> None:
        """K1 before a forward: positions [low, computed) of one part, through the row; `first`: its first page."""
        expected = chain(self.engine, part, req.namespace, req.tokens[: req.computed], self.size)
        slots = self.pool[part][row].reshape(-1)[low - first * self.size : req.computed - first * self.size]
        wrong = np.flatnonzero(slots != expected[low:])
        if not len(wrong):
            return
        if self.mover.failed_pages and (slots[wrong] >= POISON).all():
            req.bad = True
            return
        where = [(int(low + w), int(row[(low + w) // self.size - first])) for w in wrong[:6]]
        raise AssertionError(f"K1 {req.rid} reads foreign {part.name} KV at (position, page) {where}, row {row}")

    def chunk(self, which: int, count: int, *, publish: bool = True, advance: str = "") -> None:
        """Compute up to `count` more prompt tokens; publish the whole pages, and let go of what is behind the windows.

        `advance`: "first" or "last" (before or after publishing), or "" for not now.
        """
        req = self.running[which % len(self.running)]
        count = min(count, req.prompt_len - req.computed)
        if count > 0 and not self.forward(req, count):
            return
        if advance == "first":
            self.advance(req)
        if publish:
            self.publish(req)
        if advance == "last":
            self.advance(req)

    def publish(self, req: Req) -> None:
        """Insert, rewrite the row, commit: in this order."""
        start = req.lease.end
        low, high = start // self.size, req.computed // self.size
        path = self.path(req, req.computed)
        firsts = {part: max(low, min(span.first, high)) for part, span in req.rows.items()}
        own = {part: _cut(span, firsts[part], span.end) for part, span in req.rows.items()}
        before = self.seen
        insertion = self.cache.insert(req.lease, req.ids[start : req.computed], tuple(own.values()))
        if req.lease.sound_end is not None:
            assert self.untold, f"{req.lease} is said to be bad, and no load failed"
            assert insertion.end == start, f"{insertion} was published from {req.lease}, which is bad"
            self.cache.commit_row(insertion)
            self.changed().only()
            return
        assert insertion.end == high * self.size == req.lease.end, f"{insertion}, expected the end {high * self.size}"
        if high > low:
            for span, duplicates in zip(insertion.spans, insertion.duplicates, strict=True):
                first = firsts[span.part]
                assert span.first == first, f"{insertion}, expected {span.part.name} from page {first}"
                mine = own[span.part].pages[: high - first]
                self.check_canonical(req, span, duplicates, before, path[first:high], mine)
        try:
            self.cache.evict(0)
            raise AssertionError("an operation went through between insert and commit_row")
        except InvariantError:
            pass
        if self.rewrite_rows and high > low:
            for span in insertion.spans:
                row = req.rows[span.part]
                pages = row.pages.copy()
                pages[span.first - row.first : span.end - row.first] = span.pages
                req.rows[span.part] = PageSpan(part=span.part, first=row.first, pages=pages)
        self.cache.commit_row(insertion)
        req.plan_end = 0
        self.published(path[:high], {part: path[first:high] for part, first in firsts.items()}, before, req)

    def check_canonical(
        self, req: Req, given: PageSpan, duplicates: NDArray[np.int32], before: Snapshot, span: list[Prefix],
        own: NDArray[np.int32],
    ) -> None:  # fmt: skip
        """The tree's pages win where it has them; the others are the request's; duplicates are still its own."""
        part = given.part
        there = before.where["device", part]
        expected = [there.get(p, page) for p, page in zip(span, own.tolist(), strict=True)]
        assert given.pages.tolist() == expected, f"canonical {part.name} pages {given}, expected {expected}"
        extra = sorted(page for p, page in zip(span, own.tolist(), strict=True) if p in there)
        assert sorted(duplicates.tolist()) == extra, f"{part.name} duplicates {duplicates}, expected {extra}"
        ledger = self.ledger(("device", part))
        mine = ledger.request_owner(req.rid)
        assert (ledger.owner_P[duplicates] == mine).all(), "a duplicate was freed before the row was rewritten"

    def published(self, whole: list[Prefix], given: dict[Part, list[Prefix]], before: Snapshot, req: Req) -> None:
        """Publication brings exactly the new prefixes to the device, and changes nothing else."""
        change = self.changed()
        change.only(*DEVICE_GAINS)
        for part, prefixes_ in given.items():
            new = {p for p in prefixes_ if p not in before.where["device", part]}
            came = change.gained["device", part].keys()
            assert came == new, f"published {part.name}: {words(came - new)} too much, {words(new - came)} missing"
        self.order.touch(whole, priority=req.priority)

    def advance(self, req: Req) -> None:
        """Let go of what the windows left behind: pins of the lease, and own pages that were never published."""
        reached = [part for part in self.shape.windows if req.computed >= req.rows[part].first * self.size]
        if not reached:
            return
        own = []
        for part in reached:
            span, first = req.rows[part], self.cache.first_page(part, req.computed)
            expected = self.shape.first(part, req.computed)
            assert first == expected, f"the first {part.name} page is {first} at {req.computed}, expected {expected}"
            low = max(span.first, req.lease.end // self.size)
            own.append(_cut(span, low, max(low, min(first, span.end))))
            req.rows[part] = _cut(span, max(first, span.first), span.end)
        self.cache.advance(req.rid, req.lease, req.computed, own)
        for span in own:
            owners = self.ledger(("device", span.part)).owner_P[span.pages]
            assert (owners == 0).all(), f"own {span.part.name} pages behind the window were not freed"
        self.changed().only()

    def decode(self, which: int, token: int, *, advance: bool = True) -> None:
        """Append a token to a request whose known tokens are computed, and compute it."""
        req = self.running[which % len(self.running)]
        if req.computed < len(req.tokens):
            if req.computed >= req.prompt_len:
                self.forward(req, len(req.tokens) - req.computed)
            return
        if req.computed == len(req.row) * self.size:
            whole = [part for part in self.shape.parts if part not in self.shape.windows]
            given = self.allocate(req.rid, dict.fromkeys(whole, 1))
            if given is None:
                self.leave(req, retract=True)
                return
            for part, pages in given.items():
                req.extend(part, pages)
        req.tokens.append(token)
        if self.forward(req, 1) and advance:
            self.advance(req)

    def end(self, which: int, *, retract: bool, park: bool = False) -> None:
        """Finish, abort or retract, at whatever point it is."""
        self.leave(self.running[which % len(self.running)], retract=retract, park=park)

    def leave(self, req: Req, *, retract: bool, park: bool = False, failed: bool = False) -> None:
        """The only exit; a retracted request waits again with all its tokens. `failed`: it publishes nothing."""
        before, start = self.seen, req.lease.end
        failed = failed or req.lease.sound_end is not None
        tokens = req.tokens[: req.computed]
        self.cache.finish(req.rid, req.lease, np.array(tokens, np.int32), req.spans, park=park)
        self.running.remove(req)
        path = prefixes(req.namespace, tokens, self.size)
        low = start // self.size
        if failed:
            self.changed().only()
        else:
            given = {part: path[max(low, span.first) :] for part, span in req.rows.items()}
            self.published(path, given, before, req)
        for part in self.shape.parts:
            left = self.ledger(("device", part)).pages_of_request(req.rid)
            assert not left, f"O3 {req.rid} is over and owns {left} pages of {part.name}"
        if retract:
            again = Req(rid=req.rid, namespace=req.namespace, tokens=req.tokens, prompt_len=len(req.tokens),
                        priority=req.priority, lazy=req.lazy)  # fmt: skip
            self.waiting.append(again)


def _cut(span: PageSpan, first: int, end: int) -> PageSpan:
    """The pages [first, end) of a span; none where it ends before."""
    return PageSpan(part=span.part, first=first, pages=span.pages[first - span.first : max(first, end) - span.first])
