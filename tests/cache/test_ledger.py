"""The ledger: one owner per page, checked where it happens, with the evidence in the message."""

from __future__ import annotations

import numpy as np
import pytest

from serinus.cache.ledger import (
    FREE_OWNER,
    LEGAL_MOVES,
    PageLedger,
    PageState,
    copy_owner,
    tree_owner,
)
from serinus.core.errors import InvariantError


def pages(*ids: int) -> np.ndarray:
    return np.array(ids, np.int32)


@pytest.fixture
def ledger() -> PageLedger:
    return PageLedger(10)


def test_a_fresh_pool_hands_out_low_pages_first_and_never_page_0(ledger: PageLedger) -> None:
    got = ledger.take(ledger.request_owner("a"), 9)
    assert got.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert ledger.free_pages == 0


def test_freed_pages_are_handed_out_again_in_their_order(ledger: PageLedger) -> None:
    owner = ledger.request_owner("a")
    got = ledger.take(owner, 5)
    ledger.move(got, owner, FREE_OWNER, "free")
    assert ledger.take(owner, 5).tolist() == got.tolist()


def test_pages_for_several_requests_are_those_that_each_would_have_taken() -> None:
    together, apart = PageLedger(20), PageLedger(20)
    counts = [("a", 3), ("b", 1), ("a", 2), ("c", 4)]
    got = together.take_each([(together.request_owner(rid), count) for rid, count in counts], "allocate")
    each = [apart.take(apart.request_owner(rid), count, "allocate").tolist() for rid, count in counts]
    assert got.tolist() == [page for pages in each for page in pages]
    for page in got.tolist():
        assert together.history(page) == apart.history(page)
        assert together.taken_at(page) == apart.taken_at(page)
    assert [together.pages_of_request(rid) for rid in "abc"] == [5, 1, 4]
    assert (together.counts(), together.operation) == (apart.counts(), apart.operation)
    together.check()


def test_several_requests_get_nothing_where_there_is_not_enough_for_all(ledger: PageLedger) -> None:
    with pytest.raises(InvariantError, match="10 pages to take, expected 0 to the 9"):
        ledger.take_each([(ledger.request_owner("a"), 9), (ledger.request_owner("b"), 1)])
    assert ledger.free_pages == 9
    ledger.check()


def test_a_freed_page_cannot_be_freed_again(ledger: PageLedger) -> None:
    owner = ledger.request_owner("a")
    got = ledger.take(owner, 3)
    ledger.move(got[:1], owner, FREE_OWNER, "free")
    with pytest.raises(InvariantError, match=r"O1 page 1 is FREE, expected REQUEST\(a\)"):
        ledger.move(got, owner, FREE_OWNER, "free")
    ledger.check()


def test_a_stolen_page_names_both_owners_and_its_last_operations(ledger: PageLedger) -> None:
    victim, thief = ledger.request_owner("victim"), ledger.request_owner("thief")
    got = ledger.take(victim, 2, "allocate")
    with pytest.raises(InvariantError) as caught:
        ledger.move(got, thief, tree_owner(7), "publish")
    text = str(caught.value)
    assert "page 1 is REQUEST(victim), expected REQUEST(thief) to publish it to TREE(7)" in text
    assert "allocate: FREE -> REQUEST(victim)" in text


def test_a_page_listed_twice_is_refused_and_nothing_changes(ledger: PageLedger) -> None:
    owner = ledger.request_owner("a")
    ledger.take(owner, 3)
    with pytest.raises(InvariantError, match="page 2 is listed twice"):
        ledger.move(pages(1, 2, 3, 2), owner, FREE_OWNER, "free")
    assert ledger.counts().request == 3
    ledger.check()


@pytest.mark.parametrize("bad", [0, -1, 10])
def test_a_page_out_of_range_is_refused(ledger: PageLedger, bad: int) -> None:
    owner = ledger.request_owner("a")
    ledger.take(owner, 9)
    with pytest.raises(InvariantError, match=f"O6 page {bad} is named, expected 1 to 9"):
        ledger.move(pages(1, bad), owner, FREE_OWNER, "free")


def test_pages_of_another_type_are_refused(ledger: PageLedger) -> None:
    owner = ledger.request_owner("a")
    ledger.take(owner, 2)
    with pytest.raises(InvariantError, match="int64"):
        ledger.move(np.array([1, 2]), owner, FREE_OWNER, "free")


def test_more_than_the_free_pages_cannot_be_taken(ledger: PageLedger) -> None:
    with pytest.raises(InvariantError, match="10 pages to take, expected 0 to the 9"):
        ledger.take(ledger.request_owner("a"), 10)
    assert ledger.free_pages == 9


def test_only_legal_moves_are_made(ledger: PageLedger) -> None:
    owners = {
        PageState.REQUEST: ledger.request_owner("a"),
        PageState.TREE: tree_owner(1),
        PageState.COPY: copy_owner(1),
        PageState.QUARANTINED: int(PageState.QUARANTINED),
        PageState.FREE: FREE_OWNER,
    }
    for source, target in ((s, t) for s in owners for t in owners):
        if source is PageState.FREE:
            with pytest.raises(InvariantError, match="out of FREE"):
                ledger.move(pages(1), owners[source], owners[target], "try")
        elif target not in LEGAL_MOVES[source]:
            with pytest.raises(InvariantError, match="no legal move"):
                ledger.move(pages(1), owners[source], owners[target], "try")


def test_a_copied_page_goes_to_the_tree_and_a_quarantined_one_comes_back(ledger: PageLedger) -> None:
    got = ledger.take(copy_owner(3), 2, "load back")
    ledger.move(got, copy_owner(3), tree_owner(1), "complete")
    ledger.move(got[:1], tree_owner(1), int(PageState.QUARANTINED), "quarantine")
    assert (ledger.counts().tree, ledger.counts().quarantined) == (1, 1)
    ledger.move(got[:1], int(PageState.QUARANTINED), FREE_OWNER, "release_quarantined")
    assert ledger.free_pages == 8
    ledger.check()


def test_a_request_that_ends_with_pages_is_a_leak(ledger: PageLedger) -> None:
    ledger.take(ledger.request_owner("a"), 2)
    with pytest.raises(InvariantError, match=r"O3 request a ended and still owns pages \[1, 2\]"):
        ledger.forget_request("a")


def test_a_held_page_is_freed_but_not_handed_out_until_the_last_hold_is_gone(ledger: PageLedger) -> None:
    owner = ledger.request_owner("a")
    got = ledger.take(owner, 9)
    ledger.hold("transfer", got[:2])
    ledger.hold("transfer", got[:1])
    ledger.hold("restore", got[:1])
    ledger.move(got, owner, FREE_OWNER, "free")
    assert (ledger.free_pages, ledger.counts().parked) == (7, 2)
    ledger.unhold("transfer", got[:2])
    assert ledger.free_pages == 8
    ledger.unhold("restore", got[:1])
    assert ledger.free_pages == 8
    assert ledger.holds_of(1) == {"transfer": 1}
    ledger.check()
    ledger.unhold("transfer", got[:1])
    assert (ledger.free_pages, ledger.counts().parked, ledger.held_count) == (9, 0, 0)
    ledger.check()


def test_a_hold_of_a_free_page_or_an_unhold_without_a_hold_is_refused(ledger: PageLedger) -> None:
    with pytest.raises(InvariantError, match="page 4 is FREE, expected an owner to hold it from"):
        ledger.hold("transfer", pages(4))
    got = ledger.take(ledger.request_owner("a"), 1)
    ledger.hold("transfer", got)
    with pytest.raises(InvariantError, match="page 1 has no hold 'restore'"):
        ledger.unhold("restore", got)


def test_the_history_survives_the_end_of_its_log(ledger: PageLedger) -> None:
    owner = ledger.request_owner("a")
    old = ledger.take(owner, 1)
    for _ in range(3000):
        ledger.move(ledger.take(owner, 1), owner, FREE_OWNER, "free")
    assert "became REQUEST, long ago" in ledger.history(int(old[0]))
