"""The radix tree: prefixes, what each node has on which tier, pins, and the order in which nodes go.

Pure structure: it takes and gives page ids and never asks a ledger; each method returns its effects, and the pools
(page_pools.py) apply them. Pages are aligned: every node starts and ends on a page border. On every path from a root
FULL is on the device first and on the host alone afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from serinus.cache.effects import Descent, Split, Victims
from serinus.cache.eviction import Queues
from serinus.cache.ledger import Pages
from serinus.cache.node import FULL, NO_PAGES, TOKEN_BYTES, WHOLE, Lease, Node, PartPages, Span, Tier

NO_TOKENS = memoryview(b"")


class RadixTree:
    """All prefixes of all namespaces, one root each.

    Args:
        page_size: tokens per page.
        policy: eviction order, one of POLICIES.
        rules: the parts, FULL first, each with its window, or WHOLE.
        tiered: whether there is a host tier.
    """

    def __init__(
        self, page_size: int, policy: str, rules: Sequence[tuple[int, int]] = ((FULL, WHOLE),), tiered: bool = False
    ) -> None:
        self.page_size = page_size
        self.key_bytes = page_size * TOKEN_BYTES
        self.parts = tuple(part for part, _ in rules)
        self.whole = tuple(part for part, window in rules if window == WHOLE)
        """Parts whose pages stay and go with those of FULL: a node has as many of each."""
        self.windowed = tuple(part for part, window in rules if window != WHOLE)
        """Parts of which a node may have nothing where it has FULL: a tombstone."""
        width = max(self.parts) + 1
        self._windows = width if self.windowed else 0
        self._tiered = tiered
        self._nothing: PartPages = (NO_PAGES,) * width
        self._unheld = (0,) * width
        self.roots: dict[str, Node] = {}
        self.arena: dict[int, Node] = {}
        """Every node but the roots, by id."""
        self.leases: dict[Lease, None] = {}
        """Every live lease, oldest first."""
        self.queues = Queues(policy, self.windowed, tiered=tiered)
        self.requeue = self.queues.requeue
        self.queue = self.queues.device
        self.host_queue = self.queues.host
        self.cached = [0] * width
        """By part, device pages in the tree."""
        self.evictable = [0] * width
        """By part, those that evicting everything would make free: not pinned (of a part with a window: outside every
        lease's window), not held."""
        self.cached_host = [0] * width
        self.evictable_host = [0] * width
        """By part, host pages of nodes that no copy needs, duplicates or unpinned."""
        self.clock = 0
        """The operation counter: the tree's only time."""
        self._next_id = 1

    def root(self, namespace: str) -> Node:
        """The root of a namespace; made if it is new. It goes with its last node and last lease."""
        root = self.roots.get(namespace)
        if root is None:
            root = self.roots[namespace] = Node(
                node_id=0, parent=None, tokens=NO_TOKENS, device=self._nothing, host=self._nothing, start=0,
                key=namespace.encode(), born=0, held=self._unheld, windows=self._windows,
            )  # fmt: skip
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
        Counts of holds stay there too: the pools, which know the pages, correct them.
        """
        assert node.start < position < node.end, f"cache: split of {node} at {position}, expected strictly inside"
        parent = node.parent
        assert parent is not None, "cache: a root has no span to split"
        pages_above = (position - node.start) // self.page_size
        pages_below = (node.end - position) // self.page_size
        cut = (position - node.start) * TOKEN_BYTES
        upper = Node(
            node_id=self._take_id(), parent=parent, tokens=node.tokens[:cut],
            device=tuple([pages[:pages_above] for pages in node.device]),
            host=tuple([pages[:pages_above] for pages in node.host]),
            start=node.start, key=node.key, born=node.born, held=self._unheld, windows=0,
        )  # fmt: skip
        node.tokens = node.tokens[cut:]
        node.device = tuple([pages[pages_above:] for pages in node.device])
        node.host = tuple([pages[pages_above:] for pages in node.host])
        node.start = position
        node.key = bytes(node.tokens[: self.key_bytes])
        node.parent = upper
        upper.children[node.key] = node
        upper.device_children = 1 if len(node.device[FULL]) else 0
        upper.pins = 1 if node.pins else 0
        upper.window_pins, upper.window_use = node.window_pins.copy(), node.window_use.copy()
        upper.busy, upper.storing, upper.loading = node.busy, node.storing, node.loading
        upper.uses, upper.priority, upper.wanted, upper.chain = node.uses, node.priority, node.wanted, node.chain
        node.chain = None
        if node.hashes is not None:
            upper.hashes, node.hashes = node.hashes[: 16 * pages_above], node.hashes[16 * pages_above :]
        parent.children[upper.key] = upper
        old_id = node.id
        if pages_above > pages_below:
            upper.id, node.id = node.id, upper.id
        self.arena[upper.id] = upper
        self.arena[node.id] = node
        return Split(upper, node, upper if node.id == old_id else node, old_id)

    def grow(self, parent: Node, tokens: memoryview, pages: Pages) -> Node:
        """A new leaf below `parent` with these FULL pages (none if it is made on the host); both stay as they are."""
        key = bytes(tokens[: self.key_bytes])
        assert key not in parent.children, f"cache: S3 {parent} already has a child for these tokens"
        leaf = Node(
            node_id=self._take_id(), parent=parent, tokens=tokens, device=(pages, *self._nothing[1:]),
            host=self._nothing, start=parent.end, key=key, born=self.clock, held=self._unheld, windows=self._windows,
        )  # fmt: skip
        parent.children[key] = leaf
        self.arena[leaf.id] = leaf
        if len(pages):
            parent.device_children += 1
            self.cached[FULL] += len(pages)
            self.evictable[FULL] += len(pages)
        return leaf

    # Pins

    def lease(self, anchor: Node, priority: int = 0) -> Lease:
        """A new lease that ends with `anchor`. Cost: the nodes on its path that were not pinned before, plus one."""
        lease = Lease(anchor, priority)
        self.leases[lease] = None
        self.pin(anchor)
        return lease

    def end_lease(self, lease: Lease) -> None:
        """The lease pins nothing any more; its window pins ended before."""
        assert lease.live, f"cache: L5 {lease} has ended before"
        lease.live = False
        del self.leases[lease]
        self.unpin(lease.anchor)

    def pin(self, node: Node) -> None:
        """One more lease on `node`. Cost: the nodes on its path that were not pinned before, plus one."""
        node.leases += 1
        node.pins += 1
        if node.pins == 1:
            self._pin_path(node, 1)

    def unpin(self, node: Node) -> None:
        """One lease less on `node`; nodes without any become evictable."""
        assert node.leases > 0, f"cache: L5 {node} has no lease to release"
        node.leases -= 1
        node.pins -= 1
        if not node.pins:
            self._pin_path(node, -1)

    def _pin_path(self, node: Node, change: int) -> None:
        """`node` got its first pin (1) or lost its last one (-1), and so its parent has one more or less."""
        above: Node | None = node
        unheld, tiered, total = self._unheld, self._tiered, 0
        while above is not None:
            count = len(above.device[FULL])
            total += count
            if above.held is not unheld:
                for part in self.whole:
                    self.evictable[part] += change * above.held[part]
            if tiered and not (count or above.busy or above.storing):
                self._count_host(above, -change)
            if change < 0:
                if tiered and len(above.host[FULL]):
                    self.requeue(above)
                if not above.device_children:
                    self._loose_end(above)
            above = above.parent
            if above is not None:
                above.pins += change
                if above.pins > (change > 0):
                    break
        if total:
            for part in self.whole:
                self.evictable[part] -= change * total

    def pins_of(self, node: Node, part: int) -> int:
        """Pins that keep the device pages that a node has of this part."""
        return node.window_pins[part] if part in self.windowed else node.pins

    def pin_window(self, node: Node, part: int) -> None:
        """The window of one more lease or plan reaches `node`."""
        node.window_pins[part] += 1
        if node.window_pins[part] == 1 and node.alive:
            self.evictable[part] -= len(node.device[part]) - node.held[part]

    def unpin_window(self, node: Node, part: int) -> None:
        """The window of one lease or plan less reaches `node`."""
        node.window_pins[part] -= 1
        if not node.window_pins[part] and node.alive and len(node.device[part]):
            self.evictable[part] += len(node.device[part]) - node.held[part]
            self.queues.window[part].push(node)

    def set_busy(self, span: Span, change: int) -> None:
        """A copy or a plan over `span` begins (1) or ends (-1)."""
        self._claim(span.nodes(), change, 0)

    def set_storing(self, span: Span, change: int) -> None:
        """A storage write over `span` begins (1) or ends (-1)."""
        self._claim(span.nodes(), 0, change)

    def set_plan(self, span: Span, change: int) -> None:
        """A plan to load `span` is made (1) or ended (-1): its host pages stay, and what windows have on the device."""
        nodes = span.nodes()
        self._claim(nodes, change, 0)
        pin = self.pin_window if change > 0 else self.unpin_window
        for node in nodes:
            for part in self.windowed:
                pin(node, part)

    def _claim(self, nodes: list[Node], busy: int, storing: int) -> None:
        for node in nodes:
            loose = self._is_loose(node)
            node.busy += busy
            node.storing += storing
            self._recount_host(node, loose)
            if not node.busy:
                self.requeue(node)

    def touch(self, node: Node, *, priority: int = 0) -> None:
        """A match or a request ended at `node`. Ancestors learn of it when their descendants go."""
        self.clock += 1
        node.last_use = self.clock
        if priority > node.priority:
            node.priority = priority

    # What a node has where

    def put(self, node: Node, tier: Tier, part: int, pages: Pages) -> Pages:
        """`pages` are what `node` has in this tier and part (none = it leaves that one); returns the old ones.

        A node that has nothing anywhere stays in the tree until the caller drops it.
        """
        if tier:
            old, node.host = node.host[part], _with(node.host, part, pages)
            self.cached_host[part] += len(pages) - len(old)
            if self._is_loose(node):
                self.evictable_host[part] += len(pages) - len(old)
            return old
        loose = self._is_loose(node)
        old, node.device = node.device[part], _with(node.device, part, pages)
        self.cached[part] += len(pages) - len(old)
        if not self.pins_of(node, part):
            self.evictable[part] += len(pages) - len(old)
        if part == FULL:
            if node.parent is not None:
                node.parent.device_children += (len(pages) > 0) - (len(old) > 0)
            self._recount_host(node, loose)
        return old

    def set_held(self, node: Node, held: tuple[int, ...]) -> None:
        """So many of its device pages, by part, have holds."""
        if node.alive:
            for part in self.parts:
                if not self.pins_of(node, part):
                    self.evictable[part] += node.held[part] - held[part]
        node.held = held if any(held) else self._unheld

    def _is_loose(self, node: Node) -> bool:
        """Whether its host pages, if any, count as evictable."""
        return not (node.busy or node.storing) and (len(node.device[FULL]) > 0 or not node.pins) and node.alive

    def _recount_host(self, node: Node, before: bool) -> None:
        now = self._is_loose(node)
        if now != before:
            self._count_host(node, 1 if now else -1)

    def _count_host(self, node: Node, sign: int) -> None:
        for part in self.parts:
            self.evictable_host[part] += sign * len(node.host[part])

    # Eviction

    def evict(self, enough: int, part: int = FULL) -> Victims:
        """Drop device leaves, lowest rank first, until `enough` pages of `part` without holds are out or none may go.

        For a cache without a host tier, and a part that covers the whole prefix. The last victim gives up only as much
        of its tail as is needed. Cost: O(log nodes) a victim.
        """
        victims = Victims([], [], 0, 0)
        while victims.freed < enough:
            leaf = self.queue.first()
            if leaf is None:
                break
            wanted, count = enough - victims.freed, len(leaf.device[part])
            if wanted < count and leaf.held is self._unheld:
                self._trim(leaf, wanted, victims)
                victims.pages += wanted
                victims.freed += wanted
            else:
                self.queue.pop()
                victims.pages += count
                victims.freed += count - leaf.held[part]
                victims.taken.append((leaf.id, leaf.device))
                if leaf.hashes is not None:
                    victims.hashes.append(leaf.hashes)
                self.drop(leaf)
        return victims

    def _trim(self, leaf: Node, count: int, victims: Victims) -> None:
        """Cut the last `count` pages off an unpinned leaf without holds; it keeps at least one."""
        keep = len(leaf.device[FULL]) - count
        victims.taken.append((leaf.id, tuple([pages[keep:] for pages in leaf.device])))
        for part in self.parts:
            if len(leaf.device[part]):
                self.cached[part] -= count
                self.evictable[part] -= count
        leaf.device = tuple([pages[:keep] for pages in leaf.device])
        leaf.tokens = leaf.tokens[: keep * self.key_bytes]
        leaf.end = leaf.start + keep * self.page_size
        if leaf.hashes is not None:
            victims.hashes.append(leaf.hashes[16 * keep :])
            leaf.hashes = leaf.hashes[: 16 * keep]
        _release_slack(leaf)

    def drop(self, leaf: Node) -> None:
        """Take an unpinned node without children out, and all it has; its parent inherits what it knew of use."""
        parent = leaf.parent
        assert parent is not None, "cache: a root is no leaf"
        assert not leaf.children, f"cache: {leaf} is dropped and has children"
        assert not leaf.pins, f"cache: {leaf} is dropped and pinned"
        for part in self.parts:
            count = len(leaf.device[part])
            self.cached[part] -= count
            self.cached_host[part] -= len(leaf.host[part])
            if not self.pins_of(leaf, part):
                self.evictable[part] -= count - leaf.held[part]
        if self._tiered and self._is_loose(leaf):
            self._count_host(leaf, -1)
        leaf.alive = False
        del parent.children[leaf.key], self.arena[leaf.id]
        if len(leaf.device[FULL]):
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
            if len(node.device[FULL]):
                self.queue.push(node)
            elif not node.children and node.alive:
                self.host_queue.push(node)
        elif not node.children:
            node.alive = False
            self.roots.pop(node.key.decode(), None)

    def cut_off(self, top: Node, nodes: list[Node]) -> None:
        """`top` and all below it, `nodes`, leave the tree while leases may still stand on them; they have no pages.

        Their pins go on counting for the nodes above.
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
        for counts in (self.cached, self.evictable, self.cached_host, self.evictable_host):
            counts[:] = [0] * len(counts)
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


def _with(parts: PartPages, part: int, pages: Pages) -> PartPages:
    return (*parts[:part], pages, *parts[part + 1 :])


def _release_slack(node: Node) -> None:
    """Copy what is left of a node when it is less than half of the memory its views keep alive: amortised O(1)."""
    base = node.device[FULL].base
    if isinstance(base, np.ndarray) and base.size > 2 * len(node.device[FULL]):
        node.device = tuple([pages.copy() for pages in node.device])
        node.tokens = memoryview(bytes(node.tokens))
