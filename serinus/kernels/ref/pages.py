"""Pages out of and into the KV pools of all layers, as bytes: the specification.

Page bytes are page-first: [layer][k, then v][page_size, H, D]. Shapes: S = slots, H = KV heads, D = head size,
G = pages moved, R = rows of the byte buffer, Y = bytes of one page over all layers given.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from serinus.kernels.checks import check_pages
from serinus.kernels.contracts import LayersKv

__all__ = ["gather_pages", "scatter_pages"]


def gather_pages(
    layers_kv: LayersKv,
    pages_G: NDArray[np.integer[Any]],
    page_size: int,
    out_RY: Tensor,
    rows_G: NDArray[np.integer[Any]] | None = None,
) -> None:
    """Copy pages out of the pools into `out_RY`.

    Args:
        layers_kv: pools [S, H, D] of every layer, contiguous, one shape and dtype: (k, v), or one of latent rows.
        pages_G: page ids; page p is slots p * page_size .. (p + 1) * page_size - 1.
        page_size: slots in a page.
        out_RY: uint8 [R, Y], on the pools' device or on the host; rows may lie apart, each is contiguous.
        rows_G: page pages_G[g] goes to row rows_G[g], of a buffer on the host. None: to row g, and R = G.
    Raises:
        ValueError: sizes disagree, or a page or row lies outside.
    Cost: G * Y bytes read and written.
    """
    check_pages(layers_kv, pages_G, page_size, out_RY, rows_G)
    lanes = [lane for pair in layers_kv for lane in pair]
    width = out_RY.shape[1] // len(lanes)
    for i, lane in enumerate(lanes):
        found_GW = lane.view(torch.uint8).view(-1, width)[_ids(pages_G)]
        span = slice(i * width, (i + 1) * width)
        if rows_G is None:
            out_RY[:, span] = found_GW
        else:
            out_RY[_ids(rows_G), span] = found_GW.to(out_RY.device)


def scatter_pages(
    layers_kv: LayersKv,
    pages_G: NDArray[np.integer[Any]],
    page_size: int,
    bytes_RY: Tensor,
    rows_G: NDArray[np.integer[Any]] | None = None,
) -> None:
    """Copy pages from `bytes_RY` into the pools: the reverse of `gather_pages`, with its arguments and errors."""
    check_pages(layers_kv, pages_G, page_size, bytes_RY, rows_G)
    lanes = [lane for pair in layers_kv for lane in pair]
    width = bytes_RY.shape[1] // len(lanes)
    for i, lane in enumerate(lanes):
        rows_RW = bytes_RY[:, i * width : (i + 1) * width]
        found_GW = rows_RW if rows_G is None else rows_RW[_ids(rows_G)]
        lane.view(torch.uint8).view(-1, width)[_ids(pages_G)] = found_GW.to(lane.device)


def _ids(numbers_G: NDArray[np.integer[Any]]) -> Tensor:
    return torch.from_numpy(np.array(numbers_G, dtype=np.int64))
