"""What of the slots that a batch reads is digested: the columns of a plan beside the sequences that attention sees."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def match_columns(
    columns_7C: NDArray[np.int64], rows_B: NDArray[np.int64], row_count: int
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """The columns of a plan in the order of a batch, and which of them are of none of its sequences.

    Returns: due_7D as `LayerDigest` has it: a column for each sequence (nothing due: zeros), and where a sequence has
        two columns in the plan as many more; left_C.
    """
    left_C = np.ones(columns_7C.shape[1], np.bool_)
    sets: list[NDArray[np.int64]] = []
    while not sets or (left_C.any() and len(sets) < 2):
        column_of = np.full(row_count + 1, -1)
        column_of[columns_7C[1, left_C]] = np.flatnonzero(left_C)
        places_B = column_of[rows_B]
        found_B = places_B >= 0
        if sets and not found_B.any():
            break
        due_7B = np.zeros((7, len(rows_B)), np.int64)
        due_7B[:, found_B] = columns_7C[:, places_B[found_B]]
        left_C[places_B[found_B]] = False
        sets.append(due_7B)
    return (sets[0] if len(sets) == 1 else np.concatenate(sets, axis=1)), left_C


def entries_of(
    column: Sequence[int], begin: int, end: int, page_size: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Positions from `begin` to `end` - 1 that are due by one column of a plan, and their entries."""
    low, high, first, stride, offset = column[2:]
    positions = np.arange(max(low, begin), min(high, end), dtype=np.int64)
    turns, others = np.divmod(positions // page_size - first, max(1, stride))
    due = (turns >= 0) & (others == 0)
    positions, turns = positions[due], turns[due]
    return positions, offset + turns * page_size + positions % page_size
