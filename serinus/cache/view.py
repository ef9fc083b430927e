"""What the cache shows of itself: counters and gauges, and a bounded view of the tree. Reads only."""

from __future__ import annotations

from dataclasses import dataclass

from serinus.cache.node import Node, Tier
from serinus.cache.results import CacheStats, NodeView, PoolStats, TreeView
from serinus.cache.shelves import SLOTS, Shelves
from serinus.cache.tiers import TierController
from serinus.cache.tree import RadixTree
from serinus.core.parts import Part

__all__ = ["CacheCounters", "cache_stats", "tree_view"]

HEAD_TOKENS = 8
NAMES = {"pages": "device", "swa": "device_swa", "host": "host", "host_swa": "host_swa"}


@dataclass(slots=True)
class CacheCounters:
    """Counters of the face; each is told in CacheStats."""

    matched_tokens: int = 0
    hit_tokens: int = 0
    inserted_pages: int = 0
    duplicate_pages: int = 0
    evicted_pages: int = 0
    eviction_seconds: float = 0.0
    sanity_checks: int = 0
    sanity_steps: int = 0


def cache_stats(
    page_size: int, tree: RadixTree, shelves: Shelves, tiers: TierController, counters: CacheCounters
) -> CacheStats:
    """Gauges and counters of all tiers."""
    ledger = shelves.device.ledger
    pages = ledger.counts()
    backups = tiers.backups
    return CacheStats(
        page_count=ledger.page_count - 1,
        page_size=page_size,
        pages=pages,
        evictable_pages=tree.evictable_pages,
        protected_pages=tree.cached_pages - tree.evictable_pages,
        held_pages=ledger.held_count,
        node_count=len(tree.arena),
        matched_tokens=counters.matched_tokens,
        hit_tokens=counters.hit_tokens,
        inserted_pages=counters.inserted_pages,
        duplicate_pages=counters.duplicate_pages,
        evicted_pages=counters.evicted_pages + backups.evicted_pages,
        sanity_checks=counters.sanity_checks,
        pools=_pools(tree, shelves),
        backup_tokens=tiers.backup_tokens,
        backup_seconds=tiers.backup_seconds,
        loaded_tokens=tiers.loaded_tokens,
        load_seconds=tiers.load_seconds,
        failed_copies=tiers.failed_copies,
        dropped_tokens=backups.dropped_tokens,
        demoted_pages=backups.demoted_pages,
        swa_evicted_pages=backups.swa_evicted_pages,
        host_evicted_pages=tiers.host.evicted_pages,
        eviction_seconds=counters.eviction_seconds,
        prefetched_tokens=0 if tiers.prefetches is None else tiers.prefetches.tokens,
        stored_tokens=0 if tiers.writes is None else tiers.writes.tokens,
        sanity_steps=counters.sanity_steps,
    )


def _pools(tree: RadixTree, shelves: Shelves) -> dict[tuple[Tier, Part], PoolStats]:
    cached = {
        (Tier.DEVICE, Part.FULL): (tree.cached_pages, tree.evictable_pages),
        (Tier.DEVICE, Part.SWA): (tree.cached_swa, tree.evictable_swa),
        (Tier.HOST, Part.FULL): (tree.cached_host, tree.evictable_host),
        (Tier.HOST, Part.SWA): (tree.cached_host_swa, tree.evictable_host_swa),
    }
    return {
        pool: PoolStats(
            page_count=shelf.ledger.page_count - 1,
            pages=shelf.ledger.counts(),
            cached=cached[pool][0],
            evictable=cached[pool][1],
        )
        for pool, shelf in shelves.all.items()
    }


def tree_view(tree: RadixTree, limit: int) -> TreeView:
    """The first `limit` nodes, depth first, the longest unused siblings last. Cost: the nodes shown, and their
    siblings."""
    shown: list[NodeView] = []
    for name, root in sorted(tree.roots.items()):
        pending = [(child, 0) for child in _recent_last(root)]
        while pending and len(shown) < limit:
            node, depth = pending.pop()
            shown.append(_node_view(node, depth, name))
            pending.extend((child, depth + 1) for child in _recent_last(node))
    return TreeView(nodes=tuple(shown), total=len(tree.arena), now=tree.clock)


def _recent_last(node: Node) -> list[Node]:
    return sorted(node.children.values(), key=lambda child: (child.last_use, child.id))


def _node_view(node: Node, depth: int, namespace: str) -> NodeView:
    return NodeView(
        depth=depth,
        namespace=namespace,
        start=node.start,
        end=node.end,
        head=tuple(node.token_ids()[:HEAD_TOKENS].tolist()),
        pages={NAMES[slot]: len(getattr(node, slot)) for slot in SLOTS.values() if len(getattr(node, slot))},
        pins=node.pins,
        swa_pins=node.swa_pins,
        hits=node.hit_count,
        last_use=node.last_use,
        busy=node.busy,
    )
