"""KV that cannot be trusted: nodes leave the tree at once, pages only when nobody reads them any more.

Two causes: a load that failed (its pages are fine to use again once they are free), and pages whose bytes somebody
found wrong (they stay QUARANTINED until pardoned). Whatever was computed behind wrong KV is as wrong.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from serinus.cache.ledger import FREE_OWNER, STATE_BITS, STATE_MASK, Owner, Pages, PageState
from serinus.cache.node import NO_PAGES, Lease, Node, Tier
from serinus.cache.shelves import Shelf, Shelves
from serinus.core.parts import Part

__all__ = ["Condemned", "Quarantine"]


@dataclass(frozen=True, slots=True)
class Condemned:
    """What a node that left the tree had on one shelf; rows may still name these pages."""

    node: Node
    shelf: Shelf
    pages: Pages

    @property
    def owner(self) -> Owner:
        """Whose its pages are meanwhile."""
        return self.node.id << STATE_BITS | PageState.QUARANTINED

    @property
    def needed(self) -> bool:
        """Whether a copy is at it, or a lease reads it: of the window's pages those in a window, on the host none."""
        if self.node.busy or self.shelf.tier is Tier.HOST:
            return self.node.busy > 0
        return (self.node.swa_pins if self.shelf.part is Part.SWA else self.node.pins) > 0


class Quarantine:
    """Nodes that were cut off, and device pages that must not be handed out."""

    def __init__(self, shelves: Shelves) -> None:
        self._shelves = shelves
        self._tree = shelves.tree
        self._records: list[Condemned] = []
        self.cut_off: list[Node] = []
        """Topmost nodes that left the tree while leases stand on them."""
        self.failed: list[Lease] = []
        """Leases whose KV never came, since the last time somebody asked."""
        self.banned: dict[Part, set[int]] = {shelf.part: set() for shelf in shelves if shelf.tier is Tier.DEVICE}
        """Device pages with wrong bytes: owned ones are not published, freed ones stay here until pardoned."""
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
            for shelf in self._shelves:
                record = Condemned(node, shelf, self._shelves.unlink(shelf, node))
                if len(record.pages):
                    owner = int(shelf.ledger.owner_P[record.pages[0]])
                    shelf.ledger.move(record.pages, owner, record.owner, "condemn")
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
            if record.needed:
                kept.append(record)
            else:
                pages = record.pages
                if record.shelf.tier is Tier.DEVICE:
                    pages = pages[~self._is_banned(record.shelf.part, pages)]
                record.shelf.ledger.move(pages, record.owner, FREE_OWNER, "free condemned")
        self._records = kept
        self.cut_off = [top for top in self.cut_off if top.pins]

    # Pages with wrong bytes

    def condemn(self, part: Part, pages: Pages, loading: Iterable[Node]) -> int:
        """These device pages hold wrong KV; returns the tokens that are not found any more for it.

        loading: nodes that a copy fills, whose pages the ledger does not know by node.
        """
        shelf = self._shelves.all[Tier.DEVICE, part]
        states = shelf.ledger.owner_P[pages] & STATE_MASK
        bad = pages[(states != PageState.FREE) & (states != PageState.PADDING)]
        self.banned[part] |= set(bad.tolist())
        tokens = 0
        size = self._tree.page_size
        for node in sorted({*self._shelves.nodes_of(shelf, bad), *loading}, key=lambda node: node.start):
            hit = np.flatnonzero(np.isin(shelf.of(node), bad)) if node.alive else NO_PAGES
            if not len(hit):
                continue
            position = node.start + int(hit[0]) * size
            if position > node.start:
                self._shelves.split(node, position)
            for each in self.cut(node, tell=False):
                tokens += each.end - each.start
                self.keys |= self._shelves.keys.split(self._shelves.keys.of(each))
        self.release()
        return tokens

    def pardon(self, part: Part, pages: Pages) -> None:
        """These pages may be handed out again, once nobody owns them; others than condemned ones are left alone."""
        shelf = self._shelves.all[Tier.DEVICE, part]
        banned = self.banned[part]
        mine = [page for page in pages.tolist() if page in banned]
        banned -= set(mine)
        pending = {page for record in self._records if record.shelf is shelf for page in record.pages.tolist()}
        for page in mine:
            owner = int(shelf.ledger.owner_P[page])
            if owner & STATE_MASK == PageState.QUARANTINED and page not in pending:
                shelf.ledger.move(np.array([page], np.int32), owner, FREE_OWNER, "pardon")

    def pardon_all(self) -> int:
        """All condemned pages may be handed out again, once nobody owns them; how many there were."""
        count = sum(map(len, self.banned.values()))
        for part, banned in self.banned.items():
            self.pardon(part, np.array(sorted(banned), np.int32))
        return count

    def sound_count(self, part: Part, pages: Pages) -> int:
        """How many of a request's own pages, from the first on, may be published."""
        if not self.banned[part]:
            return len(pages)
        bad = self._is_banned(part, pages)
        return int(bad.argmax()) if bad.any() else len(pages)

    def free_own(self, part: Part, pages: Pages, owner: Owner, verb: str) -> None:
        """A request gives up pages of its own: free, or quarantined if their bytes were found wrong."""
        ledger = self._shelves.all[Tier.DEVICE, part].ledger
        if self.banned[part]:
            bad = self._is_banned(part, pages)
            ledger.move(pages[bad], owner, PageState.QUARANTINED, verb)
            pages = pages[~bad]
        ledger.move(pages, owner, FREE_OWNER, verb)

    def _is_banned(self, part: Part, pages: Pages) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        banned = self.banned[part]
        return np.array([page in banned for page in pages.tolist()], np.bool_) if banned else np.zeros(len(pages), bool)
