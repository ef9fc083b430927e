"""SimPool: a device pool of the simulation, with the faults of memory and copies; and a write that comes very late.

A copy between device and host may fail midway; on the way out to a peer a bit may flip, before a digest is made; KV
that a page held some time ago may land in it once more, without its stamps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from serinus.core.parts import Part
from serinus.core.rng import Rng
from serinus.kernels import Kernels
from serinus.models import ForwardBatch
from serinus.pool import DevicePool, PoolSpec

__all__ = ["PoolFaults", "SimPool", "StrayWrites"]

_USED = 0xDD
"""What memory holds before its first use: of zeros a digest, which is linear, would not notice that they were left."""
_BROKEN = 0xBB
"""What a copy that failed leaves behind."""


class PoolFaults:
    """What may happen to the pools of one engine; asked each time, whether it does."""

    def __init__(self, copy_fails: Callable[[], bool], flips: Callable[[], bool], rng: Rng) -> None:
        self.copy_fails, self.flips, self.rng = copy_fails, flips, rng


class SimPool(DevicePool):
    """A DevicePool whose copies may fail."""

    def __init__(self, spec: PoolSpec, kernels: Kernels, faults: PoolFaults) -> None:
        super().__init__(spec, kernels)
        self._faults = faults
        if spec.stamped:
            for pair in self.layers:
                for lane in pair:
                    lane.view(-1).numpy().view(np.uint8)[spec.page_size * lane[0].nbytes :] = _USED

    def copy_out(self, pages: NDArray[np.integer], bytes_RY: Tensor, rows: NDArray[np.integer]) -> None:
        """See DevicePool. Raises OSError: the copy failed midway."""
        if self._faults.copy_fails():
            bytes_RY.numpy()[rows] = _BROKEN
            raise OSError("sim: the copy failed")
        super().copy_out(pages, bytes_RY, rows)

    def copy_in(
        self, pages: NDArray[np.integer], bytes_RY: Tensor, rows: NDArray[np.integer], first: int, end: int
    ) -> None:
        """See DevicePool. Raises OSError: the copy failed midway."""
        if self._faults.copy_fails():
            self.write_pages(pages, np.full((len(pages), self.page_bytes), _BROKEN, np.uint8))
            raise OSError("sim: the copy failed")
        super().copy_in(pages, bytes_RY, rows, first, end)

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


class StrayWrites:
    """A forward hook of one rank: when a step begins, KV that a page held some time ago may land in it again."""

    def __init__(
        self, pools: Mapping[Part, DevicePool], chance: Callable[[], float], rng: Rng, struck: Callable[[], None]
    ) -> None:
        """`chance`: that it happens this time; `struck`: it did."""
        self._pools = [pool for pool in pools.values() if pool.page_bytes]
        self._chance, self._rng, self._struck = chance, rng, struck
        self._old: list[tuple[DevicePool, NDArray[np.int64], NDArray[np.uint8]]] = []

    def before(self, batch: ForwardBatch) -> None:
        chance, rng = self._chance(), self._rng
        if not chance:
            return
        for pool in self._pools:
            page = np.array([rng.randrange(1, pool.spec.page_count)])
            self._old.append((pool, page, pool.read_pages(page)))
        if rng.random() < chance:
            pool, page, data = self._old.pop(rng.randrange(len(self._old)))
            now = pool.read_pages(page)
            now[:, : pool.spec.kv_bytes] = data[:, : pool.spec.kv_bytes]
            pool.write_pages(page, now)
            self._struck()

    def before_layer(self, layer_index: int) -> None:
        """It happens before the first one."""

    def writes(self, layer_index: int) -> None:
        """Nothing that is stored is digested for it."""

    def reads(self, layer_index: int, attention: object) -> None:
        """Nothing of it is digested."""

    def after(self, batch: ForwardBatch) -> None:
        """It happens before the layers."""
