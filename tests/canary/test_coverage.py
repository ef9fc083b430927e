"""Which pages are due when: every slot within its turns, none twice in a step, and the count that the watch needs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serinus.canary.coverage import due_pages, pieces, reads_of, turn_size
from serinus.kernels import DuePages
from serinus.kernels.cpu import canary as cpu
from serinus.kernels.due import entries_of
from serinus.kernels.ref import canary as ref

BOUNDS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), min_size=1, max_size=5)
NAMES = 100


def due_of(bounds: list[tuple[int, int]], strides: list[int], page_size: int, later: int = 0) -> DuePages:
    """`later`: decode steps since the sequences read these."""
    low, high = ([pick(pair) for pair in bounds] for pick in (min, max))
    high = [each + later for each in high]
    reads = np.array(
        [[NAMES + i for i in range(len(bounds))], [*range(1, len(bounds) + 1)], low, high, strides, strides]
    )
    due = cpu.canary_due(reads, page_size)
    assert said(due) == said(ref.canary_due(reads, page_size))
    return due


def said(due: DuePages) -> DuePages:
    """With lists in place of arrays."""
    return due._replace(columns_7B=due.columns_7B.tolist(), bound_5B=due.bound_5B.tolist())


@given(st.lists(st.tuples(BOUNDS, st.integers(1, 4)), min_size=2, max_size=6), st.sampled_from((1, 4)))
def test_words_that_are_filled_again_say_what_new_ones_say(
    steps: list[tuple[list[tuple[int, int]], int]], page_size: int
) -> None:
    """Also where the batch grows, shrinks, or has less due than the one before."""
    kept = cpu.DueWords()
    for bounds, stride in steps:
        low, high = ([pick(pair) for pair in bounds] for pick in (min, max))
        count = len(bounds)
        reads = np.array([range(count), range(1, count + 1), low, high, [stride] * count, range(70, 70 + count)])
        due = kept.work_out(reads, page_size)
        assert said(due) == said(ref.canary_due(reads, page_size))
        for array, at in ((due.columns_7B, kept.columns_at), (due.bound_5B, kept.bound_at)):
            assert at == array.ctypes.data or not array.size


def test_what_is_due_of_one_step_does_not_change_with_the_next() -> None:
    first = cpu.canary_due(np.array([[0], [1], [0], [9], [1], [7]]), 4).columns_7B
    cpu.canary_due(np.array([[0], [2], [0], [30], [1], [7]]), 4)
    assert first.tolist() == [[0], [1], [0], [9], [0], [1], [0]]


def positions(due: DuePages, page_size: int) -> list[tuple[int, int]]:
    """(sequence, position) that the plan kernel will expand and find due, written once more by hand."""
    found = []
    names, _, low, high, first, stride, offsets = due.columns_7B.tolist()
    for i, name in enumerate(names):
        end = [*offsets, due.entry_count][i + 1]
        assert end > offsets[i], "a sequence with nothing due"
        for turn in range((end - offsets[i]) // page_size):
            page = first[i] + turn * stride[i]
            found += [
                (name - NAMES, position)
                for position in range(page * page_size, (page + 1) * page_size)
                if low[i] <= position < high[i]
            ]
    return found


@given(BOUNDS, st.data(), st.sampled_from((1, 2, 16)))
def test_in_so_many_steps_of_a_sequence_every_slot_is_due_exactly_once(
    bounds: list[tuple[int, int]], data: st.DataObject, page_size: int
) -> None:
    strides = [data.draw(st.integers(1, 9)) for _ in bounds]
    seen: list[tuple[int, int]] = []
    for later in range(max(strides)):
        due = due_of(bounds, strides, page_size, later)
        now = positions(due, page_size)
        assert due.slot_count == len(now)
        seen += [(i, position) for i, position in now if later < strides[i] and position < max(bounds[i])]
    assert sorted(seen) == [(i, p) for i, pair in enumerate(bounds) for p in range(min(pair), max(pair))]


@given(BOUNDS, st.integers(1, 100))
def test_pieces_cover_all_sequences_in_order_and_keep_to_the_limit(
    bounds: list[tuple[int, int]], entries_max: int
) -> None:
    due = due_of(bounds, [1] * len(bounds), 4)
    seen: list[tuple[int, int]] = []
    for columns, count in pieces(due, entries_max):
        assert count <= entries_max or columns.shape[1] == 1
        seen += positions(due._replace(columns_7B=columns, entry_count=count), 4)
    assert seen == positions(due, 4)


def test_the_turns_of_pages_that_attention_reads_together_come_together() -> None:
    assert [turn_size(size) for size in (1, 16, 48, 64, 128)] == [64, 64, 48, 64, 128]


def test_a_sequence_is_verified_whole_where_the_leader_says_so() -> None:
    reads = reads_of([3, 4], [50, 6], [True, False], [70, 80], first_name=9, stride=16, window=None)
    assert reads.tolist() == [[9, 10], [3, 4], [0, 0], [50, 6], [1, 16], [70, 80]]
    reads = reads_of([3, 4], [50, 6], [True, False], [70, 80], first_name=9, stride=16, window=8)
    assert reads.tolist() == [[9, 10], [3, 4], [43, 0], [50, 6], [1, 16], [70, 80]]


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("window", [2, 5, 9, 24])
def test_a_slot_that_leaves_a_window_is_due_once_and_so_is_its_link_with_the_slot_behind(
    window: int, page_size: int
) -> None:
    """Attention digests a position for one column alone: one that two columns name has a digest too few."""
    for start, stride in ((start, stride) for start in range(1, 90) for stride in (1, 2, 3, 16)):
        reads = reads_of([1], [start], [False], [0], first_name=0, stride=stride, window=window)
        due = due_pages(ref.canary_due, reads, page_size, window)
        named = [(at, column[2]) for column in due.columns_7B.T for at in entries_of(column, 0, 999, page_size)[0]]
        found = dict(named)
        assert len(found) == len(named) == due.slot_count, (start, stride)
        low = start - window + 1
        if low >= 0:
            assert low in found, (start, stride)
            assert low + 1 == start or found[low + 1] <= low, "what is before a column's first position is not read"
