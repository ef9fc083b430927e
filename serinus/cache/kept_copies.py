"""Copies that outlive a condemned page: what the host has of it, and of what is behind it, where that was verified.

Nothing is in the tree that was not computed on KV verified since (sched: the horizon), and a host copy carries the
stamps made as its KV was computed. So a copy whose bytes and stamps agree, and are those of the tree's own tokens, is
right, whatever became of the pages that it was copied from. The canary verifies it.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from serinus.cache.keys import HASH_BYTES
from serinus.cache.ledger import FREE_OWNER, Owner, Pages, tree_owner
from serinus.cache.node import FULL, NO_PAGES, TOKEN_BYTES, Node
from serinus.cache.page_pools import PagePool, PagePools
from serinus.cache.results import HostCopy
from serinus.core.moves import PageOrigin
from serinus.core.parts import PageSpan, Part

CheckedCopies = Mapping[Node, Mapping[int, int]]
"""By node and part, how many of its leading host pages were found sound. Others were not looked at."""


@dataclass(frozen=True, slots=True)
class _Taken:
    """Sound host pages of a node that is about to leave the tree."""

    node: Node
    parent: Node
    owner: Owner
    pages: tuple[tuple[PagePool, Pages], ...]
    """Those of part FULL come first."""


class HostCopies:
    """Finds such copies, and hangs those that are sound into the tree again."""

    def __init__(self, pools: PagePools) -> None:
        self._pools = pools
        self._tree = pools.tree

    def behind(self, part: Part, page: int, tokens_max: int) -> list[HostCopy]:
        """What the host alone could give of a cached device page and of what is behind it: parents first, what running
        requests use and what was used last before the rest, some `tokens_max` tokens. Nothing that a copy, a load or a
        write of the storage is at. Splits the node of `page`, so that it begins there."""
        pool = self._pools.device[part]
        for node in self._pools.nodes_of(pool, np.array([page], np.int32)) if self._pools.host else ():
            position = node.start + int((pool.of(node) == page).argmax()) * self._tree.page_size
            if position > node.start:
                self._pools.split(node, position)
            return self._walk(node, tokens_max)
        return []

    def _walk(self, top: Node, tokens_max: int) -> list[HostCopy]:
        found: list[HostCopy] = []
        pending = [(0, 0, top.id, top)]
        while pending and tokens_max > 0:
            *_, node = heapq.heappop(pending)
            if not len(node.host[FULL]) or node.busy or node.storing or node.loading:
                continue
            found.append(self._copy(node))
            tokens_max -= node.end - node.start
            for child in node.children.values():
                heapq.heappush(pending, (-bool(child.pins), -child.last_use, child.id, child))
        return found

    def _copy(self, node: Node) -> HostCopy:
        keys, first = self._pools.keys, node.start // self._tree.page_size
        spans = [PageSpan(pool.part, first, pool.of(node)) for pool in self._pools.host.values() if len(pool.of(node))]
        origin = PageOrigin(
            before=keys.before(node), start=node.start, tokens=node.token_ids(), chain=keys.chain_before(node)
        )
        return HostCopy(node=node, spans=tuple(spans), origin=origin)

    def unsound_keys(self, top: Node, checked: CheckedCopies | None) -> set[bytes]:
        """Keys of the pages of `top` and below whose stored copies are not to be trusted: those from the first page on
        that was looked at and is wrong; all where `checked` is None."""
        keys: set[bytes] = set()
        pending = [(top, checked is None)]
        while pending:
            node, is_wrong = pending.pop()
            first = 0 if is_wrong else self._sound_pages(node, checked or {})
            if first * self._tree.page_size < node.end - node.start:
                is_wrong = True
                keys |= self._pools.keys.split(self._pools.keys.of(node)[first * HASH_BYTES :])
            pending += [(child, is_wrong) for child in node.children.values()]
        return keys

    def _sound_pages(self, node: Node, checked: CheckedCopies) -> int:
        found = checked.get(node)
        return (node.end - node.start) // self._tree.page_size if found is None else found[FULL]

    def take(self, top: Node, checked: CheckedCopies | None) -> list[_Taken]:
        """Take the sound copies at and below `top` out of nodes that leave the tree next, parents first; `hang` gives
        them back to it. What is not sound is free."""
        taken: list[_Taken] = []
        pending = [top] if checked else []
        while pending:
            node = pending.pop()
            found = (checked or {}).get(node, {FULL: 0})
            if not found[FULL]:
                continue
            assert node.parent is not None, "cache: a root has no copies"
            pages = [(pool, self._part_of(pool, node, found)) for pool in self._pools.host.values()]
            taken.append(_Taken(node, node.parent, tree_owner(node.id), tuple(each for each in pages if len(each[1]))))
            if found[FULL] * self._tree.page_size == node.end - node.start:
                pending += node.children.values()
        return taken

    def _part_of(self, pool: PagePool, node: Node, found: Mapping[int, int]) -> Pages:
        """Unlink a node's host pages of one part; the sound ones. A part with a window is there for all pages of FULL
        that stay, or not at all."""
        count = found[FULL] if found.get(pool.part, 0) >= found[FULL] else 0
        pages = self._pools.unlink(pool, node)
        if len(pages) > count:
            pool.ledger.move(pages[count:], tree_owner(node.id), FREE_OWNER, "condemn")
        return pages[:count]

    def hang(self, taken: list[_Taken]) -> int:
        """The nodes of these copies have left the tree: new ones that only the host has stand in their places. Returns
        the tokens of them."""
        grown: dict[Node, Node] = {}
        tokens = 0
        for each in taken:
            old, count = each.node, len(each.pages[0][1])
            parent = grown.get(each.parent, each.parent)
            if not parent.alive:  # a root that had nothing else
                parent = self._tree.root(parent.key.decode())
            data = old.tokens[: count * self._tree.page_size * TOKEN_BYTES]
            node = grown[old] = self._tree.grow(parent, data, NO_PAGES)
            node.hashes = None if old.hashes is None else old.hashes[: count * HASH_BYTES]
            node.chain, node.uses, node.priority = old.chain, old.uses, old.priority
            for pool, pages in each.pages:
                self._pools.attach(pool, node, pages, each.owner, "kept on the host")
            tokens += node.end - node.start
        return tokens
