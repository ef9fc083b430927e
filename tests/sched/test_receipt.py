"""Receipts: slots that were due, summed up at the end, are what the canary's own coverage has step by step."""

from __future__ import annotations

import numpy as np
import pytest

from serinus.canary.coverage import due_pages, reads_of
from serinus.kernels.ref.canary import canary_due
from serinus.sched.receipt import slots_due


@pytest.mark.parametrize("window", [None, 2, 5, 9, 64])
@pytest.mark.parametrize("stride", [1, 2, 3, 7])
@pytest.mark.parametrize("page_size", [1, 4])
def test_slots_due_are_those_of_the_coverage(window: int | None, stride: int, page_size: int) -> None:
    for low, high in ((0, 1), (1, 30), (17, 18), (40, 83)):
        starts = np.arange(low, high)
        expected = 0
        for start in starts.tolist():
            reads = reads_of([1], [start], [False], [0], first_name=0, stride=stride, window=window)
            expected += due_pages(canary_due, reads, page_size, window).slot_count + (start > 0)  # the last one read
        assert slots_due(starts, page_size, stride, window) == expected, (low, high)
