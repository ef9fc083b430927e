"""CUDA IPC under the product's backend, simulated: memory of another process that was opened, and gathers from it.

What real memory does to a reader: it can be read whatever became of its owner, while the owner is stopped, after it was
killed, and while its pages are given to others, some of a page before the rest. No read fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from serinus.core.errors import ConfigError, TransferFailed
from serinus.kernels.ref.pull_pages import page_sums
from serinus.pd.backends import PageRows, Region, SharedAllocation, Strips, strips_between_rows
from serinus.sim.one_sided import Card, Fabric, Transfer

if TYPE_CHECKING:
    from serinus.sim.engine import SimEngine

_DEVICES = 8
_SPACE = 1 << 46
"""Addresses of one process lie below it; what was opened n-th lies at n * _SPACE and its address in its owner."""


class SimPull:
    """A gather that is under way."""

    def __init__(
        self, memory: SimIpc, transfer: Transfer, rows: Sequence[PageRows], pages: NDArray[np.int32], seed: int
    ) -> None:
        self.transfer = transfer
        self._memory, self._rows, self._pages, self._seed = memory, rows, pages, seed

    seconds = 0.0

    def done(self) -> bool:
        """Nothing of it is left to be moved."""
        return not self.transfer.left

    def sums(self) -> bytes:
        """Of what is in the own pages."""
        return self._memory.sums((self._rows,), self._pages, self._seed)


class SimIpc:
    """pd's IpcLibrary, of one rank on the device that ranks of its number share; it reaches all others."""

    def __init__(self, fabric: Fabric, engine: SimEngine, rank: int) -> None:
        self._fabric, self._engine, self._rank = fabric, engine, rank
        self._card = fabric.card(engine, rank, f"{engine.name}.{rank}")
        self.process = self._card.session
        self.device = f"device {rank}"
        self.reachable = tuple(f"device {other}" for other in range(_DEVICES))
        self._opened: dict[int, Card] = {}
        """What was opened, by number."""
        self._last = 0
        self._pulls: list[SimPull] = []
        self._is_idle = False

    def warm(self, regions: Sequence[Region]) -> None:
        """Own pages can be moved from now on."""
        for region in regions:
            self._card.register(region.address, region.byte_count)

    def share(self, address: int) -> SharedAllocation:
        """Each region is an allocation. Raises ConfigError: none begins there."""
        for store in self._engine.stores[self._rank].values():
            for region in store.regions:
                if region.address == address:
                    handle = f"{self.process}/{address}".encode()
                    return SharedAllocation(handle=handle, address=address, byte_count=region.byte_count)
        raise ConfigError(f"sim: no memory begins at {address:#x}")

    def open(self, memory: SharedAllocation) -> int:
        """Raises TransferFailed: its owner has ended."""
        card = self._fabric.cards.get(memory.handle.decode().rpartition("/")[0])
        if card is None:
            raise TransferFailed(f"sim: {memory.handle!r} is of no process")
        self._last += 1
        self._opened[self._last] = card
        return self._last * _SPACE + memory.address

    def close(self, address: int) -> None:
        """Raises AssertionError: a gather from it is under way."""
        card = self._opened.pop(address // _SPACE)
        reading = [pull for pull in self._pulls if pull.transfer.opened is card and not pull.done()]
        same = [other for other in self._opened.values() if other is card]
        assert same or not reading or not self._card.alive, f"sim: memory of {card.session} is let go while it is read"

    def pull(
        self, pairs: Sequence[tuple[PageRows, PageRows]], pages: NDArray[np.int32], sources: NDArray[np.int32],
        seed: int, behind: object,
    ) -> SimPull:  # fmt: skip
        """Each row moves at a time of its own."""
        opened = self._opened[pairs[0][1].address // _SPACE]
        found = [strips_between_rows(own, theirs, pages, sources) for own, theirs in pairs]
        strips = Strips(
            local=np.concatenate([strips.local for strips in found]),
            remote=np.concatenate([strips.remote for strips in found]) % _SPACE,
            byte_counts=np.concatenate([strips.byte_counts for strips in found]),
        )
        transfer = Transfer(own=self._card, session=opened.session, pushes=False, over=lambda: None, opened=opened)
        self._fabric.begin(transfer, strips)
        assert not transfer.error, f"sim: a read of opened memory fails: {transfer.error}"
        pull = SimPull(self, transfer, [own for own, _ in pairs], pages, seed)
        self._pulls = [*(each for each in self._pulls if not each.done()), pull]
        return pull

    def mark(self) -> object:
        """Nothing is queued on a simulated device: what a rank obeys is done."""
        return self

    def is_idle(self) -> bool:
        """Every other time, so that DATA comes with digests and without, in turns."""
        self._is_idle = not self._is_idle
        return self._is_idle

    def sums(self, rows: Sequence[Sequence[PageRows]], pages: NDArray[np.int32], seed: int) -> bytes:
        """Of own pages, as they are now."""
        stores = self._engine.stores[self._rank].values()
        found = [
            np.concatenate([next(filter(_is_there, (s.rows(each, pages) for s in stores))) for each in group], axis=1)
            for group in rows
        ]
        return np.stack([page_sums(rows_GY, seed) for rows_GY in found], axis=1).astype("<u8").tobytes()


def _is_there(rows: NDArray[np.uint8] | None) -> bool:
    return rows is not None
