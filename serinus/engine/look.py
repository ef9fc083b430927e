"""One thing of the cache looked at: a page with its owner, users, history and stamps; a node of the tree with its
tokens."""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec

from serinus.cache import PageState, PrefixCache, Tier
from serinus.core.errors import BadRequest
from serinus.engine.inspect import StampsOf
from serinus.sched import Scheduler

_TOKENS_SHOWN: Final = 2048
_STATE_MASK: Final = 7


class Look(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What is looked at."""

    what: str
    """A page, or a node of the tree: page, node."""
    tier: str = "device"
    part: str = "full"
    page: Annotated[int, msgspec.Meta(ge=0)] = 0
    node: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Its name in the tree, as `/cache` tells it."""


def look_at(look: Look, cache: PrefixCache, scheduler: Scheduler, stamps_of: StampsOf | None = None) -> dict[str, Any]:
    """JSON-ready. Raises BadRequest: there is no such page or node."""
    if look.what == "page":
        return _page(look, cache, scheduler, stamps_of)
    if look.what == "node":
        return _node(look.node, cache)
    raise BadRequest("what", look.what, "page or node")


def _page(look: Look, cache: PrefixCache, scheduler: Scheduler, stamps_of: StampsOf | None) -> dict[str, Any]:
    names = {(tier.name.lower(), part.name.lower()): (tier, part) for tier, part in cache.pools.all}
    found = names.get((look.tier, look.part))
    if found is None:
        raise BadRequest("tier", f"{look.tier} {look.part}", f"one of {', '.join(map(' '.join, names))}")
    tier, part = found
    pool, page = cache.pools.all[found], look.page
    ledger = pool.ledger
    if not 0 < page < ledger.page_count:
        raise BadRequest("page", page, f"a number from 1 to {ledger.page_count - 1}")
    owner = int(ledger.owner_P[page])
    state = PageState(owner & _STATE_MASK)
    is_device = tier is Tier.DEVICE
    seen = None if pool.sweep.clock is None else pool.sweep.clock.now() - float(pool.sweep.seen_P[page])
    return {
        "tier": look.tier, "part": look.part, "page": page, "first_slot": page * cache.page_size,
        "state": state.name.lower(), "owner": ledger.describe(owner),
        "node": owner >> 3 if state is PageState.TREE else None,
        "position": int(pool.sweep.position_P[page]) if state is PageState.TREE else None,
        "users": list(scheduler.users_of(part, page)) if is_device else [],
        "holds": ledger.holds_of(page), "history": ledger.history(page), "verified_s": seen,
        "failures": cache.tiers.quarantine.failures.get((part, page), 0) if is_device else 0,
        "stamps": stamps_of(part, page) if stamps_of is not None and is_device else [],
    }  # fmt: skip


def _node(node_id: int, cache: PrefixCache) -> dict[str, Any]:
    node = cache.tree.arena.get(node_id)
    if node is None:
        raise BadRequest("node", node_id, "a node that the tree has now")
    tokens, above = node.token_ids().tolist()[:_TOKENS_SHOWN], node.parent
    before: list[int] = []
    while above is not None and len(before) < _TOKENS_SHOWN:
        before = above.token_ids().tolist() + before
        above = above.parent
    return {
        "node": node.id, "start": node.start, "end": node.end, "tokens": tokens, "before": before[-_TOKENS_SHOWN:],
        "hits": node.hit_count, "pins": node.pins, "leases": node.leases, "busy": node.busy,
        "idle": cache.tree.clock - node.last_use, "children": len(node.children),
        "device": [len(pages) for pages in node.device], "host": [len(pages) for pages in node.host],
        "pages": node.device[0].tolist()[:256],
    }  # fmt: skip
