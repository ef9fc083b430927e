"""The one-sided operations of one rank: its libraries, the ranks of peers that they reach, and what is under way.

An operation carries a token of its caller, which is given back when the operation is over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from serinus.core.errors import ConfigError, TransferFailed
from serinus.core.parts import PageStore, Part
from serinus.pd.actions import AttachPeer, FencePeer
from serinus.pd.backends import OneSided, OpResult, OpState, Region, RowReader, SliceReader
from serinus.pd.modes import Mode
from serinus.pd.pages import DigestPiece, MovePiece, PagesGranted, RankFenced, TakeIn
from serinus.pd.slices import Slice
from serinus.pd.staged_reads import StagedRead

T = TypeVar("T")
_MARKS_MAX: Final = 1024
"""Handoffs whose grant is noted; a read of an older one begins behind what is queued when it is asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Op(Generic[T]):
    backend: OneSided
    number: int
    token: T


class OneSidedOps(Generic[T]):
    """The one-sided backends of one rank."""

    def __init__(self, backends: Sequence[OneSided]) -> None:
        self._backends = {backend.name: backend for backend in backends}
        self._joined: dict[str, tuple[OneSided, tuple[int, ...]]] = {}
        """Of each peer: its backend, and the ranks of it that we are connected to."""
        self._ops: list[_Op[T]] = []
        self._marks: dict[str, object] = {}
        """What was queued on the device when pages were granted, by handoff, where the backend knows."""
        self._lent: dict[str, NDArray[np.uint8]] = {}
        """Memory that is no pool, by the backend that may read into it."""

    def register(self, stores: Mapping[Part, PageStore]) -> dict[str, bytes]:
        """Make own pages reachable, once; endpoints by backend. Raises ConfigError: a store says not where it lies."""
        regions = {name: _regions(stores, name) for name in self._backends}
        return {name: backend.register(regions[name]) for name, backend in self._backends.items()}

    def join(self, peer: AttachPeer, ranks: Sequence[int]) -> None:
        """Connect to these ranks of a peer. Raises TransferFailed."""
        backend = self._backends[peer.backend]
        self._joined[peer.peer] = backend, tuple(ranks)
        for rank in ranks:
            if rank >= len(peer.endpoints):
                raise TransferFailed(f"pd: {peer.peer} names {len(peer.endpoints)} endpoints, expected one of {rank=}")
            backend.connect(f"{peer.peer}/{rank}", peer.endpoints[rank])

    def lend(self, peer: str, area: NDArray[np.uint8]) -> None:
        """Pages of this peer will be read into this memory. Raises TransferFailed."""
        backend = cast(RowReader, self._of(peer))
        if self._lent.get(backend.name) is not area:
            backend.lend(area)
            self._lent[backend.name] = area

    def leave(self, peer: str) -> None:
        """Undo it. Operations under way are still polled to their end."""
        if peer in self._joined:
            backend, ranks = self._joined.pop(peer)
            for rank in ranks:
                backend.disconnect(f"{peer}/{rank}")

    def has(self, backend: str) -> bool:
        """Whether it is one of these."""
        return backend in self._backends

    def writes(self, backend: str) -> bool:
        """Whether pages of equal layouts are written by their owner (push), else read."""
        return self._backends[backend].capabilities.mode is Mode.PUSH

    def digests_beside(self, peer: str) -> bool:
        """Whether the pages of now are whole, and their digests may be made while the peer reads them."""
        joined = self._joined.get(peer)
        return joined is not None and joined[0].digests_beside()

    def digests(self, command: MovePiece | DigestPiece) -> bytes | None:
        """Of own pages that a peer is to read, where the backend makes them itself."""
        joined = self._joined.get(command.peer)
        return None if joined is None else joined[0].digests(command.part, command.pages, command.digest_seed)

    def has_slices(self, backend: str) -> bool:
        """Whether ranks read their own bytes alone of pages of another layout."""
        return self.has(backend) and self._backends[backend].capabilities.slices

    def slice_digests(self, command: MovePiece, slices: Sequence[Slice]) -> bytes:
        """Of each slice of own pages that a peer is to read. Raises TransferFailed."""
        backend = cast(SliceReader, self._of(command.peer))
        return backend.slice_digests(command.part, slices, command.pages, command.digest_seed)

    def write(self, command: MovePiece, token: T) -> None:
        """Begin to write a piece into the pages of the same rank of the peer. Raises TransferFailed: nothing began."""
        backend = self._of(command.peer)
        name = f"{command.peer}/{command.rank}"
        number = backend.write(name, command.part, command.pages, command.targets)
        self._ops.append(_Op(backend=backend, number=number, token=token))

    def granted(self, command: PagesGranted) -> None:
        """Note what is queued on the device now, behind which reads of this handoff may begin."""
        mark = self._joined[command.peer][0].mark() if command.peer in self._joined else None
        if mark is not None:
            if len(self._marks) >= _MARKS_MAX:
                del self._marks[next(iter(self._marks))]
            self._marks[command.xid] = mark

    def read(self, command: TakeIn, token: T) -> None:
        """Begin to fill own pages from those of a source rank. Raises TransferFailed: nothing began."""
        backend = self._of(command.peer)
        name = f"{command.peer}/{command.source}"
        number = backend.read(
            name, command.part, command.pages, command.sources, command.digest_seed, self._marks.get(command.xid)
        )
        self._ops.append(_Op(backend=backend, number=number, token=token))

    def read_slice(self, command: TakeIn, between: tuple[Slice, Slice], token: T) -> None:
        """Begin to fill a slice of own pages from those of a source rank. Raises TransferFailed: nothing began."""
        backend = cast(SliceReader, self._of(command.peer))
        name = f"{command.peer}/{command.source}"
        number = backend.read_slice(
            name, command.part, between, command.pages, command.sources, command.digest_seed,
            self._marks.get(command.xid),
        )  # fmt: skip
        self._ops.append(_Op(backend=backend, number=number, token=token))

    def read_rows(self, read: StagedRead, token: T) -> None:
        """Begin to fill rows from pages of a source rank. Raises TransferFailed: nothing began."""
        command, backend = read.command, cast(RowReader, self._of(read.command.peer))
        assert read.rows is not None, f"pd: a read of {command.xid} without rows, expected some"
        name = f"{command.peer}/{command.source}"
        number = backend.read_rows(name, command.part, read.rows, command.sources)
        self._ops.append(_Op(backend=backend, number=number, token=token))

    def _of(self, peer: str) -> OneSided:
        if peer not in self._joined:
            raise TransferFailed(f"pd: {peer} is not connected")
        return self._joined[peer][0]

    @property
    def is_busy(self) -> bool:
        """Whether an operation is under way."""
        return bool(self._ops)

    def cancel(self, is_unwanted: Callable[[T], bool]) -> None:
        """Hint that these operations are of no use any more; each is still polled to its end."""
        for op in self._ops:
            if is_unwanted(op.token):
                op.backend.cancel(op.number)

    def poll(self) -> list[tuple[T, OpResult]]:
        """Operations that have ended since the last poll, in any way."""
        ended: list[tuple[T, OpResult]] = []
        left: list[_Op[T]] = []
        for op in self._ops:
            result = op.backend.poll(op.number)
            if result.state is OpState.PENDING:
                left.append(op)
            else:
                ended.append((op.token, result))
        self._ops = left
        return ended

    def fence(self, command: FencePeer) -> RankFenced:
        """Cut all ranks of a peer off from this rank's memory."""
        backend, all_peers, endpoint = self._backends[command.backend], False, b""
        for rank in range(command.ranks):
            result = backend.fence(f"{command.peer}/{rank}")
            if result.all_peers:
                all_peers, endpoint = True, result.endpoint
                break
        return RankFenced(peer=command.peer, backend=command.backend, all_peers=all_peers, endpoint=endpoint)

    def close(self) -> None:
        """End all connections and unregister all memory."""
        for backend in self._backends.values():
            backend.close()


def _regions(stores: Mapping[Part, PageStore], name: str) -> list[Region]:
    found: list[Region] = []
    for part, store in stores.items():
        if not store.page_bytes:
            continue
        regions = getattr(store, "regions", None) or [getattr(store, "region", None)]
        for region in regions:
            if region is None:
                raise ConfigError(
                    f"pd: backend {name} needs pages at a fixed address, the store of {part.name} names none"
                )
            found.append(
                Region(
                    part=part, address=region.address, lane_count=region.lane_count, lane_stride=region.lane_stride,
                    strip_bytes=region.strip_bytes, page_count=region.page_count,
                )
            )  # fmt: skip
    return found
