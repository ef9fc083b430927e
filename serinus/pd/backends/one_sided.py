"""What a one-sided data backend is: it reads or writes another process's pages while that process does something else.

Pages go whole: between ranks of equal layout from pool to pool, else from a pool into rows of memory that is not one;
or slices of them from pool to pool.
What may move when is decided by the handoff machines; this face only says when an operation is over, and never says so
too early. Torch-free.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from serinus.core.errors import ConfigError, InvariantError, TransferFailed
from serinus.core.parts import Part
from serinus.pd.modes import Capabilities
from serinus.pd.settings import Holds
from serinus.pd.slices import Slice

_MAGIC: Final = b"SKV1"
_HEAD: Final = struct.Struct("<4sBI")
_REGION: Final = struct.Struct("<BQIQQI")
_REGIONS_MAX: Final = 8
_SESSION_BYTES_MAX: Final = 1 << 16


class OpState(Enum):
    """Of one read or write. DONE and FAILED: nothing is read or written for it any more."""

    PENDING = "pending"
    DONE = "done"
    """All bytes are where they should be."""
    FAILED = "failed"
    """Not all bytes are, and nothing of it is under way."""
    LOST = "lost"
    """A write failed and may still go on: only a fence on the side that is written to makes that memory safe. A read is
    never lost: a backend that cannot tell ends its connection first, and says FAILED."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpResult:
    """How an operation stands, as `poll` tells."""

    state: OpState
    error: str = ""
    """In words, with FAILED and LOST."""
    digests: bytes = b""
    """With DONE: of the pages that were written, where the backend makes them itself."""
    seconds: float = 0.0
    """With DONE: how long it took, where the backend measures that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Where bytes of one part's pool lie: page p of lane l at address + l * lane_stride + p * strip_bytes.

    A page's bytes, in the order of `read_pages`, are its strips, lane after lane, region after region of its part.
    """

    part: Part
    address: int
    lane_count: int
    """k and v of every layer of the part on this rank."""
    lane_stride: int
    """Bytes from one lane to the next."""
    strip_bytes: int
    """Bytes of one page in one lane."""
    page_count: int
    """With page 0, which is padding."""

    @property
    def byte_count(self) -> int:
        """From the first lane's first page to the last lane's last."""
        return (self.lane_count - 1) * self.lane_stride + self.page_count * self.strip_bytes if self.lane_count else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PageRows:
    """Rows of bytes in every page of a region: that of page p, strip s and row r lies at
    address + p * page_step + s * strip_step + r * row_step."""

    address: int
    page_count: int
    page_step: int
    strip_count: int
    strip_step: int
    row_count: int
    """Of one strip of a page."""
    row_step: int
    row_bytes: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """Strips, rows, bytes: of both sides of a read the same."""
        return self.strip_count, self.row_count, self.row_bytes


def whole_rows(region: Region) -> PageRows:
    """All of it: a row is a page in one lane."""
    return PageRows(
        address=region.address, page_count=region.page_count, page_step=region.strip_bytes,
        strip_count=region.lane_count, strip_step=region.lane_stride, row_count=1, row_step=region.strip_bytes,
        row_bytes=region.strip_bytes,
    )  # fmt: skip


def whole_pages(regions: Sequence[Region], part: Part) -> list[PageRows]:
    """All that moves with a part, in the order of a page's bytes."""
    return [whole_rows(region) for region in regions if region.part is part]


def rows_of(region: Region, part: Slice) -> PageRows:
    """The rows of a slice in the region that holds the KV of its rank's part.

    Raises TransferFailed: that region is of pages of another size, or its lanes are neither whole pages nor strips.
    """
    if region.lane_count * region.strip_bytes != part.strip_count * part.strip_bytes:
        raise TransferFailed(
            f"pd: pages are {region.lane_count} x {region.strip_bytes} bytes there, the layout says"
            f" {part.strip_count} x {part.strip_bytes}"
        )
    if region.lane_count not in (1, part.strip_count):
        raise TransferFailed(f"pd: pages lie in {region.lane_count} lanes, expected 1 or {part.strip_count}")
    step = part.strip_bytes if region.lane_count == 1 else region.lane_stride
    return PageRows(
        address=region.address + part.strips.start * step + part.start, page_count=region.page_count,
        page_step=region.strip_bytes, strip_count=len(part.strips), strip_step=step, row_count=part.tokens,
        row_step=part.token_bytes, row_bytes=part.row_bytes,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """How one rank's memory is reached."""

    session: bytes
    """What the library needs to find the process."""
    regions: tuple[Region, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fenced:
    """A fence was performed: nothing that the peer began can reach our memory any more."""

    all_peers: bool
    """All peers were cut off, not this one alone."""
    endpoint: bytes
    """Ours from now on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Strips:
    """Pieces of memory that go from one process to another, each contiguous on both sides; int64, equal lengths."""

    local: NDArray[np.int64]
    """Addresses in our own memory."""
    remote: NDArray[np.int64]
    """Addresses in the memory of the peer."""
    byte_counts: NDArray[np.int64]


class OneSided(Protocol):
    """One rank's way to reach other processes' pages, and to be reached."""

    name: str
    """Name of the backend: cuda_ipc, nixl or mooncake."""
    capabilities: Capabilities

    @property
    def holds(self) -> Holds | None:
        """Where both sides of a pull share memory; None = decode asks with CONFIRM."""

    def register(self, regions: Sequence[Region]) -> bytes:
        """Make memory reachable, once; returns our endpoint, for the peers. Raises ConfigError where it cannot be."""

    def refusal(self, ours: Sequence[bytes], theirs: Sequence[bytes], pairs: Sequence[tuple[int, int]]) -> str:
        """Why a peer with these endpoints (one of each rank) and we, with ours, cannot reach each other, in words;
        empty = it may work. Asked for at HELLO, on the side that is read or writes. `pairs`: ranks of ours and theirs
        between which anything moves."""

    def digests(self, part: Part, pages: NDArray[np.int32], seed: int) -> bytes | None:
        """Of own pages, as OpResult.digests are; None = reads make none: XXH3, by the page workers of both sides."""

    def digests_beside(self) -> bool:
        """Whether own pages are whole as they are now, and peers may read them before their digests are made."""

    def connect(self, peer: str, endpoint: bytes) -> None:
        """Be ready to reach one rank of a peer, by a name of our choice; known names are taken anew.

        Raises:
            TransferFailed: the endpoint makes no sense, or no process is there.
        """

    def disconnect(self, peer: str) -> None:
        """No new operations with it; those under way come to their end in `poll`. Unknown names change nothing."""

    def fence(self, peer: str) -> Fenced:
        """Cut a peer off from our memory. Cost: may take a second, and every other peer's connection."""

    def write(self, peer: str, part: Part, pages: NDArray[np.int32], targets: NDArray[np.int32]) -> int:
        """Begin to write own pages into the peer's; the operation's number.

        Raises:
            TransferFailed: the peer is not connected, or the two sides' pages differ in shape. Nothing was begun.
        """

    def mark(self) -> object | None:
        """What is queued on the device of our pages now; None = they are used by this thread alone."""

    def read(
        self, peer: str, part: Part, pages: NDArray[np.int32], sources: NDArray[np.int32], digest_seed: int = 0,
        behind: Any = None,
    ) -> int:  # fmt: skip
        """Begin to fill own pages from the peer's; as `write`. `digest_seed`: of OpResult.digests; `behind`: a mark of
        this backend, None = all that is queued now."""

    def poll(self, op: int) -> OpResult:
        """How an operation is. Never waits. After anything but PENDING the number is forgotten."""

    def cancel(self, op: int) -> None:
        """A hint that it is of no use any more. It still comes to its end in `poll`."""

    def close(self) -> None:
        """Give everything back; when it returns no peer reaches our memory any more."""


class RowReader(OneSided, Protocol):
    """A backend that also reads pages into memory which is no pool (capabilities.recut is PULL)."""

    def lend(self, rows: NDArray[np.uint8]) -> None:
        """Make own memory ready for `read_rows`; no peer reaches it. Raises TransferFailed: the library refuses it."""

    def read_rows(self, peer: str, part: Part, rows: NDArray[np.uint8], sources: NDArray[np.int32]) -> int:
        """Begin to fill rows[G, page_bytes of the peer], lent before, from the peer's pages; as `read`. After FAILED
        some of it may still come: what is in the rows is checked before it is used."""


class SliceReader(OneSided, Protocol):
    """A backend that also reads slices of pages in place (capabilities.slices)."""

    def slice_digests(self, part: Part, slices: Sequence[Slice], pages: NDArray[np.int32], seed: int) -> bytes:
        """Of own pages, as OpResult.digests are: one for each slice, page by page."""

    def read_slice(
        self, peer: str, part: Part, between: tuple[Slice, Slice], pages: NDArray[np.int32],
        sources: NDArray[np.int32], digest_seed: int, behind: Any = None,
    ) -> int:  # fmt: skip
        """Begin to fill a slice of own pages from one of the peer's; as `read`. `between`: the peer's, and ours."""


def check_words(name: str, regions: Sequence[Region]) -> None:
    """Whether pages can be summed on a GPU. Raises ConfigError: strips of a region are no multiple of 8 bytes."""
    odd = [region for region in regions if region.strip_bytes % 8]
    if odd:
        raise ConfigError(
            f"pd: {name} sums words of 8 bytes on a GPU; a page of part {odd[0].part.name} has {odd[0].strip_bytes}"
        )


def check_shapes(ours: Region, theirs: Region) -> None:
    """Raises TransferFailed: pages differ in shape."""
    mine, other = (ours.lane_count, ours.strip_bytes), (theirs.lane_count, theirs.strip_bytes)
    if mine != other:
        raise TransferFailed(f"pd: pages are {mine} (lanes, bytes in each) here and {other} there, expected equal ones")


def check_pages(own_count: int, their_count: int, pages: NDArray[np.int32], others: NDArray[np.int32]) -> None:
    """Whether own `pages` and the peer's `others` are as many, of those that there are.

    Raises:
        TransferFailed: other numbers of them, or a page of theirs is out of their region.
        InvariantError: a page of ours is out of our region.
    """
    if len(pages) != len(others) or not len(pages):
        raise TransferFailed(f"pd: {len(pages)} pages here and {len(others)} there, expected as many, and some")
    if pages.min() < 1 or pages.max() >= own_count:
        raise InvariantError(f"pd: own pages {pages.min()} .. {pages.max()}, expected 1 .. {own_count - 1}")
    if others.min() < 1 or others.max() >= their_count:
        raise TransferFailed(f"pd: pages {others.min()} .. {others.max()}, the peer has 1 .. {their_count - 1}")


def strips_between(ours: Region, theirs: Region, pages: NDArray[np.int32], others: NDArray[np.int32]) -> Strips:
    """What to move between own `pages` and the peer's `others`, neighbours together.

    Raises as `check_shapes` and `check_pages`. Cost: O(stretches of neighbours * lanes) numbers, in numpy.
    """
    check_shapes(ours, theirs)
    check_pages(ours.page_count, theirs.page_count, pages, others)
    breaks = np.flatnonzero((np.diff(pages) != 1) | (np.diff(others) != 1)) + 1
    starts = np.concatenate(([0], breaks))
    counts = np.diff(np.concatenate((starts, [len(pages)]))).astype(np.int64)
    lanes = np.arange(ours.lane_count, dtype=np.int64)[:, None]

    def addresses(region: Region, ids: NDArray[np.int32]) -> NDArray[np.int64]:
        first = region.address + ids[starts].astype(np.int64) * region.strip_bytes
        found: NDArray[np.int64] = (first[None, :] + lanes * region.lane_stride).reshape(-1)
        return found

    sizes = np.broadcast_to(counts * ours.strip_bytes, (ours.lane_count, len(counts)))
    return Strips(local=addresses(ours, pages), remote=addresses(theirs, others), byte_counts=sizes.reshape(-1))


def strips_between_rows(
    ours: PageRows, theirs: PageRows, pages: NDArray[np.int32], others: NDArray[np.int32]
) -> Strips:
    """What to move between rows of own `pages` and those of the peer's `others`, one by one.

    Raises as `check_pages`, and TransferFailed: rows differ in shape. Cost: O(rows) numbers, in numpy.
    """
    if ours.shape != theirs.shape:
        raise TransferFailed(f"pd: {ours.shape} (strips, rows, bytes) here and {theirs.shape} there, expected the same")
    check_pages(ours.page_count, theirs.page_count, pages, others)
    strips_S1, rows_R = np.arange(ours.strip_count)[:, None], np.arange(ours.row_count)

    def addresses(side: PageRows, ids: NDArray[np.int32]) -> NDArray[np.int64]:
        starts_G11 = side.address + ids.astype(np.int64)[:, None, None] * side.page_step
        found: NDArray[np.int64] = (starts_G11 + strips_S1 * side.strip_step + rows_R * side.row_step).reshape(-1)
        return found

    local, remote = addresses(ours, pages), addresses(theirs, others)
    return Strips(local=local, remote=remote, byte_counts=np.full(len(local), ours.row_bytes, np.int64))


def strips_into_rows(
    rows: NDArray[np.uint8], theirs: Sequence[Region], part: Part, sources: NDArray[np.int32]
) -> Strips:  # fmt: skip
    """What to read so that rows[G, Y], contiguous, are pages of the peer as `read_pages` gives them there.

    Raises TransferFailed: its pages have another size, or there are no such pages.
    """
    other = [region for region in theirs if region.part == part]
    page_bytes = sum(region.lane_count * region.strip_bytes for region in other)
    if rows.shape != (len(sources), page_bytes) or not len(sources):
        raise TransferFailed(f"pd: rows of shape {rows.shape} for {len(sources)} pages of {page_bytes} bytes")
    starts_G1 = rows.ctypes.data + page_bytes * np.arange(len(sources), dtype=np.int64)[:, None]
    local, remote, counts = [], [], []
    for region in other:
        if sources.min() < 1 or sources.max() >= region.page_count:
            raise TransferFailed(
                f"pd: pages {sources.min()} .. {sources.max()}, the peer has 1 .. {region.page_count - 1}"
            )
        lanes_L = np.arange(region.lane_count, dtype=np.int64)
        pages_G1 = region.address + sources.astype(np.int64)[:, None] * region.strip_bytes
        local.append((starts_G1 + lanes_L * region.strip_bytes).reshape(-1))
        remote.append((pages_G1 + lanes_L * region.lane_stride).reshape(-1))
        counts.append(np.full(local[-1].shape, region.strip_bytes, np.int64))
        starts_G1 = starts_G1 + region.lane_count * region.strip_bytes
    return Strips(local=np.concatenate(local), remote=np.concatenate(remote), byte_counts=np.concatenate(counts))


def pairs_of_part(ours: Sequence[Region], theirs: Sequence[Region], part: Part) -> list[tuple[Region, Region]]:
    """Own and other region of all that moves with a part. Raises TransferFailed: they are not as many, or none."""
    mine, other = ([region for region in regions if region.part == part] for regions in (ours, theirs))
    if len(mine) != len(other) or not mine:
        raise TransferFailed(f"pd: part {part.name} lies in {len(mine)} regions here and {len(other)} there")
    return list(zip(mine, other, strict=True))


def strips_of_part(
    ours: Sequence[Region], theirs: Sequence[Region], part: Part, pages: NDArray[np.int32], others: NDArray[np.int32]
) -> Strips:
    """`strips_between` over all regions of a part (KV, and what moves with it). Raises what that raises."""
    pairs = pairs_of_part(ours, theirs, part)
    found = [strips_between(one, two, pages, others) for one, two in pairs]
    return Strips(
        local=np.concatenate([strips.local for strips in found]),
        remote=np.concatenate([strips.remote for strips in found]),
        byte_counts=np.concatenate([strips.byte_counts for strips in found]),
    )


def pack_endpoint(session: bytes, regions: Sequence[Region]) -> bytes:
    """An endpoint as it travels in HELLO."""
    rows = [_REGION.pack(r.part, r.address, r.lane_count, r.lane_stride, r.strip_bytes, r.page_count) for r in regions]
    return _HEAD.pack(_MAGIC, len(rows), len(session)) + b"".join(rows) + session


def unpack_endpoint(text: bytes) -> Endpoint:
    """The reverse. Raises TransferFailed for whatever is not an endpoint."""
    try:
        magic, count, session_bytes = _HEAD.unpack_from(text)
        start = _HEAD.size + count * _REGION.size
        whole = start + session_bytes == len(text)
        if magic != _MAGIC or not whole or count > _REGIONS_MAX or session_bytes > _SESSION_BYTES_MAX:
            raise TransferFailed(f"pd: {len(text)} bytes are no endpoint, expected one of {_MAGIC.decode()}")
        rows = [_REGION.unpack_from(text, _HEAD.size + i * _REGION.size) for i in range(count)]
        regions = tuple(
            Region(
                part=Part(part), address=address, lane_count=lanes, lane_stride=stride, strip_bytes=strip,
                page_count=pages,
            )
            for part, address, lanes, stride, strip, pages in rows
        )  # fmt: skip
    except (struct.error, ValueError) as error:
        raise TransferFailed(f"pd: {len(text)} bytes are no endpoint: {error}") from None
    limit = 1 << 63
    if any(region.address + region.byte_count >= limit for region in regions):
        raise TransferFailed("pd: an endpoint names memory beyond what there can be")
    return Endpoint(session=bytes(text[start:]), regions=regions)
