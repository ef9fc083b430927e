"""Copies to the host, and what leaves the device: the dirty queue, write-back that waits, demotion, tombstones.

Clean = the host has all that the device has of a node. Clean nodes leave at once; dirty ones that the policy wants to
keep are copied first, in a batch, and their pages are free only when that batch has ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable

from serinus.cache.copies import Copy, CopyTable
from serinus.cache.host import HostTier
from serinus.cache.ledger import FREE_OWNER
from serinus.cache.node import FULL, Node, Span
from serinus.cache.page_pools import PagePool, PagePools
from serinus.cache.policy import WritePolicy
from serinus.core.moves import Move, MoveKind

COLD_LEAVES = 16
"""Among so many of the coldest, clean nodes leave first; so many dirty ones are copied at most before one wait."""
PIECE_TOKENS = 256
"""A large node gives up its tail (or the head of what a window left behind) in pieces of at least this size."""
NOT_WANTED, IF_ROOM, AT_ANY_COST, UNDER_WAY = 0, 1, 2, 3
"""How much a copy on the host is wanted: the values of Node.wanted."""


class Backups:
    """Decides what is copied to the host and what leaves the device.

    `submit` and `wait` are the controller's: the one begins copies, the other completes them before it returns.
    """

    def __init__(
        self,
        pools: PagePools,
        table: CopyTable,
        host: HostTier,
        policy: WritePolicy,
        submit: Callable[[list[Move]], None],
        wait: Callable[[Collection[int]], None],
    ) -> None:
        self._pools = pools
        self._tree = pools.tree
        self._table = table
        self._host = host
        self._policy = policy
        self._submit = submit
        self._wait = wait
        self._parts = self._tree.parts
        size = self._tree.page_size
        self._piece_pages = -(-PIECE_TOKENS // size)
        self._window_pages = {part: -(-window // size) for part, window in pools.rules}
        self.tiered = bool(pools.host)
        self._pages_max = max(64, pools.host[FULL].ledger.page_count // 4) if pools.host else 0
        """Pages of optional backups under way."""
        self._dirty: deque[Node] = deque()
        self.demoted_pages = 0
        self.dropped_tokens = 0
        self.evicted_pages = 0
        self.window_evicted_pages = 0

    @property
    def queued(self) -> int:
        """Entries of the dirty queue, outdated ones included."""
        return len(self._dirty)

    def clean(self, node: Node) -> bool:
        """Whether the host has all that the device has of the node."""
        host = node.host
        for part in self._parts:
            if not len(host[part]) and len(node.device[part]):
                return False
        return len(host[FULL]) > 0

    # The dirty queue

    def used(self, nodes: Iterable[Node]) -> None:
        """A request published or matched these nodes: those that the policy now wants on the host are queued."""
        for node in nodes:
            if not node.wanted and self._policy.due(node) and not self.clean(node) and len(node.device[FULL]):
                node.wanted = IF_ROOM
                self._dirty.append(node)

    def _worth(self, node: Node) -> bool:
        """Whether a dirty node is copied before it leaves the device, rather than dropped."""
        return self.tiered and (node.wanted == AT_ANY_COST or self._policy.worth(node))

    def park(self, anchor: Node) -> None:
        """Every dirty node on the path to `anchor` is queued, and duplicates make room for it."""
        for node in Span(anchor, 0).nodes():
            if node.wanted != UNDER_WAY and len(node.device[FULL]) and not self.clean(node):
                node.wanted = AT_ANY_COST
                self._dirty.append(node)

    def drain(self) -> None:
        """Begin copies of queued nodes, as far as the budget allows."""
        self._low_water()
        moves: list[Move] = []
        while self._dirty and self._table.pages[MoveKind.BACKUP] < self._pages_max:
            node: Node | None = self._dirty.popleft()
            while node is not None and node.wanted in (IF_ROOM, AT_ANY_COST):  # halves that were split off above
                must, node.wanted = node.wanted == AT_ANY_COST, NOT_WANTED
                if node.alive and not self.clean(node):
                    copy = self._begin(node, must=must)
                    if copy is not None:
                        moves += copy.moves
                node = node.parent
        if moves:
            self._submit(moves)

    def _low_water(self) -> None:
        """When few device pages are free, the coldest dirty leaves are queued early."""
        ledger = self._pools.full.ledger
        if ledger.free_pages >= self._policy.watermark * ledger.page_count:
            return
        cold = self._tree.queue.take(COLD_LEAVES)
        for node in cold:
            self._tree.queue.push(node)
            if not node.wanted and self._worth(node) and not self.clean(node):
                node.wanted = IF_ROOM
                self._dirty.append(node)

    # Copies

    def start(self, nodes: Iterable[Node]) -> list[int]:
        """Copy dirty nodes to the host at the cost of duplicates there; the ops of those for which there was room."""
        copies = [copy for node in nodes if (copy := self._begin(node, must=True)) is not None]
        if copies:
            self._submit([move for copy in copies for move in copy.moves])
        return [copy.op for copy in copies]

    def _begin(self, node: Node, *, must: bool) -> Copy | None:
        """Take host pages for what the host lacks of a node; None where there is no room."""
        copy = Copy(self._table.take_op(), MoveKind.BACKUP, Span(node, node.start))
        self._table.begin(copy)
        for part, pool in self._pools.host.items():
            source = node.device[part]
            if len(source) and not len(node.host[part]):
                target = self._host.take(pool, len(source), copy.owner, must=must)
                if target is not None:
                    self._table.add(copy, pool.part, source, target)
                elif part == FULL:
                    break
        if not copy.moves:
            self._table.end(copy)
            return None
        node.wanted = UNDER_WAY
        return copy

    def end(self, copy: Copy, *, ok: bool) -> list[Node]:
        """A backup has ended: only now, and only if it succeeded, the host has these nodes. Returns them."""
        size, saved = self._tree.page_size, []
        for node in reversed(copy.span.nodes()):
            low, high = (node.start - copy.span.start) // size, (node.end - copy.span.start) // size
            node.wanted = NOT_WANTED
            for move in copy.moves:
                pool, pages = self._pools.host[move.part], move.target[low:high]
                if ok and node.alive:
                    self._pools.attach(pool, node, pages, copy.owner, "backed up")
                else:
                    pool.ledger.move(pages, copy.owner, FREE_OWNER, "backup failed")
            if ok and node.alive:
                saved.append(node)
                self.used((node,))  # a tombstone may have been filled meanwhile
        self._table.end(copy)
        return saved

    # Leaving the device

    def evict(self, pool: PagePool, enough: int) -> int:
        """Free device pages of a part until `enough` more can be handed out, or nothing more may go; how many became
        free.

        Of a part with a window those pages alone go (tombstones). Of another one whole leaves leave the device: clean
        ones among the coldest first; if they are all dirty, a batch of them is copied and waited for.
        Cost: O(log nodes) a node, and the wait for copies.
        """
        if pool.part in self._tree.windowed:
            return self._evict_window(pool, enough)
        ledger, queue = pool.ledger, self._tree.queue
        before = ledger.free_pages
        while (wanted := enough - (ledger.free_pages - before)) > 0:
            first = queue.first()
            if first is None:
                break
            if not first.busy and (self.clean(first) or not self._worth(first)):
                queue.pop()
                self._leave(self._tail(first, wanted))
                continue
            cold = queue.take(COLD_LEAVES)
            self._clean_first(pool, cold, ledger.free_pages + wanted)
            for node in cold:
                self._tree.requeue(node)
        return ledger.free_pages - before

    def _clean_first(self, pool: PagePool, cold: list[Node], goal: int) -> None:
        """Let clean ones of these leaves go, then dirty ones behind a batch of copies, until `goal` pages are free."""
        free, part = pool.ledger, pool.part
        for node in cold:
            if free.free_pages < goal and not node.busy and self.clean(node):
                self._leave(self._tail(node, goal - free.free_pages))
        if free.free_pages >= goal:
            return
        wanted, chosen = goal - free.free_pages, []
        for node in cold:
            if self._tree.queue.may_go(node):
                chosen.append(self._tail(node, wanted))
                wanted -= len(chosen[-1].device[part]) - chosen[-1].held[part]
                if wanted <= 0:
                    break
        self._secure(chosen)
        for node in chosen:
            if self._tree.queue.may_go(node) and not node.busy:
                self._leave(node)

    def _secure(self, nodes: list[Node]) -> None:
        """Copy those of `nodes` that are worth it, and wait until no copy needs any of them."""
        dirty = [node for node in nodes if self._worth(node) and not node.busy and not self.clean(node)]
        self.start(dirty)
        ops = self._table.over(nodes)
        if ops:
            self._wait(ops)

    def _tail(self, node: Node, wanted: int) -> Node:
        """The part of a leaf that leaves: its tail, if the leaf is much larger than that. The same object, shorter."""
        count = max(wanted, self._piece_pages)
        if len(node.device[FULL]) >= 2 * count and not (node.busy or any(node.held)):
            self._pools.split(node, node.end - count * self._tree.page_size)
        return node

    def _leave(self, node: Node) -> None:
        """A leaf leaves the device: it stays on the host if it is there, or it is gone with all below it."""
        pools, tree = self._pools, self._tree
        self.evicted_pages += len(node.device[FULL])
        kept = len(node.host[FULL]) > 0
        for part, pool in pools.device.items():
            if part != FULL:
                pools.detach(pool, node, "evict")
        if not kept:
            if self._worth(node):
                self.dropped_tokens += node.end - node.start
            self._host.drop_below(node)
        pages = pools.detach(pools.full, node, "evict")
        if kept:
            self.demoted_pages += pages
            tree.inherit(node)
            tree.requeue(node)
        else:
            tree.drop(node)

    # Tombstones

    def _evict_window(self, pool: PagePool, enough: int) -> int:
        """Free device pages of one part with a window, of the nodes that no window reached for longest."""
        queue, part = self._tree.queues.window[pool.part], pool.part
        before = pool.ledger.free_pages
        while (wanted := enough - (pool.ledger.free_pages - before)) > 0:
            chosen: list[Node] = []
            while wanted > 0 and len(chosen) < COLD_LEAVES and (node := queue.first()) is not None:
                queue.pop()
                if node in chosen:  # a head that a split put back into the queue
                    continue
                chosen.append(self._head(node, part, wanted))
                wanted -= len(chosen[-1].device[part]) - chosen[-1].held[part]
            if not chosen:
                break
            self._secure(chosen)
            for node in chosen:
                if queue.may_go(node) and not node.busy:
                    self.window_evicted_pages += self._pools.detach(pool, node, "tombstone")
                self._tree.requeue(node)
        return pool.ledger.free_pages - before

    def _head(self, node: Node, part: int, wanted: int) -> Node:
        """The part of a node whose pages go: of one longer than a window, its head, as hits need the end of it."""
        count = min(len(node.device[part]) - self._window_pages[part], max(wanted, self._piece_pages))
        if count < 1 or node.busy or any(node.held):
            return node
        upper = self._pools.split(node, node.start + count * self._tree.page_size).upper
        self._tree.requeue(node)
        return upper
