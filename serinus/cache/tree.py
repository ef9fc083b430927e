"""The radix tree: prefixes, the pages that hold them, pins, and the order in which leaves go.

Pure structure: it takes and gives page ids and never asks the ledger; each method returns its effects, and the cache
(prefix.py) applies them. Pages are aligned: every node starts and ends on a page border.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from serinus.cache.eviction import EvictionQueue
from serinus.cache.ledger import Pages
from serinus.cache.node import NO_PAGES, TOKEN_BYTES, Node

__all__ = ["Descent", "RadixTree", "Split", "Victims"]

NO_TOKENS = memoryview(b"")


@dataclass(slots=True)
class Descent:
    """How far a path of the tree agrees with some tokens."""

    node: Node
    """The last node that agrees entirely (or the one it began at)."""
    end: int
    """Position up to which tokens agree, on a page border; inside `partial` where that is set."""
    partial: Node | None
    """The child of `node` that agrees for its first pages only."""
    path: list[Pages]
    """Pages of the nodes that agree entirely, in order, without those of the node it began at."""


@dataclass(slots=True)
class Split:
    """Effect of a split: `pages` changed their node."""

    upper: Node
    """The new node: the first half. The old node object is the second half and keeps leases and children."""
    pages: Pages
    """Those of the shorter half, which has the new id."""
    old_id: int
    """Whose they were."""
    new_id: int
    """Whose they are."""


@dataclass(slots=True)
class Victims:
    """Effect of an eviction: these pages left the tree, node by node."""

    pages: list[Pages]
    node_ids: list[int]
    lengths: list[int]
    freed: int
    """How many of them have no holds, hence become free."""


class RadixTree:
    """All prefixes of one tier, one root per namespace."""

    def __init__(self, page_size: int, policy: str) -> None:
        self.page_size = page_size
        self.key_bytes = page_size * TOKEN_BYTES
        self.roots: dict[str, Node] = {}
        self.arena: dict[int, Node] = {}
        """Every node but the roots, by id."""
        self.queue = EvictionQueue(policy)
        self.cached_pages = 0
        """Pages in the tree."""
        self.evictable_pages = 0
        """Pages of unpinned nodes that have no holds: exactly what evicting everything would make free."""
        self.clock = 0
        """The operation counter: the tree's only time."""
        self._next_id = 1

    def root(self, namespace: str) -> Node:
        """The root of a namespace; made if it is new. It goes with its last node and last lease."""
        root = self.roots.get(namespace)
        if root is None:
            key = namespace.encode()
            root = Node(node_id=0, parent=None, tokens=NO_TOKENS, pages=NO_PAGES, start=0, key=key, born=0)
            self.roots[namespace] = root
        return root

    def descend(self, node: Node, data: bytes, origin: int) -> Descent:
        """Follow `data` (int32 ids as bytes, whole pages, the first at position `origin`) down from the end of `node`.

        Cost: one dict look-up and one memcmp per node on the path; one numpy compare where it ends. Changes nothing.
        """
        stride, at = self.key_bytes, (node.end - origin) * TOKEN_BYTES
        path: list[Pages] = []
        append, startswith = path.append, data.startswith
        while True:
            child = node.children.get(data[at : at + stride])
            if child is None:
                return Descent(node, node.end, None, path)
            if not startswith(child.tokens, at):
                return Descent(node, node.end + self._agreement(child, data, at), child, path)
            append(child.pages)
            node = child
            at += len(child.tokens)

    def _agreement(self, child: Node, data: bytes, at: int) -> int:
        """Tokens of `child`, in whole pages, that agree with `data` from byte `at`; at least one page."""
        count = min(len(child.tokens), len(data) - at) // TOKEN_BYTES
        mine = np.frombuffer(child.tokens, np.int32, count)
        yours = np.frombuffer(data, np.int32, count, at)
        differs = mine != yours
        first = int(differs.argmax())
        if not differs[first]:
            return count
        return first - first % self.page_size

    def split(self, node: Node, position: int) -> Split:
        """Cut `node` at `position` (a page border strictly inside); pages and tokens become views.

        Leases, children and identity stay with the second half; ids are given so that fewer pages change theirs.
        """
        assert node.start < position < node.end, f"cache: split of {node} at {position}, expected strictly inside"
        parent = node.parent
        assert parent is not None, "cache: a root has no span to split"
        pages_above = (position - node.start) // self.page_size
        cut = (position - node.start) * TOKEN_BYTES
        upper = Node(
            node_id=self._take_id(), parent=parent, tokens=node.tokens[:cut], pages=node.pages[:pages_above],
            start=node.start, key=node.key, born=node.born,
        )  # fmt: skip
        node.tokens = node.tokens[cut:]
        node.pages = node.pages[pages_above:]
        node.start = position
        node.key = bytes(node.tokens[: self.key_bytes])
        node.parent = upper
        upper.children[node.key] = node
        upper.pins = 1 if node.pins else 0
        parent.children[upper.key] = upper
        if len(upper.pages) > len(node.pages):
            upper.id, node.id = node.id, upper.id
            moved, new_id, old_id = node.pages, node.id, upper.id
        else:
            moved, new_id, old_id = upper.pages, upper.id, node.id
        self.arena[upper.id] = upper
        self.arena[node.id] = node
        return Split(upper, moved, old_id, new_id)

    def grow(self, parent: Node, tokens: memoryview, pages: Pages) -> Node:
        """A new leaf below `parent`. It keeps `pages` and `tokens` (whole pages, at least one), read-only now."""
        key = bytes(tokens[: self.key_bytes])
        assert key not in parent.children, f"cache: S3 {parent} already has a child for these tokens"
        leaf = Node(
            node_id=self._take_id(), parent=parent, tokens=tokens, pages=pages, start=parent.end, key=key,
            born=self.clock,
        )  # fmt: skip
        parent.children[key] = leaf
        self.arena[leaf.id] = leaf
        self.cached_pages += len(pages)
        self.evictable_pages += len(pages)
        return leaf

    # Pins

    def pin(self, node: Node) -> None:
        """One more lease on `node`. Cost: the nodes on its path that nobody pinned before, plus one."""
        node.leases += 1
        above: Node | None = node
        while above is not None:
            above.pins += 1
            if above.pins > 1:
                return
            self.evictable_pages -= len(above.pages) - above.held
            above = above.parent

    def unpin(self, node: Node) -> None:
        """One lease less on `node`; what nobody pins any more becomes evictable."""
        assert node.leases > 0, f"cache: L5 {node} has no lease to release"
        node.leases -= 1
        above: Node | None = node
        while above is not None:
            above.pins -= 1
            if above.pins:
                return
            self.evictable_pages += len(above.pages) - above.held
            if not above.children:
                self._childless(above)
            above = above.parent

    def touch(self, node: Node, *, hit: bool) -> None:
        """A match or a request ended at `node`. Ancestors learn of it when their descendants go."""
        self.clock += 1
        node.last_use = self.clock
        if hit:
            node.hit_count += 1

    def count_held(self, node_id: int, change: int) -> None:
        """`change` more (or fewer) pages of a node have holds."""
        node = self.arena[node_id]
        node.held += change
        if not node.pins:
            self.evictable_pages -= change

    # Eviction

    def evict(self, enough: int) -> Victims:
        """Drop leaves, lowest rank first, until `enough` pages without holds are out or no leaf may go.

        The last victim gives up only as much of its tail as is needed. Cost: O(log nodes) a victim.
        """
        victims = Victims([], [], [], 0)
        while victims.freed < enough:
            leaf = self.queue.first()
            if leaf is None:
                break
            wanted = enough - victims.freed
            victims.node_ids.append(leaf.id)
            if leaf.held == 0 and wanted < len(leaf.pages):
                victims.pages.append(self._trim(leaf, wanted))
            else:
                self.queue.pop()
                victims.pages.append(leaf.pages)
                self._drop(leaf)
            victims.lengths.append(len(victims.pages[-1]))
            victims.freed += victims.lengths[-1] - leaf.held
        return victims

    def _trim(self, leaf: Node, count: int) -> Pages:
        """Cut the last `count` pages off an unpinned leaf without holds; it keeps at least one."""
        keep = len(leaf.pages) - count
        tail: Pages = leaf.pages[keep:]
        leaf.pages = leaf.pages[:keep]
        leaf.tokens = leaf.tokens[: keep * self.key_bytes]
        leaf.end = leaf.start + keep * self.page_size
        self.cached_pages -= count
        self.evictable_pages -= count
        _release_slack(leaf)
        return tail

    def _drop(self, leaf: Node) -> None:
        """Take an unpinned leaf out; its parent inherits what it knew of use."""
        parent = leaf.parent
        assert parent is not None, "cache: a root is no leaf"
        del parent.children[leaf.key], self.arena[leaf.id]
        leaf.alive = False
        self.cached_pages -= len(leaf.pages)
        self.evictable_pages -= len(leaf.pages) - leaf.held
        parent.hit_count += leaf.hit_count
        if leaf.last_use > parent.last_use:
            parent.last_use = leaf.last_use
        if not parent.children and not parent.pins:
            self._childless(parent)
        _release_slack(parent)

    def _childless(self, node: Node) -> None:
        """An unpinned node has no children: a leaf may go now; an empty root goes at once."""
        if node.parent is not None:
            self.queue.push(node)
        else:
            node.alive = False
            del self.roots[node.key.decode()]

    def clear(self) -> Victims:
        """Drop every node. Only while none is pinned."""
        nodes = list(self.arena.values())
        assert not any(node.pins for node in nodes), "cache: a pinned tree is not cleared"
        freed = self.evictable_pages
        victims = Victims([n.pages for n in nodes], [n.id for n in nodes], [len(n.pages) for n in nodes], freed)
        for node in nodes:
            node.alive = False
        self.queue.clear()
        self.arena.clear()
        self.roots.clear()
        self.cached_pages = self.evictable_pages = 0
        return victims

    def nodes(self) -> Iterator[Node]:
        """Every node that the roots reach, roots included, parents first."""
        pending = list(self.roots.values())
        while pending:
            node = pending.pop()
            yield node
            pending.extend(node.children.values())

    def _take_id(self) -> int:
        self._next_id += 1
        return self._next_id - 1


def _release_slack(node: Node) -> None:
    """Copy what is left of a node when it is less than half of the memory its views keep alive: amortised O(1)."""
    base = node.pages.base
    if isinstance(base, np.ndarray) and base.size > 2 * node.pages.size:
        node.pages = node.pages.copy()
        node.tokens = memoryview(bytes(node.tokens))
