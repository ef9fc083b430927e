"""SimPool: a device pool of the simulation, with the faults of its copies.

A copy between device and host may fail midway, or do something else without saying so; on the way out to a peer a bit
may flip, before a digest is made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from serinus.core.parts import Part
from serinus.core.rng import Rng
from serinus.kernels import Kernels
from serinus.pool import DevicePool, PoolRegion, PoolSpec

_USED = 0xDD
"""What memory holds before its first use: of zeros a digest, which is linear, would not notice that they were left."""
_BROKEN = 0xBB
"""What a copy that failed leaves behind."""


class PoolFaults:
    """What may happen to the pools of one engine; asked each time, whether it does."""

    def __init__(
        self, copy_fails: Callable[[], bool], copy_errs: Callable[[], bool], flips: Callable[[], bool], rng: Rng
    ) -> None:
        self.copy_fails, self.copy_errs, self.flips, self.rng = copy_fails, copy_errs, flips, rng


class SimPool(DevicePool):
    """A DevicePool whose copies may fail."""

    def __init__(self, spec: PoolSpec, kernels: Kernels, faults: PoolFaults, part: Part) -> None:
        super().__init__(spec, kernels)
        self._faults, self._part = faults, part
        self._odd: dict[int, int] = {}
        """Of rows that a copy to the host left out, 0, or took from another page: that page. Stamps go the same way."""
        if spec.stamped:
            for pair in self.layers:
                for lane in pair:
                    lane.view(-1).numpy().view(np.uint8)[spec.page_size * lane[0].nbytes :] = _USED

    @property
    def regions(self) -> tuple[PoolRegion, ...]:
        """See DevicePool: at the same addresses in every run of its engine."""
        found = enumerate(super().regions)
        return tuple(replace(region, address=(2 * self._part + index + 1) << 40) for index, region in found)

    def copy_out(self, pages: NDArray[np.integer], bytes_RY: Tensor, rows: NDArray[np.integer]) -> None:
        """See DevicePool. Raises OSError: the copy failed midway."""
        if self._faults.copy_fails():
            bytes_RY.numpy()[rows] = _BROKEN
            raise OSError("sim: the copy failed")
        for row in rows.tolist():
            self._odd.pop(row, None)
        if self._faults.copy_errs():
            if self._faults.rng.random() < 0.5:
                self._odd |= dict.fromkeys(rows.tolist(), 0)
                return
            pages = self._others(pages)
            self._odd |= zip(rows.tolist(), pages.tolist(), strict=True)
        super().copy_out(pages, bytes_RY, rows)

    def copy_stamps_out(self, pages: NDArray[np.integer], stamps_RZ: Tensor, rows: NDArray[np.integer]) -> None:
        """See DevicePool: those of the pages that `copy_out` took."""
        took = np.array([self._odd.pop(row, page) for page, row in zip(pages.tolist(), rows.tolist(), strict=True)])
        super().copy_stamps_out(took[took > 0], stamps_RZ, rows[took > 0])

    def copy_in(
        self, pages: NDArray[np.integer], bytes_RY: Tensor, rows: NDArray[np.integer], first: int, end: int
    ) -> None:
        """See DevicePool. Raises OSError: the copy failed midway."""
        if self._faults.copy_fails():
            self.write_pages(pages, np.full((len(pages), self.page_bytes), _BROKEN, np.uint8))
            raise OSError("sim: the copy failed")
        if self._faults.copy_errs():
            if self._faults.rng.random() < 0.5:
                return
            rows = np.array([self._faults.rng.randrange(1, len(bytes_RY)) for _ in rows])
        super().copy_in(pages, bytes_RY, rows, first, end)

    def _others(self, pages: NDArray[np.integer]) -> NDArray[np.int64]:
        """As many pages, any."""
        return np.array([self._faults.rng.randrange(1, self.spec.page_count) for _ in pages])

    def hashed_pages(
        self, pages: NDArray[np.integer], rows: NDArray[np.uint8] | None, seed: int, inward: bool = False
    ) -> bytes:
        digests = super().hashed_pages(pages, rows, seed, inward)
        if inward or rows is None or not len(pages) or not self._faults.flips():
            return digests
        rng, found = self._faults.rng, bytearray(digests)
        row = rng.randrange(len(pages))
        rows[row, rng.randrange(self.spec.kv_bytes)] ^= 1 << rng.randrange(8)
        found[8 * row : 8 * row + 8] = xxhash.xxh3_64_intdigest(rows[row].tobytes(), seed).to_bytes(8, "little")
        return bytes(found)
