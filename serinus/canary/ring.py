"""Ring: where kernels note violations, and how the host reads them without making the device wait."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from serinus.kernels import RING_FIELDS, StampLane

__all__ = ["LATE_MAX", "Ring", "RingNews"]

LATE_MAX: Final = 4
"""So many readings may find that a copy is not through yet; the next one waits for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RingNews:
    """What was noted up to some moment, and not read before."""

    rows: list[list[int]]
    """New violations, RING_FIELDS numbers each."""
    lost: int
    """How many there were beside them: the ring had no row for them any more."""
    checked: list[int]
    """Slots checked by then, in each lane of the ring that is served."""
    due: int
    """Slots that had to be checked by then, in each of them."""

    @property
    def is_whole(self) -> bool:
        """Whether all that was due by then was checked."""
        return all(count == self.due for count in self.checked)


class Ring:
    """A fixed number of rows on the device, a count that never goes back, and counts of what was checked.

    On a CPU a reading has everything up to now. On an accelerator it has what the one before it began to copy, beside
    the step that ran meanwhile: `due` is copied with it, so that what was checked can be held against it exactly.
    """

    def __init__(
        self, device: str, rows: int, lanes: Sequence[StampLane] = tuple(StampLane), *, late: bool = False
    ) -> None:
        """
        Args:
            lanes: those in which every slot that is due is checked.
            late: read as on an accelerator, whatever the device.
        """
        self.rows_QF: Tensor = torch.zeros((rows, RING_FIELDS), dtype=torch.int64, device=device)
        self.count_1: Tensor = torch.zeros(1, dtype=torch.int64, device=device)
        self.checked_L: Tensor = torch.zeros(len(StampLane), dtype=torch.int64, device=device)
        self.tensors: tuple[Tensor, Tensor, Tensor] = (self.rows_QF, self.count_1, self.checked_L)
        """As the kernels take them."""
        self.due = 0
        """Slots that had to be checked so far; CanaryRank adds them."""
        self._lanes = lanes
        self._here = (self.count_1.numpy(), self.checked_L.numpy()) if device == "cpu" and not late else None
        self._has_event = device != "cpu"
        self._read = 0
        self._seen_due = 0
        self._copies: tuple[Tensor, ...] | None = None
        self._copied_due = 0
        self._event: Any = None
        self._late = 0

    @property
    def steps_late(self) -> int:
        """Steps by which a reading may be behind, at most; 0 = none."""
        return 0 if self._here is not None else 1 + LATE_MAX

    @property
    def is_silent(self) -> bool:
        """Whether a host sees at once that there is nothing new; of an accelerator's ring it does not."""
        return self._here is not None and self.due == self._seen_due and int(self._here[0][0]) == self._read

    def take(self, *, wait: bool = False) -> list[RingNews]:
        """What is new, oldest first. `wait`: all that was queued up to now; on an accelerator that blocks."""
        if self._here is not None:
            count_1, checked_L = self._here
            return [self._new(self.rows_QF, int(count_1[0]), checked_L.tolist(), self.due)]
        news = self._copied(wait=wait)
        if self._copies is None:
            self._copy()
        if wait:
            news += self._copied(wait=True)
        return news

    def _copy(self) -> None:
        """Begin to copy what was queued up to now."""
        pinned = self._has_event
        self._copies = tuple(torch.empty_like(t, device="cpu", pin_memory=pinned) for t in self.tensors)
        for target, source in zip(self._copies, self.tensors, strict=True):
            target.copy_(source, non_blocking=True)
        self._copied_due, self._late = self.due, 0
        if pinned:
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def _copied(self, *, wait: bool) -> list[RingNews]:
        """The copy under way, if it is through."""
        if self._copies is None:
            return []
        if self._has_event:
            self._late += 1
            if wait or self._late > LATE_MAX:
                self._event.synchronize()
            elif not self._event.query():
                return []
        rows, count, checked = self._copies
        self._copies = None
        return [self._new(rows, int(count), checked.tolist(), self._copied_due)]

    def _new(self, rows: Tensor, count: int, checked: list[int], due: int) -> RingNews:
        size = len(rows)
        first = max(self._read, count - size)
        lost = first - self._read
        self._read, self._seen_due = count, due
        new = [rows[number % size].tolist() for number in range(first, count)]
        return RingNews(rows=new, lost=lost, checked=[checked[lane] for lane in self._lanes], due=due)
