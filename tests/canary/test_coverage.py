"""Which pages are due when: every slot within its turns, none twice in a step, and the count that the watch needs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from serinus.canary.coverage import DuePages, Span, due_pages, pieces

SPANS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), min_size=1, max_size=5)


def positions(due: DuePages, page_size: int) -> list[tuple[int, int]]:
    """(sequence, position) that the plan kernel will expand and find due, written once more by hand."""
    found = []
    for i, index in enumerate(due.index.tolist()):
        for turn in range(int(due.page_count[i])):
            page = int(due.first_page[i]) + turn * due.stride
            for position in range(page * page_size, (page + 1) * page_size):
                if due.low[i] <= position < due.high[i]:
                    found.append((index, position))
    return found


@given(SPANS, st.integers(1, 9), st.sampled_from((1, 2, 16)), st.integers(0, 50))
def test_in_so_many_steps_every_slot_is_due_exactly_once(
    bounds: list[tuple[int, int]], stride: int, page_size: int, first_step: int
) -> None:
    spans = [Span(row=i + 1, low=min(pair), high=max(pair)) for i, pair in enumerate(bounds)]
    seen: list[tuple[int, int]] = []
    for step in range(first_step, first_step + stride):
        due = due_pages(spans, range(len(spans)), step=step, stride=stride, page_size=page_size)
        now = positions(due, page_size)
        assert due.slot_count == len(now)
        seen += now
    everything = [(i, p) for i, span in enumerate(spans) for p in range(span.low, span.high)]
    assert sorted(seen) == everything


@given(SPANS, st.integers(1, 100))
def test_pieces_cover_all_sequences_in_order_and_keep_to_the_limit(
    bounds: list[tuple[int, int]], entries_max: int
) -> None:
    spans = [Span(row=i + 1, low=min(pair), high=max(pair)) for i, pair in enumerate(bounds)]
    due = due_pages(spans, range(len(spans)), step=0, stride=1, page_size=4)
    cut = pieces(due, 4, entries_max)
    assert [i for piece in cut for i in range(piece.start, piece.stop)] == list(range(len(due.rows)))
    for piece in cut:
        entries = int(due.page_count[piece].sum()) * 4
        assert entries <= entries_max or piece.stop - piece.start == 1
