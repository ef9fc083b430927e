"""The face of the cache, one promise a test."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from serinus.cache import CacheGeometry, Insertion, Lease, Pages, PartGeometry, PrefixCache, RowView
from serinus.core.errors import CapacityError, ConfigError, InvariantError
from serinus.core.parts import Part
from tests.cache.shop import full

SIZE = 4


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def span(start: int, stop: int) -> np.ndarray:
    return np.arange(start, stop, dtype=np.int32)


def device(page_count: int, page_size: int = SIZE, **settings: Any) -> PrefixCache:
    return PrefixCache(
        CacheGeometry(page_size=page_size, parts={Part.FULL: PartGeometry(pages=page_count)}), **settings
    )


@pytest.fixture
def cache() -> PrefixCache:
    return device(33)


def seat(cache: PrefixCache, rid: str, tokens: np.ndarray, namespace: str = "") -> tuple[Lease, Pages]:
    match = cache.match_prefix(namespace, tokens, len(tokens) - 1)
    own = cache.allocate(rid, -(-len(tokens) // cache.page_size) - len(match.pages))
    assert own is not None
    cache.used(match.lease, match.length)
    return match.lease, np.concatenate((match.pages, own[0]))


def rows(*running: tuple[str, Lease, Pages]) -> list[RowView]:
    return [RowView(rid=rid, lease=lease, spans=full(0, row)) for rid, lease, row in running]


def insert(cache: PrefixCache, lease: Lease, tokens: np.ndarray, row: Pages) -> Insertion:
    start = lease.end
    return cache.insert(lease, tokens[start:], full(start // cache.page_size, row[start // cache.page_size :]))


def serve(cache: PrefixCache, rid: str, tokens: np.ndarray, namespace: str = "") -> Pages:
    lease, row = seat(cache, rid, tokens, namespace)
    cache.finish(rid, lease, tokens, full(0, row))
    return row


def test_a_served_prompt_is_found_again_in_whole_pages(cache: PrefixCache) -> None:
    row = serve(cache, "a", span(0, 14))
    assert cache.probe("", span(0, 14)).device == 12
    match = cache.match_prefix("", span(0, 14), 14)
    assert match.length == 12
    assert match.pages.tolist() == row[:3].tolist()


def test_a_match_is_never_longer_than_max_len_and_splits_there(cache: PrefixCache) -> None:
    row = serve(cache, "a", span(0, 16))
    match = cache.match_prefix("", span(0, 16), 15)
    assert match.length == match.lease.end == 12
    assert match.pages.tolist() == row[:3].tolist()
    assert cache.match_prefix("", span(0, 16), 16).length == 16
    assert cache.match_prefix("", span(0, 16), 0).length == 0
    assert cache.match_prefix("", span(0, 16), -3).length == 0
    cache.sanity_check()


def test_namespaces_share_nothing(cache: PrefixCache) -> None:
    serve(cache, "a", span(0, 8), "tenant")
    assert cache.probe("tenant", span(0, 8)).device == 8
    assert cache.probe("", span(0, 8)).device == 0


def test_probe_changes_nothing(cache: PrefixCache) -> None:
    serve(cache, "a", span(0, 16))
    before = cache.stats()
    assert cache.probe("", ids(0, 1, 2, 3, 4, 5, 6, 7, 99, 99)).device == 8
    assert cache.probe("unknown", span(0, 8)).device == 0
    assert cache.stats() == before


def test_two_requests_over_one_prompt_end_on_one_set_of_pages(cache: PrefixCache) -> None:
    tokens = span(0, 10)
    (lease_a, row_a), (lease_b, row_b) = seat(cache, "a", tokens), seat(cache, "b", tokens)
    cache.commit_row(insert(cache, lease_a, tokens, row_a))
    insertion = insert(cache, lease_b, tokens, row_b)
    assert insertion.pages.tolist() == row_a[:2].tolist()
    assert insertion.duplicates[0].tolist() == row_b[:2].tolist()
    free = cache.free()
    row_b[:2] = insertion.pages
    cache.commit_row(insertion)
    assert cache.free() == free + 2
    cache.sanity_check(rows(("a", lease_a, row_a), ("b", lease_b, row_b)))
    cache.finish("a", lease_a, tokens, full(0, row_a))
    cache.finish("b", lease_b, tokens, full(0, row_b))
    assert (cache.tree.cached[Part.FULL], cache.free()) == (2, 30)


def test_an_insertion_dropped_uncommitted_stops_the_next_operation(cache: PrefixCache) -> None:
    tokens = span(0, 8)
    lease, row = seat(cache, "a", tokens)
    insertion = insert(cache, lease, tokens, row)
    with pytest.raises(InvariantError, match="insertion of a from page 0 up to position 8 was dropped"):
        cache.allocate("b", 1)
    cache.commit_row(insertion)
    with pytest.raises(InvariantError, match="expected the pending one, None"):
        cache.commit_row(insertion)


def test_a_row_that_was_not_rewritten_is_refused_at_the_end(cache: PrefixCache) -> None:
    tokens = span(0, 8)
    (lease_a, row_a), (lease_b, row_b) = seat(cache, "a", tokens), seat(cache, "b", tokens)
    cache.commit_row(insert(cache, lease_a, tokens, row_a))
    cache.commit_row(insert(cache, lease_b, tokens, row_b))
    with pytest.raises(InvariantError, match="O5 row of b has FULL"):
        cache.sanity_check(rows(("a", lease_a, row_a), ("b", lease_b, row_b)))
    with pytest.raises(InvariantError, match="O5 the row of Lease"):
        cache.finish("b", lease_b, tokens, full(0, row_b))


def test_chunks_are_published_from_the_lease(cache: PrefixCache) -> None:
    tokens = span(0, 30)
    lease, row = seat(cache, "a", tokens)
    for computed in (3, 7, 8, 21, 30):
        insertion = insert(cache, lease, tokens[:computed], row)
        cache.commit_row(insertion)
        assert lease.end == insertion.end == computed // SIZE * SIZE
        assert cache.probe("", tokens).device == lease.end
    with pytest.raises(InvariantError, match="insert begins at 4, expected the end of the lease, 28"):
        cache.insert(lease, tokens[4:], full(1, row[1:]))


def test_fewer_pages_than_tokens_are_refused(cache: PrefixCache) -> None:
    tokens = span(0, 16)
    lease, row = seat(cache, "a", tokens)
    with pytest.raises(InvariantError, match="2 pages for 16 tokens, expected 4 or more"):
        cache.insert(lease, tokens, full(0, row[:2]))


def test_tokens_of_another_type_are_refused(cache: PrefixCache) -> None:
    with pytest.raises(InvariantError, match="tokens are int64"):
        cache.match_prefix("", np.arange(8), 8)


def test_a_lease_is_released_once(cache: PrefixCache) -> None:
    tokens = span(0, 8)
    lease, row = seat(cache, "a", tokens)
    cache.finish("a", lease, tokens, full(0, row))
    with pytest.raises(InvariantError, match="L5"):
        cache.finish("a", lease, tokens, full(0, row))
    with pytest.raises(InvariantError, match="L5"):
        cache.release(lease)
    with pytest.raises(InvariantError, match="L5"):
        cache.insert(lease, tokens, full(lease.end // 4, row))


def test_a_request_cannot_finish_with_another_ones_lease(cache: PrefixCache) -> None:
    tokens = span(0, 8)
    lease, row = seat(cache, "a", tokens)
    cache.commit_row(insert(cache, lease, tokens, row))
    with pytest.raises(InvariantError, match="b finishes with Lease"):
        cache.finish("b", lease, tokens, full(0, row))


def test_a_request_that_forgets_a_page_at_the_end_is_a_leak(cache: PrefixCache) -> None:
    tokens = span(0, 10)
    lease, row = seat(cache, "a", tokens)
    with pytest.raises(InvariantError, match="O3 request a ended and still owns pages"):
        cache.finish("a", lease, tokens, full(0, row[:2]))


def test_an_aborted_request_publishes_only_what_it_computed(cache: PrefixCache) -> None:
    tokens = span(0, 30)
    lease, row = seat(cache, "a", tokens)
    cache.finish("a", lease, tokens[:9], full(0, row))
    assert (cache.probe("", tokens).device, cache.tree.cached[Part.FULL], cache.free()) == (8, 2, 30)


def test_allocation_evicts_the_unpinned_and_refuses_without_a_trace(cache: PrefixCache) -> None:
    serve(cache, "old", span(0, 40))
    lease, row = seat(cache, "live", span(100, 140))
    assert (cache.free(), cache.evictable()) == (12, 10)
    before = cache.stats()
    assert cache.allocate("x", 23) is None
    assert cache.stats() == before
    got = cache.allocate("x", 22)
    assert got is not None
    assert not set(got[0].tolist()) & set(row.tolist())
    assert cache.probe("", span(0, 40)).device == 0
    cache.finish("live", lease, span(100, 140), full(0, row))
    cache.sanity_check()


def test_eviction_takes_no_more_of_the_last_leaf_than_needed(cache: PrefixCache) -> None:
    serve(cache, "a", span(0, 40))
    assert cache.evict(3) == 3
    assert cache.probe("", span(0, 40)).device == 28
    assert cache.evict(99) == 7
    cache.sanity_check()


def test_a_small_rest_does_not_keep_large_memory_alive() -> None:
    cache = device(4097, 16)
    serve(cache, "a", span(0, 65_536))
    cache.evict(4090)
    (node,) = cache.tree.arena.values()
    assert len(node.device[0]) == 6
    assert node.device[0].base is None or node.device[0].base.size < 20
    assert len(node.tokens.obj) < 20 * 64  # type: ignore[arg-type]


def test_a_held_page_survives_eviction_until_the_transfer_drained(cache: PrefixCache) -> None:
    row = serve(cache, "a", span(0, 128))
    lease, again = seat(cache, "b", np.concatenate((span(0, 12), ids(7))))
    cache.hold("transfer", again[:3])
    cache.finish("b", lease, span(0, 12), full(0, again))
    assert (cache.evictable(), cache.free()) == (28, 1)
    assert cache.allocate("c", 30) is None
    got = cache.allocate("c", 29)
    assert got is not None
    assert not np.isin(row[:3], got[0]).any()
    assert cache.stats().pages.parked == 3 - cache.tree.cached[Part.FULL]
    cache.unhold("transfer", row[:3])
    assert cache.available() == 3
    cache.sanity_check()


def test_flush_empties_an_idle_cache_and_refuses_a_busy_one(cache: PrefixCache) -> None:
    tokens = span(0, 10)
    lease, row = seat(cache, "r1", tokens)
    cache.commit_row(insert(cache, lease, tokens, row))
    cache.hold("transfer", row[:1])
    with pytest.raises(CapacityError, match=r"1 leases; 1 pages of requests r1; 1 pages held by transfer"):
        cache.reset()
    cache.finish("r1", lease, tokens, full(0, row))
    cache.unhold("transfer", row[:1])
    assert cache.reset() == 2
    assert (cache.free(), cache.tree.cached[Part.FULL], cache.probe("", tokens).device) == (32, 0, 0)
    cache.sanity_check([])


def test_without_prefixes_nothing_outlives_its_request() -> None:
    cache = device(33, enable_prefix=False)
    tokens = span(0, 16)
    lease, row = seat(cache, "a", tokens)
    insertion = cache.insert(lease, tokens[8:], full(2, row[2:]))
    assert (len(insertion.pages), insertion.changed) == (0, False)
    cache.commit_row(insertion)
    cache.finish("a", lease, tokens, full(0, row))
    assert (cache.tree.cached[Part.FULL], cache.free(), cache.probe("", tokens).device) == (0, 32, 0)


def test_the_sweep_leaves_out_what_leases_pin_if_asked(cache: PrefixCache) -> None:
    serve(cache, "a", span(0, 8))
    match = cache.match_prefix("", span(0, 8), 4)
    both = cache.walk(0, 1000)
    assert both.cursor == 0
    assert both.positions.tolist() == list(range(8))
    assert both.previous.tolist() == [0, *both.slots[:-1].tolist()]
    assert cache.walk(0, 1000, unlocked_only=True).positions.tolist() == [4, 5, 6, 7]
    cache.release(match.lease)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"page_count": 33, "page_size": 3}, "page_size is 3, expected a power of two from 1 to 128"),
        ({"page_count": 1, "page_size": 4}, "FULL has 1 pages, expected at least 2"),
        ({"page_count": 33, "page_size": 4, "policy": "mru"}, "policy is 'mru', expected one of lru, lfu, fifo"),
    ],
)
def test_a_wrong_setting_is_refused_in_words(settings: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        device(**settings)


def hit(cache: PrefixCache, tokens: np.ndarray) -> None:
    match = cache.match_prefix("", tokens, len(tokens))
    cache.used(match.lease, match.length)
    cache.release(match.lease)


def test_lfu_counts_the_hits_of_children_that_are_gone() -> None:
    cache = device(33, 1, policy="lfu")
    stem = ids(1, 2)
    for last in (3, 4):
        serve(cache, f"r{last}", ids(1, 2, last, 9))
        for _ in range(2):
            hit(cache, ids(1, 2, last, 9))
    serve(cache, "other", ids(5, 6))
    for _ in range(3):
        hit(cache, ids(5, 6))
    cache.evict(4)
    assert cache.probe("", stem).device == 2, "the stem's own children are gone"
    cache.evict(2)
    assert cache.probe("", stem).device == 2, "5 hits went through the stem, 3 through the other"
    assert cache.probe("", ids(5, 6)).device == 0


def test_lfu_ties_fall_to_the_longest_unused_even_through_children() -> None:
    cache = device(33, 1, policy="lfu")
    serve(cache, "a", ids(1, 2, 3))
    hit(cache, ids(1, 2))
    serve(cache, "b", ids(5, 6))
    hit(cache, ids(5, 6))
    hit(cache, ids(1, 2, 3))
    cache.evict(1)
    assert cache.probe("", ids(5, 6)).device == 1
