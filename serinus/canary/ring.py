"""Ring: where kernels note violations, and how the host reads them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from serinus.core.parts import Part
from serinus.kernels import RING_FIELDS, StampLane, carry_words

_LANES: Final = len(StampLane)
_COUNTS: Final = 1 + _LANES
"""Of a ring: its violations, and what was checked in each lane."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RingNews:
    """What was noted since the last reading."""

    rows: list[list[int]]
    """New violations, RING_FIELDS numbers each."""
    lost: int
    """How many there were beside them: the ring had no row for them any more."""
    checked: list[int]
    """Slots checked so far, in each lane of the ring that is served."""
    due: int
    """Slots that had to be checked so far, in each of them."""

    @property
    def is_whole(self) -> bool:
        """Whether all that was due was checked."""
        return all(count == self.due for count in self.checked)


class MarkedCounts:
    """The counts of several rings at one place in the order of the device's work: on their way to the host."""

    def __init__(self, words: list[int] | Tensor, due: Sequence[int], copied: Any = None) -> None:
        """`words`: counts of rings, behind them those by sequence; a tensor is there when the event `copied` is."""
        self.due = due
        """Slots that had to be checked by then, by ring."""
        self._words, self._copied = words, copied

    def by_sequence(self) -> list[int]:
        """What that pass checked of one sequence after the other, by lane. Waits as `words`."""
        return self.words()[len(self.due) * _COUNTS :]

    def words(self) -> list[int]:
        """Of each ring its violations, then what was checked, by lane. Waits until the device has come to that
        place."""
        if not isinstance(self._words, list):
            self._copied.synchronize()
            self._words = cast(list[int], self._words.tolist())
        return self._words


@dataclass(slots=True, kw_only=True)
class CanaryMark:
    """What was checked up to one place in the order of the device's work."""

    step: int
    """The latest step that the leader had begun by then: pages handed out since are not what was checked."""
    rids: tuple[str, ...]
    """Requests of the pass that was queued last."""
    counts: Mapping[Part, MarkedCounts]
    swept: Mapping[Part, int]
    """Sweeps since the rings were read, by part."""


class RingCounts:
    """The counts of several rings side by side: of an accelerator one copy reads them all."""

    def __init__(self, device: str, rings: int, sequences: int = 0) -> None:
        """`sequences`: of one pass at most, for which is counted what it checks of each."""
        self._size = size = rings * _COUNTS
        self._words_W = torch.zeros(size + sequences * _LANES, dtype=torch.int64, device=device)
        self.counts_RC: Tensor = self._words_W[:size].view(rings, _COUNTS)
        """Of each ring its violations, then what was checked, by lane."""
        self.by_sequence_N4: Tensor = self._words_W[size:].view(sequences, _LANES)
        """Of each sequence of a pass what was checked, by lane."""
        self._here: NDArray[np.int64] | None = None if self._words_W.is_cuda else self._words_W.numpy()
        self._latest: MarkedCounts | None = None
        """Of the last reading without a mark."""
        self.read: list[int] = [0] * size
        """The counts that the host has read last."""
        self.rings: list[Ring] = []
        """The rings themselves, in their order."""

    def mark(self, sequences: int = 0) -> MarkedCounts:
        """The counts as they will be when the device has done what is queued now, the last pass of which is of so many
        sequences. Does not wait."""
        end, due = self._size + sequences * _LANES, [ring.due for ring in self.rings]
        if self._here is not None:
            return MarkedCounts(self._here[:end].tolist(), due)
        words_W = torch.empty(end, dtype=torch.int64, pin_memory=True)
        carry_words(words_W, self._words_W[:end])
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()
        return MarkedCounts(words_W, due, copied)

    def expire(self) -> None:
        """More was queued, or done: the next reading copies anew."""
        self._latest = None

    def latest(self) -> MarkedCounts:
        """The last copy; where that expired, a new one."""
        if self._latest is None:
            self._latest = self.mark()
        return self._latest


class Ring:
    """A fixed number of rows on the device, a count that never goes back, and counts of what was checked."""

    def __init__(
        self, rows: int, counts: RingCounts, lanes: Sequence[StampLane] = tuple(StampLane), *,
        by_sequence: bool = False,
    ) -> None:  # fmt: skip
        """`counts`: those of which the next ones are of this ring. `lanes`: those in which every slot that is due is
        checked. `by_sequence`: what a pass checks is counted by sequence too."""
        self._counts, self._index = counts, len(counts.rings)
        counts.rings.append(self)
        own_C = counts.counts_RC[self._index]
        self.rows_QF: Tensor = torch.zeros((rows, RING_FIELDS), dtype=torch.int64, device=own_C.device)
        self.count_1, self.checked_L = own_C[:1], own_C[1:]
        self.tensors: tuple[Tensor, ...] = (self.rows_QF, self.count_1, self.checked_L)
        """As the kernels take them."""
        if by_sequence:
            self.tensors += (counts.by_sequence_N4,)
        self.due = 0
        """Slots that had to be checked so far; the caller of the kernels adds them."""
        self.lanes = tuple(lanes)
        first = self._index * _COUNTS
        self._words = first, *(first + 1 + lane for lane in lanes)
        """Which words of a reading are its own: violations, and what was checked in these lanes."""
        self._read = 0
        self.told = 0
        """Those of them that the latest reading told of: later passes may be queued."""

    def begin_anew(self) -> None:
        """Nothing was due, checked or found so far. Not while a reading is marked."""
        self.due = self._read = self.told = 0
        self._counts.counts_RC[self._index].zero_()
        self._counts.read = [0] * len(self._counts.read)

    def fewest(self, lanes: Collection[StampLane]) -> int:
        """Slots that were checked by the latest reading, in that of these lanes in which they are fewest; a lane that
        is not served does not count."""
        words = self._counts.latest().words()
        return min(words[place] for lane, place in zip(self.lanes, self._words[1:], strict=True) if lane in lanes)

    @property
    def looked(self) -> list[int]:
        """Slots that were looked at so far in each of all lanes, by the latest reading. Waits for nothing."""
        first = self._index * _COUNTS + 1
        return self._counts.read[first : first + _LANES]

    def take(self, marked: MarkedCounts | None = None) -> RingNews | None:
        """What is new; None where nothing was found since the last reading, and all that was due was checked. Of an
        accelerator the rows are copied where there are new ones. `marked`: what was new then; what was queued behind it
        may be under way."""
        due = self.due if marked is None else marked.due[self._index]
        if due <= self.told:
            return None
        words = self._counts.read = (self._counts.latest() if marked is None else marked).words()
        count, *checked = [words[place] for place in self._words]
        if count == self._read and checked.count(due) == len(checked):
            self.told = due
            return None
        size, first, rows = len(self.rows_QF), self._read, list[list[int]]()
        if count > first:
            rows = self.rows_QF.tolist()  # waits for all that is queued; later violations may have taken rows
            first = max(first, int(self.count_1) - size) if marked is not None else max(first, count - size)
            first = min(first, count)
        lost = first - self._read
        self._read, self.told = count, due
        return RingNews(
            rows=[rows[number % size] for number in range(first, count)], lost=lost, checked=checked, due=due
        )
