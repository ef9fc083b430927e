"""Digests of pages in host memory, where a page of all layers is one row; see the reference for what they mean.

G = pages, S = slots of a page.
"""

from __future__ import annotations

import ctypes

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from serinus.kernels.checks import check_page_digests
from serinus.kernels.cpu.canary import Digest, run_digest


def page_digests(
    data_PY: NDArray[np.uint8], pages_G: NDArray[np.int64], page_size: int, row_bytes: int, coefficients_L22W: Tensor
) -> NDArray[np.int64]:
    """Digests [G, S, 2] of pages: to the kernel of `canary_digest` a slot is a byte offset here, a layer an address."""
    check_page_digests(data_PY, pages_G, page_size, row_bytes, coefficients_L22W)
    layers, halves, _, width = coefficients_L22W.shape
    out = np.empty((len(pages_G), page_size, 2), np.int64)
    inside = np.arange(page_size, dtype=np.int64) * row_bytes
    slots = np.ascontiguousarray(pages_G[:, None] * data_PY.strides[0] + inside)
    base, strip = data_PY.ctypes.data, page_size * row_bytes
    pools = (ctypes.c_int64 * (halves * layers))(*range(base, base + halves * layers * strip, strip))
    run_digest(
        Digest(
            0, ctypes.addressof(pools), slots.ctypes.data, coefficients_L22W.data_ptr(), out.ctypes.data, slots.size,
            layers, width, 1, 0, 0, 0, halves,
        ),
        alone=True,
    )  # fmt: skip
    return out
