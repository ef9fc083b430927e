"""Which stamps are verified in which step: plain arithmetic over pages, no tensors.

`full` is stride 1: every page of every running request in every step. `rotating:N` is stride N: page p in the steps
with step % N == p % N, so each at least once in N steps; a sequence that just came (prefix hit, load, handoff) whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["DuePages", "Span", "due_pages", "pieces"]

Counts = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """What may be verified of one sequence in one part: positions [low, high) of the row."""

    row: int
    low: int
    high: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DuePages:
    """Input of the plan kernel for some sequences of one part; each array has one entry a sequence."""

    index: Counts
    """Which of the given spans."""
    rows: Counts
    low: Counts
    high: Counts
    first_page: Counts
    page_count: Counts
    """Pages due: every stride-th from first_page on."""
    stride: int
    slot_count: int
    """Positions within [low, high) on those pages: what the device must report as checked."""


def due_pages(spans: Sequence[Span], index: Sequence[int], *, step: int, stride: int, page_size: int) -> DuePages:
    """The pages due in a step. `index`: the number by which each span is known to whoever reads the violations."""
    low = np.fromiter((s.low for s in spans), np.int64, len(spans))
    high = np.fromiter((s.high for s in spans), np.int64, len(spans))
    start_page, end_page = low // page_size, -(-high // page_size)
    first_page = start_page + (step - start_page) % stride
    page_count = np.maximum(0, -(-(end_page - first_page) // stride))
    due = (page_count > 0) & (high > low)
    rows = np.fromiter((s.row for s in spans), np.int64, len(spans))
    last_page = first_page + (page_count - 1) * stride
    # Whole pages, less what lies before `low` on the first and behind `high` on the last.
    slots = page_count * page_size
    slots -= np.where(first_page == start_page, low - start_page * page_size, 0)
    slots -= np.where(last_page == end_page - 1, end_page * page_size - high, 0)
    return DuePages(
        index=np.asarray(index, np.int64)[due], rows=rows[due], low=low[due], high=high[due],
        first_page=first_page[due], page_count=page_count[due], stride=stride, slot_count=int(slots[due].sum()),
    )  # fmt: skip


def pieces(due: DuePages, page_size: int, entries_max: int) -> list[slice]:
    """Cut the sequences into runs of at most `entries_max` entries (or one sequence): a plan larger than that is run
    in pieces, never skipped."""
    found: list[slice] = []
    begin, total = 0, 0
    for i, count in enumerate((due.page_count * page_size).tolist()):
        if total and total + count > entries_max:
            found.append(slice(begin, i))
            begin, total = i, 0
        total += count
    if total:
        found.append(slice(begin, len(due.rows)))
    return found
