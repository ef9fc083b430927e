"""KV that cannot be trusted: nodes leave the tree at once, pages only when nothing reads them any more.

Two causes: a load that failed (its pages are fine to use again once they are free), and pages whose bytes were found
wrong (they stay QUARANTINED until released). All that was computed behind wrong KV is as wrong.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from serinus.cache.ledger import FREE_OWNER, STATE_BITS, STATE_MASK, Owner, Pages, PageState
from serinus.cache.node import NO_PAGES, Lease, Node, Tier
from serinus.cache.page_pools import PagePool, PagePools
from serinus.core.parts import Part

__all__ = ["CutOff", "PageQuarantine"]


@dataclass(frozen=True, slots=True)
class CutOff:
    """What a node that left the tree had on one pool; rows may still name these pages."""

    node: Node
    pool: PagePool
    pages: Pages

    @property
    def owner(self) -> Owner:
        """The owner of its pages meanwhile."""
        return self.node.id << STATE_BITS | PageState.QUARANTINED


class PageQuarantine:
    """Nodes that were cut off, and device pages that must not be handed out."""

    def __init__(self, pools: PagePools) -> None:
        self._pools = pools
        self._tree = pools.tree
        self._records: list[CutOff] = []
        self.cut_off: list[Node] = []
        """Topmost nodes that left the tree while leases stand on them."""
        self.failed: list[Lease] = []
        """Leases whose KV never came, since they were last taken."""
        self.banned: dict[Part, set[int]] = {pool.part: set() for pool in pools.device.values()}
        """Device pages with wrong bytes: owned ones are not published, freed ones stay here until released."""
        self.keys: set[bytes] = set()
        """Keys of pages that may have been stored wrong: never read again by this engine."""

    def cut(self, top: Node, *, tell: bool) -> list[Node]:
        """Nothing at or below `top` is found any more. Leases there are unsound; `tell`: they are also reported."""
        self._mark_users(top, tell=tell)
        pending, below = [top], []
        while pending:
            node = pending.pop()
            below.append(node)
            pending.extend(node.children.values())
        for node in reversed(below):
            for pool in self._pools:
                record = CutOff(node, pool, self._pools.unlink(pool, node))
                if len(record.pages):
                    owner = int(pool.ledger.owner_P[record.pages[0]])
                    pool.ledger.move(record.pages, owner, record.owner, "quarantine")
                    self._records.append(record)
            node.loading = 0
        self._tree.cut_off(top, below)
        self.cut_off.append(top)
        return below

    def _mark_users(self, top: Node, *, tell: bool) -> None:
        for lease in self._tree.leases:
            node: Node | None = lease.anchor
            while node is not None and node is not top:
                node = node.parent
            if node is top:
                if lease.sound_end is None:
                    lease.sound_end = top.start
                    if tell:
                        self.failed.append(lease)
                lease.sound_end = min(lease.sound_end, top.start)

    def release(self) -> None:
        """Free the pages of nodes that were cut off as soon as no lease and no copy needs them."""
        if not self._records and not self.cut_off:
            return
        kept = []
        for record in self._records:
            if self._is_needed(record):
                kept.append(record)
            else:
                pages = record.pages
                if record.pool.tier is Tier.DEVICE:
                    pages = pages[~self._is_banned(record.pool.part, pages)]
                record.pool.ledger.move(pages, record.owner, FREE_OWNER, "free quarantined")
        self._records = kept
        self.cut_off = [top for top in self.cut_off if top.pins]

    def _is_needed(self, record: CutOff) -> bool:
        """Whether a copy is at it, or a lease reads it: in a part with a window only from there, on the host never."""
        node, pool = record.node, record.pool
        return node.busy > 0 or (pool.tier is Tier.DEVICE and self._tree.pins_of(node, pool.part) > 0)

    # Pages with wrong bytes

    def add(self, part: Part, pages: Pages, loading: Iterable[Node]) -> int:
        """These device pages hold wrong KV; returns the tokens that are not found any more for it.

        loading: nodes that a copy fills; the ledger lists their pages under the copy.
        """
        pool = self._pools.device[part]
        states = pool.ledger.owner_P[pages] & STATE_MASK
        bad = pages[(states != PageState.FREE) & (states != PageState.PADDING)]
        self.banned[part] |= set(bad.tolist())
        tokens = 0
        size = self._tree.page_size
        for node in sorted({*self._pools.nodes_of(pool, bad), *loading}, key=lambda node: node.start):
            hit = np.flatnonzero(np.isin(pool.of(node), bad)) if node.alive else NO_PAGES
            if not len(hit):
                continue
            position = node.start + int(hit[0]) * size
            if position > node.start:
                self._pools.split(node, position)
            for each in self.cut(node, tell=False):
                tokens += each.end - each.start
                self.keys |= self._pools.keys.split(self._pools.keys.of(each))
        self.release()
        return tokens

    def release_quarantined(self, part: Part, pages: Pages) -> None:
        """These pages may be handed out again, once nothing owns them; other pages are left alone."""
        pool = self._pools.device[part]
        banned = self.banned[part]
        mine = [page for page in pages.tolist() if page in banned]
        banned -= set(mine)
        pending = {page for record in self._records if record.pool is pool for page in record.pages.tolist()}
        for page in mine:
            owner = int(pool.ledger.owner_P[page])
            if owner & STATE_MASK == PageState.QUARANTINED and page not in pending:
                pool.ledger.move(np.array([page], np.int32), owner, FREE_OWNER, "release_quarantined")

    def release_all_quarantined(self) -> int:
        """All quarantined pages may be handed out again, once nothing owns them; how many there were."""
        count = sum(map(len, self.banned.values()))
        for part, banned in self.banned.items():
            self.release_quarantined(part, np.array(sorted(banned), np.int32))
        return count

    def sound_count(self, part: Part, pages: Pages) -> int:
        """How many of a request's own pages, from the first on, may be published."""
        if not self.banned[part]:
            return len(pages)
        bad = self._is_banned(part, pages)
        return int(bad.argmax()) if bad.any() else len(pages)

    def free_own(self, part: Part, pages: Pages, owner: Owner, verb: str) -> None:
        """A request gives up pages of its own: free, or quarantined if their bytes were found wrong."""
        ledger = self._pools.device[part].ledger
        if self.banned[part]:
            bad = self._is_banned(part, pages)
            ledger.move(pages[bad], owner, PageState.QUARANTINED, verb)
            pages = pages[~bad]
        ledger.move(pages, owner, FREE_OWNER, verb)

    def _is_banned(self, part: Part, pages: Pages) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        banned = self.banned[part]
        return np.array([page in banned for page in pages.tolist()], np.bool_) if banned else np.zeros(len(pages), bool)
