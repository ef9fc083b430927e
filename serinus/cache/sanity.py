"""Every invariant of the cache that can be seen between two operations; each raises with its name.

S structure, D data, O ownership, L leases, T tracking, C copies. Reads only, and recomputes from the nodes up whatever
the tree keeps incrementally. Complete when idle and in tests; node by node, round and round, in production.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Never

import numpy as np
from numpy.typing import NDArray

from serinus.cache.eviction import EvictionQueue
from serinus.cache.ledger import STATE_BITS, STATE_MASK, Pages, PageState, tree_owner
from serinus.cache.node import NO_PAGES, TOKEN_BYTES, Node, Tier
from serinus.cache.results import RowView
from serinus.cache.shelves import Shelf, Shelves
from serinus.cache.tiers import TierController
from serinus.cache.tree import RadixTree
from serinus.core.errors import InvariantError
from serinus.core.moves import MoveKind

__all__ = ["SanityChecks"]

CHILDREN_MAX = 256
"""Nodes with more children have their pins checked by the complete check alone."""


@dataclass(slots=True)
class _Claims:
    """What leases, plans and copies say that nodes should count, by identity of the node."""

    leases: Counter[int] = field(default_factory=Counter)
    swa_pins: Counter[int] = field(default_factory=Counter)
    busy: Counter[int] = field(default_factory=Counter)
    condemned_pins: Counter[int] = field(default_factory=Counter)
    """Pinned nodes that were cut off, by the parent they hung from."""


class SanityChecks:
    """Holds the tree against itself, the ledgers, the leases and the copies."""

    def __init__(self, tree: RadixTree, shelves: Shelves, tiers: TierController) -> None:
        self._tree = tree
        self._shelves = shelves
        self._tiers = tiers
        self._round: list[int] = []

    def busy(self) -> str:
        """What keeps the cache from being reset, in words."""
        ledgers = [shelf.ledger for shelf in self._shelves if shelf.tier is Tier.DEVICE]
        owned = sum(ledger.counts().request for ledger in ledgers)
        rids = dict.fromkeys(rid for ledger in ledgers for rid in ledger.request_ids)
        held = sum(ledger.held_count for ledger in ledgers)
        names = dict.fromkeys(name for ledger in ledgers for name in ledger.hold_names)
        waiting = 0 if self._tiers.prefetches is None else self._tiers.prefetches.active
        reasons = {
            f"{len(self._tree.leases)} leases": len(self._tree.leases),
            f"{owned} pages of requests {', '.join(list(rids)[:8])}": owned,
            f"{held} pages held by {', '.join(names)}": held,
            f"{waiting} prefetches": waiting,
        }
        return "; ".join(words for words, count in reasons.items() if count)

    def step(self, budget: int) -> int:
        """Check up to `budget` nodes by themselves; the next call goes on behind them."""
        checked = 0
        claims = self._condemned_claims()
        while checked < budget:
            if not self._round:
                self._round = list(self._tree.arena)
                if not self._round or checked:
                    break
            node = self._tree.arena.get(self._round.pop())
            if node is not None:
                self._check_alone(node)
                if len(node.children) <= CHILDREN_MAX:
                    self._check_pins(node, claims)
                checked += 1
        return checked

    def complete(self, rows: Iterable[RowView] | None) -> None:
        """Everything. Cost: O(pages + nodes)."""
        for shelf in self._shelves:
            shelf.ledger.check()
        claims = self._claims()
        seen: dict[int, Node] = {}
        for node in self._tree.nodes():
            self._check_pins(node, claims)
            self._check_claims(node, claims)
            if node.parent is None:
                self._check_root(node)
                continue
            if node.id in seen:
                _broken("S6", f"{node} is reached twice")
            seen[node.id] = node
            self._check_alone(node)
        arena = self._tree.arena
        if seen.keys() != arena.keys() or any(arena[i] is not node for i, node in seen.items()):
            _broken("S5", f"the arena has nodes {sorted(arena.keys() ^ seen.keys())[:16]} that the roots do not reach")
        self._check_totals(seen)
        for queue in self._tree.queues.all:
            _check_queue(queue, seen)
        self._check_leases()
        self._check_copies()
        if rows is not None:
            self._check_rows(rows)

    # Nodes

    def _check_root(self, root: Node) -> None:
        if self._tree.roots.get(root.key.decode()) is not root:
            _broken("S6", f"root {root.key!r} is not the root of its namespace")
        if root.start or root.end or len(root.tokens) or any(len(shelf.of(root)) for shelf in self._shelves):
            _broken("S1", f"root {root} has a span, expected none")
        if not root.children and not root.pins:
            _broken("S5", f"namespace {root.key!r} is empty and unpinned, expected it to be gone")

    def _check_alone(self, node: Node) -> None:
        """What can be said of a node and its parent without looking at others."""
        parent, size = node.parent, self._tree.page_size
        if not node.alive:
            _broken("L3", f"{node} is reachable and marked as gone")
        if parent is None or parent.children.get(node.key) is not node or node.start != parent.end:
            _broken("S1", f"{node} does not hang where its parent {parent} ends, under its first page")
        length = node.end - node.start
        if length <= 0 or length % size:
            _broken("S2", f"{node} has {length} tokens, expected whole pages of {size}")
        if bytes(node.tokens[: size * TOKEN_BYTES]) != node.key:
            _broken("S3", f"{node} is keyed by {node.key!r}, expected its first page")
        if len(node.tokens) != length * TOKEN_BYTES:
            _broken("S4", f"{node} has {len(node.tokens)} bytes of tokens, expected {length * TOKEN_BYTES}")
        if not len(node.pages) and not len(node.host):
            _broken("D2", f"{node} is on no tier")
        if len(node.pages) and parent.parent is not None and not len(parent.pages):
            _broken("D3", f"{node} is on the device below {parent}, which is not")
        if (len(node.swa) and not len(node.pages)) or (len(node.host_swa) and not len(node.host)):
            _broken("D4", f"{node} has SWA on a tier without FULL")
        for shelf in self._shelves:
            pages = shelf.of(node)
            if len(pages):
                if len(pages) * size != length:
                    _broken("D1", f"{node} has {len(pages)} {shelf.slot}, expected {length // size}")
                self._check_pages(shelf, node, parent, pages)
        self._check_held(node)

    def _check_pages(self, shelf: Shelf, node: Node, parent: Node, pages: Pages) -> None:
        owners = shelf.ledger.owner_P[pages]
        if shelf.tier is Tier.DEVICE and node.loading & 1 << shelf.part:
            wrong = (owners & STATE_MASK) != PageState.COPY
        else:
            wrong = owners != tree_owner(node.id)
        if wrong.any():
            page = int(pages[wrong.argmax()])
            words = shelf.ledger.describe(int(shelf.ledger.owner_P[page]))
            _broken("O2", f"{node} lists {shelf.slot} {page}, which is {words}; {shelf.ledger.history(page)}")
        positions = node.start + np.arange(len(pages)) * self._tree.page_size
        above = shelf.of(parent)
        previous = np.concatenate((above[-1:] if len(above) else np.zeros(1, np.int32), pages[:-1]))
        if (shelf.sweep.position_P[pages] != positions).any() or (shelf.sweep.previous_P[pages] != previous).any():
            _broken("D1", f"the sweep has other positions or predecessors for {shelf.slot} of {node} than the tree")

    def _check_held(self, node: Node) -> None:
        swa = self._shelves.swa
        held = int(np.count_nonzero(self._shelves.device.ledger.hold_P[node.pages]))
        swa_held = 0 if swa is None else int(np.count_nonzero(swa.ledger.hold_P[node.swa]))
        if (held, swa_held) != (node.held, node.swa_held):
            counted = f"{node.held} + {node.swa_held}"
            _broken("L4", f"{node} counts {counted} held pages, expected {held} + {swa_held}")

    def _check_pins(self, node: Node, claims: _Claims) -> None:
        pinned = sum(child.pins > 0 for child in node.children.values()) + claims.condemned_pins[id(node)]
        if node.pins != node.leases + pinned or node.leases < 0:
            _broken("L1", f"{node} has {node.pins} pins, expected {node.leases + pinned} ({node.leases} leases)")
        on_device = sum(len(child.pages) > 0 for child in node.children.values())
        if node.device_children != on_device:
            _broken("D3", f"{node} counts {node.device_children} children on the device, expected {on_device}")

    def _check_claims(self, node: Node, claims: _Claims) -> None:
        if node.leases != claims.leases[id(node)]:
            _broken("L1", f"{node} counts {node.leases} leases and plans, expected {claims.leases[id(node)]}")
        if node.swa_pins != claims.swa_pins[id(node)]:
            _broken("L2", f"{node} has {node.swa_pins} SWA pins, expected {claims.swa_pins[id(node)]}")
        if node.busy != claims.busy[id(node)]:
            _broken("C2", f"{node} counts {node.busy} copies and plans, expected {claims.busy[id(node)]}")

    def _condemned_claims(self) -> _Claims:
        claims = _Claims()
        for top in self._tiers.quarantine.cut_off:
            if top.parent is not None and top.pins:
                claims.condemned_pins[id(top.parent)] += 1
        return claims

    def _claims(self) -> _Claims:
        claims = self._condemned_claims()
        for lease in self._tree.leases:
            claims.leases[id(lease.anchor)] += 1
            node = lease.anchor
            while node.parent is not None and node.start >= lease.swa_from and self._shelves.swa is not None:
                claims.swa_pins[id(node)] += 1
                node = node.parent
            if lease.plan is not None:
                claims.leases[id(lease.plan.anchor)] += 1
                for node in lease.plan.nodes():
                    claims.swa_pins[id(node)] += 1
                    claims.busy[id(node)] += 1
        for copy in self._tiers.table.all():
            for node in copy.span.nodes():
                claims.busy[id(node)] += 1
        return claims

    # Totals, queues, leases

    def _check_totals(self, nodes: dict[int, Node]) -> None:
        tree = self._tree
        loose = [n for n in nodes.values() if not (n.busy or n.storing) and (len(n.pages) or not n.pins)]
        counted = {
            "pages": (tree.cached_pages, tree.evictable_pages),
            "swa": (tree.cached_swa, tree.evictable_swa),
            "host": (tree.cached_host, tree.evictable_host),
            "host_swa": (tree.cached_host_swa, tree.evictable_host_swa),
        }
        evictable = {
            "pages": sum(len(n.pages) - n.held for n in nodes.values() if not n.pins),
            "swa": sum(len(n.swa) - n.swa_held for n in nodes.values() if not n.swa_pins),
            "host": sum(len(n.host) for n in loose),
            "host_swa": sum(len(n.host_swa) for n in loose),
        }
        for shelf in self._shelves:
            cached = sum(len(shelf.of(node)) for node in nodes.values())
            filling = sum(
                len(shelf.of(node))
                for node in nodes.values()
                if shelf.tier is Tier.DEVICE and node.loading & 1 << shelf.part
            )
            listed = int(((shelf.ledger.owner_P & STATE_MASK) == PageState.TREE).sum())
            if not cached == counted[shelf.slot][0] == listed + filling:
                _broken(
                    "O2",
                    f"the tree counts {counted[shelf.slot][0]} {shelf.slot} and the ledger {listed} (and {filling}"
                    f" that copies fill), expected {cached}",
                )
            if evictable[shelf.slot] != counted[shelf.slot][1]:
                _broken("L4", f"{counted[shelf.slot][1]} {shelf.slot} are evictable, expected {evictable[shelf.slot]}")

    def _check_leases(self) -> None:
        for lease in self._tree.leases:
            if not lease.live:
                _broken("L5", f"{lease} is released and still counted")
            if lease.sound_end is not None:
                continue
            node = lease.anchor
            while node.parent is not None:
                if not node.alive or not len(node.pages):
                    _broken("L3", f"{lease} stands on {node}, which is gone or not on the device")
                if self._shelves.swa is not None and node.end > lease.swa_want and not len(node.swa):
                    _broken("L3", f"{lease} reads SWA from {lease.swa_want} on, and {node} has none")
                node = node.parent

    def _check_copies(self) -> None:
        under_way = {MoveKind.BACKUP: 0, MoveKind.LOAD: 0}
        filled: dict[tuple[Tier, int], set[int]] = {}
        for copy in self._tiers.table.all():
            under_way[copy.kind] += len(copy.full) + len(copy.swa)
            into, outof = (Tier.HOST, Tier.DEVICE) if copy.kind is MoveKind.BACKUP else (Tier.DEVICE, Tier.HOST)
            for move in copy.moves():
                target = self._shelves.all[into, move.part].ledger
                source = self._shelves.all[outof, move.part].ledger
                bad = (target.owner_P[move.target] != copy.owner) & (
                    (target.owner_P[move.target] & STATE_MASK) != PageState.QUARANTINED
                )
                if bad.any():
                    page = int(move.target[bad.argmax()])
                    _broken("C1", f"copy {copy.op} fills page {page}, which is not its own; {target.history(page)}")
                if ((source.owner_P[move.source] & STATE_MASK) == PageState.FREE).any():
                    _broken("C1", f"copy {copy.op} reads free pages among {move.source.tolist()[:16]}")
                others = filled.setdefault((into, move.part), set())
                if others & set(move.target.tolist()):
                    _broken("C1", f"copy {copy.op} fills pages of another copy: {others & set(move.target.tolist())}")
                others |= set(move.target.tolist())
        if under_way != self._tiers.table.pages:
            _broken("C3", f"{self._tiers.table.pages} pages are under way, expected {under_way}")
        self._check_orphans()

    def _check_orphans(self) -> None:
        """Every page in state COPY belongs to a copy or a prefetch that is there."""
        known = {copy.owner for copy in self._tiers.table.all()}
        if self._tiers.prefetches is not None:
            known |= self._tiers.prefetches.owners
        for shelf in self._shelves:
            owners = shelf.ledger.owner_P[(shelf.ledger.owner_P & STATE_MASK) == PageState.COPY]
            lost = set(np.unique(owners).tolist()) - known
            if lost:
                _broken("C2", f"{shelf.slot} belong to copies {[o >> STATE_BITS for o in lost]}, which are not there")

    # Rows

    def _check_rows(self, rows: Iterable[RowView]) -> None:
        """O3 and O5: a row is its lease's canonical pages, then the request's own pages, all of them, each once."""
        size = self._tree.page_size
        known = {rid for shelf in self._shelves for rid in shelf.ledger.request_ids}
        for row in rows:
            known.discard(row.rid)
            if not row.lease.live:
                _broken("L5", f"running request {row.rid} has {row.lease}")
            leased = row.lease.end // size
            self._check_tail(self._shelves.device, row.rid, row.pages[leased:])
            skip = max(0, leased - row.swa_first)
            if self._shelves.swa is not None:
                self._check_tail(self._shelves.swa, row.rid, row.swa_pages[skip:])
            if row.lease.sound_end is not None:
                continue
            canonical, window = self._lease_pages(row)
            if not np.array_equal(row.pages[:leased], canonical):
                got = row.pages[:leased].tolist()
                _broken("O5", f"row of {row.rid} begins with {got}, expected {canonical.tolist()}")
            want = max(row.swa_first, row.lease.swa_want // size)
            mine = row.swa_pages[want - row.swa_first : skip]
            if self._shelves.swa is not None and not np.array_equal(mine, window[want:leased]):
                got = mine.tolist()
                _broken("O5", f"SWA row of {row.rid} has {got} from page {want} on, expected {window[want:].tolist()}")
        for rid in known:
            for shelf in self._shelves:
                if shelf.ledger.pages_of_request(rid):
                    _broken("O3", f"request {rid} owns {shelf.slot} {_owned(shelf, rid).tolist()} and has no row")

    def _check_tail(self, shelf: Shelf, rid: str, pages: Pages) -> None:
        tail = np.sort(pages)
        owned = _owned(shelf, rid) if rid in shelf.ledger.request_ids else tail[:0]
        if not np.array_equal(tail, owned):
            _broken("O3", f"row of {rid} ends with {shelf.slot} {tail.tolist()}, and it owns {owned.tolist()}")

    def _lease_pages(self, row: RowView) -> tuple[Pages, Pages]:
        """Canonical FULL and SWA pages of a lease, by page index; -1 where there is no SWA."""
        path: list[Node] = []
        node: Node | None = row.lease.anchor
        while node is not None:
            if not node.alive:
                _broken("L3", f"{row.lease} of {row.rid} stands on {node}, which left the tree")
            path.append(node)
            node = node.parent
        full = np.concatenate([node.pages for node in path[::-1]])
        swa = [node.swa if len(node.swa) else np.full(len(node.pages), -1, np.int32) for node in path[::-1]]
        return full, np.concatenate(swa) if swa else NO_PAGES


def _owned(shelf: Shelf, rid: str) -> NDArray[np.intp]:
    return np.flatnonzero(shelf.ledger.owner_P == shelf.ledger.request_owner(rid))


def _check_queue(queue: EvictionQueue, nodes: dict[int, Node]) -> None:
    """T1 to T4: whoever may go has one entry, and it stands where the node's rank is, or before it."""
    entries: dict[int, Node] = {}
    for rank, node in queue:
        if not node.alive:
            continue
        if node.id in entries or not node.queued & queue.bit:
            _broken("T4", f"{node} has two entries in the {queue.name} queue, or one that it does not know of")
        if rank > queue.rank(node):
            _broken("T4", f"{node} is queued at {rank} ({queue.name}), expected {queue.rank(node)} or earlier")
        entries[node.id] = node
    for node in nodes.values():
        if queue.may_go(node) and node.id not in entries:
            _broken("T1" if queue.bit <= 2 else "T2", f"{node} may go, expected an entry in the {queue.name} queue")
        if node.queued & queue.bit and node.id not in entries:
            _broken("T4", f"{node} believes that it is in the {queue.name} queue")


def _broken(name: str, what: str) -> Never:
    raise InvariantError(f"cache: {name} {what}")
