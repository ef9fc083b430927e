"""What an engine tells of itself: for `/cache` its pools, storage and tree, for `/server_info` its load. Plain data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from serinus.cache import PrefixCache
from serinus.pool.storage import ShelfCounts
from serinus.sched import SchedStats

__all__ = ["EngineFacts", "cache_view", "engine_info"]


class _Counted(Protocol):
    def counts(self) -> ShelfCounts: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What is told of an engine beside its state."""

    engine: str = ""
    role: str = "unified"
    shelf: _Counted | None = None
    """The page store of the storage tier; None = there is none."""
    ranks: Callable[[], list[dict[str, Any]]] = list
    """All ranks with their processes, where there are several."""


def engine_info(stats: SchedStats, own: dict[str, Any], facts: EngineFacts | None) -> dict[str, Any]:
    """JSON-ready. `own`: what the engine adds (turns, peers)."""
    return {
        "num_running_reqs": stats.num_running_reqs,
        "num_queue_reqs": stats.num_queue_reqs,
        "num_decode_prealloc_queue_reqs": stats.num_decode_prealloc_queue_reqs,
        "num_decode_transfer_queue_reqs": stats.num_decode_transfer_queue_reqs,
        "num_prefill_inflight_queue_reqs": stats.num_prefill_inflight_queue_reqs,
        "token_usage": stats.token_usage,
        "free_tokens": stats.free_tokens,
        "evictable_tokens": stats.evictable_tokens,
        **own,
        "ranks": [] if facts is None else facts.ranks(),
    }


def cache_view(cache: PrefixCache, limit: int, facts: EngineFacts | None = None) -> dict[str, Any]:
    """JSON-ready. `limit`: nodes at most.

    Cost: proportional to `limit`, whatever the size of the tree.
    """
    facts = facts or EngineFacts()
    stats, tree = cache.stats(), cache.tree_view(limit)
    pools = [
        {
            "tier": tier.name.lower(),
            "part": part.name.lower(),
            "pages": pool.page_count,
            "cached": pool.cached,
            "evictable": pool.evictable,
            "free": pool.pages.free,
            "request": pool.pages.request,
            "copy": pool.pages.copy,
            "quarantined": pool.pages.quarantined,
            "retired": pool.pages.retired,
        }
        for (tier, part), pool in sorted(stats.pools.items())
    ]
    nodes = [
        {
            "depth": node.depth,
            "namespace": node.namespace,
            "start": node.start,
            "end": node.end,
            "head": node.head,
            "pages": dict(node.pages),
            "pins": node.pins,
            "swa_pins": node.window_pins,
            "hits": node.hits,
            "idle": tree.now - node.last_use,
            "busy": node.busy,
        }
        for node in tree.nodes
    ]
    view: dict[str, Any] = {
        "engine": facts.engine,
        "role": facts.role,
        "page_size": stats.page_size,
        "pools": pools,
        "tree": {"total": tree.total, "nodes": nodes},
    }
    if facts.shelf is not None:
        held = facts.shelf.counts()
        view["storage"] = {
            "pages": held.pages, "bytes": held.byte_count, "removed": held.removed, "bad": held.bad,
        }  # fmt: skip
    return view
