"""Every invariant of the cache that can be seen between two operations; each raises with its name.

S structure, D data, O ownership, L leases, T tracking. Reads only, and recomputes from the nodes up whatever the
tree keeps incrementally.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Never

import numpy as np

from serinus.cache.ledger import STATE_MASK, PageLedger, PageState, tree_owner
from serinus.cache.node import TOKEN_BYTES, Node
from serinus.cache.results import RowView
from serinus.cache.sweep import SweepIndex
from serinus.cache.tree import RadixTree
from serinus.core.errors import InvariantError

__all__ = ["check_cache", "check_rows"]


def check_cache(tree: RadixTree, ledger: PageLedger, sweep: SweepIndex) -> None:
    """Hold the tree against itself and against the ledger. Cost: O(nodes + cached pages)."""
    seen: dict[int, Node] = {}
    for node in tree.nodes():
        _check_pins(node)
        for key, child in node.children.items():
            _check_child(tree.page_size, node, key, child)
        if node.parent is None:
            _check_root(tree, node)
            continue
        if node.id in seen:
            _broken("S6", f"{node} is reached twice")
        seen[node.id] = node
        _check_pages(node, ledger, sweep)
    if seen.keys() != tree.arena.keys() or any(tree.arena[i] is not node for i, node in seen.items()):
        _broken("S5", f"the arena has nodes {sorted(tree.arena.keys() ^ seen.keys())[:16]} that the roots do not reach")
    _check_totals(tree, ledger, seen)
    _check_queue(tree, seen)


def check_rows(rows: Iterable[RowView], ledger: PageLedger, page_size: int) -> None:
    """O3 and O5: a row is its lease's canonical pages, then the request's own pages, all of them, each once."""
    known = set(ledger.request_ids)
    for row in rows:
        canonical = _lease_pages(row)
        leased = len(canonical)
        if not np.array_equal(row.pages[:leased], canonical):
            _broken("O5", f"row of {row.rid} begins with {row.pages[:leased].tolist()}, expected {canonical.tolist()}")
        tail = np.sort(row.pages[leased:])
        owned = _owned(ledger, row.rid) if row.rid in known else tail[:0]
        if not np.array_equal(tail, owned):
            _broken("O3", f"row of {row.rid} ends with pages {tail.tolist()}, and it owns {owned.tolist()}")
        known.discard(row.rid)
    for rid in known:
        if ledger.pages_of_request(rid):
            _broken("O3", f"request {rid} owns pages {_owned(ledger, rid).tolist()} and has no row")


def _owned(ledger: PageLedger, rid: str) -> np.ndarray[tuple[int], np.dtype[np.intp]]:
    return np.flatnonzero(ledger.owner_P == ledger.request_owner(rid))


def _lease_pages(row: RowView) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    if not row.lease.live:
        _broken("L5", f"running request {row.rid} has {row.lease}")
    path = []
    node: Node | None = row.lease.anchor
    while node is not None:
        if not node.alive:
            _broken("L3", f"{row.lease} of {row.rid} stands on {node}, which left the tree")
        path.append(node.pages)
        node = node.parent
    return np.concatenate(path[::-1])


def _check_root(tree: RadixTree, root: Node) -> None:
    if tree.roots.get(root.key.decode()) is not root:
        _broken("S6", f"root {root.key!r} is not the root of its namespace")
    if root.start or root.end or len(root.pages) or len(root.tokens):
        _broken("S1", f"root {root} has a span, expected none")
    if not root.children and not root.pins:
        _broken("S5", f"namespace {root.key!r} is empty and unpinned, expected it to be gone")


def _check_child(page_size: int, node: Node, key: bytes, child: Node) -> None:
    if child.parent is not node or child.start != node.end:
        _broken("S1", f"{child} below {node} starts at {child.start}, expected {node.end}")
    length = child.end - child.start
    if length <= 0 or length % page_size:
        _broken("S2", f"{child} has {length} tokens, expected whole pages of {page_size}")
    if key != child.key or bytes(child.tokens[: page_size * TOKEN_BYTES]) != key:
        _broken("S3", f"{child} is keyed by {key!r}, expected its first page")
    if len(child.tokens) != length * TOKEN_BYTES:
        _broken("S4", f"{child} has {len(child.tokens)} bytes of tokens, expected {length * TOKEN_BYTES}")
    if len(child.pages) * page_size != length:
        _broken("D1", f"{child} has {len(child.pages)} pages, expected {length // page_size}")


def _check_pages(node: Node, ledger: PageLedger, sweep: SweepIndex) -> None:
    owners = ledger.owner_P[node.pages]
    if (owners != tree_owner(node.id)).any():
        page = int(node.pages[(owners != tree_owner(node.id)).argmax()])
        _broken("O2", f"{node} lists page {page}, which is {ledger.describe(int(ledger.owner_P[page]))};"
                      f" {ledger.history(page)}")  # fmt: skip
    held = int(np.count_nonzero(ledger.hold_P[node.pages]))
    if held != node.held:
        _broken("L4", f"{node} counts {node.held} held pages, expected {held}")
    positions = node.start + np.arange(len(node.pages)) * (node.end - node.start) // len(node.pages)
    above = node.parent.pages[-1:] if node.parent is not None and len(node.parent.pages) else np.zeros(1, np.int32)
    previous = np.concatenate((above, node.pages[:-1]))
    if (sweep.position_P[node.pages] != positions).any() or (sweep.previous_P[node.pages] != previous).any():
        _broken("D1", f"the sweep has other positions or predecessors for {node} than the tree")


def _check_pins(node: Node) -> None:
    expected = node.leases + sum(child.pins > 0 for child in node.children.values())
    if node.pins != expected or node.leases < 0:
        _broken("L1", f"{node} has {node.pins} pins, expected {expected} ({node.leases} leases)")
    if not node.alive:
        _broken("L3", f"{node} is reachable and marked as gone")


def _check_totals(tree: RadixTree, ledger: PageLedger, nodes: dict[int, Node]) -> None:
    cached = sum(len(node.pages) for node in nodes.values())
    evictable = sum(len(node.pages) - node.held for node in nodes.values() if not node.pins)
    listed = int(((ledger.owner_P & STATE_MASK) == PageState.TREE).sum())
    if not cached == tree.cached_pages == listed:
        _broken("O2", f"the tree counts {tree.cached_pages} pages and the ledger {listed}, expected {cached}")
    if evictable != tree.evictable_pages:
        _broken("L4", f"{tree.evictable_pages} pages are evictable, expected {evictable}")


def _check_queue(tree: RadixTree, nodes: dict[int, Node]) -> None:
    entries: dict[int, Node] = {}
    for rank, node in tree.queue:
        if node.alive:
            if node.id in entries or not node.queued:
                _broken("T4", f"{node} has two queue entries, or one that it does not know of")
            if rank > tree.queue.rank(node):
                _broken("T4", f"{node} is queued at {rank}, expected {tree.queue.rank(node)} or earlier")
            entries[node.id] = node
    for node in nodes.values():
        if not node.children and not node.pins and node.id not in entries:
            _broken("T1", f"{node} is an evictable leaf, expected an entry in the queue")
        if node.queued and node.id not in entries:
            _broken("T4", f"{node} believes that it is queued")


def _broken(name: str, what: str) -> Never:
    raise InvariantError(f"cache: {name} {what}")
