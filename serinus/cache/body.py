"""What a cache is made of, and what can be asked of it without changing it. The operations are in prefix.py."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from serinus.cache.coverage import cover
from serinus.cache.events import EventLog, KvEvent
from serinus.cache.keys import PageKeys
from serinus.cache.ledger import STATE_MASK, PageLedger, Pages, PageState
from serinus.cache.matching import Matcher
from serinus.cache.node import Lease, Tier
from serinus.cache.policy import WRITE_POLICIES, check_settings
from serinus.cache.ports import PageMover, PageStorage
from serinus.cache.publish import Publisher, token_bytes
from serinus.cache.results import (
    CacheGeometry,
    CacheStats,
    Insertion,
    Probe,
    ResidentSlots,
    RowView,
    TreeView,
)
from serinus.cache.sanity import SanityChecks
from serinus.cache.shelves import Shelves
from serinus.cache.tiers import TierController
from serinus.cache.tree import RadixTree
from serinus.cache.view import CacheCounters, cache_stats, tree_view
from serinus.cache.window import Windows
from serinus.core.clock import Clock
from serinus.core.errors import InvariantError
from serinus.core.moves import MoveKind
from serinus.core.parts import Part

__all__ = ["CacheBody", "words_of"]


class CacheBody:
    """One tree, its shelves and tiers, and their gauges, checks and views."""

    def __init__(
        self,
        geometry: CacheGeometry,
        *,
        enable_prefix: bool = True,
        policy: str = "lru",
        write_policy: str = "write_through",
        mover: PageMover | None = None,
        storage: PageStorage | None = None,
        namespace: str = "",
        kv_events: bool = False,
        clock: Clock | None = None,
    ) -> None:
        check_settings(geometry, policy, write_policy, mover, storage)
        self.geometry = geometry
        self.page_size = geometry.page_size
        self.page_count = geometry.full_pages
        self.enable_prefix = enable_prefix
        self.policy = policy
        self.write_policy = write_policy
        self.tree = RadixTree(geometry.page_size, policy)
        keys = PageKeys(namespace, geometry.page_size)
        self.events = EventLog(keys, geometry.page_size) if kv_events else None
        self.shelves = Shelves(geometry, self.tree, keys, self.events)
        self.ledger = self.shelves.device.ledger
        self.ledgers: Mapping[tuple[Tier, Part], PageLedger] = {
            pool: shelf.ledger for pool, shelf in self.shelves.all.items()
        }
        self._windows = Windows(self.shelves, geometry.window)
        self.tiers = TierController(
            self.shelves, WRITE_POLICIES[write_policy], self._windows, geometry.window, mover, storage
        )
        self._matcher = Matcher(self.shelves, self.tiers, self._windows, geometry.window)
        self._publisher = Publisher(self.shelves, self.tiers, self._windows)
        self._checks = SanityChecks(self.tree, self.shelves, self.tiers)
        self._tiered = mover is not None
        self._window = geometry.window
        self._clock = clock
        self._pending: Insertion | None = None
        self._counters = CacheCounters()

    # Counts

    @property
    def free_pages(self) -> int:
        """Device FULL pages that can be handed out without evicting."""
        return self.ledger.free_pages

    @property
    def evictable_pages(self) -> int:
        """Cached device FULL pages that eviction can make free now."""
        return self.tree.evictable_pages

    @property
    def available_pages(self) -> int:
        """free + evictable."""
        return self.ledger.free_pages + self.tree.evictable_pages

    @property
    def used_pages(self) -> int:
        """Device FULL pages that `allocate` cannot give now: of requests, pinned, held, in copies, or quarantined."""
        return self.page_count - 1 - self.available_pages

    @property
    def cached_pages(self) -> int:
        """Device FULL pages in the tree."""
        return self.tree.cached_pages

    def free(self, part: Part = Part.FULL) -> int:
        """Device pages of a part that can be handed out without evicting; 0 for a part that is not there."""
        ledger = self.ledgers.get((Tier.DEVICE, part))
        return 0 if ledger is None else ledger.free_pages

    def evictable(self, part: Part = Part.FULL) -> int:
        """Cached device pages of a part that eviction can make free now."""
        return self.tree.evictable_pages if part is Part.FULL else self.tree.evictable_swa

    def available(self, part: Part = Part.FULL) -> int:
        """free + evictable: `allocate` succeeds exactly up to here, in each part."""
        return self.free(part) + self.evictable(part)

    def swa_first_page(self, position: int) -> int:
        """Index of the first page whose SWA computing `position` reads; without that part, the page of `position`."""
        return self._windows.start(position) // self.page_size

    @property
    def swa_pin_pages_max(self) -> int:
        """So many SWA pages a lease keeps at most once it was advanced; 0 without that part."""
        return self._windows.pin_pages_max

    # Questions

    def probe(self, ns: str, tokens: NDArray[np.int32]) -> Probe:
        """Length of the cached prefix of `tokens`, page aligned. Changes nothing, pins nothing."""
        root = self.tree.roots.get(ns)
        if root is None or not self.enable_prefix:
            return Probe(device=0, total=0)
        whole = len(tokens) - len(tokens) % self.page_size
        found = self.tree.descend(root, token_bytes(tokens[:whole]), 0)
        if self.shelves.plain:
            return Probe(device=found.end, total=found.end)
        usable = cover(found, self._window)
        return Probe(device=usable.device, total=usable.total)

    def loads_over(self, lease: Lease, tokens: NDArray[np.int32]) -> frozenset[int]:
        """Loads under way that fill pages which `tokens`, from the end of the lease on, would find in the tree: whoever
        publishes them takes those pages for its own, and nobody knows yet whether their KV comes. Changes nothing."""
        if not len(self.tiers.table) or not self.enable_prefix or lease.sound_end is not None:
            return frozenset()
        whole = len(tokens) - len(tokens) % self.page_size
        found = self.tree.descend(lease.anchor, token_bytes(tokens[:whole]), lease.end)
        filled = [node for node in (*found.path, found.partial) if node is not None and node.loading]
        copies = map(self.tiers.table.get, self.tiers.table.over(filled) if filled else ())
        return frozenset(copy.op for copy in copies if copy.kind is MoveKind.LOAD)

    def busy(self) -> str:
        """What keeps the cache from being reset, in words; empty when it is idle."""
        return self._checks.busy()

    def walk(
        self,
        cursor: int,
        budget: int,
        *,
        tier: Tier = Tier.DEVICE,
        part: Part = Part.FULL,
        unlocked_only: bool = False,
    ) -> ResidentSlots:
        """The cached slots of the next pages in page order, about `budget` slots; start with 0, go on with `.cursor`.

        Safe across any change in between: a page that stays cached is seen once per sweep. `unlocked_only` leaves
        out pages that a lease pins. Pages that a copy still fills are not seen. No Python per token or page.
        """
        shelf = self.shelves.all[tier, part]
        arena = self.tree.arena if unlocked_only else None
        return shelf.sweep.walk(shelf.ledger, arena, cursor, budget, window=part is Part.SWA)

    def sanity_check(self, rows: Iterable[RowView] | None = None) -> None:
        """Check every invariant that holds between operations; with `rows` also those between rows and pages.

        `rows` are all running requests, or None to leave O3 and O5 out. Cost: O(pages + nodes): when idle and in tests.
        Raises InvariantError naming the invariant.
        """
        self._check_committed()
        self._checks.complete(rows)
        self._counters.sanity_checks += 1

    def sanity_step(self, budget: int) -> int:
        """Check the next `budget` nodes alone, going round for ever; returns how many. Cheap enough for production.

        Raises InvariantError naming the invariant. Cost: a few microseconds a node.
        """
        checked = self._checks.step(budget)
        self._counters.sanity_steps += checked
        return checked

    def host_pages(self, part: Part = Part.FULL) -> Pages:
        """Host pages of a part that are cached now. Cost: O(host pages)."""
        owner_P = self.ledgers[Tier.HOST, part].owner_P
        return np.flatnonzero((owner_P & STATE_MASK) == PageState.TREE).astype(np.int32)

    def stats(self) -> CacheStats:
        """Gauges and counters, for metrics and log lines. Cost: O(tiers and parts)."""
        return cache_stats(self.page_size, self.tree, self.shelves, self.tiers, self._counters)

    def take_events(self) -> list[KvEvent]:
        """What routers are told, since the last call; empty unless `kv_events`."""
        return [] if self.events is None else self.events.take()

    def tree_view(self, limit: int) -> TreeView:
        """What is cached where, `limit` nodes at most."""
        return tree_view(self.tree, limit)

    # Inside

    def _check_committed(self) -> None:
        if self._pending is not None:
            raise InvariantError(
                f"cache: {words_of(self._pending)} was dropped, expected commit_row before anything else"
            )


def words_of(insertion: Insertion) -> str:
    """An insertion in few words."""
    return f"insertion of {insertion.rid or 'nobody'} [{insertion.from_pos}, {insertion.end})"
