"""Which stamps are verified in which step: each sequence's stride, and a plan cut into pieces. No tensors.

`full` is a stride of 1: every page of every running request in every step. `rotating:N` is stride N: each page once in
any N steps of the request, by the position that it computes; where the leader says so (SeqWork.whole) all of them at
once. Which pages that are in a step is worked out by `canary_due`.

The turns of neighbouring pages come together (`turn_size`): attention on a GPU digests a block of positions or none of
it, so that of four pages in a block one that is due would cost as much as all; on a CPU it fetches the factors of a
layer anew for pages that lie apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from struct import Struct
from typing import Final

import numpy as np
from numpy.typing import NDArray

from serinus.kernels import DuePages

Counts = NDArray[np.int64]
_BLOCK: Final = 64
"""Positions that attention reads at a time (kernels/*/decode_attention.py)."""


def turn_size(page_size: int) -> int:
    """Positions whose turn comes in one step, whole pages: what `due_pages` and a watch take for their page size."""
    return page_size * max(1, _BLOCK // page_size)


def due_pages(
    canary_due: Callable[[Counts, int], DuePages], reads_6B: Counts, page_size: int,
    window: int | None,
) -> DuePages:  # fmt: skip
    """What is due of these reads. Of a part with a window also each slot that leaves it: read for the last time in this
    step, its turn might come after its last reader. The slot behind it is verified with it: that one is the last that
    can tell whether the slot belongs before it, and with it the page. From there on the chain goes to the last slot
    that is read, which is held against the request."""
    due = canary_due(reads_6B, page_size)
    if window is not None:
        low, high, strides = reads_6B[2:5]
        own = (high - low // page_size) % strides == 0  # its page is due in this step
        behind = (low + 1 >= high) | ((high - (low + 1) // page_size) % strides == 0)  # and that of the slot behind it
        leaves = (high > low) & (high - low == window - 1) & ~(own & behind)
        if leaves.any():
            last, own, behind = reads_6B[:, leaves], own[leaves], behind[leaves]
            last[3], last[4] = last[2] + 2 - behind, 1
            before = canary_due(last, page_size)
            before.columns_7B[4] += own  # begins with the slot behind: attention digests no position for two columns
            due.columns_7B[6] += before.entry_count
            # They stand before the others: attention, which digests what it reads, looks for the last of a row.
            due = due._replace(
                columns_7B=np.concatenate((before.columns_7B, due.columns_7B), axis=1),
                entry_count=due.entry_count + before.entry_count,
                slot_count=due.slot_count + before.slot_count - int(own.sum()),
            )
    return due


class ReadsRoom:
    """Where `reads_of` writes: an array that stays while the number of sequences does."""

    def __init__(self) -> None:
        self._resize(0)

    def write(self, count: int, *words: int) -> Counts:
        """The array [6, count], of these words; what it held before is overwritten."""
        if count != self._count:
            self._resize(count)
        self._pack(*words)
        return self._reads_6B

    def _resize(self, count: int) -> None:
        self._count, self._reads_6B = count, np.empty((6, count), np.int64)
        self._pack = partial(Struct(f"{6 * count}q").pack_into, self._reads_6B.data, 0)


def reads_of(
    rows: Sequence[int], starts: Sequence[int], wholes: Sequence[bool], chains: Sequence[int], *, first_name: int,
    stride: int, window: int | None, room: ReadsRoom | None = None,
) -> Counts:  # fmt: skip
    """Input of `canary_due`, [6, B]: names from `first_name` on, rows, what each reads (all before its start, or the
    `window` that its next token sees, less that token), strides: 1 where it is verified as a whole; chain
    hashes of all before their starts. `room`: None = of its own."""
    count = len(starts)
    low: Sequence[int] = [0] * count
    if window is not None:
        low = [max(0, start - window + 1) for start in starts]
    strides = [1 if whole else stride for whole in wholes] if any(wholes) else [stride] * count
    names = range(first_name, first_name + count)
    return (room or ReadsRoom()).write(count, *names, *rows, *low, *starts, *strides, *chains)


def pieces(due: DuePages, entries_max: int) -> Sequence[tuple[Counts, int]]:
    """Columns and entry counts of runs of sequences of at most `entries_max` entries (or one sequence): a plan larger
    than that is run in pieces, never skipped."""
    if due.entry_count <= entries_max:
        return ((due.columns_7B, due.entry_count),) if due.entry_count else ()
    offsets, cut = [*due.columns_7B[-1].tolist(), due.entry_count], list[tuple[Counts, int]]()
    begin = 0
    for end in range(1, len(offsets)):
        if end == len(offsets) - 1 or offsets[end + 1] - offsets[begin] > entries_max:
            columns = np.ascontiguousarray(due.columns_7B[:, begin:end])
            columns[-1] -= offsets[begin]
            cut.append((columns, offsets[end] - offsets[begin]))
            begin = end
    return cut
