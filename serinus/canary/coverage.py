"""Which stamps are verified in which step: each sequence's stride, and a plan cut into pieces. Plain data, no tensors.

`full` is a stride of 1: every page of every running request in every step. `rotating:N` is stride N: page p in the
steps with step % N == p % N, so each at least once in N steps; a sequence that just came (prefix hit, load, handoff)
whole. Which pages that are in a step is worked out by `canary_due`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["DuePages", "pieces", "reads_of"]

Counts = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class DuePages:
    """What a step verifies of one part, as `canary_due` says it."""

    columns_7B: Counts
    entry_count: int
    """Slots of all pages due."""
    slot_count: int
    """Those of them that are verified: what the device must report as checked."""


def reads_of(
    rows: Sequence[int], starts: Sequence[int], is_fresh: Sequence[bool], *, first_name: int, stride: int,
    window: int | None,
) -> Counts:  # fmt: skip
    """Input of `canary_due`, [5, B]: names from `first_name` on, rows, what each reads (all before its start, or the
    `window` that its next token sees, less that token), strides: 1 where it just came. A slot has its turn before it
    leaves the window."""
    low: Sequence[int] = [0] * len(starts)
    if window is not None:
        stride = min(stride, max(1, window - 1))
        low = [max(0, start - window + 1) for start in starts]
    strides = [1 if fresh else stride for fresh in is_fresh]
    return np.array([range(first_name, first_name + len(starts)), rows, low, starts, strides], np.int64)


def pieces(due: DuePages, entries_max: int) -> Iterator[tuple[Counts, int]]:
    """Columns and entry counts of runs of sequences of at most `entries_max` entries (or one sequence): a plan larger
    than that is run in pieces, never skipped."""
    if due.entry_count <= entries_max:
        if due.entry_count:
            yield due.columns_7B, due.entry_count
        return
    offsets = [*due.columns_7B[-1].tolist(), due.entry_count]
    begin = 0
    for end in range(1, len(offsets)):
        if end == len(offsets) - 1 or offsets[end + 1] - offsets[begin] > entries_max:
            columns = np.ascontiguousarray(due.columns_7B[:, begin:end])
            columns[-1] -= offsets[begin]
            yield columns, offsets[end] - offsets[begin]
            begin = end
