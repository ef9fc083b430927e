"""Room on the device: what can be handed out to requests, and evicting until it can.

Decides for all parts alike; which node goes first is eviction.py's, how it goes backup.py's (with a host tier) or the
tree's (without).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from serinus.cache.ledger import STATE_MASK, Pages, PageState
from serinus.cache.node import NO_PAGES
from serinus.cache.page_pools import PagePool, PagePools
from serinus.cache.tiers import TierController
from serinus.core.clock import Clock
from serinus.core.parts import Part
from serinus.core.times import TimeCounts


class DeviceRoom:
    """Device pages of all parts: counts, allocation, eviction, holds."""

    def __init__(self, pools: PagePools, tiers: TierController, clock: Clock | None) -> None:
        self._pools = pools
        self._tree = pools.tree
        self._tiers = tiers
        self._clock = clock
        self._device = tuple(pools.device.values())
        self._ledgers = tuple([pool.ledger for pool in self._device])
        self._whole_first = sorted(self._device, key=lambda pool: pool.part in self._tree.windowed)
        """Evicting a leaf for a part that covers whole prefixes frees what it has of the other parts too."""
        self._evicted_pages = 0
        self.eviction_times = TimeCounts()
        """Of evictions, waiting for write-backs included; none without a clock."""

    @property
    def evicted_pages(self) -> int:
        """Counter: FULL pages that eviction took from the device."""
        return self._evicted_pages + self._tiers.backups.evicted_pages

    def free(self, part: int) -> int:
        """Pages that can be handed out without evicting; 0 for a part that is not there."""
        pool = self._pools.device.get(part)
        return 0 if pool is None else pool.ledger.free_pages

    def available(self, part: int) -> int:
        """free + evictable; 0 for a part that is not there."""
        pool = self._pools.device.get(part)
        return 0 if pool is None else pool.ledger.free_pages + self._tree.evictable[part]

    def make(self, counts: Sequence[int]) -> bool:
        """Evict until that many pages of each part are free (parts without a count need none). False: there is no room,
        and nothing changed, or a load failed while eviction waited for it."""
        if self._has_free(counts):
            return True
        wanted = dict(zip(self._pools.device, counts, strict=False))
        if any(count > self.available(part) for part, count in wanted.items()):
            return False
        for pool in self._whole_first:
            self.evict(pool, wanted.get(pool.part, 0) - pool.ledger.free_pages)
        return self._has_free(counts)

    def _has_free(self, counts: Sequence[int]) -> bool:
        for count, ledger in zip(counts, self._ledgers, strict=False):  # noqa: SIM110 (a generator costs twice that)
            if count > ledger.free_pages:
                return False
        return True

    def allocate(self, rids: Sequence[str], counts: Sequence[Sequence[int]]) -> tuple[Pages, ...] | None:
        """Pages of each part for requests, evicting as needed; None, with nothing given, where there is no room.
        counts: part by part, those of each request."""
        if not self.make([sum(each) for each in counts]):
            return None
        given = [NO_PAGES] * len(self._ledgers)
        for at, (each, ledger) in enumerate(zip(counts, self._ledgers, strict=False)):
            owners = [(ledger.request_owner(rid), count) for rid, count in zip(rids, each, strict=True) if count > 0]
            if owners:
                given[at] = ledger.take_each(owners, "allocate")
        return tuple(given)

    def evict(self, pool: PagePool, enough: int) -> int:
        """Evict until `enough` more pages of a device pool are free, or nothing more may go; how many became free."""
        if enough <= 0:
            return 0
        began = self._clock.now() if self._clock is not None else 0.0
        if self._pools.host or pool.part in self._tree.windowed:
            freed = self._tiers.backups.evict(pool, enough)
        else:
            victims = self._tree.evict(enough, pool.part)
            self._pools.apply(victims)
            self._evicted_pages += victims.pages
            freed = victims.freed
        if self._clock is not None:
            self.eviction_times.observe(self._clock.now() - began)
        return freed

    # Holds

    def hold(self, name: str, pages: Pages, part: Part) -> None:
        """Hold device pages; see PrefixCache.hold."""
        self._recount(part, self._pools.device[part].ledger.hold(name, pages))

    def unhold(self, name: str, pages: Pages, part: Part) -> None:
        """Drop one hold of each; see PrefixCache.unhold."""
        self._recount(part, self._pools.device[part].ledger.unhold(name, pages))

    def _recount(self, part: Part, pages: Pages) -> None:
        """The holds of these pages began or ended: nodes that list them count again."""
        if len(pages):
            pool = self._pools.device[part]
            loading = bool(np.any((pool.ledger.owner_P[pages] & STATE_MASK) == PageState.COPY))
            for node in (*self._pools.nodes_of(pool, pages), *(self._tiers.table.nodes() if loading else ())):
                self._pools.recount(node)
