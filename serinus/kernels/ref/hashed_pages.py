"""Pages out of and into the KV pools, with a digest of each: the specification.

Shapes: G = pages moved, Y = bytes of one page over all lanes, P = pages of the pool, W = bytes of one page in one lane.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from serinus.kernels.checks import check_hashed

__all__ = ["hashed_pages"]


@torch.inference_mode()
def hashed_pages(
    lanes: Sequence[Tensor], pages_G: NDArray[np.int64], rows_GY: NDArray[np.uint8] | None, seed: int,
    inward: bool = False,
) -> NDArray[np.uint64]:  # fmt: skip
    """Move pages between the pools and a buffer of whole pages, and return XXH3 (64 bits) of each page.

    Args:
        lanes: uint8 [P, W] each, of one P, contiguous: where a page's bytes lie, in the order of a buffer's row.
        pages_G: int64 page ids; distinct where pages are filled.
        rows_GY: uint8 [G, Y] on the host; may change while it is read, may be read only where `inward`. None: nothing
            is moved, pages are only hashed.
        seed: of XXH3, 64 bits.
        inward: the buffer goes into the pages; else the pages into the buffer.
    Returns: [G], the hashes of what was written (of what was read where nothing was).
    Raises:
        ValueError: sizes disagree, or a page lies outside.
    Cost: G * Y bytes read, and written once; here more often.
    """
    check_hashed(lanes, pages_G, rows_GY)
    ids = torch.from_numpy(np.ascontiguousarray(pages_G))
    if inward and rows_GY is not None:
        kept_GY = rows_GY.copy()  # the buffer may change: what is hashed is what is written
        start = 0
        for lane in lanes:
            lane[ids.to(lane.device)] = torch.from_numpy(kept_GY[:, start : start + lane.shape[1]]).to(lane.device)
            start += lane.shape[1]
    else:
        kept_GY = torch.cat([lane[ids.to(lane.device)] for lane in lanes], dim=1).cpu().numpy()
        if rows_GY is not None:
            rows_GY[:] = kept_GY
    return np.array([xxhash.xxh3_64_intdigest(row, seed) for row in kept_GY], dtype=np.uint64)
