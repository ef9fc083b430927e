"""The host tier: write policies, leaving the device, loading back, and what happens when copies fail."""

from __future__ import annotations

import numpy as np
import pytest

from serinus.cache import CacheGeometry, PartGeometry, PrefixCache, Tier
from serinus.core.errors import CapacityError, ConfigError, InvariantError
from serinus.core.moves import MoveKind
from serinus.core.parts import Part
from tests.cache.shop import HandMover, Shop, span


def hosted(**settings: object) -> Shop:
    return Shop(**{"full": 33, "host": 65, **settings})  # type: ignore[arg-type]


def on_host(shop: Shop, prompt: np.ndarray) -> None:
    """Served, backed up, and evicted from the device."""
    shop.serve("maker", prompt)
    shop.settle()
    shop.cache.evict(99)
    assert shop.lengths(prompt) == (0, len(prompt) // shop.size * shop.size)


def test_nothing_is_on_the_host_before_its_copy_has_ended() -> None:
    shop = hosted()
    shop.serve("a", span(0, 16))
    shop.cache.poll()
    assert len(shop.mover.open) == 1
    assert shop.cache.stats().pools[Tier.HOST, Part.FULL].cached == 0
    shop.check()
    shop.mover.end()
    assert shop.cache.poll().in_flight == 0
    assert shop.cache.stats().pools[Tier.HOST, Part.FULL].cached == 4
    assert shop.cache.stats().backup_tokens == 16
    shop.check()


def test_clean_leaves_leave_the_device_without_a_wait_and_stay_on_the_host() -> None:
    shop = hosted()
    shop.serve("a", span(0, 16))
    shop.settle()
    freed = shop.cache.evict(4)
    assert (freed, shop.mover.waited) == (4, [])
    assert shop.lengths(span(0, 16)) == (0, 16)
    assert shop.cache.stats().demoted_pages == 4
    shop.check()


def test_a_dirty_leaf_is_copied_and_waited_for_before_its_pages_are_free() -> None:
    shop = hosted(write_policy="write_back")
    shop.serve("a", span(0, 16))
    shop.cache.poll()
    assert not shop.mover.open, "write_back copies nothing early"
    freed = shop.cache.evict(4)
    assert (freed, len(shop.mover.waited)) == (4, 1)
    assert shop.lengths(span(0, 16)) == (0, 16)
    shop.check()


def test_dirty_leaves_are_copied_in_one_batch() -> None:
    shop = hosted(write_policy="write_back")
    for at in (0, 100, 200):
        shop.serve(f"r{at}", span(at, at + 8))
    batches: list[int] = []
    submit = shop.mover.submit
    shop.mover.submit = lambda moves: (batches.append(len(moves)), submit(moves))[1]  # type: ignore[method-assign]
    assert shop.cache.evict(6) == 6
    assert batches == [3]


def test_write_back_does_not_copy_the_parent_and_a_leased_parent_stays() -> None:
    shop = hosted(write_policy="write_back")
    guest = shop.seat("parent", span(0, 8))
    shop.publish(guest, 8)
    shop.serve("child", span(0, 24))
    assert shop.cache.evict(99) == 4
    shop.check(guest)
    assert shop.lengths(span(0, 24)) == (8, 24)
    assert shop.cache.stats().pools[Tier.HOST, Part.FULL].cached == 4, "the parent has no copy, and needs none"
    shop.leave(guest)


def test_clean_ones_among_the_coldest_go_before_dirty_ones() -> None:
    shop = hosted(write_policy="write_through_selective")
    shop.serve("once", span(0, 8))
    shop.serve("twice", span(100, 108))
    shop.serve("twice again", span(100, 108))
    shop.settle()
    assert shop.cache.evict(2) == 2
    assert shop.lengths(span(0, 8)) == (0, 0), "a leaf used once is not worth a copy"
    assert shop.cache.evict(2) == 2
    assert shop.lengths(span(100, 108)) == (0, 8)
    assert shop.mover.waited == []


def test_low_water_copies_the_coldest_early_under_write_back() -> None:
    shop = hosted(write_policy="write_back", full=9)
    shop.serve("a", span(0, 32))
    shop.cache.poll()
    assert len(shop.mover.open) == 1, "no device page is free"


def test_a_parked_request_is_copied_whatever_the_policy() -> None:
    shop = hosted(write_policy="write_back")
    shop.leave(shop.seat("a", span(0, 16)), park=True)
    shop.settle()
    shop.cache.evict(99)
    assert shop.lengths(span(0, 16)) == (0, 16)
    assert shop.mover.waited == []


def test_a_failed_backup_leaves_nothing_on_the_host_and_the_eviction_drops() -> None:
    shop = hosted(write_policy="write_back")
    shop.mover.fails = {MoveKind.BACKUP}
    shop.serve("a", span(0, 16))
    assert shop.cache.evict(4) == 4
    assert shop.lengths(span(0, 16)) == (0, 0)
    stats = shop.cache.stats()
    assert (stats.failed_copies, stats.dropped_tokens) == (1, 16)
    assert stats.pools[Tier.HOST, Part.FULL].pages.free == 64
    shop.check()


def test_without_room_on_the_host_a_dirty_leaf_is_dropped_and_counted() -> None:
    shop = hosted(write_policy="write_back", host=3)
    shop.serve("a", span(0, 16))
    assert shop.cache.evict(4) == 4
    assert shop.cache.stats().dropped_tokens == 16
    shop.check()


def test_a_dropped_leaf_takes_what_hangs_below_it_on_the_host_along() -> None:
    shop = hosted(write_policy="write_back", host=9)
    shop.serve("head", span(0, 8))
    shop.serve("tail", span(0, 16))
    assert shop.cache.evict(2) == 2
    assert shop.lengths(span(0, 16)) == (8, 16)
    shop.mover.fails = {MoveKind.BACKUP}
    assert shop.cache.evict(2) == 2
    assert shop.lengths(span(0, 16)) == (0, 0)
    assert not shop.cache.tree.arena
    shop.check()


def test_the_host_gives_up_duplicates_before_what_is_nowhere_else() -> None:
    shop = hosted(host=9)
    on_host(shop, span(0, 16))
    shop.serve("b", span(100, 116))
    shop.settle()
    assert shop.cache.stats().pools[Tier.HOST, Part.FULL].pages.free == 0
    assert shop.cache.evict(2, Tier.HOST) >= 2
    assert shop.lengths(span(0, 16)) == (0, 16)
    assert shop.lengths(span(100, 116)) == (16, 16)
    shop.check()


def test_the_host_gives_up_the_tail_of_its_coldest_leaf() -> None:
    shop = hosted()
    on_host(shop, span(0, 16))
    on_host(shop, span(100, 116))
    assert shop.cache.evict(1, Tier.HOST) == 1
    assert shop.lengths(span(0, 16)) == (0, 12)
    assert shop.lengths(span(100, 116)) == (0, 16)
    shop.check()


def test_a_load_brings_back_what_the_host_has_and_others_may_match_it_at_once() -> None:
    shop = hosted()
    on_host(shop, span(0, 16))
    guest = shop.seat("b", span(0, 20), load=True)
    assert (guest.match.length, guest.lease.end) == (0, 16)
    (moves,) = shop.mover.open.values()
    assert [(m.kind, m.part, len(m.source)) for m in moves] == [(MoveKind.LOAD, Part.FULL, 4)]
    assert moves[0].target.tolist() == guest.row[:4].tolist()
    other = shop.seat("c", span(0, 20))
    assert other.match.length == 16
    assert len(shop.cache.walk(0, 1000).slots) == 0, "the sweep does not look at pages that are being filled"
    shop.check(guest, other)
    shop.mover.end()
    assert shop.cache.poll().ended_loads == (next(iter(m.op for m in moves)),)
    assert len(shop.cache.walk(0, 1000).slots) == 16
    shop.check(guest, other)
    shop.leave(guest)
    shop.leave(other)
    assert shop.cache.stats().loaded_tokens == 16
    shop.check()


def test_a_load_is_all_or_nothing() -> None:
    shop = hosted()
    on_host(shop, span(0, 64))
    taken = shop.cache.allocate("big", 20)
    assert taken is not None
    match = shop.cache.match_prefix("", span(0, 65), 64)
    assert match.load is not None
    assert (match.load.end, match.load.pages, match.load.tokens) == (64, (16,), 64)
    before = shop.cache.ledger.counts()
    assert shop.cache.load_back("b", match.lease, match.load) is None
    assert shop.cache.ledger.counts() == before
    assert not shop.mover.open
    shop.cache.release(match.lease)
    shop.cache.sanity_check()


def test_the_host_keeps_what_a_plan_needs_until_the_lease_ends() -> None:
    shop = hosted()
    on_host(shop, span(0, 16))
    match = shop.cache.match_prefix("", span(0, 17), 16)
    assert shop.cache.evict(99, Tier.HOST) == 0
    shop.check()
    shop.cache.drop_load(match.lease)
    assert shop.cache.evict(99, Tier.HOST) == 4
    shop.cache.release(match.lease)
    shop.check()


def test_a_request_that_computes_what_the_host_has_gives_its_pages_to_the_node() -> None:
    shop = hosted()
    on_host(shop, span(0, 16))
    guest = shop.seat("b", span(0, 16))
    shop.publish(guest, 16)
    assert shop.lengths(span(0, 16)) == (16, 16)
    assert shop.cache.stats().pools[Tier.HOST, Part.FULL].cached == 4, "the copy is good still"
    shop.check(guest)
    shop.leave(guest)
    shop.cache.poll()
    assert not shop.mover.open


def test_a_failed_load_is_not_matched_and_is_reported_for_the_leases_that_use_it() -> None:
    shop = hosted()
    on_host(shop, span(0, 16))
    first = shop.seat("b", span(0, 20), load=True)
    shop.publish(first, 20)
    second = shop.seat("c", span(0, 24))
    bystander = shop.seat("d", span(100, 108))
    shop.mover.end(ok=False)
    news = shop.cache.poll()
    assert set(news.failed_loads) == {first.lease, second.lease}
    assert first.lease.sound_end == 0
    assert shop.lengths(span(0, 20)) == (0, 0)
    shop.check(first, second, bystander)
    shop.publish(second, 24)
    assert shop.lengths(span(0, 24)) == (0, 0), "what was computed from bad KV is not published"
    quarantined = shop.cache.ledger.counts().quarantined
    assert quarantined == 5, "rows name these pages still"
    shop.leave(first)
    shop.leave(second)
    assert shop.cache.ledger.counts().quarantined == 0
    shop.check(bystander)
    again = shop.seat("b", span(0, 20))
    assert again.match.length == 0
    assert shop.cache.poll().failed_loads == ()


def test_an_eviction_waits_for_a_load_whose_request_is_gone() -> None:
    shop = hosted()
    on_host(shop, span(0, 16))
    shop.leave(shop.seat("b", span(0, 20), load=True), computed=16)
    assert shop.cache.evictable() == 4
    assert shop.cache.evict(4) == 4
    assert len(shop.mover.waited) == 1
    assert shop.lengths(span(0, 16)) == (0, 16)
    shop.check()


def test_completions_that_come_early_wait_for_their_turn() -> None:
    shop = hosted()
    on_host(shop, span(0, 16))
    guest = shop.seat("b", span(0, 20), load=True)
    shop.serve("c", span(100, 116))
    shop.cache.poll()
    shop.mover.end()
    shop.serve("d", span(200, 216))
    assert guest.lease.sound_end is None
    news = shop.cache.poll(settle=[12345])
    assert len(news.ended_loads) == 1
    shop.leave(guest)
    shop.check()


def test_settling_ends_a_load_at_once() -> None:
    shop = hosted()
    on_host(shop, span(0, 16))
    match = shop.cache.match_prefix("", span(0, 17), 16)
    assert match.load is not None
    loaded = shop.cache.load_back("b", match.lease, match.load)
    assert loaded is not None
    assert shop.cache.poll(settle=[loaded.op]).ended_loads == (loaded.op,)
    assert shop.cache.poll(settle=[loaded.op]).ended_loads == ()
    shop.cache.release(match.lease)


def test_a_load_that_others_made_meanwhile_copies_nothing() -> None:
    shop = hosted()
    on_host(shop, span(0, 16))
    late = shop.cache.match_prefix("", span(0, 17), 16)
    guest = shop.seat("b", span(0, 20), load=True)
    assert late.load is not None
    loaded = shop.cache.load_back("late", late.lease, late.load)
    assert loaded is not None
    assert (loaded.op, loaded.length, len(shop.mover.open)) == (0, 16, 1)
    assert loaded.pages.tolist() == guest.row[:4].tolist()
    shop.cache.release(late.lease)
    shop.leave(guest)
    shop.check()


def test_a_hold_on_pages_that_a_load_fills_counts() -> None:
    shop = hosted()
    on_host(shop, span(0, 16))
    guest = shop.seat("b", span(0, 20), load=True)
    pages = guest.row[:2].copy()
    shop.cache.hold("transfer", pages)
    shop.mover.end()
    shop.cache.poll()
    shop.leave(guest)
    assert shop.cache.evictable() == 3
    shop.cache.unhold("transfer", pages)
    assert shop.cache.evictable() == 5
    shop.check()


def test_both_parts_go_to_the_host_and_the_window_alone_comes_back() -> None:
    shop = Shop(full=33, swa=33, window=8, host=65, host_swa=65)
    on_host(shop, span(0, 32))
    match = shop.cache.match_prefix("", span(0, 33), 32)
    assert match.load is not None
    assert match.load.pages == (8, 8), "nodes move as a whole"
    shop.cache.release(match.lease)
    shop.serve("short", span(0, 8))
    shop.settle()
    guest = shop.seat("b", span(0, 36), load=True)
    assert (guest.lease.end, guest.rows[Part.SWA].first) == (32, 6)
    shop.check(guest)
    shop.mover.end()
    shop.cache.poll()
    shop.check(guest)
    shop.leave(guest)
    shop.check()


def test_a_tombstone_is_loaded_from_the_host_where_full_never_left() -> None:
    shop = Shop(full=33, swa=33, window=8, host=65, host_swa=65)
    shop.serve("a", span(0, 16))
    shop.settle()
    shop.cache.evict(99, Tier.DEVICE, Part.SWA)
    match = shop.cache.match_prefix("", span(0, 17), 16)
    assert (match.length, match.load is not None) == (0, True)
    assert match.load is not None
    assert (match.load.pages, match.load.end) == ((0, 2), 16)
    assert shop.cache.evict(99, Tier.HOST) == 2, "the plan needs the last window"
    loaded = shop.cache.load_back("b", match.lease, match.load)
    assert loaded is not None
    assert (len(loaded.pages), loaded.spans[1].first, len(loaded.spans[1].pages)) == (4, 2, 2)
    shop.settle()
    shop.cache.release(match.lease)
    assert shop.lengths(span(0, 16)) == (16, 16)
    shop.check()


def test_a_flush_waits_for_backups_and_names_the_busy_requests_otherwise() -> None:
    shop = hosted()
    guest = shop.seat("a", span(0, 16))
    with pytest.raises(CapacityError, match="1 leases; 4 pages of requests a"):
        shop.cache.reset()
    shop.leave(guest)
    shop.cache.poll()
    assert shop.cache.reset() == 4
    assert len(shop.mover.waited) == 1
    assert shop.cache.stats().pools[Tier.HOST, Part.FULL].pages.free == 64
    assert shop.lengths(span(0, 16)) == (0, 0)
    shop.check()


@pytest.mark.parametrize("policy", ["lru", "lfu", "fifo", "priority"])
def test_every_policy_empties_every_tier(policy: str) -> None:
    shop = hosted(policy=policy)
    for at in range(0, 400, 50):
        shop.serve(f"r{at}", span(at, at + 30))
        shop.cache.poll()
        shop.mover.end()
    shop.settle()
    shop.cache.evict(99)
    shop.cache.evict(99, Tier.HOST)
    assert (shop.cache.free(), len(shop.cache.tree.arena), len(shop.cache.tree.roots)) == (32, 0, 0)
    shop.check()


@pytest.mark.parametrize("parts", [{}, {"swa": 33, "window": 6, "host_swa": 65}])
def test_queues_do_not_keep_nodes_that_have_left_the_tree(parts: dict[str, int]) -> None:
    shop = hosted(**parts)
    for at in range(0, 20_000, 100):
        shop.serve(f"r{at}", span(at, at + 16))
        shop.settle()
    cached = len(shop.cache.tree.arena)
    assert cached < 50
    for queue in shop.cache.tree.queues.all:
        assert len(queue) < 150, f"{queue.name} has {len(queue)} entries of {cached} nodes"
    shop.check()


def test_the_lowest_priority_goes_first() -> None:
    shop = Shop(full=33, policy="priority")
    for rid, at, priority in (("low", 0, 0), ("high", 100, 5), ("later", 200, 0)):
        shop.leave(shop.seat(rid, span(at, at + 8), priority=priority))
    assert shop.cache.evict(4) == 4
    assert shop.lengths(span(100, 108)) == (8, 8)


def test_a_tier_without_its_mover_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match="0 host pages with a mover"):
        PrefixCache(CacheGeometry(page_size=4, parts={Part.FULL: PartGeometry(pages=9)}), mover=HandMover())
    with pytest.raises(ConfigError, match="a storage without a host tier"):
        Shop(storage=True)
    with pytest.raises(ConfigError, match="write policy is 'write_around'"):
        hosted(write_policy="write_around")
    with pytest.raises(ConfigError, match="SWA has no window"):
        Shop(swa=9)


def test_the_tree_view_is_bounded_and_says_where_things_are() -> None:
    shop = hosted()
    on_host(shop, span(0, 16))
    shop.serve("b", span(100, 116), "tenant")
    view = shop.cache.tree_view(1)
    assert (len(view.nodes), view.total) == (1, 2)
    nodes = shop.cache.tree_view(10).nodes
    assert [(n.namespace, n.start, n.end, dict(n.pages)) for n in nodes] == [
        ("", 0, 16, {"host": 4}),
        ("tenant", 0, 16, {"device": 4}),
    ]
    assert nodes[0].head == tuple(range(8))


def test_the_view_shows_of_siblings_what_tells_them_apart() -> None:
    """Branches may begin alike for nearly a page: their first tokens would show the same of each."""
    shop = hosted()
    for name, page in (("a", (1, 2, 3, 4)), ("b", (1, 2, 3, 5)), ("c", (1, 9, 3, 4)), ("d", (7, 8, 9, 9))):
        shop.serve(name, np.array(page * 2, np.int32))
    nodes = shop.cache.tree_view(10).nodes
    assert {each.head_start: each.head[:1] for each in nodes if each.head[0] in (9, 7)} == {1: (9,), 0: (7,)}
    assert sorted((each.head_start, each.head[0]) for each in nodes) == [(0, 7), (1, 9), (3, 4), (3, 5)]
    assert len({(each.head_start, each.head) for each in nodes}) == 4


def test_the_incremental_check_goes_round_and_finds_what_is_wrong() -> None:
    shop = hosted()
    for at in (0, 100, 200):
        shop.serve(f"r{at}", span(at, at + 8))
    assert [shop.cache.sanity_step(2) for _ in range(3)] == [2, 1, 2]
    next(iter(shop.cache.tree.arena.values())).pins = 7
    with pytest.raises(InvariantError, match="L1"):
        shop.cache.sanity_step(3)
