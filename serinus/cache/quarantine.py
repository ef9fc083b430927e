"""KV that cannot be trusted: nodes leave the tree at once, pages only when nothing reads them any more.

Two causes: a load that failed (its pages are fine to use again once they are free), and pages whose KV was found wrong
(they stay QUARANTINED until released; the second time they are RETIRED). All that was computed behind wrong KV is as
wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Final

import numpy as np

from serinus.cache.kept_copies import CheckedCopies, HostCopies
from serinus.cache.keys import HASH_BYTES
from serinus.cache.ledger import FREE_OWNER, STATE_BITS, STATE_MASK, Owner, Pages, PageState
from serinus.cache.node import NO_PAGES, TOKEN_BYTES, Lease, Node, Tier
from serinus.cache.page_pools import PagePool, PagePools
from serinus.cache.results import Condemned
from serinus.core.parts import Part

FAILURES_MAX: Final = 2
"""So often a page may fail before it is retired."""
_RETIRED_SHARE = 16
"""One page in so many of a part is retired at most: faults that move are no page's own, and requests need room."""
_QUARANTINED_MIN: Final = 16
_QUARANTINED_SHARE: Final = 16
"""As many pages, or one in so many of the pool, are in quarantine at most: of more, the first are released."""
_CONDEMNED: Final = [PageState.REQUEST, PageState.TREE, PageState.COPY, PageState.QUARANTINED]
"""States in which a page has KV that something may read."""


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
        self.copies = HostCopies(pools)
        self._records: list[CutOff] = []
        self.cut_off: list[Node] = []
        """Topmost nodes that left the tree while leases stand on them."""
        self.failed: list[Lease] = []
        """Leases whose KV never came, since they were last taken."""
        self.banned: dict[Part, dict[int, None]] = {pool.part: {} for pool in pools.device.values()}
        """Device pages with wrong KV, the first found first: owned ones are not published, freed ones stay here until
        released."""
        self.failures: dict[tuple[Part, int], int] = {}
        """By part and device page, how often its KV was found wrong; a flush does not forget it."""
        self.worn = 0
        """Of these, how many failed FAILURES_MAX times or more."""
        self.retired: set[tuple[Part, int]] = set()
        """By part and device page, those that are never handed out again."""
        self.keys: set[bytes] = set()
        """Keys of pages that may have been stored wrong: not read before the storage has removed them (removals.py)."""

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

    def cut_keys(self, keys: Set[bytes]) -> int:
        """Pages of these keys are wrong, or were computed from wrong ones, wherever their KV lies: their nodes leave
        the tree with all that is below, and leases on them are reported. Of what is below, other engines may not have
        known when they removed these pages: it is removed from the storage too. Returns the tokens that are not found
        any more.

        Cost: a look at the keys of every node that has some.
        """
        size, tokens = self._tree.page_size, 0
        for node in list(self._tree.nodes()):
            if not node.alive or not node.hashes:
                continue
            hashes = node.hashes
            places = range(0, len(hashes), HASH_BYTES)
            bad = next((at for at in places if hashes[at : at + HASH_BYTES] in keys), None)
            if bad is None:
                continue
            if bad:
                self._pools.split(node, node.start + bad // HASH_BYTES * size)
            self.keys |= self.copies.unsound_keys(node, None) - keys
            tokens += sum(each.end - each.start for each in self.cut(node, tell=True))
        self.release()
        return tokens

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
        kept, idle = [], dict[Part, list[int]]()
        for record in self._records:
            if self._is_needed(record):
                kept.append(record)
                continue
            pages = record.pages
            if record.pool.tier is Tier.DEVICE:
                bad = self._is_banned(record.pool.part, pages)
                idle.setdefault(record.pool.part, []).extend(pages[bad].tolist())
                pages = pages[~bad]
            record.pool.ledger.move(pages, record.owner, FREE_OWNER, "free quarantined")
        self._records = kept
        self.cut_off = [top for top in self.cut_off if top.pins]
        for part, pages_ in idle.items():
            self._retire(part, pages_)

    def _is_needed(self, record: CutOff) -> bool:
        """Whether a copy is at it, or a lease reads it: in a part with a window only from there, on the host never."""
        node, pool = record.node, record.pool
        return node.busy > 0 or (pool.tier is Tier.DEVICE and self._tree.pins_of(node, pool.part) > 0)

    # Pages with wrong KV

    def condemn(
        self, part: Part, pages: Pages, loading: Iterable[Node], *, counts: bool, checked: CheckedCopies | None = None
    ) -> Condemned:
        """These device pages hold wrong KV: nothing of them is found any more, nor what was computed behind them.

        loading: nodes that a copy fills; the ledger lists their pages under the copy. counts: it is a failure of these
        pages, and the second one retires them. checked: what was found of the copies of all that on the host: sound
        ones stay, and of what the storage has nothing is removed but what continues a wrong one; None = nothing of it
        is trusted on any tier.
        """
        pool = self._pools.device[part]
        states = pool.ledger.owner_P[pages] & STATE_MASK
        bad = pages[np.isin(states, _CONDEMNED) & ~self._is_banned(part, pages)]
        if not len(bad):
            return Condemned(tokens=0, pages={})
        for page in bad.tolist():
            self.banned[part][page] = None
            failures = self.failures[part, page] = self.failures.get((part, page), 0) + counts
            self.worn += counts and failures == FAILURES_MAX
        below: list[Node] = []
        salt, prefix, kept = "", b"", 0
        gone: dict[Part, list[Pages]] = {part: [bad]}
        size = self._tree.page_size
        for node in sorted({*self._pools.nodes_of(pool, bad), *loading}, key=lambda node: node.start):
            hit = np.flatnonzero(np.isin(pool.of(node), bad)) if node.alive else NO_PAGES
            if not len(hit):
                continue
            position = node.start + int(hit[0]) * size
            if position > node.start:
                self._pools.split(node, position)
            if not below:
                salt, prefix = _prefix_of(node, size)
            copies = self.copies.take(node, checked)
            below += self._condemn_below(node, gone, checked)
            kept += self.copies.hang(copies)
        self.release()
        self._bound(part)
        return _condemned(below, gone, salt, prefix, kept)

    def condemn_prefix(self, salt: str, tokens: bytes, position: int, arrived_from: str) -> Condemned:
        """The KV of `tokens` (int32, from position 0 on) is wrong from `position` on, with all that was computed behind
        it, wherever it lies; the pages are free to use again.

        arrived_from: of what is wrong, only what came by a handoff from this engine, or is not on the device; empty =
        everything.
        """
        size = self._tree.page_size
        whole = len(tokens) // TOKEN_BYTES // size * size
        at = min(position // size * size, whole)
        root = self._tree.roots.get(salt)
        if root is None or not tokens:
            return Condemned(tokens=0, pages={})
        if at < whole:
            names = self._pools.keys
            self.keys.add(names.chain(names.seed(salt.encode()), tokens[: (at + size) * TOKEN_BYTES])[-HASH_BYTES:])
        found = self._tree.descend(root, tokens[: at * TOKEN_BYTES], 0)
        pending: list[Node] = []
        if found.end == at and found.partial is not None:
            pending = [self._pools.split(found.partial, at).lower]
        elif found.end == at:
            pending = list(found.node.children.values())
        if at < whole:
            key = tokens[at * TOKEN_BYTES : (at + size) * TOKEN_BYTES]
            pending = [node for node in pending if node.key == key]
        below: list[Node] = []
        gone: dict[Part, list[Pages]] = {}
        while pending:
            node = pending.pop()
            if self._may_come_from(node, arrived_from):
                below += self._condemn_below(node, gone)
            else:
                pending += node.children.values()
        self.release()
        return _condemned(below, gone, salt, tokens[: min(whole, at + size) * TOKEN_BYTES])

    def _may_come_from(self, node: Node, engine: str) -> bool:
        pool = self._pools.full
        traces = pool.ledger.traces_of(pool.of(node)) if engine and len(pool.of(node)) else []
        return not engine or not len(pool.of(node)) or any(each.arrived and each.engine == engine for each in traces)

    def _condemn_below(
        self, top: Node, gone: dict[Part, list[Pages]], checked: CheckedCopies | None = None
    ) -> list[Node]:
        """Cut `top` off for its wrong KV, and add the device pages of all that goes with it to `gone`."""
        self.keys |= self.copies.unsound_keys(top, checked)
        pending = [top]
        while pending:
            node = pending.pop()
            pending.extend(node.children.values())
            for pool in self._pools.device.values():
                gone.setdefault(pool.part, []).append(pool.of(node))
        return self.cut(top, tell=False)

    def _bound(self, part: Part) -> None:
        """Where quarantine has grown large, release what came first: a page that fails once may do well again."""
        ledger, banned = self._pools.device[part].ledger, self.banned[part]
        over = len(banned) - max(_QUARANTINED_MIN, ledger.page_count // _QUARANTINED_SHARE)
        if over > 0:
            self.release_quarantined(part, np.array(list(banned)[:over], np.int32), owned=False)

    def release_quarantined(self, part: Part, pages: Pages, *, owned: bool = True) -> None:
        """These pages may be handed out again, once nothing owns them (`owned` False: those that something owns stay as
        they are); other pages are left alone."""
        ledger, banned = self._pools.device[part].ledger, self.banned[part]
        for page in [page for page in pages.tolist() if page in banned]:
            idle = self._is_idle(part, page)
            if idle or owned:
                del banned[page]
            if idle:
                ledger.move(np.array([page], np.int32), int(ledger.owner_P[page]), FREE_OWNER, "release_quarantined")

    def release_all_quarantined(self) -> int:
        """All quarantined pages may be handed out again, once nothing owns them; how many there were."""
        count = sum(map(len, self.banned.values()))
        for part, banned in self.banned.items():
            self.release_quarantined(part, np.array(list(banned), np.int32))
        return count

    def _retire(self, part: Part, pages: Sequence[int]) -> None:
        """Those of these quarantined pages that failed too often are never handed out again."""
        ledger = self._pools.device[part].ledger
        for page in pages:
            if ledger.counts().retired >= ledger.page_count // _RETIRED_SHARE:
                return
            if self.failures.get((part, page), 0) >= FAILURES_MAX and self._is_idle(part, page):
                del self.banned[part][page]
                self.retired.add((part, page))
                owner = int(ledger.owner_P[page])
                ledger.move(np.array([page], np.int32), owner, int(PageState.RETIRED), "retire")

    def _is_idle(self, part: Part, page: int) -> bool:
        """Whether a banned page is in quarantine, and nothing reads it any more."""
        pool = self._pools.device[part]
        if int(pool.ledger.owner_P[page]) & STATE_MASK != PageState.QUARANTINED:
            return False
        return not any(record.pool is pool and page in record.pages for record in self._records)

    def sound_count(self, part: Part, pages: Pages) -> int:
        """How many of a request's own pages, from the first on, may be published."""
        if not self.banned[part]:
            return len(pages)
        bad = self._is_banned(part, pages)
        return int(bad.argmax()) if bad.any() else len(pages)

    def free_own(self, part: Part, pages: Pages, owner: Owner, verb: str) -> None:
        """A request gives up pages of its own: free, or quarantined if their KV was found wrong."""
        ledger = self._pools.device[part].ledger
        if self.banned[part]:
            bad = self._is_banned(part, pages)
            ledger.move(pages[bad], owner, PageState.QUARANTINED, verb)
            self._retire(part, pages[bad].tolist())
            pages = pages[~bad]
        ledger.move(pages, owner, FREE_OWNER, verb)

    def _is_banned(self, part: Part, pages: Pages) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        banned = self.banned[part]
        return np.array([page in banned for page in pages.tolist()], np.bool_) if banned else np.zeros(len(pages), bool)


def _condemned(below: list[Node], gone: dict[Part, list[Pages]], salt: str, prefix: bytes, kept: int = 0) -> Condemned:
    return Condemned(
        tokens=sum(node.end - node.start for node in below) - kept,
        pages={part: np.unique(np.concatenate(found)) for part, found in gone.items()},
        salt=salt,
        prefix=prefix,
        kept=kept,
    )


def _prefix_of(node: Node, size: int) -> tuple[str, bytes]:
    """The namespace of a node, and the tokens from position 0 through its first page."""
    pieces = [bytes(node.tokens[: size * TOKEN_BYTES])]
    above = node.parent
    while above is not None and above.parent is not None:
        pieces.append(bytes(above.tokens))
        above = above.parent
    return "" if above is None else above.key.decode(), b"".join(reversed(pieces))
