"""What an engine's cache holds, as plain data for `/cache`: pools, storage, and the first nodes of the tree."""

from __future__ import annotations

from typing import Any, Protocol

from serinus.cache import PrefixCache
from serinus.pool.storage import ShelfCounts

__all__ = ["cache_view"]


class _Counted(Protocol):
    def counts(self) -> ShelfCounts: ...


def cache_view(
    cache: PrefixCache, limit: int, *, engine: str, role: str, shelf: _Counted | None = None
) -> dict[str, Any]:
    """JSON-ready. `limit`: nodes at most; `shelf`: of the storage tier, where there is one.

    Cost: proportional to `limit`, whatever the size of the tree.
    """
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
            "swa_pins": node.swa_pins,
            "hits": node.hits,
            "idle": tree.now - node.last_use,
            "busy": node.busy,
        }
        for node in tree.nodes
    ]
    view: dict[str, Any] = {
        "engine": engine,
        "role": role,
        "page_size": stats.page_size,
        "pools": pools,
        "tree": {"total": tree.total, "nodes": nodes},
    }
    if shelf is not None:
        held = shelf.counts()
        view["storage"] = {
            "pages": held.pages, "bytes": held.byte_count, "removed": held.removed, "bad": held.bad,
        }  # fmt: skip
    return view
