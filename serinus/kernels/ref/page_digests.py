"""Digests of pages in host memory, where a page of all layers is one row: the specification.

Shapes: P = pages of the buffer, Y = bytes of one, G = pages digested, S = slots of a page, L = layers, W = 16-bit lanes
digested of one layer's row of one half.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from serinus.kernels.checks import check_page_digests

__all__ = ["page_digests"]


def page_digests(
    data_PY: NDArray[np.uint8], pages_G: NDArray[np.int64], page_size: int, row_bytes: int, coefficients_L22W: Tensor
) -> NDArray[np.int64]:
    """Digests [G, S, 2] (of K, of V) as `canary_digest` gives them, of pages as `DevicePool.read_pages` lays them out.

    Args:
        data_PY: the buffer; rows are contiguous.
        pages_G: rows of it.
        page_size: slots of a page.
        row_bytes: of one slot of one layer, K or V, or of a latent row.
        coefficients_L22W: of `digest_coefficients`, on the CPU. Lanes of a row behind W are not read.
    Raises:
        ValueError: sizes disagree, or a page lies outside.
    Cost: G * S * L * 2 * W * 2 bytes read, on the calling thread alone: it stands beside a forward pass.
    """
    check_page_digests(data_PY, pages_G, page_size, row_bytes, coefficients_L22W)
    layers, halves, _, width = coefficients_L22W.shape
    factors = coefficients_L22W.numpy().view(np.uint32).astype(np.uint64)
    found = np.zeros((len(pages_G), page_size, 2), np.uint64)
    for at, page in enumerate(pages_G.tolist()):
        row = np.ascontiguousarray(data_PY[page, : layers * halves * page_size * row_bytes])
        lanes = row.view(np.uint16).reshape(layers, halves, page_size, row_bytes // 2)[..., :width].astype(np.uint64)
        sums = np.einsum("lhsw,lhcw->shc", lanes, factors) & np.uint64(0xFFFFFFFF)
        found[at, :, :halves] = sums[..., 0] | sums[..., 1] << np.uint64(32)
    return found.view(np.int64)
