"""Pages whose bytes were found wrong: they are neither matched nor allocated until they are released."""

from __future__ import annotations

import numpy as np
import pytest

from serinus.cache import PrefetchState, Tier
from serinus.cache.keys import PageKeys
from serinus.core.errors import CapacityError
from serinus.core.parts import Part
from tests.cache.shop import SIZE, Shop, span


def test_a_quarantined_page_takes_all_behind_it_out_of_sight_and_nothing_before_it() -> None:
    shop = Shop()
    shop.serve("a", span(0, 16))
    shop.serve("b", span(0, 24))
    row = shop.cache.match_prefix("", span(0, 24), 24)
    shop.cache.release(row.lease)
    assert shop.cache.condemn(Part.FULL, row.pages[2:3]).tokens == 16
    assert shop.lengths(span(0, 24)) == (8, 8)
    assert (shop.cache.ledger.counts().quarantined, shop.cache.free()) == (1, 29)
    shop.check()
    shop.cache.evict(99)
    got = shop.cache.allocate("c", 31)
    assert got is not None
    assert row.pages[2] not in got[0]
    assert shop.cache.allocate("c", 1) is None
    shop.cache.release_quarantined(Part.FULL, row.pages)
    again = shop.cache.allocate("c", 1)
    assert again is not None
    assert again[0].tolist() == [row.pages[2]]


def test_a_flush_releases_what_was_quarantined_and_a_refused_one_does_not() -> None:
    shop = Shop(swa=33, window=10)
    guest = shop.seat("a", span(0, 24))
    shop.publish(guest, 24)
    shop.cache.condemn(Part.SWA, guest.swa[4:5])
    shop.cache.condemn(Part.FULL, guest.row[1:2])
    with pytest.raises(CapacityError):
        shop.cache.reset()
    shop.leave(guest)
    assert shop.cache.stats().pages.quarantined == 1
    assert (shop.cache.available(Part.FULL), shop.cache.available(Part.SWA)) == (31, 31)
    shop.cache.reset()
    assert shop.cache.stats().pages.quarantined == 0
    assert (shop.cache.free(Part.FULL), shop.cache.free(Part.SWA)) == (32, 32)
    shop.check()


def test_requests_that_hold_a_quarantined_page_keep_it_and_publish_nothing_behind_it() -> None:
    shop = Shop()
    guest = shop.seat("a", span(0, 24))
    shop.publish(guest, 12)
    other = shop.seat("b", span(0, 8))
    assert shop.cache.condemn(Part.FULL, guest.row[1:2]).tokens == 8
    assert (guest.lease.sound_end, other.lease.sound_end) == (4, None)
    shop.check(guest, other)
    shop.publish(guest, 24)
    assert shop.lengths(span(0, 24)) == (4, 4)
    assert shop.cache.poll().failed_loads == ()
    shop.leave(guest)
    shop.check(other)
    assert shop.cache.ledger.counts().quarantined == 1
    shop.leave(other)
    assert shop.lengths(span(0, 8)) == (8, 8), "the other computed its own second page"


def test_a_running_requests_own_quarantined_page_is_not_published_and_not_handed_out() -> None:
    shop = Shop()
    guest = shop.seat("a", span(0, 24))
    bad = guest.row[3:4].copy()
    assert shop.cache.condemn(Part.FULL, bad).tokens == 0
    shop.publish(guest, 24)
    assert guest.lease.end == 12
    shop.check(guest)
    shop.leave(guest)
    assert shop.lengths(span(0, 24)) == (12, 12)
    assert shop.cache.ledger.counts().quarantined == 1
    shop.cache.release_quarantined(Part.FULL, bad)
    assert shop.cache.ledger.counts().quarantined == 0
    shop.check()


def test_a_quarantined_window_page_ends_its_prefix_too() -> None:
    shop = Shop(full=33, swa=33, window=8)
    guest = shop.seat("a", span(0, 24))
    shop.publish(guest, 16)
    shop.cache.condemn(Part.SWA, guest.swa[5:6])
    shop.leave(guest)
    assert shop.lengths(span(0, 24)) == (20, 20)
    assert shop.cache.ledgers[Tier.DEVICE, Part.SWA].counts().quarantined == 1
    shop.check()


def test_copies_on_host_and_storage_are_forgotten_with_the_page() -> None:
    shop = Shop(full=33, host=65, storage=True)
    shop.serve("a", span(0, 16))
    shop.settle()
    shop.answer("write")
    found = shop.cache.match_prefix("", span(0, 16), 16)
    shop.cache.condemn(Part.FULL, found.pages[1:2])
    shop.cache.release(found.lease)
    assert shop.cache.ledger.counts().quarantined == 1
    assert len(shop.cache.host_pages()) == 1
    shop.cache.evict(99)
    shop.cache.evict(99, Tier.HOST)
    assert shop.cache.prefetch("b", "", span(0, 16))
    shop.answer("query")
    shop.answer("read")
    assert (shop.cache.prefetch_state("b"), shop.cache.prefetched_tokens("b")) == (PrefetchState.GRAFT, 4)
    shop.check()


def test_what_is_free_cannot_be_quarantined() -> None:
    shop = Shop()
    assert shop.cache.condemn(Part.FULL, span(1, 9)).tokens == 0
    assert shop.cache.free() == 32
    assert shop.cache.allocate("a", 32) is not None


def test_a_page_that_fails_twice_is_retired_and_a_flush_does_not_bring_it_back() -> None:
    shop = Shop()
    for times in (1, 2):
        shop.serve("a", span(0, 8))
        found = shop.cache.match_prefix("", span(0, 8), 8)
        page = found.pages[:1].copy()
        shop.cache.condemn(Part.FULL, page)
        shop.cache.condemn(Part.FULL, page)  # the same failure, told twice
        shop.cache.release(found.lease)
        counts = shop.cache.ledger.counts()
        assert (counts.quarantined, counts.retired) == ((1, 0) if times == 1 else (0, 1))
        shop.cache.reset()
        shop.check()
    shop.cache.release_all_quarantined()
    assert shop.cache.ledger.counts().retired == 1
    got = shop.cache.allocate("b", 31)
    assert got is not None
    assert page[0] not in got[0]
    assert shop.cache.allocate("b", 1) is None


def test_a_requests_own_page_is_retired_when_it_gives_it_back_and_what_a_peer_sent_wrong_is_no_failure() -> None:
    shop = Shop()
    own = None
    for times, counts in ((0, False), (1, True), (2, True)):
        guest = shop.seat("a", span(0, 24))
        own = guest.row[3:4].copy() if own is None else own
        assert own[0] in guest.row
        shop.cache.condemn(Part.FULL, own, counts=counts)
        shop.leave(guest)
        assert shop.cache.ledger.counts().retired == (times == 2)
        shop.cache.reset()
    shop.check()


def test_quarantine_is_bounded_the_first_pages_of_it_go_back_to_work() -> None:
    shop = Shop()
    shop.serve("a", span(0, 80))
    found = shop.cache.match_prefix("", span(0, 80), 80)
    for page in found.pages[::-1]:
        shop.cache.condemn(Part.FULL, np.array([page], np.int32))
    assert shop.cache.ledger.counts().quarantined == 20, "the lease reads all of them still"
    shop.cache.release(found.lease)
    shop.serve("b", span(100, 104))
    other = shop.cache.match_prefix("", span(100, 104), 4)
    shop.cache.release(other.lease)
    shop.cache.condemn(Part.FULL, other.pages)
    assert shop.cache.ledger.counts().quarantined == 16
    shop.check()


def keys_of(tokens: np.ndarray) -> list[bytes]:
    names = PageKeys("", SIZE)
    chained = names.chain(names.seed(b""), tokens.tobytes())
    return [chained[at : at + 16] for at in range(0, len(chained), 16)]


def stored_shop() -> tuple[Shop, np.ndarray]:
    """A prompt of four pages on every tier, and its device pages."""
    shop = Shop(full=33, host=65, storage=True)
    shop.serve("a", span(0, 16))
    shop.settle()
    shop.answer("write")
    match = shop.cache.match_prefix("", span(0, 16), 16)
    shop.cache.release(match.lease)
    return shop, match.pages


def test_what_was_condemned_is_removed_from_the_storage_and_read_again_only_when_it_is_gone() -> None:
    shop, pages = stored_shop()
    keys = keys_of(span(0, 16))
    assert shop.cache.condemn(Part.FULL, pages[2:3])
    assert shop.cache.poll().in_flight == 1
    assert shop.storage.asked == [("remove", shop.storage.asked[0][1], (), sorted(keys[2:]))]
    shop.cache.evict(99)
    shop.cache.evict(99, Tier.HOST)
    assert shop.cache.prefetch("b", "", span(0, 20))
    shop.answer("query")
    assert [len(entry[3]) for entry in shop.storage.asked if entry[0] == "read"] == [2]
    shop.answer("read")
    shop.cache.release_aborted_request("b")
    assert shop.storage.answer("remove", torn=2) == 1
    assert shop.cache.poll().in_flight == 0
    shop.cache.poll()
    assert not shop.storage.asked, "removed twice"
    assert shop.cache.stats().removed_pages == 2
    shop.serve("c", span(0, 16))
    shop.settle()
    shop.answer("write")
    shop.cache.evict(99)
    shop.cache.evict(99, Tier.HOST)
    assert shop.cache.prefetch("d", "", span(0, 20))
    shop.answer("query")
    assert [len(entry[3]) for entry in shop.storage.asked if entry[0] == "read"] == [4], "the right pages are no use"
    shop.answer("read")
    shop.check()


def test_a_removal_that_failed_leaves_its_pages_unread() -> None:
    shop, pages = stored_shop()
    shop.cache.condemn(Part.FULL, pages[:1])
    shop.cache.poll()
    (entry,) = shop.storage.asked
    shop.storage.asked.clear()
    shop.storage.fail(entry[1])
    assert shop.cache.poll().in_flight == 0
    assert shop.cache.prefetch("b", "", span(0, 20))
    shop.answer("query")
    assert shop.cache.prefetch_state("b") is PrefetchState.MISS
    assert not shop.storage.asked, "it is asked for again and again"


def test_what_was_read_before_its_page_was_condemned_becomes_no_node() -> None:
    shop, _ = stored_shop()
    keys = keys_of(span(0, 16))
    shop.cache.evict(99)
    shop.cache.evict(99, Tier.HOST)
    assert shop.cache.prefetch("b", "", span(0, 20))
    shop.answer("query")
    shop.storage.recalls += [keys[3], keys[1]]
    shop.answer("read")
    assert shop.lengths(span(0, 20)) == (0, 4)
    assert shop.cache.stats().pools[Tier.HOST, Part.FULL].pages.copy == 0
    shop.check()


def test_what_another_engine_removed_is_cut_here_what_was_made_of_it_goes_too_and_requests_on_it_are_told() -> None:
    shop, pages = stored_shop()
    keys = keys_of(span(0, 20))
    above = shop.seat("above", span(0, 10))
    below = shop.seat("below", span(0, 20))
    assert (above.lease.end, below.lease.end) == (8, 16)
    shop.publish(below, 20)
    shop.storage.recalls += [b"nobodys key 1234", keys[2], keys[3]]
    assert shop.cache.poll().failed_loads == (below.lease,)
    assert below.lease.sound_end == 8
    assert shop.lengths(span(0, 20)) == (8, 8)
    assert [entry[3] for entry in shop.storage.asked] == [keys[4:]], "the others are removed already"
    shop.check(above, below)
    shop.leave(above)
    shop.leave(below)
    assert shop.cache.stats().pages.quarantined == 0
    shop.check()
    assert len(pages) == 4


@pytest.mark.parametrize("cached", [True, False], ids=["the device has it too", "the host has it alone"])
def test_a_host_page_that_is_found_wrong_before_it_is_stored_is_given_up(cached: bool) -> None:
    shop = Shop(full=33, host=65, storage=True)
    shop.serve("a", span(0, 16))
    shop.settle()
    assert len(shop.cache.host_pages()) == 4
    if not cached:
        shop.cache.evict(99)
    shop.answer("write", bad=(2,))
    assert len(shop.cache.host_pages()) == 2, "from the wrong page on"
    assert shop.lengths(span(0, 16)) == ((16, 16) if cached else (0, 8))
    shop.check()
    shop.serve("b", span(0, 16), load=not cached)
    shop.settle()
    shop.answer("write")
    assert len(shop.cache.host_pages()) == 4, "copied again"
    assert len(shop.storage.stored) == 4
    shop.check()
