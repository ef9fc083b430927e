"""What the scheduler reports: the outcome of a step, and how things stand. Plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from serinus.cache import PrefixCache
from serinus.core.handoff import ChunkReady
from serinus.core.parts import Part
from serinus.core.request import TokenDelta


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one step brought."""

    deltas: tuple[TokenDelta, ...] = ()
    """For the callers of this engine; at most one per request."""
    chunks: tuple[ChunkReady, ...] = ()
    """For decode engines, in the order of the work."""
    prompt_tokens: int = 0
    """Tokens computed in prompt chunks."""
    decode_tokens: int = 0
    """Tokens computed one per request."""
    new_requests: int = 0
    """Requests that were admitted in the plan of this step."""
    cached_tokens: int = 0
    """Tokens those found in the cache."""
    cached_by_tier: Mapping[str, int] = field(default_factory=dict)
    """The same, by the tier they came from."""
    retracted: int = 0
    """Requests that gave their pages back in the plan of this step."""


@dataclass(slots=True, kw_only=True)
class Totals:
    """Counters since the start; they only grow."""

    requests: int = 0
    """Requests that `add` took."""
    finished: int = 0
    """Ended by STOP or LENGTH, or handed off whole."""
    aborted: int = 0
    """Ended by ABORT (client, operator, peer)."""
    retracted: int = 0
    """Times a request gave its pages back under pressure."""
    recomputed: int = 0
    """Remote requests that were computed here after all."""
    healed_tokens: int = 0
    """Tokens computed again because KV was found wrong."""
    wrong_streams: int = 0
    """Requests that ended because a token had left that turned out wrong."""
    prompt_tokens: int = 0
    """Prompt tokens of requests whose prompt was answered."""
    computed_tokens: int = 0
    """Tokens that went through the model, recomputed ones included."""
    generation_tokens: int = 0
    """Tokens that this engine generated."""
    cached_tokens: dict[str, int] = field(default_factory=dict)
    """Prompt tokens found in a cache, by tier."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedStats:
    """How things stand now."""

    num_running_reqs: int
    """In the batch: prefilling or decoding."""
    num_queue_reqs: int
    """Waiting to be computed here."""
    num_retracted_reqs: int
    """Of those, how many had run already."""
    num_prefill_inflight_queue_reqs: int
    """Prefilled for a peer, pages not drained."""
    num_decode_prealloc_queue_reqs: int
    """Remote requests without pages."""
    num_decode_transfer_queue_reqs: int
    """Remote requests with reserved pages."""
    total_tokens: int
    """Slots of the pool, without the padding page."""
    free_tokens: int
    """Slots of free pages."""
    evictable_tokens: int
    """Slots of cached pages that no request uses."""
    used_tokens: int
    """Slots of all other pages."""
    token_usage: float
    """used / total, of the part that is fuller."""
    in_flight: int
    """Copies and storage operations that have not ended: a waiting request may be able to run as soon as one does."""
    totals: Totals
    """A copy of the counters."""


def sched_stats(
    totals: Totals, cache: PrefixCache, *, running: int, queued: int, retracted: int, inflight: int, prealloc: int,
    transfer: int, in_flight: int,
) -> SchedStats:  # fmt: skip
    """How things stand, from the lengths of the queues and a look at the pools of the device."""
    size = cache.page_size
    total = (cache.page_count - 1) * size
    free, evictable = cache.free() * size, cache.evictable() * size
    used = total - free - evictable
    usage = used / total
    for part, shape in cache.geometry.parts.items():
        if part is not Part.FULL:
            usage = max(usage, 1 - cache.available(part) / (shape.pages - 1))
    return SchedStats(
        num_running_reqs=running,
        num_queue_reqs=queued,
        num_retracted_reqs=retracted,
        num_prefill_inflight_queue_reqs=inflight,
        num_decode_prealloc_queue_reqs=prealloc,
        num_decode_transfer_queue_reqs=transfer,
        total_tokens=total,
        free_tokens=free,
        evictable_tokens=evictable,
        used_tokens=used,
        token_usage=usage,
        in_flight=in_flight,
        totals=replace(totals, cached_tokens=dict(totals.cached_tokens)),
    )
