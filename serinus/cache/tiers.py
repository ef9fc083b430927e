"""The tier controller: the only place where completions of copies and storage change state.

Joins host room, backups, loads and storage; decides in which order things end. Knows no requests but by their leases.
"""

from __future__ import annotations

from collections.abc import Collection

from serinus.cache.backup import Backups
from serinus.cache.copies import CopyTable
from serinus.cache.host import HostTier
from serinus.cache.loading import Loads
from serinus.cache.node import FULL, Lease, Span
from serinus.cache.page_pools import PagePools
from serinus.cache.policy import WritePolicy
from serinus.cache.ports import PageMover, PageStorage
from serinus.cache.prefetch import Prefetches, StorageWrites
from serinus.cache.quarantine import PageQuarantine
from serinus.cache.removals import StorageRemovals
from serinus.cache.results import CacheNews, Loaded
from serinus.cache.window import Windows
from serinus.core.errors import InvariantError
from serinus.core.moves import Move, MoveDone, MoveKind
from serinus.core.parts import Part
from serinus.core.times import TimeCounts

NO_NEWS = CacheNews()


class TierController:
    """Host and storage beside the device; with neither, it only evicts."""

    def __init__(
        self,
        pools: PagePools,
        policy: WritePolicy,
        windows: Windows,
        mover: PageMover | None,
        storage: PageStorage | None,
    ) -> None:
        self._pools = pools
        self._mover = mover
        self._storage = storage
        self.table = CopyTable(pools.tree)
        self.host = HostTier(pools)
        self.backups = Backups(pools, self.table, self.host, policy, self._submit, self.wait)
        self.quarantine = PageQuarantine(pools)
        self.loads = Loads(pools, self.table, self.quarantine, windows)
        self.prefetches: Prefetches | None = None
        self.writes: StorageWrites | None = None
        self.removals: StorageRemovals | None = None
        if storage is not None:
            self.prefetches = Prefetches(pools, self.table, self.host, storage, self.quarantine.keys)
            self.writes = StorageWrites(pools, self.table, storage)
            self.removals = StorageRemovals(self.table, storage, self.prefetches, self.quarantine.keys)
        self._early: list[MoveDone] = []
        """Completions that came while something else was waited for: they count at the next poll."""
        self._ended_loads: list[int] = []
        self.backup_tokens = 0
        self.backup_times = TimeCounts()
        self.loaded_tokens = 0
        self.load_times = TimeCounts()
        self.failed_copies = 0

    @property
    def in_flight(self) -> int:
        """Copies and storage operations that have not ended, or not begun."""
        storing = 0 if self.writes is None else self.writes.in_flight
        reading = 0 if self.prefetches is None else self.prefetches.in_flight
        removing = 0 if self.removals is None else self.removals.in_flight
        return len(self.table) + self.backups.queued + storing + reading + removing

    def poll(self, settle: Collection[int]) -> CacheNews:
        """Take the operations that ended, in the order of submission; then begin those that wait. Blocks until the
        copies `settle` have ended. Raises InvariantError for an answer to an operation that is not in flight."""
        if self._mover is None:
            return NO_NEWS
        done, self._early = [*self._early, *self._mover.poll()], []
        for each in done:
            self._end(each)
        open_ops = {copy.op for copy in self.table.all()}
        self.wait([op for op in settle if op in open_ops])
        if self._storage is not None:
            self._poll_storage(self._storage)
        self.backups.drain()
        if self.writes is not None:
            self.writes.drain()
        return self._news()

    def _poll_storage(self, storage: PageStorage) -> None:
        """What other engines removed is condemned here too, before anything is made of what was read; then what this
        one condemned is removed."""
        prefetches, writes, removals = self.prefetches, self.writes, self.removals
        assert prefetches, "cache: a storage that nothing reads"
        assert writes, "cache: a storage that nothing writes"
        assert removals, "cache: a storage from which nothing is removed"
        answers = storage.poll()
        recalled = removals.recalled()
        if recalled:
            self.quarantine.cut_keys(set(recalled))
        removals.drain()
        for answer in answers:
            if not any(owner.done(answer) for owner in (prefetches, writes, removals)):
                raise InvariantError(f"cache: C2 storage operation {answer.op} is done, expected one in flight")
        wrong, writes.wrong = writes.wrong, []
        for span, position in wrong:
            self._condemn_on_host(span, position)

    def _condemn_on_host(self, span: Span, position: int) -> None:
        """The copy that the host has of `span` is wrong from `position` on. What the device has too stays, and is
        copied again when it is used; what the host has alone is gone, with all that is below."""
        for node in reversed(span.nodes()):
            if not node.alive or node.end <= position or not len(node.host[FULL]):
                continue
            if node.start < position:
                self._pools.split(node, position)
            if len(node.device[FULL]) and not node.busy:
                self.host.give_up(node)
            else:
                self.quarantine.cut(node, tell=True)
        self.quarantine.release()

    def _news(self) -> CacheNews:
        failed = self.quarantine.failed
        prefetched: tuple[str, ...] = ()
        if self.prefetches is not None:
            prefetched, self.prefetches.ended = tuple(self.prefetches.ended), []
        news = CacheNews(
            failed_loads=tuple(lease for lease in failed if lease.live),
            ended_loads=tuple(self._ended_loads),
            prefetched=prefetched,
            in_flight=self.in_flight,
        )
        failed.clear()
        self._ended_loads.clear()
        return news

    def wait(self, ops: Collection[int]) -> None:
        """Block until these copies have ended, and complete exactly them: others keep their place in the order.

        Raises InvariantError where the mover returns and has not ended all of them."""
        pending = set(ops)
        if not pending:
            return
        assert self._mover is not None, "cache: copies without a mover"
        ended = [done for done in self._early if done.op in pending]
        self._early = [done for done in self._early if done.op not in pending]
        missing = pending - {done.op for done in ended}
        if missing:
            came = self._mover.wait(missing)
            ended += [done for done in came if done.op in missing]
            self._early += [done for done in came if done.op not in missing]
        for done in ended:
            pending.discard(done.op)
            self._end(done)
        if pending:
            raise InvariantError(f"cache: C2 copies {sorted(pending)} were waited for, and the mover did not end them")

    def wait_all(self) -> None:
        """Block until no copy is in flight."""
        self.wait([copy.op for copy in self.table.all()])

    def load(self, rid: str, lease: Lease) -> Loaded:
        """Carry out the lease's plan; there is room."""
        loaded, copy = self.loads.begin(rid, lease)
        if copy is not None:
            self._submit(copy.moves)
        return loaded

    def _submit(self, moves: list[Move]) -> None:
        assert self._mover is not None, "cache: copies without a mover"
        self._mover.submit(moves)

    def _end(self, done: MoveDone) -> None:
        """A copy has ended."""
        copy = self.table.get(done.op)
        tokens = copy.count(Part.FULL) * self._pools.tree.page_size
        self.failed_copies += not done.ok
        if copy.kind is MoveKind.LOAD:
            self.loads.end(copy, ok=done.ok)
            self._ended_loads.append(done.op)
            self.loaded_tokens += tokens if done.ok else 0
            self.load_times.observe(done.seconds)
            return
        saved = self.backups.end(copy, ok=done.ok)
        self.quarantine.release()
        self.backup_tokens += tokens if done.ok else 0
        self.backup_times.observe(done.seconds)
        if self.writes is not None:
            self.writes.saved(saved)
