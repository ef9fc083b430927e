"""What the cache shows of itself: counters and gauges, and a bounded view of the tree. Reads only."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from serinus.cache.node import FULL, Node, Tier
from serinus.cache.page_pools import PagePools
from serinus.cache.publish import Publisher
from serinus.cache.results import CacheStats, NodeView, PoolStats, TreeView
from serinus.cache.room import DeviceRoom
from serinus.cache.tiers import TierController
from serinus.cache.tree import RadixTree
from serinus.core.parts import Part

HEAD_TOKENS = 8


@dataclass(slots=True)
class CacheCounters:
    """Counters of the face; each is told in CacheStats."""

    hit_tokens: int = 0
    sanity_checks: int = 0
    sanity_steps: int = 0


def cache_stats(
    pools: PagePools, tiers: TierController, room: DeviceRoom, published: Publisher, counters: CacheCounters
) -> CacheStats:
    """Gauges and counters of all tiers."""
    tree = pools.tree
    ledger = pools.full.ledger
    pages = ledger.counts()
    backups = tiers.backups
    return CacheStats(
        page_count=ledger.page_count - 1,
        page_size=tree.page_size,
        pages=pages,
        held_pages=ledger.held_count,
        hit_tokens=counters.hit_tokens,
        duplicate_pages=published.duplicate_pages,
        evicted_pages=room.evicted_pages,
        sanity_checks=counters.sanity_checks,
        pools=_pools(tree, pools),
        backup_tokens=tiers.backup_tokens,
        backup_times=tiers.backup_times,
        loaded_tokens=tiers.loaded_tokens,
        load_times=tiers.load_times,
        failed_copies=tiers.failed_copies,
        dropped_tokens=backups.dropped_tokens,
        demoted_pages=backups.demoted_pages,
        window_evicted_pages=backups.window_evicted_pages,
        host_evicted_pages=tiers.host.evicted_pages,
        eviction_times=room.eviction_times,
        prefetched_tokens=0 if tiers.prefetches is None else tiers.prefetches.tokens,
        stored_tokens=0 if tiers.writes is None else tiers.writes.tokens,
        removed_pages=0 if tiers.removals is None else tiers.removals.pages,
        sanity_steps=counters.sanity_steps,
    )


def _pools(tree: RadixTree, pools: PagePools) -> dict[tuple[Tier, Part], PoolStats]:
    return {
        key: PoolStats(
            page_count=pool.ledger.page_count - 1,
            pages=pool.ledger.counts(),
            cached=(tree.cached_host if pool.tier else tree.cached)[pool.part],
            evictable=(tree.evictable_host if pool.tier else tree.evictable)[pool.part],
        )
        for key, pool in pools.all.items()
    }


def tree_view(tree: RadixTree, limit: int) -> TreeView:
    """The first `limit` nodes, depth first, the longest unused siblings last. Cost: the nodes shown, and their
    siblings, sorted twice."""
    shown: list[NodeView] = []
    for name, root in sorted(tree.roots.items()):
        pending = [(child, 0, sorted(root.children)) for child in _recent_last(root)]
        while pending and len(shown) < limit:
            node, depth, keys = pending.pop()
            shown.append(_node_view(node, depth, name, tree.clock, _alike(node.key, keys)))
            keys = sorted(node.children)
            pending.extend((child, depth + 1, keys) for child in _recent_last(node))
    return TreeView(nodes=tuple(shown), total=len(tree.arena))


def _recent_last(node: Node) -> list[Node]:
    return sorted(node.children.values(), key=lambda child: (child.last_use, child.id))


def _alike(key: bytes, keys: Sequence[bytes]) -> int:
    """Tokens that a node's first page begins with as that of another of these siblings does; `keys` is sorted, so it is
    the next on one side."""
    at = bisect_left(keys, key)
    beside = (*keys[max(at - 1, 0) : at], *keys[at + 1 : at + 2])
    mine = np.frombuffer(key, np.int32)
    return max((int(np.argmax(mine != np.frombuffer(other, np.int32))) for other in beside), default=0)


def _node_view(node: Node, depth: int, namespace: str, now: int, alike: int) -> NodeView:
    return NodeView(
        id=node.id,
        depth=depth,
        namespace=namespace,
        start=node.start,
        end=node.end,
        head_start=node.start + alike,
        head=tuple(node.token_ids()[alike : alike + HEAD_TOKENS].tolist()),
        pages=_page_counts(node),
        pins=node.pins,
        swa_pins=sum(node.window_pins),
        hits=node.hit_count,
        idle=now - node.last_use,
        busy=node.busy,
    )


def _page_counts(node: Node) -> dict[str, int]:
    """By tier and part: "device", "device_swa" and so on; FULL has the name of the tier."""
    return {
        name if part == FULL else f"{name}_{Part(part).name.lower()}": len(pages)
        for name, parts in (("device", node.device), ("host", node.host))
        for part, pages in enumerate(parts)
        if len(pages)
    }
