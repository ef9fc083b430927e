"""Every invariant of the cache that can be seen between two operations; each raises with its name.

S structure, D data, O ownership, L leases, T tracking, C copies. Reads only, and recomputes from the nodes up what the
tree keeps incrementally. Complete when idle and in tests; node by node, round and round, in production.
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
from serinus.cache.node import FULL, TOKEN_BYTES, Node, Tier
from serinus.cache.page_pools import PagePool, PagePools
from serinus.cache.results import RowView
from serinus.cache.tiers import TierController
from serinus.cache.tree import RadixTree
from serinus.core.errors import InvariantError
from serinus.core.moves import MoveKind
from serinus.core.parts import Part

CHILDREN_MAX = 256
"""Nodes with more children have their pins checked by the complete check alone."""


@dataclass(slots=True)
class _Claims:
    """What leases, plans and copies say that nodes should count, by identity of the node."""

    leases: Counter[int] = field(default_factory=Counter)
    window_pins: Counter[tuple[int, int]] = field(default_factory=Counter)
    """By identity of the node, and part."""
    busy: Counter[int] = field(default_factory=Counter)
    cut_off_pins: Counter[int] = field(default_factory=Counter)
    """Pinned nodes that were cut off, by the parent they hung from."""


class SanityChecks:
    """Holds the tree against itself, the ledgers, the leases and the copies."""

    def __init__(self, tree: RadixTree, pools: PagePools, tiers: TierController) -> None:
        self._tree = tree
        self._pools = pools
        self._tiers = tiers
        self._round: list[int] = []

    def busy(self) -> str:
        """What keeps the cache from being reset, in words."""
        ledgers = [pool.ledger for pool in self._pools if pool.tier is Tier.DEVICE]
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
        claims = self._cut_off_claims()
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
        for pool in self._pools:
            pool.ledger.check()
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
        if root.start or root.end or len(root.tokens) or any(len(pool.of(root)) for pool in self._pools):
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
        if not len(node.device[FULL]) and not len(node.host[FULL]):
            _broken("D2", f"{node} is on no tier")
        if len(node.device[FULL]) and parent.parent is not None and not len(parent.device[FULL]):
            _broken("D3", f"{node} is on the device below {parent}, which is not")
        for pages_of in (node.device, node.host):
            if not len(pages_of[FULL]) and any(map(len, pages_of)):
                _broken("D4", f"{node} has another part on a tier without FULL")
        for part in self._tree.whole:
            if len(node.device[part]) != len(node.device[FULL]):
                _broken("D4", f"{node} has FULL on the device without {Part(part).name}, which covers whole prefixes")
        for pool in self._pools:
            pages = pool.of(node)
            if len(pages):
                if len(pages) * size != length:
                    _broken("D1", f"{node} has {len(pages)} {pool}, expected {length // size}")
                self._check_pages(pool, node, parent, pages)
        self._check_held(node)

    def _check_pages(self, pool: PagePool, node: Node, parent: Node, pages: Pages) -> None:
        owners = pool.ledger.owner_P[pages]
        if pool.tier is Tier.DEVICE and node.loading & 1 << pool.part:
            wrong = (owners & STATE_MASK) != PageState.COPY
        else:
            wrong = owners != tree_owner(node.id)
        if np.count_nonzero(wrong):  # a fifth of the time of wrong.any()
            page = int(pages[wrong.argmax()])
            words = pool.ledger.describe(int(pool.ledger.owner_P[page]))
            _broken("O2", f"{node} lists page {page} of the {pool}, which is {words}; {pool.ledger.history(page)}")
        positions = np.arange(node.start, node.end, self._tree.page_size)
        above = pool.of(parent)
        previous = pool.sweep.previous_P[pages]
        if (
            np.count_nonzero(pool.sweep.position_P[pages] != positions)
            or np.count_nonzero(previous[1:] != pages[:-1])
            or previous[0] != (above[-1] if len(above) else 0)
        ):
            _broken("D1", f"the sweep has other positions or predecessors for {pool} of {node} than the tree")

    def _check_held(self, node: Node) -> None:
        for part, pool in self._pools.device.items():
            held = int(np.count_nonzero(pool.ledger.hold_P[node.device[part]]))
            if held != node.held[part]:
                _broken("L4", f"{node} counts {node.held[part]} held {pool}, expected {held}")

    def _check_pins(self, node: Node, claims: _Claims) -> None:
        pinned = sum(child.pins > 0 for child in node.children.values()) + claims.cut_off_pins[id(node)]
        if node.pins != node.leases + pinned or node.leases < 0:
            _broken("L1", f"{node} has {node.pins} pins, expected {node.leases + pinned} ({node.leases} leases)")
        on_device = sum(len(child.device[FULL]) > 0 for child in node.children.values())
        if node.device_children != on_device:
            _broken("D3", f"{node} counts {node.device_children} children on the device, expected {on_device}")

    def _check_claims(self, node: Node, claims: _Claims) -> None:
        if node.leases != claims.leases[id(node)]:
            _broken("L1", f"{node} counts {node.leases} leases and plans, expected {claims.leases[id(node)]}")
        for part in self._tree.windowed:
            pins, expected = node.window_pins[part], claims.window_pins[id(node), part]
            if pins != expected:
                _broken("L2", f"{node} has {pins} window pins of {Part(part).name}, expected {expected}")
        if node.busy != claims.busy[id(node)]:
            _broken("C2", f"{node} counts {node.busy} copies and plans, expected {claims.busy[id(node)]}")

    def _cut_off_claims(self) -> _Claims:
        claims = _Claims()
        for top in self._tiers.quarantine.cut_off:
            if top.parent is not None and top.pins:
                claims.cut_off_pins[id(top.parent)] += 1
        return claims

    def _claims(self) -> _Claims:
        claims = self._cut_off_claims()
        for lease in self._tree.leases:
            claims.leases[id(lease.anchor)] += 1
            for part, mine in zip(self._tree.windowed, lease.windows, strict=True):
                node = lease.anchor
                while node.parent is not None and node.start >= mine.first:
                    claims.window_pins[id(node), part] += 1
                    node = node.parent
            if lease.plan is not None:
                claims.leases[id(lease.plan.anchor)] += 1
                for node in lease.plan.nodes():
                    for part in self._tree.windowed:
                        claims.window_pins[id(node), part] += 1
                    claims.busy[id(node)] += 1
        for copy in self._tiers.table.all():
            for node in copy.span.nodes():
                claims.busy[id(node)] += 1
        return claims

    # Totals, queues, leases

    def _check_totals(self, nodes: dict[int, Node]) -> None:
        tree = self._tree
        for pool in self._pools:
            part, device = pool.part, pool.tier is Tier.DEVICE
            counted = tree.cached[part] if device else tree.cached_host[part]
            cached = sum(len(pool.of(node)) for node in nodes.values())
            filling = sum(len(pool.of(n)) for n in nodes.values() if device and n.loading & 1 << part)
            listed = np.count_nonzero((pool.ledger.owner_P & STATE_MASK) == PageState.TREE)
            if not cached == counted == listed + filling:
                _broken(
                    "O2",
                    f"the tree counts {counted} {pool} and the ledger {listed} (and {filling} that copies fill),"
                    f" expected {cached}",
                )
            evictable = tree.evictable[part] if device else tree.evictable_host[part]
            expected = sum(self._evictable(pool, node) for node in nodes.values())
            if evictable != expected:
                _broken("L4", f"{evictable} {pool} are evictable, expected {expected}")

    def _evictable(self, pool: PagePool, node: Node) -> int:
        """Pages of a node that evicting everything from its pool would make free."""
        part, pages = pool.part, len(pool.of(node))
        if pool.tier is Tier.HOST:
            loose = not (node.busy or node.storing) and (len(node.device[FULL]) or not node.pins)
            return pages if loose else 0
        return 0 if self._tree.pins_of(node, part) else pages - node.held[part]

    def _check_leases(self) -> None:
        for lease in self._tree.leases:
            if not lease.live:
                _broken("L5", f"{lease} is released and still counted")
            if lease.sound_end is not None:
                continue
            node = lease.anchor
            while node.parent is not None:
                if not node.alive or not len(node.device[FULL]):
                    _broken("L3", f"{lease} stands on {node}, which is gone or not on the device")
                for part, mine in zip(self._tree.windowed, lease.windows, strict=True):
                    if node.end > mine.want and not len(node.device[part]):
                        _broken("L3", f"{lease} reads {Part(part).name} from {mine.want} on, and {node} has none")
                node = node.parent

    def _check_copies(self) -> None:
        under_way = {MoveKind.BACKUP: 0, MoveKind.LOAD: 0}
        filled: dict[tuple[Tier, int], set[int]] = {}
        for copy in self._tiers.table.all():
            under_way[copy.kind] += copy.page_count
            into, outof = (Tier.HOST, Tier.DEVICE) if copy.kind is MoveKind.BACKUP else (Tier.DEVICE, Tier.HOST)
            for move in copy.moves:
                target = self._pools.all[into, move.part].ledger
                source = self._pools.all[outof, move.part].ledger
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
        for pool in self._pools:
            owners = pool.ledger.owner_P[(pool.ledger.owner_P & STATE_MASK) == PageState.COPY]
            lost = set(owners.tolist()) - known
            if lost:
                _broken("C2", f"{pool} belong to copies {[o >> STATE_BITS for o in lost]}, which are not there")

    # Rows

    def _check_rows(self, rows: Iterable[RowView]) -> None:
        """O3 and O5: a row is its lease's canonical pages, then the request's own pages, all of them, each once."""
        size = self._tree.page_size
        known = {rid for pool in self._pools for rid in pool.ledger.request_ids}
        for row in rows:
            known.discard(row.rid)
            if not row.lease.live:
                _broken("L5", f"running request {row.rid} has {row.lease}")
            leased = row.lease.end // size
            windows = dict(zip(self._tree.windowed, row.lease.windows, strict=True))
            path = None if row.lease.sound_end is not None else self._path(row)
            for span in row.spans:
                pool = self._pools.device[span.part]
                skip = max(0, leased - span.first)
                self._check_tail(pool, row.rid, span.pages[skip:])
                if path is None:
                    continue
                first = span.first
                if span.part in windows:
                    first = max(first, windows[span.part].want // size)
                elif first:
                    _broken("O5", f"row of {row.rid} begins with page {first} of {span.part.name}, expected 0")
                mine, canonical = span.pages[first - span.first : skip], self._canonical(pool, path)[first:leased]
                if not np.array_equal(mine, canonical):
                    got, expected = mine.tolist(), canonical.tolist()
                    _broken("O5", f"row of {row.rid} has {span.part.name} {got} from {first} on, expected {expected}")
        for rid in known:
            for pool in self._pools:
                if pool.ledger.pages_of_request(rid):
                    _broken("O3", f"request {rid} owns {pool} {_owned(pool, rid).tolist()} and has no row")

    def _check_tail(self, pool: PagePool, rid: str, pages: Pages) -> None:
        tail = np.sort(pages)
        owned = _owned(pool, rid) if rid in pool.ledger.request_ids else tail[:0]
        if not np.array_equal(tail, owned):
            _broken("O3", f"row of {rid} ends with {pool} {tail.tolist()}, and it owns {owned.tolist()}")

    def _path(self, row: RowView) -> list[Node]:
        """The nodes of a row's lease, the first one first."""
        path: list[Node] = []
        node: Node | None = row.lease.anchor
        while node is not None:
            if not node.alive:
                _broken("L3", f"{row.lease} of {row.rid} stands on {node}, which left the tree")
            path.append(node)
            node = node.parent
        return path[::-1]

    def _canonical(self, pool: PagePool, path: list[Node]) -> Pages:
        """The pages of a path by page index; -1 where the pool has none."""
        pages = [pool.of(n) if len(pool.of(n)) else np.full(len(n.device[FULL]), -1, np.int32) for n in path]
        return np.concatenate(pages)


def _owned(pool: PagePool, rid: str) -> NDArray[np.intp]:
    return np.flatnonzero(pool.ledger.owner_P == pool.ledger.request_owner(rid))


def _check_queue(queue: EvictionQueue, nodes: dict[int, Node]) -> None:
    """T1 to T4: a node that may go has one entry, and it stands where the node's rank is, or before it."""
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
            _broken(
                "T1" if queue.tier is Tier.DEVICE else "T2",
                f"{node} may go, expected an entry in the {queue.name} queue",
            )
        if node.queued & queue.bit and node.id not in entries:
            _broken("T4", f"{node} believes that it is in the {queue.name} queue")


def _broken(name: str, what: str) -> Never:
    raise InvariantError(f"cache: {name} {what}")
