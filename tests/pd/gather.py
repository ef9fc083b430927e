"""What a device gathers, for tests without one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from serinus.kernels.ref.pull_pages import page_sums
from serinus.pd.backends import PageRows


@dataclass(slots=True)
class Gather:
    """A Pull that moves when it is told to; what is left of an owner can be read all the same."""

    move: Callable[[], bytes]
    found: bytes = b""
    seconds: float = 0.25

    def done(self) -> bool:
        return bool(self.found)

    def sums(self) -> bytes:
        self.found = self.found or self.move()
        return self.found


def sums_of(
    memory_at: Callable[[int, int], NDArray[np.uint8]], rows: Sequence[Sequence[PageRows]], pages: NDArray[np.int32],
    seed: int,
) -> bytes:  # fmt: skip
    """Of whole pages of one region; `memory_at` gives bytes at an address."""
    ((own,),) = rows
    starts = [own.address + lane * own.strip_step for lane in range(own.strip_count)]
    lanes = [memory_at(start, own.page_count * own.row_bytes) for start in starts]
    found = [lane.reshape(-1, own.row_bytes)[pages] for lane in lanes]
    return page_sums(np.concatenate(found, axis=1), seed).astype("<u8").tobytes()
