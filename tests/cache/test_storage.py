"""Storage and events: prefetch in all its states, write-through, and what routers are told."""

from __future__ import annotations

import numpy as np
import pytest

from serinus.cache import AllBlocksCleared, BlockRemoved, BlockStored, PrefetchState, Tier
from serinus.cache.events import EVENTS_MAX
from serinus.core.parts import Part
from tests.cache.shop import Shop, span


def stored(prompt_len: int = 16, **settings: object) -> Shop:
    """A shop whose storage has a prompt that device and host lost."""
    shop = Shop(**{"full": 33, "host": 65, "storage": True, **settings})  # type: ignore[arg-type]
    shop.serve("maker", span(0, prompt_len))
    shop.settle()
    shop.answer("write")
    assert shop.cache.reset() > 0
    assert shop.cache.stats().stored_tokens == prompt_len
    return shop


def test_what_the_host_has_got_is_stored_and_held_until_the_writer_is_done() -> None:
    shop = Shop(full=33, host=65, storage=True)
    shop.serve("a", span(0, 16))
    shop.settle()
    assert shop.cache.poll().in_flight == 1
    assert shop.cache.evict(99, Tier.HOST) == 0, "a write reads these pages"
    shop.check()
    assert shop.storage.answer("write") == 1
    assert shop.cache.poll().in_flight == 0
    assert shop.cache.evict(99, Tier.HOST) == 4
    shop.check()


def test_a_node_that_is_split_before_its_write_begins_is_stored_whole() -> None:
    shop = Shop(full=257, host=257, storage=True)
    shop.serve("more than is written at once", span(1000, 1256))
    shop.serve("a", span(0, 32))
    shop.settle()
    assert len(shop.storage.asked) == 1, "nothing waits"
    shop.serve("b", np.concatenate((span(0, 16), span(500, 516))))
    shop.settle()
    while shop.storage.answer("write"):
        shop.cache.poll()
    assert shop.cache.stats().stored_tokens == 256 + 32 + 16
    shop.cache.reset()
    assert shop.cache.prefetch("c", "", span(0, 32))
    shop.answer("query")
    shop.answer("read")
    assert shop.lengths(span(0, 32)) == (0, 32)
    shop.check()


def test_a_storage_that_does_not_get_on_has_no_more_waiting_than_the_host_has() -> None:
    shop = Shop(full=33, host=257, storage=True)
    for at in range(0, 20_000, 100):
        shop.serve(f"r{at}", span(at, at + 16))
        shop.settle()
    under_way, cached = len(shop.storage.asked), len(shop.cache.tree.arena)
    assert (under_way, cached) == (16, 64)
    assert shop.cache.tiers.in_flight - under_way <= 2 * cached
    left = shop.cache.tiers.in_flight
    while shop.storage.answer("write"):
        shop.cache.poll()
        assert shop.cache.tiers.in_flight < left
        left = shop.cache.tiers.in_flight
    assert shop.cache.stats().stored_tokens == cached * 16, "all that the host still has is stored"
    shop.check()


@pytest.mark.parametrize("policy", ["lru", "priority"])
def test_a_prefetch_makes_no_room_by_the_prefix_that_it_goes_on_from(policy: str) -> None:
    """The host gives up the end of what it has used least recently first: that end is what is asked for next."""
    shop = stored(32, host=17, policy=policy)
    shop.cache.prefetch("b", "", span(0, 16))
    for kind in ("query", "read"):
        shop.storage.answer(kind)
        shop.cache.poll()
    for first in (100, 200, 300):
        shop.serve(f"r{first}", span(first, first + 16))
        shop.settle()
        shop.storage.answer("write")
        shop.cache.poll()
    shop.cache.evict(99)
    assert [shop.lengths(span(first, first + 32))[1] for first in (0, 100, 200, 300)] == [16] * 4
    shop.cache.prefetch("c", "", span(0, 32))
    for kind in ("query", "read"):
        shop.storage.answer(kind)
        shop.cache.poll()
    assert [shop.lengths(span(first, first + 32))[1] for first in (0, 100, 200, 300)] == [32, 0, 16, 16]
    shop.check()


def test_what_a_prefetch_brings_is_as_important_as_its_request() -> None:
    shop = stored(policy="priority")
    for rid, first, priority in (("a", 100, 2), ("b", 200, 0)):
        shop.leave(shop.seat(rid, span(first, first + 8), priority=priority))
    shop.settle()
    shop.storage.answer("write")
    shop.cache.poll()
    shop.cache.evict(99)
    shop.cache.prefetch("c", "", span(0, 16), priority=1)
    for kind in ("query", "read"):
        shop.storage.answer(kind)
        shop.cache.poll()
    left = []
    for count in (2, 4, 2):
        left.append([shop.lengths(span(first, first + 8))[1] for first in (100, 0, 200)])
        assert shop.cache.evict(count, Tier.HOST) == count
    assert left == [[8, 8, 8], [8, 8, 0], [8, 0, 0]]
    shop.check()


def test_a_prefetch_brings_a_prefix_to_the_host() -> None:
    shop = stored()
    assert shop.cache.prefetch("b", "", span(0, 20))
    assert shop.cache.prefetch_state("b") is PrefetchState.QUERY
    assert shop.storage.answer("query") == 1
    assert shop.cache.poll().prefetched == ()
    assert shop.cache.prefetch_state("b") is PrefetchState.READ
    assert shop.lengths(span(0, 20)) == (0, 0)
    shop.check()
    shop.storage.answer("read")
    assert shop.cache.poll().prefetched == ("b",)
    assert (shop.cache.prefetch_state("b"), shop.cache.prefetched_tokens("b")) == (PrefetchState.GRAFT, 16)
    assert shop.lengths(span(0, 20)) == (0, 16)
    shop.check()
    shop.serve("b", span(0, 20), load=True)
    assert shop.cache.prefetch_state("b") is PrefetchState.NONE
    shop.check()


def test_a_prefetch_of_pages_that_are_not_stored_is_a_miss() -> None:
    shop = stored()
    assert shop.cache.prefetch("b", "", span(500, 520))
    shop.storage.answer("query")
    assert shop.cache.poll().prefetched == ("b",)
    assert shop.cache.prefetch_state("b") is PrefetchState.MISS
    shop.check()


def test_nothing_is_asked_where_device_and_host_have_it_all() -> None:
    shop = Shop(full=33, host=65, storage=True)
    shop.serve("a", span(0, 16))
    assert not shop.cache.prefetch("b", "", span(0, 18))
    assert not Shop(full=33).cache.prefetch("b", "", span(0, 16))


def test_a_torn_page_ends_what_is_grafted() -> None:
    shop = stored()
    shop.cache.prefetch("b", "", span(0, 16))
    shop.answer("query")
    shop.answer("read", torn=2)
    assert shop.lengths(span(0, 16)) == (0, 8)
    assert shop.cache.prefetched_tokens("b") == 8
    assert shop.cache.stats().pools[Tier.HOST, Part.FULL].pages.copy == 0
    shop.check()


def test_a_prefetch_shrinks_to_the_room_there_is() -> None:
    shop = stored(host=5)
    shop.cache.prefetch("b", "", span(0, 16))
    shop.answer("query")
    shop.answer("read")
    assert shop.lengths(span(0, 16)) == (0, 8), "half of the host at most"
    shop.check()


def test_the_deadline_takes_what_has_come_and_lets_the_readers_end() -> None:
    shop = stored(prompt_len=400, full=129, host=301)
    shop.cache.prefetch("b", "", span(0, 400))
    shop.answer("query")
    assert [len(entry[3]) for entry in shop.storage.asked] == [64, 36]
    late = shop.storage.asked.pop()
    shop.answer("read")
    assert shop.cache.prefetch_cut("b") == 256
    assert shop.cache.prefetch_state("b") is PrefetchState.CUT
    assert shop.lengths(span(0, 400)) == (0, 256)
    assert shop.storage.cancelled == [late[1]]
    assert shop.cache.stats().pools[Tier.HOST, Part.FULL].pages.copy == 36, "the reader may still write there"
    shop.check()
    shop.storage.asked.append(late)
    shop.answer("read")
    assert shop.cache.stats().pools[Tier.HOST, Part.FULL].pages.copy == 0
    assert shop.cache.prefetch_cut("b") == 256, "once is enough"
    shop.check()


@pytest.mark.parametrize("state", [PrefetchState.QUERY, PrefetchState.READ, PrefetchState.GRAFT, PrefetchState.CUT])
def test_an_aborted_request_leaves_its_prefetch_safely_in_any_state(state: PrefetchState) -> None:
    shop = stored()
    shop.cache.prefetch("b", "", span(0, 16))
    if state is not PrefetchState.QUERY:
        shop.storage.answer("query")
        shop.cache.poll()
    if state is PrefetchState.GRAFT:
        shop.storage.answer("read")
        shop.cache.poll()
    if state is PrefetchState.CUT:
        shop.cache.prefetch_cut("b")
    assert shop.cache.prefetch_state("b") is state
    shop.cache.release_aborted_request("b")
    shop.cache.release_aborted_request("b")
    assert shop.cache.prefetch_state("b") is PrefetchState.NONE
    shop.check()
    shop.storage.answer("query")
    shop.storage.answer("read")
    assert shop.cache.poll().in_flight == 0
    assert shop.cache.stats().pools[Tier.HOST, Part.FULL].pages.copy == 0
    shop.check()
    shop.cache.reset()


def test_a_graft_whose_beginning_is_gone_is_a_miss() -> None:
    shop = Shop(full=33, host=65, storage=True)
    shop.serve("a", span(0, 32))
    shop.settle()
    shop.answer("write")
    shop.cache.evict(99)
    shop.cache.evict(4, Tier.HOST)
    assert shop.lengths(span(0, 32)) == (0, 16)
    shop.cache.prefetch("b", "", span(0, 32))
    shop.answer("query")
    shop.cache.evict(99, Tier.HOST)
    shop.answer("read")
    assert shop.cache.prefetch_state("b") is PrefetchState.MISS
    assert shop.cache.stats().pools[Tier.HOST, Part.FULL].pages.free == 64
    shop.check()


def test_pages_that_another_request_computed_meanwhile_are_not_grafted() -> None:
    shop = stored(32)
    shop.cache.prefetch("b", "", span(0, 32))
    shop.answer("query")
    shop.serve("c", span(0, 20))
    shop.answer("read")
    assert shop.cache.prefetched_tokens("b") == 12
    assert shop.lengths(span(0, 32)) == (20, 32)
    shop.check()


def test_a_window_is_prefetched_with_its_prefix() -> None:
    shop = stored(40, swa=33, window=8, host_swa=65)
    shop.cache.prefetch("b", "", span(0, 40))
    shop.answer("query")
    assert [(entry[2], len(entry[3])) for entry in shop.storage.asked] == [((Part.SWA,), 2), ((Part.FULL,), 10)]
    shop.answer("read")
    assert shop.lengths(span(0, 40)) == (0, 40)
    assert shop.lengths(span(0, 36)) == (0, 0)
    shop.check()
    shop.serve("b", span(0, 44), load=True)
    shop.settle()
    shop.check()


def test_a_prefix_is_found_as_far_as_its_window_was_stored() -> None:
    shop = stored(40, swa=33, window=8, host_swa=65)
    keys = sorted(key for part, key in shop.storage.stored if part is Part.SWA)
    shop.cache.prefetch("probe", "", span(0, 40))
    ((_, _, _, asked),) = shop.storage.asked
    shop.cache.release_aborted_request("probe")
    shop.answer("query")
    shop.storage.stored.discard((Part.SWA, asked[8]))
    assert asked[8] in keys
    shop.cache.prefetch("b", "", span(0, 40))
    shop.answer("query")
    shop.answer("read")
    assert shop.lengths(span(0, 40)) == (0, 32)
    shop.check()


def test_keys_differ_in_everything_that_shapes_the_bytes() -> None:
    keys: list[bytes] = []
    for namespace, salt, start in (("bf16", "", 0), ("fp8", "", 0), ("bf16", "tenant", 0), ("bf16", "", 1)):
        shop = Shop(full=33, host=65, storage=True, namespace=namespace)
        shop.cache.prefetch("a", salt, span(start, start + 8))
        keys += shop.storage.asked[0][3]
    assert len(set(keys)) == len(keys) == 8


def test_namespaces_share_nothing_on_any_tier() -> None:
    shop = stored()
    shop.cache.prefetch("b", "tenant", span(0, 16))
    shop.answer("query")
    assert shop.cache.prefetch_state("b") is PrefetchState.MISS
    shop.serve("c", span(0, 16))
    shop.settle()
    assert shop.lengths(span(0, 16), "tenant") == (0, 0)


def test_events_tell_routers_where_blocks_are() -> None:
    shop = Shop(full=33, host=65, kv_events=True)
    shop.serve("a", span(0, 8))
    shop.serve("b", span(0, 16))
    first, second = shop.cache.take_events()
    assert isinstance(first, BlockStored)
    assert isinstance(second, BlockStored)
    assert (first.parent_block_hash, first.medium, first.block_size) == (None, "GPU", 4)
    assert second.parent_block_hash == first.block_hashes[-1]
    assert second.token_ids == tuple(range(8, 16))
    shop.settle()
    assert [(type(e), e.medium) for e in shop.cache.take_events()] == [(BlockStored, "CPU")] * 2  # type: ignore[union-attr]
    shop.cache.evict(1)
    (gone,) = shop.cache.take_events()
    assert gone == BlockRemoved(block_hashes=second.block_hashes, medium="GPU")
    shop.cache.reset()
    assert shop.cache.take_events() == [AllBlocksCleared()]
    assert shop.cache.take_events() == []


def test_where_events_are_not_taken_readers_are_told_to_start_over() -> None:
    shop = Shop(full=33, kv_events=True)
    log = shop.cache.events
    assert log is not None
    for number in range(EVENTS_MAX + 1):
        log.removed(number.to_bytes(16, "little"), Tier.DEVICE)
    start, last = shop.cache.take_events()
    assert start == AllBlocksCleared()
    assert last == BlockRemoved(block_hashes=(EVENTS_MAX,), medium="GPU")


def test_events_of_a_trimmed_leaf_name_the_blocks_that_went() -> None:
    shop = Shop(full=33, kv_events=True)
    shop.serve("a", span(0, 16))
    (stored_event,) = shop.cache.take_events()
    assert isinstance(stored_event, BlockStored)
    shop.cache.evict(1)
    assert shop.cache.take_events() == [BlockRemoved(block_hashes=stored_event.block_hashes[3:], medium="GPU")]
    assert Shop(full=33).cache.take_events() == []
