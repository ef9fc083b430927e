"""The radix tree: prefixes, what each node has on which tier, pins, and the order in which nodes go.

Pure structure: it takes and gives page ids and never asks a ledger; each method returns its effects, and the shelves
(shelves.py) apply them. Pages are aligned: every node starts and ends on a page border. On every path from a root FULL
is on the device first and on the host alone afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from serinus.cache.eviction import Queues
from serinus.cache.ledger import Pages
from serinus.cache.node import NO_PAGES, TOKEN_BYTES, Lease, Node, Span

__all__ = ["Descent", "RadixTree", "Split", "Victims"]

NO_TOKENS = memoryview(b"")


@dataclass(slots=True)
class Descent:
    """How far a path of the tree agrees with some tokens, whatever the tier."""

    node: Node
    """The last node that agrees entirely (or the one it began at)."""
    end: int
    """Position up to which tokens agree, on a page border; inside `partial` where that is set."""
    partial: Node | None
    """The child of `node` that agrees for its first pages only."""
    path: list[Node]
    """The nodes that agree entirely, in order, without the one it began at."""


@dataclass(slots=True)
class Split:
    """Effect of a split: the pages of `moved` changed their node."""

    upper: Node
    """The new node: the first half. The old node object is the second half and keeps leases and children."""
    lower: Node
    moved: Node
    """The shorter half, which has the new id."""
    old_id: int
    """Whose its pages were."""


@dataclass(slots=True)
class Victims:
    """Effect of an eviction: these pages left the tree, node by node."""

    pages: list[Pages]
    node_ids: list[int]
    lengths: list[int]
    swa: list[Pages]
    """Device SWA pages that went with them."""
    swa_ids: list[int]
    swa_lengths: list[int]
    hashes: list[bytes]
    """Of the FULL pages; only of nodes that have theirs."""
    freed: int
    """How many of the FULL pages have no holds, hence become free."""


class RadixTree:
    """All prefixes of all namespaces, one root each."""

    def __init__(self, page_size: int, policy: str) -> None:
        self.page_size = page_size
        self.key_bytes = page_size * TOKEN_BYTES
        self.roots: dict[str, Node] = {}
        self.arena: dict[int, Node] = {}
        """Every node but the roots, by id."""
        self.leases: dict[Lease, None] = {}
        """Every live lease, oldest first."""
        self.queues = Queues(policy)
        self.queue = self.queues.device
        self.swa_queue = self.queues.swa
        self.host_queue = self.queues.host
        self.cached_pages = 0
        """Device FULL pages in the tree."""
        self.evictable_pages = 0
        """Those of unpinned nodes that have no holds: exactly what evicting everything would make free."""
        self.cached_swa = 0
        self.evictable_swa = 0
        """Device SWA pages outside every lease's window, without holds."""
        self.cached_host = 0
        self.evictable_host = 0
        """Host FULL pages of nodes that no copy needs, duplicates or unpinned."""
        self.cached_host_swa = 0
        self.evictable_host_swa = 0
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
        path: list[Node] = []
        append, startswith = path.append, data.startswith
        while True:
            child = node.children.get(data[at : at + stride])
            if child is None:
                return Descent(node, node.end, None, path)
            if not startswith(child.tokens, at):
                return Descent(node, node.end + self._agreement(child, data, at), child, path)
            append(child)
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
        Counts of holds stay there too: the shelves, which know the pages, correct them.
        """
        assert node.start < position < node.end, f"cache: split of {node} at {position}, expected strictly inside"
        parent = node.parent
        assert parent is not None, "cache: a root has no span to split"
        pages_above = (position - node.start) // self.page_size
        pages_below = (node.end - position) // self.page_size
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
        upper.device_children = 1 if len(node.pages) else 0
        upper.pins = 1 if node.pins else 0
        parent.children[upper.key] = upper
        self._split_rest(upper, node, pages_above)
        moved, old_id = upper, node.id
        if pages_above > pages_below:
            upper.id, node.id = node.id, upper.id
            moved = node
        self.arena[upper.id] = upper
        self.arena[node.id] = node
        return Split(upper, node, moved, old_id)

    def _split_rest(self, upper: Node, node: Node, pages_above: int) -> None:
        """What only caches with several tiers or parts have."""
        upper.swa_pins, upper.busy, upper.storing, upper.loading = node.swa_pins, node.busy, node.storing, node.loading
        upper.swa_use, upper.uses, upper.priority = node.swa_use, node.uses, node.priority
        upper.wanted = node.wanted
        upper.swa, node.swa = node.swa[:pages_above], node.swa[pages_above:]
        upper.host, node.host = node.host[:pages_above], node.host[pages_above:]
        upper.host_swa, node.host_swa = node.host_swa[:pages_above], node.host_swa[pages_above:]
        if node.hashes is not None:
            upper.hashes, node.hashes = node.hashes[: 16 * pages_above], node.hashes[16 * pages_above :]

    def grow(self, parent: Node, tokens: memoryview, pages: Pages) -> Node:
        """A new leaf below `parent`. It keeps `pages` (none if it is born on the host) and `tokens`, read-only now."""
        key = bytes(tokens[: self.key_bytes])
        assert key not in parent.children, f"cache: S3 {parent} already has a child for these tokens"
        leaf = Node(
            node_id=self._take_id(), parent=parent, tokens=tokens, pages=pages, start=parent.end, key=key,
            born=self.clock,
        )  # fmt: skip
        parent.children[key] = leaf
        self.arena[leaf.id] = leaf
        if len(pages):
            parent.device_children += 1
            self.cached_pages += len(pages)
            self.evictable_pages += len(pages)
        return leaf

    # Pins

    def lease(self, anchor: Node, priority: int = 0) -> Lease:
        """A new lease that ends with `anchor`. Cost: the nodes on its path that nobody pinned before, plus one."""
        lease = Lease(anchor, priority)
        self.leases[lease] = None
        self.pin(anchor)
        return lease

    def end_lease(self, lease: Lease) -> None:
        """The lease pins nothing any more; its SWA pins ended before."""
        assert lease.live, f"cache: L5 {lease} has ended before"
        lease.live = False
        del self.leases[lease]
        self.unpin(lease.anchor)

    def pin(self, node: Node) -> None:
        """One more lease on `node`. Cost: the nodes on its path that nobody pinned before, plus one."""
        node.leases += 1
        above: Node | None = node
        while above is not None:
            above.pins += 1
            if above.pins > 1:
                return
            self.evictable_pages -= len(above.pages) - above.held
            if len(above.host) and not (len(above.pages) or above.busy or above.storing):
                self.evictable_host -= len(above.host)
                self.evictable_host_swa -= len(above.host_swa)
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
            if len(above.host):
                if not (len(above.pages) or above.busy or above.storing):
                    self.evictable_host += len(above.host)
                    self.evictable_host_swa += len(above.host_swa)
                self.requeue(above)
            if not above.device_children:
                self._loose_end(above)
            above = above.parent

    def set_busy(self, span: Span, change: int) -> None:
        """A copy or a plan over `span` begins (1) or ends (-1)."""
        for node in span.nodes():
            self._account(node, -1)
            node.busy += change
            self._account(node, 1)
            if not node.busy:
                self.requeue(node)

    def set_storing(self, span: Span, change: int) -> None:
        """A storage write over `span` begins (1) or ends (-1)."""
        for node in span.nodes():
            self._account(node, -1)
            node.storing += change
            self._account(node, 1)
            self.requeue(node)

    def set_plan(self, span: Span, change: int) -> None:
        """A plan to load `span` is made (1) or ended (-1): its host pages stay, and what SWA it has on the device."""
        for node in span.nodes():
            self._account(node, -1)
            node.busy += change
            node.swa_pins += change
            self._account(node, 1)
            self.requeue(node)

    def touch(self, node: Node, *, hit: bool, priority: int = 0) -> None:
        """A match or a request ended at `node`. Ancestors learn of it when their descendants go."""
        self.clock += 1
        node.last_use = self.clock
        if hit:
            node.hit_count += 1
        if priority > node.priority:
            node.priority = priority

    # What a node has where

    def put(self, node: Node, slot: str, pages: Pages) -> Pages:
        """`pages` are what `node` has in the tier and part called `slot` (none = it leaves that one); returns the old.

        Its last pages of all take it out of nothing: the caller drops it.
        """
        old: Pages = getattr(node, slot)
        self._account(node, -1)
        setattr(node, slot, pages)
        if slot == "pages" and node.parent is not None:
            node.parent.device_children += (len(pages) > 0) - (len(old) > 0)
        self._account(node, 1)
        return old

    def recount_held(self, node: Node, held: int, swa_held: int) -> None:
        """So many of its device pages have holds."""
        self._account(node, -1)
        node.held, node.swa_held = held, swa_held
        self._account(node, 1)

    def _account(self, node: Node, sign: int) -> None:
        """Add or take away what `node` contributes to the counts."""
        if not node.alive:
            return
        self.cached_pages += sign * len(node.pages)
        self.cached_swa += sign * len(node.swa)
        self.cached_host += sign * len(node.host)
        self.cached_host_swa += sign * len(node.host_swa)
        if not node.pins:
            self.evictable_pages += sign * (len(node.pages) - node.held)
        if not node.swa_pins:
            self.evictable_swa += sign * (len(node.swa) - node.swa_held)
        if not (node.busy or node.storing) and (len(node.pages) or not node.pins):
            self.evictable_host += sign * len(node.host)
            self.evictable_host_swa += sign * len(node.host_swa)

    def requeue(self, node: Node) -> None:
        """Something about `node` changed: it stands in every queue where it belongs."""
        self.queues.requeue(node)

    # Eviction

    def evict(self, enough: int) -> Victims:
        """Drop device leaves, lowest rank first, until `enough` FULL pages without holds are out or none may go.

        For a cache without a host tier. The last victim gives up only as much of its tail as is needed.
        Cost: O(log nodes) a victim.
        """
        victims = Victims([], [], [], [], [], [], [], 0)
        while victims.freed < enough:
            leaf = self.queue.first()
            if leaf is None:
                break
            wanted = enough - victims.freed
            if leaf.held == 0 and leaf.swa_held == 0 and wanted < len(leaf.pages):
                self._trim(leaf, wanted, victims)
                victims.freed += wanted
            else:
                self.queue.pop()
                victims.freed += len(leaf.pages) - leaf.held
                self._note(victims, leaf, 0)
                self.drop(leaf)
        return victims

    def _note(self, victims: Victims, leaf: Node, keep: int) -> None:
        """What `leaf` has behind its first `keep` pages goes."""
        victims.pages.append(leaf.pages[keep:])
        victims.node_ids.append(leaf.id)
        victims.lengths.append(len(leaf.pages) - keep)
        if len(leaf.swa):
            victims.swa.append(leaf.swa[keep:])
            victims.swa_ids.append(leaf.id)
            victims.swa_lengths.append(len(leaf.swa) - keep)
        if leaf.hashes is not None:
            victims.hashes.append(leaf.hashes[16 * keep :])

    def _trim(self, leaf: Node, count: int, victims: Victims) -> None:
        """Cut the last `count` pages off an unpinned leaf without holds; it keeps at least one."""
        keep = len(leaf.pages) - count
        self._note(victims, leaf, keep)
        leaf.pages = leaf.pages[:keep]
        leaf.tokens = leaf.tokens[: keep * self.key_bytes]
        leaf.end = leaf.start + keep * self.page_size
        self.cached_pages -= count
        self.evictable_pages -= count
        if len(leaf.swa):
            leaf.swa = leaf.swa[:keep]
            self.cached_swa -= count
            self.evictable_swa -= count
        if leaf.hashes is not None:
            leaf.hashes = leaf.hashes[: 16 * keep]
        _release_slack(leaf)

    def drop(self, leaf: Node) -> None:
        """Take an unpinned node without children out, and all it has; its parent inherits what it knew of use."""
        parent = leaf.parent
        assert parent is not None, "cache: a root is no leaf"
        assert not leaf.children, f"cache: {leaf} is dropped and has children"
        assert not leaf.pins, f"cache: {leaf} is dropped and pinned"
        if not len(leaf.host):
            self.cached_pages -= len(leaf.pages)
            self.evictable_pages -= len(leaf.pages) - leaf.held
            if len(leaf.swa):
                self.cached_swa -= len(leaf.swa)
                self.evictable_swa -= len(leaf.swa) - leaf.swa_held
        else:
            self._account(leaf, -1)
        leaf.alive = False
        del parent.children[leaf.key], self.arena[leaf.id]
        if len(leaf.pages):
            parent.device_children -= 1
        self.inherit(leaf)
        _release_slack(parent)

    def inherit(self, leaf: Node) -> None:
        """`leaf` is off the device, or gone: its parent learns what it knew of use, and may go now itself."""
        parent = leaf.parent
        assert parent is not None, "cache: a root is no leaf"
        parent.hit_count += leaf.hit_count - leaf.hits_given
        leaf.hits_given = leaf.hit_count
        if leaf.last_use > parent.last_use:
            parent.last_use = leaf.last_use
        if leaf.priority > parent.priority:
            parent.priority = leaf.priority
        if not parent.pins and not parent.device_children:
            self._loose_end(parent)

    def _loose_end(self, node: Node) -> None:
        """An unpinned node has no device child: a leaf of its tier may go now; an empty root goes at once."""
        if node.parent is not None:
            if len(node.pages):
                self.queue.push(node)
            elif not node.children and node.alive:
                self.host_queue.push(node)
        elif not node.children:
            node.alive = False
            self.roots.pop(node.key.decode(), None)

    def cut_off(self, top: Node, nodes: list[Node]) -> None:
        """`top` and all below it, `nodes`, leave the tree while leases may still stand on them; they have no pages.

        Their pins go on counting for the nodes above: nobody else looks at them.
        """
        parent = top.parent
        assert parent is not None, "cache: a root is not cut off"
        del parent.children[top.key]
        for node in nodes:
            node.alive = False
            del self.arena[node.id]
        if not parent.pins and not parent.device_children:
            self._loose_end(parent)

    def clear(self) -> list[Node]:
        """Drop every node and say which there were. Only while none is pinned."""
        nodes = list(self.arena.values())
        assert not any(node.pins or node.busy for node in nodes), "cache: a pinned tree is not cleared"
        for node in nodes:
            node.alive = False
        self.queues.clear()
        self.arena.clear()
        self.roots.clear()
        self.cached_pages = self.evictable_pages = self.cached_swa = self.evictable_swa = 0
        self.cached_host = self.evictable_host = self.cached_host_swa = self.evictable_host_swa = 0
        return nodes

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
