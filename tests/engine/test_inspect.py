"""What `/cache` says of a cache."""

from __future__ import annotations

import json

import numpy as np

from serinus.cache import CacheGeometry, PartGeometry, PrefixCache
from serinus.core.parts import PageSpan, Part
from serinus.engine.inspect import EngineFacts, cache_view
from serinus.pool.storage import ShelfCounts


class Shelf:
    def counts(self) -> ShelfCounts:
        return ShelfCounts(pages=3, byte_count=4096, removed=2, bad=1)


def publish(cache: PrefixCache, namespace: str, tokens: list[int]) -> None:
    ids = np.array(tokens, np.int32)
    match = cache.match_prefix(namespace, ids, len(ids))
    pages = cache.allocate("r", len(ids) // 4 - len(match.pages))
    assert pages is not None
    whole = PageSpan(part=Part.FULL, first=0, pages=np.concatenate((match.pages, pages[0])))
    cache.finish("r", match.lease, ids, (whole,))


def test_the_view_shows_pools_and_as_much_of_the_tree_as_is_asked_for() -> None:
    cache = PrefixCache(CacheGeometry(page_size=4, parts={Part.FULL: PartGeometry(pages=33)}))
    publish(cache, "", list(range(16)))
    publish(cache, "", [*range(8), *range(50, 58)])
    publish(cache, "tenant", list(range(8)))
    busy = cache.match_prefix("", np.arange(8, dtype=np.int32), 8)
    view = json.loads(json.dumps(cache_view(cache, 10, EngineFacts(engine="e-0", shelf=Shelf()))))
    assert (view["engine"], view["role"], view["page_size"]) == ("e-0", "unified", 4)
    assert view["storage"] == {"pages": 3, "bytes": 4096, "removed": 2, "bad": 1}
    (pool,) = view["pools"]
    assert (pool["tier"], pool["part"], pool["pages"], pool["cached"], pool["free"]) == ("device", "full", 32, 8, 24)
    assert pool["quarantined"] == 0
    nodes = view["tree"]["nodes"]
    shown = sorted((n["namespace"], n["depth"], n["start"], n["end"], n["pages"]["device"], n["pins"]) for n in nodes)
    assert shown == [
        ("", 0, 0, 8, 2, 1),
        ("", 1, 8, 16, 2, 0),
        ("", 1, 8, 16, 2, 0),
        ("tenant", 0, 0, 8, 2, 0),
    ]
    assert {tuple(n["head"]) for n in nodes if n["depth"]} == {tuple(range(8, 16)), tuple(range(50, 58))}
    cache.release(busy.lease)
    few = cache_view(cache, 2, EngineFacts(engine="e-0"))
    assert len(few["tree"]["nodes"]) == 2
    assert few["tree"]["total"] == 4
    assert "storage" not in few


def test_pages_in_quarantine_are_counted_apart() -> None:
    cache = PrefixCache(CacheGeometry(page_size=4, parts={Part.FULL: PartGeometry(pages=33)}))
    publish(cache, "", list(range(16)))
    match = cache.match_prefix("", np.arange(16, dtype=np.int32), 16)
    cache.release(match.lease)
    cache.condemn(Part.FULL, match.pages[2:3])
    (pool,) = cache_view(cache, 10, EngineFacts())["pools"]
    assert pool["quarantined"] == 1
