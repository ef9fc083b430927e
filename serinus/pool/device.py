"""DevicePool: the KV bytes of one engine, all layers. Holds; which owner has which page is decided elsewhere.

Shapes: S = slots = page_count * page_size, H = KV heads, D = head size, G = pages moved, Y = bytes of a page,
R = rows of a byte buffer, W = bytes of one lane (k, v or the latent rows of one layer) of a page.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from serinus.core.errors import ConfigError
from serinus.core.stamps import STAMP_BYTES, STAMP_FIELDS
from serinus.kernels import Kernels, prefer_huge_pages

__all__ = ["DevicePool", "PoolRegion", "PoolSpec", "lazy_zeros"]

_LINE_BYTES = 64
Strips = Sequence[tuple[Tensor, ...]]
"""Strips of slots of one width: (k, v) or the latent rows of layers, or lanes of stamps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSpec:
    """The size and shape of a pool."""

    layer_count: int
    """Layers of which KV is kept: those of one part. 0 where no layer is of that part: its pages then have no bytes."""
    kv_head_count: int
    """KV heads of each layer, on this rank."""
    head_size: int
    """Elements of one head."""
    page_size: int
    """Slots of a page."""
    page_count: int
    """Pages, with page 0, which is padding; so at least 2."""
    dtype: torch.dtype
    """Of keys and values: torch.float32, torch.bfloat16 or torch.float16."""
    device: str = "cpu"
    """Where the bytes are."""
    halves: int = 2
    """Rows of a slot in each layer: keys and values, or 1 that is both (Part.halves)."""
    stamped: bool = False
    """Whether the canary's stamps are kept beside the KV and move with it."""

    def __post_init__(self) -> None:
        for name, low in (("layer_count", 0), ("kv_head_count", 1), ("head_size", 1), ("page_size", 1)):
            if getattr(self, name) < low:
                raise ConfigError(f"pool: {name} is {getattr(self, name)}, expected at least {low}")
        if self.page_count < 2:
            raise ConfigError(f"pool: page_count is {self.page_count}, expected at least 2 (page 0 is padding)")
        if self.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ConfigError(f"pool: dtype is {self.dtype}, expected torch.float32, torch.bfloat16 or torch.float16")

    @property
    def slot_count(self) -> int:
        """Slots of the pool, with those of the padding page."""
        return self.page_count * self.page_size

    @property
    def page_bytes(self) -> int:
        """Bytes of one page: the rows of all layers, then the stamps."""
        return self.kv_bytes + self.stamp_bytes

    @property
    def kv_bytes(self) -> int:
        """Of them, those of rows."""
        return self.page_size * self.slot_bytes

    @property
    def stamp_bytes(self) -> int:
        """Of them, those of the stamps; a part without layers has none."""
        return self.page_size * self.halves * STAMP_BYTES if self.stamped and self.layer_count else 0

    @property
    def layer_bytes(self) -> int:
        """Bytes of one page of one layer, all halves."""
        return self.page_size * self.halves * self.kv_head_count * self.head_size * self.dtype.itemsize

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot over all layers, without stamps."""
        return self.layer_count * self.halves * self.kv_head_count * self.head_size * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRegion:
    """Where bytes of a pool lie: page p of lane l at address + l * lane_stride + p * strip_bytes."""

    address: int
    lane_count: int
    lane_stride: int
    strip_bytes: int
    """Bytes of one page in one lane."""
    page_count: int


class DevicePool:
    """The keys and values of every slot.

    One zeroed allocation of page_count * page_bytes (and one for stamps). On the CPU it comes from calloc, so the OS
    maps a page of memory when it is first written: a large pool costs nothing until it is used.
    """

    def __init__(self, spec: PoolSpec, kernels: Kernels) -> None:
        self.spec = spec
        self._kernels = kernels
        shape = (spec.layer_count, spec.halves, spec.slot_count, spec.kv_head_count, spec.head_size)
        bytes_all = _zeros(spec.kv_bytes * spec.page_count, spec.device)
        lanes = bytes_all.view(spec.dtype).view(shape)
        self.layers: tuple[tuple[Tensor, ...], ...] = tuple(tuple(halves) for halves in lanes)
        """(k, v), or the latent rows alone, of each layer, [S, H, D] each, contiguous, as models and kernels take
        them."""
        self.k: tuple[Tensor, ...] = tuple(halves[0] for halves in self.layers)
        """Keys (or latent rows) of each layer."""
        self.v: tuple[Tensor, ...] = tuple(halves[1] for halves in self.layers if len(halves) == 2)
        """Values of each layer; none where rows are latent."""
        stamp_shape = (2 * spec.halves, spec.slot_count, STAMP_FIELDS)
        self.stamps_LS4: Tensor | None = None
        """The canary's stamps, int64 [2 * halves, S, STAMP_FIELDS], where the pool keeps them."""
        self._strips = [(self.layers, 0)] if self.layers else []
        if spec.stamp_bytes:
            self.stamps_LS4 = (
                _zeros(spec.stamp_bytes * spec.page_count, spec.device).view(torch.int64).view(stamp_shape)
            )
            lanes_S14 = self.stamps_LS4.view(-1, spec.slot_count, 1, STAMP_FIELDS)
            self._strips.append(((tuple(lanes_S14),), spec.kv_bytes))
        self._lanes = [lane for strips, _ in self._strips for lane in self._page_lanes(strips)]

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers: the Y of read_pages and write_pages."""
        return self.spec.page_bytes

    @property
    def regions(self) -> tuple[PoolRegion, ...]:
        """For transports that reach these bytes: KV, then stamps; strips of a page in `read_pages` order."""
        spec, found = self.spec, []
        lanes = (
            (self.k[0] if self.k else None, spec.halves * spec.layer_count, spec.kv_bytes),
            (self.stamps_LS4, 2 * spec.halves, spec.stamp_bytes),
        )
        for start, lane_count, page_bytes in lanes:
            if start is not None:
                strip_bytes = page_bytes // lane_count
                stride = strip_bytes * spec.page_count
                found.append(
                    PoolRegion(
                        address=start.data_ptr(), lane_count=lane_count, lane_stride=stride, strip_bytes=strip_bytes,
                        page_count=spec.page_count,
                    )
                )  # fmt: skip
        return tuple(found)

    def read_pages(self, pages: NDArray[np.integer], out: NDArray[np.uint8] | None = None) -> NDArray[np.uint8]:
        """The bytes of whole pages, [G, Y], page-first: [layer][k, then v, or one][page_size, H, D], then the stamps,
        [lane][page_size, STAMP_FIELDS], where the pool keeps them.

        Args:
            pages: page ids in [0, page_count).
            out: where to put them, uint8 [G, Y], writable, C order (a view of shared memory, say); None allocates.
        Returns: `out`.
        Raises:
            ValueError: the buffer has another size, or a page is none of ours.
        Cost: G * Y bytes read and written; waits for the device.
        """
        if out is None:
            out = np.empty((len(pages), self.page_bytes), dtype=np.uint8)
        page_ids, out_GY = self._page_ids(pages), torch.from_numpy(out)
        for strips, part_GZ in self._parts(out_GY):
            self._kernels.gather_pages(strips, page_ids, self.spec.page_size, part_GZ)
        return out

    def write_pages(self, pages: NDArray[np.integer], data: NDArray[np.uint8]) -> None:
        """Fill whole pages from the bytes that `read_pages` gave, here or in an engine of equal layout.

        Args:
            pages: distinct page ids in [1, page_count).
            data: uint8 [G, Y], C order; may be read-only.
        Raises:
            ValueError: the data has another size, or a page is none of ours.
        Cost: G * Y bytes read and written.
        """
        page_ids = self._page_ids(pages)
        for strips, part_GZ in self._parts(_tensor_of(data)):
            self._kernels.scatter_pages(strips, page_ids, self.spec.page_size, part_GZ)

    def hashed_pages(
        self, pages: NDArray[np.integer], rows: NDArray[np.uint8] | None, seed: int, inward: bool = False
    ) -> bytes:
        """`read_pages` into rows[G, Y] (`write_pages` from them where `inward`) and XXH3 of each page, in one pass.

        Args:
            pages: as `read_pages` and `write_pages` take them.
            rows: uint8 [G, Y]; where `inward` they may be read only, and change under our hands: what is hashed is what
                is in the pool. None: pages are hashed where they lie.
            seed: of XXH3.
        Returns: a little-endian u64 for each page.
        Raises:
            ValueError: as `read_pages`.
        Cost: on the CPU that of the copy alone; waits for an accelerator.
        """
        assert self._lanes, "pool: pages of a part without layers have no bytes to hash"
        ids = np.ascontiguousarray(pages, dtype=np.int64)
        return self._kernels.hashed_pages(self._lanes, ids, rows, seed, inward).astype("<u8").tobytes()

    def copy_out(self, pages: NDArray[np.integer], bytes_RY: Tensor, rows: NDArray[np.integer]) -> None:
        """Page pages[g] goes to row rows[g] of a buffer on the host; layout as `read_pages`.

        On an accelerator everything is queued on the current stream and nothing waits, as far as the buffer is pinned.

        Raises:
            ValueError: sizes disagree, or a page or row is none of ours.
        Cost: G * Y bytes read and written, on the calling thread alone.
        """
        for strips, part_RZ in self._parts(bytes_RY):
            self._copy_out(strips, pages, part_RZ, rows)

    def _copy_out(self, strips: Strips, pages: NDArray[np.integer], part_RZ: Tensor, rows: NDArray[np.integer]) -> None:
        if self.spec.device == "cpu":
            page_ids, row_ids = self._page_ids(pages), torch.from_numpy(np.ascontiguousarray(rows, dtype=np.int64))
            self._kernels.gather_pages(strips, page_ids, self.spec.page_size, part_RZ, row_ids)
            return
        lanes = self._page_lanes(strips)
        self._check_on_host(pages, rows, part_RZ, sum(lane.shape[1] for lane in lanes))
        page_ids = self._page_ids(pages)
        found_GZ = torch.cat([lane.index_select(0, page_ids) for lane in lanes], dim=1)
        for at, row, count in _runs(rows, merge=part_RZ.is_contiguous()):
            part_RZ[row : row + count].copy_(found_GZ[at : at + count], non_blocking=True)

    def copy_in(
        self, pages: NDArray[np.integer], bytes_RY: Tensor, rows: NDArray[np.integer], first: int, end: int
    ) -> None:
        """The reverse of `copy_out`, for layers first .. end - 1 of this pool; the rows still hold all layers."""
        if first < end:
            width = self.spec.layer_bytes
            self._copy_in(self.layers[first:end], pages, bytes_RY[:, first * width : end * width], rows)

    def copy_stamps_in(self, pages: NDArray[np.integer], bytes_RY: Tensor, rows: NDArray[np.integer]) -> None:
        """The reverse of `copy_out`, for the stamps; nothing where the pool keeps none."""
        for strips, part_RZ in self._parts(bytes_RY)[1:]:
            self._copy_in(strips, pages, part_RZ, rows)

    def _copy_in(self, strips: Strips, pages: NDArray[np.integer], part_RZ: Tensor, rows: NDArray[np.integer]) -> None:
        if self.spec.device == "cpu":
            page_ids, row_ids = self._page_ids(pages), torch.from_numpy(np.ascontiguousarray(rows, dtype=np.int64))
            self._kernels.scatter_pages(strips, page_ids, self.spec.page_size, part_RZ, row_ids)
            return
        lanes = self._page_lanes(strips)
        width = lanes[0].shape[1]
        self._check_on_host(pages, rows, part_RZ, width * len(lanes))
        page_ids = self._page_ids(pages)
        staged_GZ = torch.empty((len(pages), part_RZ.shape[1]), dtype=torch.uint8, device=self.spec.device)
        for at, row, count in _runs(rows, merge=part_RZ.is_contiguous()):
            staged_GZ[at : at + count].copy_(part_RZ[row : row + count], non_blocking=True)
        for i, lane_PW in enumerate(lanes):
            lane_PW.index_copy_(0, page_ids, staged_GZ[:, i * width : (i + 1) * width])

    def _parts(self, bytes_RY: Tensor) -> list[tuple[Strips, Tensor]]:
        """The strips of this pool, each with its columns of a buffer of whole pages."""
        if len(self._strips) <= 1:
            return [(strips, bytes_RY) for strips, _ in self._strips]
        if bytes_RY.ndim != 2 or bytes_RY.shape[1] != self.page_bytes:
            raise ValueError(f"pool: page buffer {tuple(bytes_RY.shape)}, expected rows of {self.page_bytes} bytes")
        edges = pairwise([*(offset for _, offset in self._strips), self.page_bytes])
        return [(strips, bytes_RY[:, low:high]) for (strips, _), (low, high) in zip(self._strips, edges, strict=True)]

    def _page_lanes(self, strips: Strips) -> list[Tensor]:
        return [lane.view(torch.uint8).view(self.spec.page_count, -1) for halves in strips for lane in halves]

    def _check_on_host(
        self, pages: NDArray[np.integer], rows: NDArray[np.integer], bytes_RZ: Tensor, width: int
    ) -> None:
        """What the kernels check, without asking the device."""
        if bytes_RZ.dtype != torch.uint8 or bytes_RZ.shape[1] != width or len(pages) != len(rows):
            raise ValueError(
                f"pool: {len(pages)} pages to {len(rows)} rows of {bytes_RZ.dtype} {tuple(bytes_RZ.shape)}, "
                f"expected as many, of uint8 [R, {width}]"
            )
        for what, ids, count in (("pages", pages, self.spec.page_count), ("rows", rows, bytes_RZ.shape[0])):
            if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < count:
                raise ValueError(f"pool: {what} {ids.min()} .. {ids.max()}, expected 0 .. {count - 1}")

    def _page_ids(self, pages: NDArray[np.integer]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(pages, dtype=np.int64)).to(self.spec.device)


def _zeros(byte_count: int, device: str) -> Tensor:
    """Zero bytes, aligned to a cache line; on the CPU from calloc (torch.zeros would touch every page)."""
    if device != "cpu":
        return torch.zeros(byte_count, dtype=torch.uint8, device=device)
    return torch.from_numpy(lazy_zeros(byte_count, _LINE_BYTES))


def lazy_zeros(byte_count: int, align: int) -> NDArray[np.uint8]:
    """Zero bytes of the host, aligned, on huge pages where there are some; mapped when they are first written."""
    raw = np.zeros(byte_count + align, dtype=np.uint8)
    prefer_huge_pages(raw.ctypes.data, raw.nbytes)
    skip = -raw.ctypes.data % align
    return raw[skip : skip + byte_count]


def _runs(rows: NDArray[np.integer], *, merge: bool) -> Iterator[tuple[int, int, int]]:
    """(index, row, count) of stretches of consecutive rows; each row alone without `merge`."""
    if not len(rows):
        return
    breaks = np.flatnonzero(np.diff(rows) != 1) + 1 if merge else np.arange(1, len(rows))
    edges = [0, *breaks.tolist(), len(rows)]
    for at, end in pairwise(edges):
        yield at, int(rows[at]), end - at


class _Alias:
    """The memory of an array that is only read, said to be writable: torch warns about any other."""

    def __init__(self, data: NDArray[np.uint8]) -> None:
        self._keep = data
        self.__array_interface__ = {**data.__array_interface__, "data": (data.ctypes.data, False)}


def _tensor_of(data: NDArray[np.uint8]) -> Tensor:
    """A tensor over the bytes, without a copy, to be read only."""
    return torch.from_numpy(data if data.flags.writeable else np.asarray(_Alias(data)))
