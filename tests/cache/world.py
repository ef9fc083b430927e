"""A tiny engine around a PrefixCache; the state machine, the driver and the mutants drive it. Oracles: base.py.

Before each fake forward every page that a row names, as far as the part's window reads it, must hold its own prefix's
hash, whoever owned the page before.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from serinus.core.errors import InvariantError
from serinus.core.parts import Part
from serinus.testing.fake_mover import POISON
from tests.cache.base import EVICTION, Base, Req
from tests.cache.model import DEVICE_FULL, DEVICE_SWA, Prefix, Snapshot, chain, prefixes, words


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
        self.order.touch(path[: match.length // self.size], priority=req.priority, hit=True)
        if match.load is None or not load or not self.load_back(req, match):
            self.seat(req, match.pages, match.swa_first, match.swa_pages, match.length)
            req.plan_end = match.load.end if match.load is not None else 0
            if drop:
                self.cache.drop_load(match.lease)
                req.plan_end = 0
        need = -(-len(req.tokens) // self.size) - len(req.row)
        leased = path[: max(req.plan_end, match.lease.end) // self.size]
        swa = 0 if req.lazy or self.shape.window is None else need
        given = self.allocate(req.rid, need, swa, leased, leased[req.swa_first : match.lease.end // self.size])
        if given is None:
            self.cache.release(match.lease)
            self.changed().only()
            self.order.touch(path[: match.length // self.size], priority=req.priority)
            return
        self.cache.release_aborted_request(req.rid)
        self.waiting.remove(req)
        self.running.append(req)
        req.lease = match.lease
        req.row = np.concatenate((req.row, given.full))
        req.swa = np.concatenate((req.swa, given.swa))

    def seat(self, req: Req, pages: Any, swa_first: int, swa_pages: Any, length: int) -> None:
        """A row begins with what is cached."""
        req.row, req.swa_first, req.swa, req.computed = pages.copy(), swa_first, swa_pages.copy(), length
        req.plan_end = 0

    def check_match(self, req: Req, match: Any, device: int, total: int) -> None:
        """A match against the snapshot before it: lengths, pages and the plan of a load."""
        assert match.length == device == match.lease.end, f"match of {match.length} tokens, expected {device}"
        path = self.path(req, device)
        pages = [self.seen.where[DEVICE_FULL][p] for p in path]
        assert match.pages.tolist() == pages, f"match gives pages {match.pages}, the tree lists {pages}"
        assert match.swa_first == self.shape.swa_first(device), f"{match}, expected {self.shape.swa_first(device)}"
        swa = [self.seen.where[DEVICE_SWA][p] for p in path[match.swa_first :]]
        assert match.swa_pages.tolist() == swa, f"match gives SWA pages {match.swa_pages}, the tree lists {swa}"
        load = match.load
        assert (load is None) == (total == device), f"{load} for {total} tokens of which {device} are on the device"
        if load is not None:
            path = self.path(req, total)
            full = sum(p not in self.seen.where[DEVICE_FULL] for p in path)
            assert (load.end, load.tokens, load.full) == (total, total - device, full), f"{load} for {total}, {full}"
            swa_count = sum(p not in self.seen.where[DEVICE_SWA] for p in path[self.shape.swa_first(total) :])
            assert load.swa >= swa_count if self.shape.window else not load.swa, f"{load}, {swa_count} SWA pages lack"

    def load_back(self, req: Req, match: Any) -> bool:
        """The host's part comes to the device, or nothing changes but what eviction does."""
        load, first = match.load, match.length // self.size
        room = (self.cache.available(Part.FULL), self.cache.available(Part.SWA) if self.shape.window else 0)
        before = self.seen
        loaded = self.cache.load_back(req.rid, match.lease, load)
        change = self.changed()
        fits = load.full <= room[0] and load.swa <= room[1]
        assert (loaded is not None) == fits or self.untold, f"{load} with room {room} gives {loaded}"
        path = self.path(req, load.end)
        if loaded is None:
            change.only(*(EVICTION if self.untold else ()))
            assert match.lease.end == match.length, "a refused load moved the lease"
            return False
        change.only(*EVICTION, ("gained", DEVICE_FULL), ("gained", DEVICE_SWA))
        assert change.gained[DEVICE_FULL].keys() == {p for p in path if p not in before.where[DEVICE_FULL]}
        assert change.gained[DEVICE_SWA].keys() <= set(path), "a load brought SWA of others"
        assert loaded.length == load.end == match.lease.end, f"{loaded} of {load}"
        pages = [self.seen.where[DEVICE_FULL][p] for p in path]
        assert loaded.first == first, f"{loaded}, expected pages from {first}"
        assert loaded.pages.tolist() == pages[first:], f"{loaded}, the tree lists {pages[first:]}"
        assert pages[:first] == match.pages.tolist(), "a load moved pages of the match"
        assert loaded.swa_first == self.shape.swa_first(load.end), f"{loaded} of {load}"
        swa = [self.seen.where[DEVICE_SWA][p] for p in path[loaded.swa_first :]] if self.shape.window else []
        assert loaded.swa_pages.tolist() == swa, f"{loaded}, the tree lists SWA {swa}"
        assert change.gained[DEVICE_FULL] or change.gained[DEVICE_SWA], f"{load} brought nothing"
        for pool in (DEVICE_FULL, DEVICE_SWA):
            change.gained[pool] = {}
        self.check_eviction(change, None, path, path[loaded.swa_first :])
        self.seat(req, np.array(pages, np.int32), loaded.swa_first, loaded.swa_pages, load.end)
        return True

    def allocate(
        self, rid: str, full: int, swa: int, pins: list[Prefix] | None = None, window_pins: list[Prefix] | None = None
    ) -> Any:
        """Ask for pages: None if and only if there is no room. Pins: of a lease whose request does not run yet."""
        wanted = {Part.FULL: full, Part.SWA: swa}
        room = {part: self.cache.available(part) for part in self.shape.parts}
        free = {part: self.ledger(("device", part)).free_pages for part in self.shape.parts}
        given = self.cache.allocate(rid, full, swa)
        change = self.changed()
        fits = all(wanted[part] <= room[part] for part in room)
        assert (given is not None) == fits or self.untold, f"{wanted} pages asked, room for {room}, got {given}"
        if given is None:
            change.only(*(EVICTION if self.untold else ()))
            return None
        self.check_eviction(change, max(0, full - free[Part.FULL]), pins, window_pins)
        if swa <= free.get(Part.SWA, 0):
            alone = change.lost[DEVICE_SWA].keys() - change.lost[DEVICE_FULL].keys()
            assert not alone, f"SWA went although {free} pages were free for {wanted}: {words(alone)}"
        for part, pages in ((Part.FULL, given.full), (Part.SWA, given.swa)):
            assert len(pages) == wanted[part], f"{len(pages)} pages of {part.name}, expected {wanted[part]}"
            if not len(pages):
                continue
            stale = set(pages.tolist()) & (self.held(part) | self.mover.use.of("device", part))
            assert not stale, f"I1 pages {stale} of {part.name} were handed out while a hold or a copy needs them"
            self.pool[part][pages] = 0
        return given

    # Computing

    def forward(self, req: Req, count: int) -> bool:
        """Compute `count` tokens: read what the parts' windows reach, write theirs. False: no SWA page, retracted."""
        end = req.computed + count
        if self.shape.window is not None:
            short = -(-end // self.size) - req.swa_first - len(req.swa)
            if short > 0:
                given = self.allocate(req.rid, 0, short)
                if given is None:
                    self.leave(req, retract=True)
                    return False
                req.swa = np.concatenate((req.swa, given.swa))
        self.mover.gate()
        self.read(req, Part.FULL, req.row, 0, 0)
        if self.shape.window is not None:
            low = max(0, req.computed - self.shape.window + 1)
            assert req.swa_first * self.size <= low, f"testing: {req} lost SWA pages that it reads from {low} on"
            self.read(req, Part.SWA, req.swa, req.swa_first, low)
        for part, row, first in ((Part.FULL, req.row, 0), (Part.SWA, req.swa, req.swa_first)):
            if part in self.shape.parts:
                content = chain(self.engine, part, req.namespace, req.tokens[:end], self.size)
                for at in range(req.computed, end):
                    value = content[at] | np.uint64(POISON if req.bad else 0)
                    self.pool[part][row[at // self.size - first], at % self.size] = value
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
        """Compute up to `count` more prompt tokens; publish the whole pages, and let go of SWA behind the window.

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
        swa_low = max(low, min(req.swa_first, high))
        own_swa = req.swa[swa_low - req.swa_first :]
        before = self.seen
        insertion = self.cache.insert(
            req.lease, req.ids[start : req.computed], self.room.PartPages(full=req.row[low:], swa=own_swa), start,
            swa_low if self.shape.window is not None else None,
        )  # fmt: skip
        if req.lease.sound_end is not None:
            assert self.untold, f"{req.lease} is said to be bad, and no load failed"
            assert insertion.end == start, f"{insertion} was published from {req.lease}, which is bad"
            self.cache.commit_row(insertion)
            self.changed().only()
            return
        assert insertion.end == high * self.size == req.lease.end, f"{insertion}, expected the end {high * self.size}"
        given = (insertion.pages, insertion.duplicates)
        self.check_canonical(req, Part.FULL, before, path[low:high], req.row[low:high], given)
        if self.shape.window is not None and high > low:
            assert insertion.swa_first == swa_low, f"{insertion}, expected SWA from page {swa_low}"
            given = (insertion.swa_pages, insertion.swa_duplicates)
            self.check_canonical(req, Part.SWA, before, path[swa_low:high], own_swa[: high - swa_low], given)
        try:
            self.cache.evict(0)
            raise AssertionError("an operation went through between insert and commit_row")
        except InvariantError:
            pass
        if self.rewrite_rows:
            req.row[low:high] = insertion.pages
            if self.shape.window is not None and high > low:
                req.swa[swa_low - req.swa_first : high - req.swa_first] = insertion.swa_pages
        self.cache.commit_row(insertion)
        req.plan_end = 0
        self.published(path[:high], path[low:high], path[swa_low:high] if self.shape.window else [], before, req)

    def check_canonical(
        self, req: Req, part: Part, before: Snapshot, span: list[Prefix], own: NDArray[np.int32], given: Any
    ) -> None:
        """The tree's pages win where it has them; the others are the request's; duplicates are still its own."""
        (pages, duplicates), there = given, before.where["device", part]
        expected = [there.get(p, page) for p, page in zip(span, own.tolist(), strict=True)]
        assert pages.tolist() == expected, f"canonical {part.name} pages {pages}, expected {expected}"
        extra = sorted(page for p, page in zip(span, own.tolist(), strict=True) if p in there)
        assert sorted(duplicates.tolist()) == extra, f"{part.name} duplicates {duplicates}, expected {extra}"
        ledger = self.ledger(("device", part))
        mine = ledger.request_owner(req.rid)
        assert (ledger.owner_P[duplicates] == mine).all(), "a duplicate was freed before the row was rewritten"

    def published(self, whole: list[Prefix], full: list[Prefix], swa: list[Prefix], before: Snapshot, req: Req) -> None:
        """Publication brings exactly the new prefixes to the device, and changes nothing else."""
        change = self.changed()
        change.only(("gained", DEVICE_FULL), ("gained", DEVICE_SWA))
        for pool, given in ((DEVICE_FULL, full), (DEVICE_SWA, swa)):
            new = {p for p in given if p not in before.where[pool]}
            came = change.gained[pool].keys()
            assert came == new, f"published to {pool}: {words(came - new)} too much, {words(new - came)} missing"
        self.order.touch(whole, priority=req.priority)

    def advance(self, req: Req) -> None:
        """Let go of what the window left behind: pins of the lease, and own pages that were never published."""
        if self.shape.window is None or req.computed < req.swa_first * self.size:
            return
        first = self.cache.swa_first_page(req.computed)
        assert first == self.shape.swa_first(req.computed), f"swa_first_page is {first} at {req.computed}"
        own = req.swa[max(0, req.lease.end // self.size - req.swa_first) : max(0, first - req.swa_first)]
        self.cache.advance(req.rid, req.lease, req.computed, own)
        assert (self.ledger(DEVICE_SWA).owner_P[own] == 0).all(), "own SWA pages behind the window were not freed"
        req.swa = req.swa[max(0, first - req.swa_first) :]
        req.swa_first = max(first, req.swa_first)
        self.changed().only()

    def decode(self, which: int, token: int, *, advance: bool = True) -> None:
        """Append a token to a request whose known tokens are computed, and compute it."""
        req = self.running[which % len(self.running)]
        if req.computed < len(req.tokens):
            if req.computed >= req.prompt_len:
                self.forward(req, len(req.tokens) - req.computed)
            return
        if req.computed == len(req.row) * self.size:
            given = self.allocate(req.rid, 1, 0)
            if given is None:
                self.leave(req, retract=True)
                return
            req.row = np.concatenate((req.row, given.full))
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
        self.cache.finish(
            req.rid, req.lease, np.array(tokens, np.int32), self.room.PartPages(full=req.row, swa=req.swa),
            req.swa_first, park=park,
        )  # fmt: skip
        self.running.remove(req)
        path = prefixes(req.namespace, tokens, self.size)
        low = start // self.size
        if failed:
            self.changed().only()
        else:
            self.published(path, path[low:], path[max(low, req.swa_first) :] if self.shape.window else [], before, req)
        for part in self.shape.parts:
            left = self.ledger(("device", part)).pages_of_request(req.rid)
            assert not left, f"O3 {req.rid} is over and owns {left} pages of {part.name}"
        if retract:
            again = Req(rid=req.rid, namespace=req.namespace, tokens=req.tokens, prompt_len=len(req.tokens),
                        priority=req.priority, lazy=req.lazy)  # fmt: skip
            self.waiting.append(again)
