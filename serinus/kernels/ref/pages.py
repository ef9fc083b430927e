"""Pages out of and into the KV pools of all layers, as bytes: the specification.

Page bytes are page-first: [layer][k, then v][page_size, H, D]. Shapes: S = slots, H = KV heads, D = head size,
G = pages moved, Y = bytes of one page over all layers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["check_pages", "gather_pages", "scatter_pages"]


def check_pages(layers_kv: Sequence[tuple[Tensor, Tensor]], pages_G: Tensor, page_size: int, bytes_GY: Tensor) -> None:
    """Raise ValueError where sizes disagree or a page lies outside of the pools."""
    k_pool = layers_kv[0][0]
    page_bytes = page_size * k_pool[0].numel() * k_pool.element_size() * 2 * len(layers_kv)
    if bytes_GY.dtype != torch.uint8 or tuple(bytes_GY.shape) != (pages_G.shape[0], page_bytes):
        raise ValueError(
            f"kernels: page buffer {bytes_GY.dtype} {tuple(bytes_GY.shape)}, "
            f"expected uint8 ({pages_G.shape[0]}, {page_bytes})"
        )
    if k_pool.shape[0] % page_size:
        raise ValueError(f"kernels: {k_pool.shape[0]} slots are no whole number of pages of {page_size}")
    page_count = k_pool.shape[0] // page_size
    if pages_G.numel() and not (int(pages_G.min()) >= 0 and int(pages_G.max()) < page_count):
        raise ValueError(f"kernels: pages {int(pages_G.min())} .. {int(pages_G.max())}, expected 0 .. {page_count - 1}")


def gather_pages(layers_kv: Sequence[tuple[Tensor, Tensor]], pages_G: Tensor, page_size: int, out_GY: Tensor) -> None:
    """Copy pages out of the pools into `out_GY`.

    Args:
        layers_kv: (k, v) pools [S, H, D] of every layer, contiguous, one shape and dtype.
        pages_G: int64 page ids; page p is slots p * page_size .. (p + 1) * page_size - 1.
        page_size: slots in a page.
        out_GY: uint8 [G, Y], on the pools' device or on the host; row g receives page pages_G[g].
    Raises:
        ValueError: sizes disagree, or a page lies outside of the pools.
    Cost: G * Y bytes read and written.
    """
    check_pages(layers_kv, pages_G, page_size, out_GY)
    lanes = [lane for pair in layers_kv for lane in pair]
    width = out_GY.shape[1] // len(lanes)
    for i, lane in enumerate(lanes):
        out_GY[:, i * width : (i + 1) * width] = lane.view(torch.uint8).view(-1, width)[pages_G]


def scatter_pages(
    layers_kv: Sequence[tuple[Tensor, Tensor]], pages_G: Tensor, page_size: int, bytes_GY: Tensor
) -> None:
    """Copy pages from `bytes_GY` into the pools: the reverse of `gather_pages`, with its arguments and errors."""
    check_pages(layers_kv, pages_G, page_size, bytes_GY)
    lanes = [lane for pair in layers_kv for lane in pair]
    width = bytes_GY.shape[1] // len(lanes)
    for i, lane in enumerate(lanes):
        rows_GW = bytes_GY[:, i * width : (i + 1) * width].to(lane.device)
        lane.view(torch.uint8).view(-1, width)[pages_G] = rows_GW
