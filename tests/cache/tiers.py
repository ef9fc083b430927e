"""The tiny engine with its other tiers: copies that end in any order and badly, storage, prefetch, crash, drain."""

from __future__ import annotations

from collections import Counter

from serinus.core.moves import MoveKind
from serinus.core.parts import Part
from serinus.testing.fake_mover import POISON
from tests.cache.base import DEVICE_LOSSES, HOST_GAINS, HOST_LOSSES, Req
from tests.cache.model import DEVICE_FULL, HOST_FULL, POOLS, Prefix, page_content, words
from tests.cache.world import World

STEPS_MAX = 400
COUNTERS = (
    "evicted_pages", "duplicate_pages", "hit_tokens", "demoted_pages", "backup_tokens", "loaded_tokens",
    "failed_copies", "dropped_tokens", "window_evicted_pages", "host_evicted_pages", "prefetched_tokens",
    "stored_tokens",
)  # fmt: skip
"""Counters of the cache that tell whether a driver reaches what it should."""


class TieredWorld(World):
    """Adds what happens between the tiers."""

    def boot(self) -> None:
        """See Base; the counters of the one before are kept."""
        super().boot()
        self.totals = getattr(self, "totals", Counter())
        self.archive = getattr(self, "archive", set())

    calm = False
    """No faults: copies do not fail, nothing is lost, the host is told to give up nothing."""
    steps = 0
    """How many rules ran."""
    totals: Counter[str]
    """Counters of the caches that were closed in this world."""
    archive: set[Prefix]
    """What the host had when a storage operation ended: worth asking the storage for."""
    host_low = 1 << 30
    """The fewest host pages that were free at any look: while they suffice for all, write_through lacks nothing."""

    # Copies

    def end_copy(self, which: int, *, ok: bool = True) -> None:
        """Some copy ends; the cache does not know yet."""
        op = list(self.mover.pending)[which % len(self.mover.pending)]
        if not ok:
            self.doom_copy(which)
        self.mover.finish(op)
        self.changed().only()

    def loads_pending(self) -> list[int]:
        """Which of the pending copies are loads."""
        return [at for at, copy in enumerate(self.mover.pending.values()) if copy.moves[0].kind is MoveKind.LOAD]

    def doom_copy(self, which: int) -> None:
        """Some copy will fail, whenever it ends."""
        self.failures += 1
        self.mover.fail(list(self.mover.pending)[which % len(self.mover.pending)])

    def poll(self) -> int:
        """The cache learns what ended; requests over a load that failed start again. Returns how much is in flight."""
        failed = {op: moves for op, moves in self.mover.failed_pages.items() if op not in self.mover.pending}
        news = self.cache.poll()
        change = self.changed()
        change.only(*HOST_GAINS, *HOST_LOSSES, *(DEVICE_LOSSES if failed else ()))
        told = [req for req in self.running if req.lease in news.failed_loads]
        assert failed or not news.failed_loads, f"{news.failed_loads} failed without a load that did"
        for op, moves in failed.items():
            gone = {
                (move.part, page) for move in moves for page in move.target.tolist() if self.is_bad(move.part, page, op)
            }
            for req in self.running:
                assert not self.leased(req) & gone or req in told, f"{req.rid} reads failed load {op}, and was not told"
            del self.mover.failed_pages[op]
        for req in told:
            assert req.lease.sound_end is not None, f"{req.lease} failed, and its KV is said to be good"
            assert req.lease.sound_end < req.lease.end, f"{req.lease} failed from {req.lease.sound_end} on"
            self.leave(req, retract=True, failed=True)
        lost = [req.rid for req in self.running if req.bad]
        assert not lost or self.mover.failed_pages, f"{lost} computed on a load that failed, and were not told"
        self.order.keep(self.seen.where[DEVICE_FULL])
        self.check_prefetched(news.prefetched)
        under_way = len(self.mover.pending) + (len(self.storage.pending) if self.storage else 0)
        assert news.in_flight >= under_way > 0 or not under_way, f"{news}, and {under_way} operations are under way"
        self.note_room()
        return int(news.in_flight)

    def is_bad(self, part: Part, page: int, op: int) -> bool:
        """Whether a device page still has what failed copy `op` left in it: others may have taken it since."""
        return bool((self.pool[part][page] == POISON | op).any())

    def leased(self, req: Req) -> set[tuple[Part, int]]:
        """The pages that a request has from the tree."""
        count = req.lease.end // self.size
        return {(part, page) for part, s in req.rows.items() for page in s.pages[: max(0, count - s.first)].tolist()}

    def check_prefetched(self, rids: tuple[str, ...]) -> None:
        """Each prefetch that is reported as ended is in a final state."""
        state = self.room.PrefetchState
        for rid in rids:
            now = self.cache.prefetch_state(rid)
            assert now in (state.GRAFT, state.CUT, state.MISS), f"{rid} is told to be over, in {now}"

    def note_room(self) -> None:
        """Remember how full the host was."""
        if self.shape.tiered:
            self.host_low = min(self.host_low, *(self.ledger(("host", part)).free_pages for part in self.shape.parts))

    def settle(self) -> None:
        """Everything under way ends well; then nothing may be under way, and write_through has copied all it should."""
        for _ in range(STEPS_MAX):
            for op in list(self.mover.pending):
                self.mover.finish(op)
            if self.storage is not None:
                for op in list(self.storage.pending):
                    self.storage.finish(op)
            if not self.poll() and self.quiet:
                break
        else:
            raise AssertionError(f"still busy after {STEPS_MAX} polls: {self.cache.busy()}, {self.mover.pending}")
        for pool in self.shape.pools:
            copies = self.ledger(pool).counts().copy
            assert not copies, f"C1 {copies} pages of {pool} are in copies, and there are none"
        self.check_written_through()
        self.check_all_stored()

    def check_written_through(self) -> None:
        """Under write_through, while the host never ran low, all that is published has its copy."""
        room = max(self.shape.pages(pool) for pool in self.shape.pools if pool[0] == "device")
        if self.shape.write_policy != "write_through" or not self.shape.tiered or self.failures:
            return
        if self.host_low < room:
            return
        for part in self.shape.parts:
            lacking = self.seen.where["device", part].keys() - self.seen.where["host", part].keys()
            assert not lacking, f"write_through: idle, no host copy of {words(lacking)} in {part.name}"

    def check_all_stored(self) -> None:
        """Where nothing failed, the storage has all that the host has."""
        if self.storage is None or self.failures:
            return
        stored = {(part, content.tobytes()) for (_, part), content in self.stored.items()}
        for part in self.shape.parts:
            copies = {
                page_content(self.engine, part, each, self.size).tobytes(): each
                for each in self.seen.where["host", part]
            }
            lacking = [prefix for content, prefix in copies.items() if (part, content) not in stored]
            assert not lacking, f"idle, and the storage has nothing of {words(lacking)} in {part.name}"

    # Storage

    def end_storage(self, which: int, good_max: int | None = None) -> None:
        """Some storage operation ends: whole, in part, or lost."""
        assert self.storage is not None
        pending = list(self.storage.pending)
        self.failures += good_max is not None
        self.archive |= self.seen.where[HOST_FULL].keys()
        self.storage.finish(pending[which % len(pending)], good_max)
        self.changed().only()

    def lose(self, which: int) -> None:
        """A stored page is gone."""
        assert self.storage is not None
        keys = sorted(self.stored)
        if keys:
            self.failures += 1
            self.storage.lose([keys[which % len(keys)]])

    def prefetching(self) -> bool:
        """Whether a waiting request has a prefetch that is not over."""
        return any(not self.cache.prefetch_state(req.rid).over for req in self.waiting)

    def prefetch(self, which: int) -> None:
        """A waiting request asks the storage for what it lacks."""
        req = self.waiting[which % len(self.waiting)]
        state = self.room.PrefetchState
        if self.cache.prefetch_state(req.rid) is state.NONE:
            asked = self.cache.prefetch(req.rid, req.namespace, req.ids)
            now = self.cache.prefetch_state(req.rid)
            assert now is (state.QUERY if asked else state.NONE), f"asked: {asked}, and the prefetch is in {now}"
        self.changed().only(*HOST_LOSSES)

    def cut(self, which: int) -> None:
        """The deadline of a prefetch: what has come is taken."""
        req = self.waiting[which % len(self.waiting)]
        state = self.room.PrefetchState
        if self.cache.prefetch_state(req.rid) is state.NONE:
            return
        tokens = self.cache.prefetch_cut(req.rid)
        change = self.changed()
        change.only(*HOST_GAINS)
        grafted = len(change.gained[HOST_FULL]) * self.size
        assert grafted <= max(tokens, 0), f"a cut grafted {grafted} tokens and tells of {tokens}"
        assert self.cache.prefetch_state(req.rid).over, f"cut, and in {self.cache.prefetch_state(req.rid)}"

    def abort_prefetch(self, which: int) -> None:
        """The prefetch is given up, the request waits on."""
        req = self.waiting[which % len(self.waiting)]
        self.cache.release_aborted_request(req.rid)
        assert self.cache.prefetch_state(req.rid) is self.room.PrefetchState.NONE, "an aborted prefetch lives on"
        self.changed().only()

    # Looking without staying

    def look(self, which: int, *, drop: bool) -> None:
        """A match that is given back at once, with or without its plan to load."""
        req = self.waiting[which % len(self.waiting)]
        match = self.cache.match_prefix(req.namespace, req.ids, len(req.tokens), priority=req.priority)
        path = self.path(req)
        assert match.length == self.seen.usable(self.shape, path), f"{match} of {words(path[-1:])}"
        self.order.touch(path[: match.length // self.size], priority=req.priority)
        if drop:
            self.cache.drop_load(match.lease)
            self.changed().only()
        self.cache.release(match.lease)
        self.order.touch(path[: match.length // self.size], priority=req.priority)
        self.changed().only()

    # Ends

    def crash(self, engine: str | None = None) -> None:
        """The process dies, whatever is under way; another starts over the same storage (of another dtype, even)."""
        for req in self.running:
            self.waiting.append(_again(req))
        self.running.clear()
        self.holds.clear()
        self.totals = self.counted()
        self.engine = self.engine if engine is None else engine
        self.host_low = 1 << 30
        self.boot()

    def counted(self) -> Counter[str]:
        """Counters over all caches of this world."""
        stats = self.cache.stats()
        return self.totals + Counter({name: getattr(stats, name) for name in COUNTERS})

    def drain(self) -> None:
        """End everything: tier by tier all comes back."""
        while self.running:
            self.end(0, retract=False)
        self.check()
        while self.waiting:
            self.give_up(0)
        while self.holds:
            self.unhold(0)
        self.settle()
        self.check()
        for pool in sorted(POOLS, key=lambda pool: (pool[0], -pool[1])):
            if pool in self.shape.pools:
                self.evict(self.shape.pages(pool), pool)
                self.settle()
                self.check()
        for pool in self.shape.pools:
            counts = self.ledger(pool).counts()
            assert counts.free == self.shape.pages(pool) - 1, f"lost pages of {pool}: {counts}"
            assert not self.ledger(pool).request_ids, f"requests are left in the ledger of {pool}"
        assert not self.cache.tree.arena, "nodes are left in an empty tree"
        assert not self.cache.tree.roots, "namespaces are left in an empty tree"
        assert not self.cache.busy(), f"an empty cache is busy: {self.cache.busy()}"


def _again(req: Req) -> Req:
    """The same request, from its start."""
    return Req(
        rid=req.rid, namespace=req.namespace, tokens=req.tokens, prompt_len=len(req.tokens), priority=req.priority,
        lazy=req.lazy,
    )  # fmt: skip
