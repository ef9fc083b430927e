"""Ring: where kernels note violations, and how the host reads them without making the device wait."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from serinus.kernels import RING_FIELDS

__all__ = ["Ring"]


class Ring:
    """A fixed number of rows on the device, a count that never goes back, and counts of what was checked.

    `mark` at the end of a step, `take` at the end of a later one: on a CPU what was marked is there at once; on an
    accelerator it is copied beside the next step, and taken when that copy is through.
    """

    def __init__(self, device: str, rows: int, lanes: int = 4) -> None:
        self.rows_QF: Tensor = torch.zeros((rows, RING_FIELDS), dtype=torch.int64, device=device)
        self.count_1: Tensor = torch.zeros(1, dtype=torch.int64, device=device)
        self.checked_L: Tensor = torch.zeros(lanes, dtype=torch.int64, device=device)
        self.tensors: tuple[Tensor, Tensor, Tensor] = (self.rows_QF, self.count_1, self.checked_L)
        """As the kernels take them."""
        self._here = (self.count_1.numpy(), self.checked_L.numpy()) if device == "cpu" else None
        self._read = 0
        self._copies: tuple[Tensor, ...] | None = None
        self._event: Any = None

    @property
    def is_silent(self) -> bool:
        """Whether a host sees at once that there is nothing new; of an accelerator's ring it does not."""
        return self._here is not None and int(self._here[0][0]) == self._read

    def mark(self) -> None:
        """Everything noted by what was queued up to now may be read by a later `take`."""
        if self._here is not None or self._copies is not None:
            return
        self._copies = tuple(torch.empty_like(t, device="cpu", pin_memory=True) for t in self.tensors)
        for target, source in zip(self._copies, self.tensors, strict=True):
            target.copy_(source, non_blocking=True)
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record()

    def take(self, *, wait: bool = False) -> tuple[list[list[int]], int, list[int]] | None:
        """(rows of new violations, how many there are that have no row any more, checked so far by lane); None where
        nothing marked has come yet. `wait` blocks until it has."""
        if self._here is not None:
            count_1, checked_L = self._here
            return self._new(self.rows_QF, int(count_1[0]), checked_L.tolist())
        if self._copies is None:
            return None
        if wait:
            self._event.synchronize()
        elif not self._event.query():
            return None
        rows, count, checked = self._copies
        self._copies = None
        return self._new(rows, int(count), checked.tolist())

    def _new(self, rows: Tensor, count: int, checked: list[int]) -> tuple[list[list[int]], int, list[int]]:
        if count == self._read:
            return [], 0, checked
        size = len(rows)
        first = max(self._read, count - size)
        lost = first - self._read
        self._read = count
        return [rows[number % size].tolist() for number in range(first, count)], lost, checked
