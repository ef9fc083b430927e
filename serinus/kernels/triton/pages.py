"""Pages out of and into the KV pools of all layers, in one kernel; see the reference. A page's strips lie in lanes: K
and V of a layer, or stamps.

S = slots, G = pages moved, R = rows of the byte buffer, Y = bytes of one page over all lanes, L = lanes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from serinus.kernels.checks import check_pages
from serinus.kernels.contracts import LayersKv
from serinus.kernels.triton.pinned import read_in_place

_BLOCK = 1024
_UNITS = {8: torch.int64, 2: torch.int16, 1: torch.int8}


def gather_pages(
    layers_kv: LayersKv, pages_G: Tensor, page_size: int, out_RY: Tensor,
    rows_G: Tensor | None = None,
) -> None:  # fmt: skip
    """Copy pages out of the pools; see the reference. Cost: one read and one write; waits where the buffer is the
    host's, but for rows of pinned memory, which are written in place."""
    check_pages(layers_kv, pages_G, page_size, out_RY, rows_G)
    lanes = _lanes(layers_kv, page_size)
    device = lanes[0].device
    if _in_reach(out_RY, rows_G, device):
        move_pages(lanes, pages_G, out_RY, rows_G, outward=True)
        return
    found_GY = torch.empty((len(pages_G), out_RY.shape[1]), dtype=torch.uint8, device=device)
    move_pages(lanes, pages_G, found_GY, None, outward=True)
    if rows_G is None:
        out_RY.copy_(found_GY)
    else:
        out_RY[rows_G] = found_GY.to(out_RY.device)


def scatter_pages(
    layers_kv: LayersKv, pages_G: Tensor, page_size: int, bytes_RY: Tensor,
    rows_G: Tensor | None = None,
) -> None:  # fmt: skip
    """Copy pages into the pools: the reverse of `gather_pages`."""
    check_pages(layers_kv, pages_G, page_size, bytes_RY, rows_G)
    lanes = _lanes(layers_kv, page_size)
    device = lanes[0].device
    if _in_reach(bytes_RY, rows_G, device):
        move_pages(lanes, pages_G, bytes_RY, rows_G, outward=False)
        return
    found_GY = bytes_RY if rows_G is None else bytes_RY[rows_G]
    move_pages(lanes, pages_G, found_GY.to(device), None, outward=False)


def _in_reach(bytes_RY: Tensor, rows_G: Tensor | None, device: torch.device) -> bool:
    """Whether kernels read and write the buffer where it lies. Rows of pinned memory are small beside what the copy
    engine moves for them, which would take as long for each of them as for 80 KB."""
    return bytes_RY.device == device or (rows_G is not None and device.type == "cuda" and bytes_RY.is_pinned())


def _lanes(layers_kv: LayersKv, page_size: int) -> list[Tensor]:
    """uint8 [P, W] of each half of each layer."""
    pages = layers_kv[0][0].shape[0] // page_size
    return [half.view(torch.uint8).view(pages, -1) for pair in layers_kv for half in pair]


def move_pages(
    lanes: Sequence[Tensor], pages_G: Tensor, bytes_RY: Tensor, rows_G: Tensor | None, *, outward: bool
) -> None:
    """Between lanes, uint8 [P, W] each, and rows of a buffer that their device reaches: page pages_G[g] and row
    rows_G[g], or g. Outward: into the buffer."""
    if not len(pages_G):
        return
    widths = tuple(lane.shape[1] for lane in lanes)
    odd = (*widths, bytes_RY.stride(0), bytes_RY.data_ptr(), *(lane.data_ptr() for lane in lanes))
    unit = next(unit for unit in _UNITS if not any(each % unit for each in odd))
    device, count = lanes[0].device, len(pages_G)
    table_3L = _table(tuple(lane.data_ptr() for lane in lanes), widths, unit, device)
    ids_2G = torch.empty((2, count + count % 2), dtype=torch.int64, device=pages_G.device)  # both begin at 16 bytes
    ids_2G[0, :count] = pages_G
    if rows_G is not None:
        ids_2G[1, :count] = rows_G
    with read_in_place(ids_2G, device) as there_2G:
        _move[(count, len(lanes), triton.cdiv(max(widths) // unit, _BLOCK))](
            table_3L, len(lanes), there_2G[0], there_2G[1], bytes_RY.view(torch.uint8), bytes_RY.stride(0) // unit,
            UNIT=unit, OUTWARD=outward, HAS_ROWS=rows_G is not None, BLOCK=_BLOCK,
        )  # fmt: skip


@lru_cache(maxsize=64)
def _table(addresses: tuple[int, ...], widths: tuple[int, ...], unit: int, device: torch.device) -> Tensor:
    """Address, width and place in a row of each lane, in units; copied once."""
    starts = [sum(widths[:i]) // unit for i in range(len(widths))]
    return torch.tensor([addresses, [width // unit for width in widths], starts], dtype=torch.int64).to(device)


_jit: Any = triton.jit


@_jit
def _move(
    table, lanes, pages, rows, buffer, stride,
    UNIT: tl.constexpr, OUTWARD: tl.constexpr, HAS_ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    g, lane = tl.program_id(0), tl.program_id(1)
    dtype: tl.constexpr = tl.int64 if UNIT == 8 else (tl.int16 if UNIT == 2 else tl.int8)
    width, start = tl.load(table + lanes + lane), tl.load(table + 2 * lanes + lane)
    w = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = w < width
    row = g.to(tl.int64)
    if HAS_ROWS:
        row = tl.load(rows + g)
    here = tl.load(table + lane).to(tl.pointer_type(dtype)) + tl.load(pages + g) * width + w
    there = buffer.to(tl.pointer_type(dtype)) + row * stride + start + w
    if OUTWARD:
        tl.store(there, tl.load(here, mask=inside, other=0), mask=inside)
    else:
        tl.store(here, tl.load(there, mask=inside, other=0), mask=inside)
