"""Sliding windows: which prefixes are usable, what may go early, and what comes back."""

from __future__ import annotations

import numpy as np
import pytest

from serinus.cache import Tier
from serinus.core.errors import InvariantError
from serinus.core.parts import Part
from tests.cache.shop import Shop, span


def windowed(**settings: int) -> Shop:
    return Shop(**{"full": 33, "swa": 33, "window": 8, **settings})


def tombstone(shop: Shop, count: int) -> None:
    assert shop.cache.evict(count, Tier.DEVICE, Part.SWA) >= count


def test_a_match_gives_the_pages_of_the_window_before_its_end() -> None:
    shop = windowed()
    guest = shop.seat("a", span(0, 40))
    row, swa = guest.row.copy(), guest.swa.copy()
    shop.leave(guest)
    match = shop.cache.match_prefix("", span(0, 41), 40)
    assert (match.length, match.spans[1].first) == (40, 8)
    assert match.pages.tolist() == row.tolist()
    assert match.spans[1].pages.tolist() == swa[8:].tolist()
    assert shop.cache.first_page(Part.SWA, 40) == 8
    shop.cache.release(match.lease)
    shop.check()


def test_a_prefix_without_its_window_is_shorter_than_its_full_pages() -> None:
    shop = windowed()
    shop.serve("head", span(0, 16))
    shop.serve("tail", span(0, 40))
    tail = shop.cache.match_prefix("", span(0, 40), 40)
    tombstone(shop, 2)
    assert shop.lengths(span(0, 40)) == (40, 40), "the lease kept the last window"
    shop.cache.release(tail.lease)
    shop.cache.evict(99, Tier.DEVICE, Part.SWA)
    assert shop.lengths(span(0, 40)) == (0, 0), "FULL is there, and no window of SWA before any end"
    assert shop.cache.tree.cached[Part.FULL] == 10
    shop.check()


def test_the_beginning_needs_no_more_than_there_is() -> None:
    shop = windowed(window=1000)
    shop.serve("a", span(0, 12))
    assert shop.lengths(span(0, 12)) == (12, 12)


def test_a_tombstone_is_filled_by_the_next_request_that_computes_there() -> None:
    shop = windowed()
    shop.serve("a", span(0, 24))
    shop.cache.evict(99, Tier.DEVICE, Part.SWA)
    full = shop.cache.tree.cached[Part.FULL]
    guest = shop.seat("b", span(0, 24))
    assert guest.match.length == 0
    shop.publish(guest, 24)
    assert shop.lengths(span(0, 24)) == (24, 24)
    assert shop.cache.tree.cached[Part.FULL] == full, "the FULL pages were duplicates"
    shop.check(guest)
    shop.leave(guest)
    shop.check()


def test_half_a_tombstone_is_filled_where_the_request_has_pages_only() -> None:
    shop = windowed()
    shop.serve("a", span(0, 32))
    shop.cache.evict(99, Tier.DEVICE, Part.SWA)
    guest = shop.seat("b", span(0, 32))
    shop.cache.advance("b", guest.lease, 32, [guest.drop(Part.SWA, 6)])
    shop.publish(guest, 32)
    assert shop.lengths(span(0, 32)) == (32, 32)
    assert shop.lengths(span(0, 24)) == (0, 0)
    shop.check(guest)
    shop.leave(guest)
    shop.check()


def test_positions_behind_the_window_become_tombstones_if_the_request_dropped_them() -> None:
    shop = windowed()
    guest = shop.seat("a", span(0, 40))
    shop.cache.advance("a", guest.lease, 40, [guest.drop(Part.SWA, 8)])
    shop.publish(guest, 40)
    assert shop.cache.stats().pools[Tier.DEVICE, Part.SWA].cached == 2
    assert shop.lengths(span(0, 40)) == (40, 40)
    shop.check(guest)
    shop.leave(guest)


def test_a_long_request_pins_a_window_of_pages_and_no_more() -> None:
    shop = windowed(full=129, swa=20)
    guest = shop.seat("a", span(0, 12))
    for end in range(12, 400, 4):
        shop.publish(guest, end)
        shop.cache.advance("a", guest.lease, end)
        own = shop.cache.allocate("a", 1, 1)
        assert own is not None, f"no SWA page at {end}, though a window is 2 pages"
        guest.tokens = span(0, end + 4)
        guest.extend(own)
        keep = shop.cache.first_page(Part.SWA, end)
        guest.drop(Part.SWA, keep - guest.rows[Part.SWA].first)
        pool = shop.cache.stats().pools[Tier.DEVICE, Part.SWA]
        assert pool.cached - pool.evictable <= shop.cache.pin_pages_max(Part.SWA)
    shop.check(guest)
    shop.leave(guest, 396)
    shop.check()


def _join(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.concatenate((a, b))


def test_an_insert_without_the_pages_of_its_own_window_is_refused() -> None:
    shop = windowed()
    guest = shop.seat("a", span(0, 24))
    guest.drop(Part.SWA, 6)
    with pytest.raises(InvariantError, match=r"L3 .* reads SWA from 0 on"):
        shop.publish(guest, 24)


def test_tombstones_take_the_head_of_a_long_node_first() -> None:
    shop = Shop(full=300, swa=300, window=8)
    shop.serve("a", span(0, 1024))
    tombstone(shop, 1)
    assert shop.lengths(span(0, 1024)) == (1024, 1024), "the window before its end is still there"
    assert shop.cache.stats().window_evicted_pages == 64


def test_pages_of_both_parts_come_together_or_not_at_all() -> None:
    shop = windowed(swa=9)
    before = shop.cache.stats()
    assert shop.cache.allocate("a", 4, 9) is None
    assert shop.cache.stats() == before
    pages = shop.cache.allocate("a", 4, 8)
    assert pages is not None
    assert [len(each) for each in pages] == [4, 8]


def test_a_held_window_page_survives_its_tombstone() -> None:
    shop = windowed()
    guest = shop.seat("a", span(0, 16))
    shop.publish(guest, 16)
    pages = guest.swa[:4].copy()
    shop.cache.hold("transfer", pages, Part.SWA)
    shop.leave(guest)
    assert shop.cache.evictable(Part.SWA) == 0
    shop.cache.evict(99, Tier.DEVICE, Part.SWA)
    assert shop.cache.free(Part.SWA) == 28
    shop.cache.unhold("transfer", pages, Part.SWA)
    assert shop.cache.free(Part.SWA) == 32
    shop.check()


def test_the_sweep_of_the_window_part_knows_no_predecessor_behind_a_tombstone() -> None:
    shop = windowed()
    shop.serve("head", span(0, 8))
    shop.serve("tail", span(0, 16))
    part = shop.cache.walk(0, 1000, part=Part.SWA)
    assert sorted(part.positions.tolist()) == list(range(16))
    assert (part.previous == 0).sum() == 1
    keep = shop.cache.match_prefix("", span(0, 16), 16)
    shop.cache.evict(2, Tier.DEVICE, Part.SWA)
    part = shop.cache.walk(0, 1000, part=Part.SWA)
    assert sorted(part.positions.tolist()) == list(range(8, 16))
    assert part.previous[part.positions == 8].tolist() == [0]
    assert len(shop.cache.walk(0, 1000, part=Part.SWA, unlocked_only=True).slots) == 0
    shop.cache.release(keep.lease)
    shop.check()
