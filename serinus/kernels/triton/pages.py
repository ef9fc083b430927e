"""Pages out of and into the KV pools of all layers, in one kernel; see the reference. A page's strips lie in lanes: K
and V of a layer, or stamps.

S = slots, G = pages moved, R = rows of the byte buffer, Y = bytes of one page over all lanes, L = lanes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from serinus.kernels.checks import check_pages
from serinus.kernels.contracts import LayersKv
from serinus.kernels.cuda_library import current_stream
from serinus.kernels.triton.kept import KeptKernel, keep
from serinus.kernels.triton.pinned import read_in_place

_BLOCK = 1024
_UNITS = {8: torch.int64, 2: torch.int16, 1: torch.int8}


def gather_pages(
    layers_kv: LayersKv, pages_G: NDArray[np.integer[Any]], page_size: int, out_RY: Tensor,
    rows_G: NDArray[np.integer[Any]] | None = None,
) -> None:  # fmt: skip
    """Copy pages out of the pools; see the reference. Cost: one read and one write; waits where the buffer is the
    host's, but for rows of pinned memory, which are written in place."""
    check_pages(layers_kv, pages_G, page_size, out_RY, rows_G)
    lanes, device = _lanes(layers_kv, page_size), layers_kv[0][0].device
    if _in_reach(out_RY, rows_G, device):
        move_pages(lanes, device, pages_G, out_RY, rows_G, outward=True)
        return
    found_GY = torch.empty((len(pages_G), out_RY.shape[1]), dtype=torch.uint8, device=device)
    move_pages(lanes, device, pages_G, found_GY, None, outward=True)
    if rows_G is None:
        out_RY.copy_(found_GY)
    else:
        out_RY[torch.from_numpy(np.array(rows_G, dtype=np.int64))] = found_GY.to(out_RY.device)


def scatter_pages(
    layers_kv: LayersKv, pages_G: NDArray[np.integer[Any]], page_size: int, bytes_RY: Tensor,
    rows_G: NDArray[np.integer[Any]] | None = None,
) -> None:  # fmt: skip
    """Copy pages into the pools: the reverse of `gather_pages`."""
    check_pages(layers_kv, pages_G, page_size, bytes_RY, rows_G)
    lanes, device = _lanes(layers_kv, page_size), layers_kv[0][0].device
    if _in_reach(bytes_RY, rows_G, device):
        move_pages(lanes, device, pages_G, bytes_RY, rows_G, outward=False)
        return
    found_GY = bytes_RY if rows_G is None else bytes_RY[torch.from_numpy(np.array(rows_G, dtype=np.int64))]
    move_pages(lanes, device, pages_G, found_GY.to(device), None, outward=False)


def _in_reach(bytes_RY: Tensor, rows_G: NDArray[np.integer[Any]] | None, device: torch.device) -> bool:
    """Whether kernels read and write the buffer where it lies. Rows of pinned memory are small beside what the copy
    engine moves for them, which would take as long for each of them as for 80 KB."""
    return bytes_RY.device == device or (rows_G is not None and device.type == "cuda" and bytes_RY.is_pinned())


def _lanes(layers_kv: LayersKv, page_size: int) -> list[tuple[int, int]]:
    """Of each half of each layer its address, and the bytes of a page of it."""
    lanes = [half for pair in layers_kv for half in pair]
    return [(half.data_ptr(), page_size * math.prod(half.shape[1:]) * half.element_size()) for half in lanes]


def move_pages(
    lanes: Sequence[tuple[int, int]], device: torch.device, pages_G: NDArray[np.integer[Any]], bytes_RY: Tensor,
    rows_G: NDArray[np.integer[Any]] | None, *, outward: bool,
) -> None:  # fmt: skip
    """Between lanes of a device (address, bytes of a page) and rows of a uint8 buffer that it reaches: page pages_G[g]
    and row rows_G[g], or g. Outward: into the buffer.

    It makes few calls of torch, as each gives up the interpreter's lock: with thirty of them a thread beside a decode
    took 4 to 6 ms for the stamps of 64 pages, longer than the copy of these.
    """
    count = len(pages_G)
    if not count:
        return
    addresses, widths = zip(*lanes, strict=True)
    odd = (*widths, bytes_RY.stride(0), bytes_RY.data_ptr(), *addresses)
    unit = next(unit for unit in _UNITS if not any(each % unit for each in odd))
    ids_2G = np.empty((1 if rows_G is None else 2, count), dtype=np.int64)
    ids_2G[0] = pages_G
    if rows_G is not None:
        ids_2G[1] = rows_G
    form = unit, outward, rows_G is not None, _BLOCK
    table, stride = _table(addresses, widths, unit, device), bytes_RY.stride(0) // unit
    grid, kept = (count, len(lanes), triton.cdiv(max(widths) // unit, _BLOCK)), _KEPT.get((device, *form))
    with read_in_place(ids_2G, device) as ids:
        if kept is not None:
            tensors = (each.data_ptr() for each in (table, ids, bytes_RY))
            kept.launch(grid, current_stream(device.index), *tensors, len(lanes), count, stride)
            return
        compiled = _move[(*grid,)](table, ids, bytes_RY, len(lanes), count, stride, *form)
    if made := keep(compiled, device):
        _KEPT[device, *form] = made


@lru_cache(maxsize=64)
def _table(addresses: tuple[int, ...], widths: tuple[int, ...], unit: int, device: torch.device) -> Tensor:
    """Address, width and place in a row of each lane, in units; copied once."""
    starts = [sum(widths[:i]) // unit for i in range(len(widths))]
    return torch.tensor([addresses, [width // unit for width in widths], starts], dtype=torch.int64).to(device)


_jit: Any = triton.jit
_KEPT: dict[tuple[Any, ...], KeptKernel] = {}
"""By device and what is constant in them."""


@_jit(
    do_not_specialize=["lanes", "count", "stride"], do_not_specialize_on_alignment=["table", "ids", "buffer"],
)  # fmt: skip
def _move(
    table, ids, buffer, lanes, count, stride: tl.int64,
    UNIT: tl.constexpr, OUTWARD: tl.constexpr, HAS_ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    g, lane = tl.program_id(0), tl.program_id(1)
    dtype: tl.constexpr = tl.int64 if UNIT == 8 else (tl.int16 if UNIT == 2 else tl.int8)
    width, start = tl.load(table + lanes + lane), tl.load(table + 2 * lanes + lane)
    w = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = w < width
    row = g.to(tl.int64)
    if HAS_ROWS:
        row = tl.load(ids + count + g)
    here = tl.load(table + lane).to(tl.pointer_type(dtype)) + tl.load(ids + g) * width + w
    there = buffer.to(tl.pointer_type(dtype)) + row * stride + start + w
    if OUTWARD:
        tl.store(there, tl.load(here, mask=inside, other=0), mask=inside)
    else:
        tl.store(here, tl.load(there, mask=inside, other=0), mask=inside)
