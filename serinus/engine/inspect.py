"""What an engine tells of itself: for `/cache` its pools, storage and tree, for `/server_info` its load. Plain data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from serinus.cache import PrefixCache
from serinus.core.parts import Part
from serinus.kernels import stamp_lanes
from serinus.pool import DevicePool
from serinus.pool.storage import ShelfCounts
from serinus.sched import SchedStats

StampsOf = Callable[[Part, int], dict[str, list[list[str]]]]
"""The stamps of a device page: by lane, of each slot token, position, chain hash and digest."""


class _Counted(Protocol):
    def counts(self) -> ShelfCounts: ...


def _no_floor(tokens: int) -> float:
    return 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What is told of an engine beside its state."""

    engine: str = ""
    role: str = "unified"
    shelf: _Counted | None = None
    """The page store of the storage tier; None = there is none."""
    ranks: Callable[[], list[dict[str, Any]]] = list
    """All ranks with their processes, where there are several."""
    device: str = ""
    """Where the model runs."""
    step_floor_s: Callable[[int], float] = _no_floor
    """Seconds that a decode step takes at least, by the tokens that its requests have; 0 = not known."""
    stamps_of: StampsOf | None = None
    """Reads the stamps of a page of the leader's rank; None = there are none."""


def engine_info(stats: SchedStats, own: dict[str, Any], facts: EngineFacts) -> dict[str, Any]:
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
        "ranks": facts.ranks(),
    }


def cache_view(cache: PrefixCache, limit: int, facts: EngineFacts) -> dict[str, Any]:
    """JSON-ready. `limit`: nodes at most.

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
            "quarantined": pool.pages.quarantined,
            "retired": pool.pages.retired,
        }
        for (tier, part), pool in sorted(stats.pools.items())
    ]
    view: dict[str, Any] = {
        "engine": facts.engine,
        "role": facts.role,
        "page_size": stats.page_size,
        "pools": pools,
        "tree": asdict(tree),
    }
    if facts.shelf is not None:
        held = facts.shelf.counts()
        view["storage"] = {
            "pages": held.pages, "bytes": held.byte_count, "removed": held.removed, "bad": held.bad,
        }  # fmt: skip
    return view


def stamps_reader(pools: Mapping[Part, DevicePool]) -> StampsOf:
    """Reads the stamps of pages of these pools, those of one rank. Waits for the device."""

    def stamps_of(part: Part, page: int) -> dict[str, list[list[str]]]:
        pool = pools[part]
        if pool.stamps_LS4 is None:
            return {}
        size = pool.spec.page_size
        stamps = pool.stamps_LS4[:, page * size : (page + 1) * size].tolist()
        return {
            lane.name.lower(): [
                [str(token), str(place), _hex(chain), _hex(digest)] for token, place, chain, digest in rows
            ]
            for lane, rows in zip(stamp_lanes(part), stamps, strict=True)
        }

    return stamps_of


def _hex(value: int) -> str:
    return f"{value & (1 << 64) - 1:016x}"
