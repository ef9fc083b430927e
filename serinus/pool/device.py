"""DevicePool: the KV bytes of one engine, all layers. Holds; who owns which page is decided elsewhere.

Shapes: S = slots = page_count * page_size, H = KV heads, D = head size, G = pages moved, Y = bytes of a page.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from serinus.core.errors import ConfigError
from serinus.kernels import Kernels, prefer_huge_pages

__all__ = ["DevicePool", "PoolSpec"]

_LINE_BYTES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSpec:
    """The size and shape of a pool."""

    layer_count: int
    """Layers whose KV is kept."""
    kv_head_count: int
    """KV heads of each layer, on this rank."""
    head_size: int
    """Elements of one head."""
    page_size: int
    """Slots of a page."""
    page_count: int
    """Pages, with page 0, which is padding; so at least 2."""
    dtype: torch.dtype
    """torch.float32 or torch.bfloat16."""
    device: str = "cpu"
    """Where the bytes are."""

    def __post_init__(self) -> None:
        for name in ("layer_count", "kv_head_count", "head_size", "page_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"pool: {name} is {getattr(self, name)}, expected at least 1")
        if self.page_count < 2:
            raise ConfigError(f"pool: page_count is {self.page_count}, expected at least 2 (page 0 is padding)")
        if self.dtype not in (torch.float32, torch.bfloat16):
            raise ConfigError(f"pool: dtype is {self.dtype}, expected torch.float32 or torch.bfloat16")

    @property
    def slot_count(self) -> int:
        """Slots of the pool, with those of the padding page."""
        return self.page_count * self.page_size

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers, k and v."""
        return self.page_size * self.slot_bytes

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot over all layers, k and v."""
        return self.layer_count * 2 * self.kv_head_count * self.head_size * self.dtype.itemsize


class DevicePool:
    """The keys and values of every slot.

    One zeroed allocation of page_count * page_bytes. On the CPU it comes from calloc, so the OS maps a page of
    memory when it is first written: a large pool costs nothing until it is used.
    """

    def __init__(self, spec: PoolSpec, kernels: Kernels) -> None:
        self.spec = spec
        self._kernels = kernels
        shape = (spec.layer_count, 2, spec.slot_count, spec.kv_head_count, spec.head_size)
        bytes_all = _zeros(spec.page_bytes * spec.page_count, spec.device)
        lanes = bytes_all.view(spec.dtype).view(shape)
        self.k: tuple[Tensor, ...] = tuple(lanes[layer, 0] for layer in range(spec.layer_count))
        """Keys of each layer, [S, H, D], contiguous."""
        self.v: tuple[Tensor, ...] = tuple(lanes[layer, 1] for layer in range(spec.layer_count))
        """Values of each layer, [S, H, D], contiguous."""
        self.layers: tuple[tuple[Tensor, Tensor], ...] = tuple(zip(self.k, self.v, strict=True))
        """(k, v) of each layer, as models and kernels take them."""

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers: the Y of read_pages and write_pages."""
        return self.spec.page_bytes

    def read_pages(self, pages: NDArray[np.integer], out: NDArray[np.uint8] | None = None) -> NDArray[np.uint8]:
        """The bytes of whole pages, [G, Y], page-first: [layer][k, then v][page_size, H, D].

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
        self._kernels.gather_pages(self.layers, self._page_ids(pages), self.spec.page_size, torch.from_numpy(out))
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
        self._kernels.scatter_pages(self.layers, self._page_ids(pages), self.spec.page_size, _tensor_of(data))

    def _page_ids(self, pages: NDArray[np.integer]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(pages, dtype=np.int64)).to(self.spec.device)


def _zeros(byte_count: int, device: str) -> Tensor:
    """Zero bytes, aligned to a cache line; on the CPU from calloc (torch.zeros would touch every page)."""
    if device != "cpu":
        return torch.zeros(byte_count, dtype=torch.uint8, device=device)
    raw = np.zeros(byte_count + _LINE_BYTES, dtype=np.uint8)
    prefer_huge_pages(raw.ctypes.data, raw.nbytes)
    skip = -raw.ctypes.data % _LINE_BYTES
    return torch.from_numpy(raw[skip : skip + byte_count])


class _Alias:
    """The memory of an array that is only read, said to be writable: torch warns about any other."""

    def __init__(self, data: NDArray[np.uint8]) -> None:
        self._keep = data
        self.__array_interface__ = {**data.__array_interface__, "data": (data.ctypes.data, False)}


def _tensor_of(data: NDArray[np.uint8]) -> Tensor:
    """A tensor over the bytes, without a copy, to be read only."""
    return torch.from_numpy(data if data.flags.writeable else np.asarray(_Alias(data)))
