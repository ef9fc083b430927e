"""DevicePool: the KV bytes of one engine, all layers. Holds; which owner has which page is decided elsewhere.

Shapes: S = slots = page_count * page_size, H = KV heads, D = head size, G = pages moved, Y = bytes of a page,
R = rows of a byte buffer, W = bytes of one lane (k, v or the latent rows of one layer) of a page.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from serinus.core.errors import ConfigError
from serinus.core.stamps import STAMP_BYTES, STAMP_FIELDS
from serinus.kernels import FP8_FORMATS, Kernels, prefer_huge_pages
from serinus.pool.copy_engine import copy_runs

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, *FP8_FORMATS)
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
    """Of keys and values: torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn or torch.float8_e5m2."""
    device: str = "cpu"
    """Where the bytes are."""
    halves: int = 2
    """Rows of a slot in each layer: keys and values, or 1 that is both (Part.halves)."""
    page_first: bool | None = None
    """Whether a page is one contiguous run. None = on an accelerator: its copy engine moves whole pages; no kernel of
    the cpu column reads such pools."""
    stamped: bool = False
    """Whether the canary's stamps are kept beside the KV and move with it."""

    def __post_init__(self) -> None:
        for name, low in (("layer_count", 0), ("kv_head_count", 1), ("head_size", 1), ("page_size", 1)):
            if getattr(self, name) < low:
                raise ConfigError(f"pool: {name} is {getattr(self, name)}, expected at least {low}")
        if self.page_count < 2:
            raise ConfigError(f"pool: page_count is {self.page_count}, expected at least 2 (page 0 is padding)")
        if self.dtype not in _DTYPES:
            raise ConfigError(f"pool: dtype is {self.dtype}, expected one of {', '.join(map(str, _DTYPES))}")

    @property
    def is_page_first(self) -> bool:
        """Whether a page is one contiguous run, [layer][k, v][page_size, H, D]; else each half of each layer is one of
        all slots."""
        return self.device != "cpu" if self.page_first is None else self.page_first

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

    One zeroed allocation of page_count * page_bytes (and one for stamps). On the CPU the OS maps a page of memory when
    it is first written: a large pool costs nothing until it is used.
    """

    def __init__(self, spec: PoolSpec, kernels: Kernels) -> None:
        """Raises ConfigError: a page-first pool, of which the cpu column knows nothing."""
        if spec.is_page_first and kernels.columns["paged_attention"] == "cpu":
            raise ConfigError("pool: a page-first pool for kernels of column cpu, expected page_first=False")
        self.spec = spec
        self._kernels = kernels
        row = (spec.kv_head_count, spec.head_size)
        values = _zeros(spec.kv_bytes * spec.page_count, spec.device).view(spec.dtype)
        self.pages_PY: Tensor | None = None
        """Where the pool is page first: the rows of whole pages, uint8, one contiguous run each."""
        if spec.is_page_first:
            values_PL = values.view(spec.page_count, spec.layer_count, spec.halves, spec.page_size, *row)
            lanes = [values_PL[:, layer].unbind(1) for layer in range(spec.layer_count)]
            self.pages_PY = values.view(torch.uint8).view(spec.page_count, spec.kv_bytes)
        else:
            lanes = list(values.view(spec.layer_count, spec.halves, spec.slot_count, *row))
        self.layers: tuple[tuple[Tensor, ...], ...] = tuple(tuple(halves) for halves in lanes)
        """(k, v), or the latent rows alone, of each layer, as models and kernels take them (kernels/pool_rows.py):
        [S, H, D], or page first."""
        self.k: tuple[Tensor, ...] = tuple(halves[0] for halves in self.layers)
        """Keys (or latent rows) of each layer."""
        self.v: tuple[Tensor, ...] = tuple(halves[1] for halves in self.layers if len(halves) == 2)
        """Values of each layer; none where rows are latent."""
        stamp_shape = (2 * spec.halves, spec.slot_count, STAMP_FIELDS)
        self.stamps_LS4: Tensor | None = None
        """The canary's stamps, int64 [2 * halves, S, STAMP_FIELDS], where the pool keeps them."""
        self._strips: list[Strips] = []
        """KV, then stamps, as far as the pool has them."""
        if self.pages_PY is not None and self.layers:
            self._strips = [((self.pages_PY.view(spec.slot_count, 1, spec.slot_bytes),),)]
        elif self.layers:
            self._strips = [self.layers]
        if spec.stamp_bytes:
            self.stamps_LS4 = (
                _zeros(spec.stamp_bytes * spec.page_count, spec.device).view(torch.int64).view(stamp_shape)
            )
            lanes_S14 = self.stamps_LS4.view(-1, spec.slot_count, 1, STAMP_FIELDS)
            self._strips.append((tuple(lanes_S14),))
        self._lanes = [lane for strips in self._strips for lane in self._page_lanes(strips)]

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers: the Y of read_pages and write_pages."""
        return self.spec.page_bytes

    @property
    def regions(self) -> tuple[PoolRegion, ...]:
        """For transports that reach these bytes: KV, then stamps; strips of a page in `read_pages` order."""
        spec, found = self.spec, []
        lane_count = 1 if spec.is_page_first else spec.halves * spec.layer_count
        lanes = (
            (self.k[0] if self.k else None, lane_count, spec.kv_bytes),
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
        for strips, part_GZ in self._parts(torch.from_numpy(out)):
            self._kernels.gather_pages(strips, pages, self.spec.page_size, part_GZ)
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
        for strips, part_GZ in self._parts(_tensor_of(data)):
            self._kernels.scatter_pages(strips, pages, self.spec.page_size, part_GZ)

    def read_stamps(self, pages: NDArray[np.integer]) -> NDArray[np.uint8]:
        """The stamps of pages alone, [G, stamp_bytes], as `read_pages` has them; the pool keeps some. Waits for the
        device."""
        strips, part_GZ = self._strips[-1], torch.empty((len(pages), self.spec.stamp_bytes), dtype=torch.uint8)
        self._kernels.gather_pages(strips, pages, self.spec.page_size, part_GZ)
        return part_GZ.numpy()

    def write_stamps(self, pages: NDArray[np.integer], rows: NDArray[np.uint8]) -> None:
        """The reverse, queued behind what is queued on the current stream; nothing waits."""
        rows_GZ = _tensor_of(rows)
        if self.spec.device != "cpu":
            rows_GZ = rows_GZ.pin_memory().to(self.spec.device, non_blocking=True)
        self._kernels.scatter_pages(self._strips[-1], pages, self.spec.page_size, rows_GZ)

    def warm_stamps(self) -> None:
        """Make both ready, on the padding page; nothing where the pool keeps none."""
        if self.spec.stamp_bytes:
            padding = np.zeros(1, np.int64)
            self.write_stamps(padding, self.read_stamps(padding))

    def token_digests(
        self, pages: NDArray[np.integer], first_layer: int, coefficients_L22W: Tensor
    ) -> NDArray[np.uint64]:
        """Digests [G * page_size, 2] (of K, of V), as `canary_digest` gives them, of the rows of these pages in as many
        layers as there are coefficients, from `first_layer` of this pool on. Waits for the device."""
        layers = self.layers[first_layer : first_layer + len(coefficients_L22W)]
        slots_N = (_ids(pages)[:, None] * self.spec.page_size + torch.arange(self.spec.page_size)).view(-1)
        found_N2 = self._kernels.canary_digest(
            layers, slots_N.to(self.spec.device), coefficients_L22W.to(self.spec.device)
        )
        return found_N2.cpu().numpy().view(np.uint64)

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
        """The rows of page pages[g] go to row rows[g] of a buffer on the host, without stamps; layout as `read_pages`.

        On an accelerator everything is queued on the current stream and nothing waits, as far as the buffer is pinned.

        Raises:
            ValueError: sizes disagree, or a page or row is none of ours.
        Cost: G * Y bytes read and written, by the copy engine or on the calling thread alone.
        """
        if not self.layers:
            return
        if self.pages_PY is None:
            self._kernels.gather_pages(self.layers, pages, self.spec.page_size, self._columns(0, bytes_RY), rows)
            return
        self._check_on_host(pages, bytes_RY, rows)
        _move(bytes_RY, rows, self.pages_PY, pages, slice(0, self.spec.kv_bytes))

    def copy_in(
        self, pages: NDArray[np.integer], bytes_RY: Tensor, rows: NDArray[np.integer], first: int, end: int
    ) -> None:
        """The reverse of `copy_out`, for layers first .. end - 1 of this pool; the rows still hold all layers."""
        if first >= end:
            return
        columns = slice(first * self.spec.layer_bytes, end * self.spec.layer_bytes)
        if self.pages_PY is None:
            layers, size = self.layers[first:end], self.spec.page_size
            self._kernels.scatter_pages(layers, pages, size, bytes_RY[:, columns], rows)
            return
        self._check_on_host(pages, bytes_RY, rows)
        _move(self.pages_PY, pages, bytes_RY, rows, columns)

    def copy_stamps_out(self, pages: NDArray[np.integer], stamps_RZ: Tensor, rows: NDArray[np.integer]) -> None:
        """As `copy_out`, of stamps, to a buffer of them alone, by a kernel; nothing where the pool keeps none."""
        if self.spec.stamp_bytes:
            self._kernels.gather_pages(self._strips[1], pages, self.spec.page_size, stamps_RZ, rows)

    def copy_stamps_in(self, pages: NDArray[np.integer], stamps_RZ: Tensor, rows: NDArray[np.integer]) -> None:
        """The reverse of `copy_stamps_out`."""
        if self.spec.stamp_bytes:
            self._kernels.scatter_pages(self._strips[1], pages, self.spec.page_size, stamps_RZ, rows)

    def _parts(self, bytes_RY: Tensor) -> list[tuple[Strips, Tensor]]:
        """The strips of this pool, each with its columns of a buffer of whole pages."""
        return [(strips, self._columns(i, bytes_RY)) for i, strips in enumerate(self._strips)]

    def _columns(self, index: int, bytes_RY: Tensor) -> Tensor:
        """The columns of one of them."""
        if len(self._strips) == 1:
            return bytes_RY
        if bytes_RY.ndim != 2 or bytes_RY.shape[1] != self.page_bytes:
            raise ValueError(f"pool: page buffer {tuple(bytes_RY.shape)}, expected rows of {self.page_bytes} bytes")
        return bytes_RY[:, : self.spec.kv_bytes] if index == 0 else bytes_RY[:, self.spec.kv_bytes :]

    def _page_lanes(self, strips: Strips) -> list[Tensor]:
        return [lane.view(torch.uint8).view(self.spec.page_count, -1) for halves in strips for lane in halves]

    def _check_on_host(self, pages: NDArray[np.integer], bytes_RY: Tensor, rows: NDArray[np.integer]) -> None:
        """What the kernels check, where none is called."""
        if bytes_RY.dtype != torch.uint8 or bytes_RY.shape[1] != self.page_bytes or len(pages) != len(rows):
            raise ValueError(
                f"pool: {len(pages)} pages to {len(rows)} rows of {bytes_RY.dtype} {tuple(bytes_RY.shape)}, "
                f"expected as many, of uint8 [R, {self.page_bytes}]"
            )
        for what, ids, count in (("pages", pages, self.spec.page_count), ("rows", rows, bytes_RY.shape[0])):
            if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < count:
                raise ValueError(f"pool: {what} {ids.min()} .. {ids.max()}, expected 0 .. {count - 1}")


def _move(
    target_RY: Tensor, rows: NDArray[np.integer], source_PY: Tensor, pages: NDArray[np.integer], columns: slice
) -> None:
    """Columns of row pages[g] of one become those of row rows[g] of the other; rows are contiguous, neighbours may lie
    apart. Between accelerator and host the copy engine does it, on the current stream."""
    if target_RY.device == source_PY.device:
        target_RY[:, columns][_ids(rows)] = source_PY[:, columns][_ids(pages)]
        return
    targets, sources = (
        memory.data_ptr() + columns.start + np.asarray(ids, dtype=np.int64) * memory.stride(0)
        for memory, ids in ((target_RY, rows), (source_PY, pages))
    )
    copy_runs(targets, sources, np.full(len(targets), columns.stop - columns.start, dtype=np.int64))


def _ids(numbers: NDArray[np.integer]) -> Tensor:
    """Pages or rows as torch takes them."""
    return torch.from_numpy(np.ascontiguousarray(numbers, dtype=np.int64))


def _zeros(byte_count: int, device: str) -> Tensor:
    """Zero bytes, aligned to a cache line at least; on the CPU not touched yet (torch.zeros would touch every page)."""
    if device != "cpu":
        return torch.zeros(byte_count, dtype=torch.uint8, device=device)
    return torch.from_numpy(lazy_zeros(byte_count))


def lazy_zeros(byte_count: int) -> NDArray[np.uint8]:
    """Zero bytes of the host from the beginning of a page on, huge pages where there are some; mapped when they are
    first written.

    Not from calloc: where freed blocks leave a hole in the heap it reuses that, and writes all of it.
    Raises MemoryError: the system does not give the memory.
    """
    try:
        mapped = mmap.mmap(-1, max(byte_count, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"pool: the system gives no {byte_count} bytes ({error})") from error
    memory = np.frombuffer(mapped, dtype=np.uint8)[:byte_count]
    prefer_huge_pages(memory.ctypes.data, byte_count)
    return memory


class _Alias:
    """The memory of an array that is only read, said to be writable: torch warns about any other."""

    def __init__(self, data: NDArray[np.uint8]) -> None:
        self._keep = data
        self.__array_interface__ = {**data.__array_interface__, "data": (data.ctypes.data, False)}


def _tensor_of(data: NDArray[np.uint8]) -> Tensor:
    """A tensor over the bytes, without a copy, to be read only."""
    return torch.from_numpy(data if data.flags.writeable else np.asarray(_Alias(data)))
