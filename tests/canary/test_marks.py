"""Marks: what a ring had noted when a pass was queued, read when the next one may have noted more."""

from __future__ import annotations

import torch

from serinus.canary.ring import Ring, RingCounts
from serinus.kernels import RING_FIELDS, StampLane


def note(ring: Ring, name: int, checked: int = 4) -> None:
    """What a kernel does that checks some slots and finds one wrong."""
    number = int(ring.count_1)
    ring.rows_QF[number % len(ring.rows_QF)] = name
    ring.count_1 += 1
    ring.checked_L += checked
    ring.due += checked


def test_a_mark_tells_what_was_noted_before_it_and_nothing_later() -> None:
    counts = RingCounts("cpu", 1)
    ring = Ring(8, counts)
    note(ring, 11)
    first = counts.mark()
    note(ring, 22)
    second = counts.mark()
    news = ring.take(first)
    assert news is not None
    assert news.rows == [[11] * RING_FIELDS]
    assert news.is_whole
    news = ring.take(second)
    assert news is not None
    assert news.rows == [[22] * RING_FIELDS]
    assert news.checked == [8] * len(StampLane)
    assert news.is_whole
    assert ring.take(second) is None


def test_a_mark_of_a_pass_that_was_read_with_a_later_one_tells_nothing_twice() -> None:
    counts = RingCounts("cpu", 1)
    ring = Ring(8, counts)
    note(ring, 11)
    mark = counts.mark()
    note(ring, 22)
    news = ring.take()
    assert news is not None
    assert [row[0] for row in news.rows] == [11, 22]
    assert ring.take(mark) is None


def test_a_slot_that_was_due_and_not_checked_is_seen_at_its_mark() -> None:
    counts = RingCounts("cpu", 1)
    ring = Ring(8, counts)
    ring.due += 4
    mark = counts.mark()
    note(ring, 22)
    news = ring.take(mark)
    assert news is not None
    assert not news.is_whole


def test_rows_that_a_later_pass_took_are_told_as_lost() -> None:
    counts = RingCounts("cpu", 1)
    ring = Ring(2, counts)
    note(ring, 11)
    note(ring, 22)
    mark = counts.mark()
    note(ring, 33)
    news = ring.take(mark)
    assert news is not None
    assert ([row[0] for row in news.rows], news.lost) == ([22], 1)
    news = ring.take()
    assert news is not None
    assert ([row[0] for row in news.rows], news.lost) == ([33], 0)


def test_a_mark_keeps_what_its_pass_checked_of_each_sequence() -> None:
    counts = RingCounts("cpu", 2, 3)
    for index in range(2):
        Ring(8, counts, by_sequence=not index)
    counts.by_sequence_N4[:] = torch.arange(12).view(3, 4)
    mark = counts.mark(2)
    counts.by_sequence_N4.fill_(9)
    assert mark.by_sequence() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert counts.mark(1).by_sequence() == [9] * 4


def test_what_was_looked_at_is_told_as_it_was_read_last_and_waits_for_nothing() -> None:
    """The log says it every so many steps. To ask the device would wait for the step that is queued behind."""
    counts = RingCounts("cpu", 2)
    ring, other = Ring(8, counts), Ring(8, counts)
    note(ring, 11)
    note(other, 22, checked=3)
    mark = counts.mark()
    note(ring, 33)
    assert ring.looked == other.looked == [0] * len(StampLane)
    ring.take(mark)
    assert ring.looked == [4] * len(StampLane)
    assert other.looked == [3] * len(StampLane)
    ring.begin_anew()
    assert ring.looked == [0] * len(StampLane)
