"""Pages out of and into the KV pools with their XXH3: one kernel and one copy between the device and pinned memory, and
the hash there, by the cpu column, of the very bytes that were copied. See the reference.

G = pages moved, Y = bytes of one page over all lanes, P = pages of the pool, W = bytes of one page in one lane.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from serinus.kernels.checks import check_hashed
from serinus.kernels.cpu import hashed_pages as host
from serinus.kernels.triton.pages import move_pages


@torch.inference_mode()
def hashed_pages(
    lanes: Sequence[Tensor], pages_G: NDArray[np.int64], rows_GY: NDArray[np.uint8] | None, seed: int,
    inward: bool = False,
) -> NDArray[np.uint64]:  # fmt: skip
    """Move pages and hash them; see the reference. Cost: one pass over the bus, two over memory of the host; waits for
    the device where pages are read."""
    width, count, device = check_hashed(lanes, pages_G, rows_GY), len(pages_G), lanes[0].device
    staged_GY = torch.empty((count, width), dtype=torch.uint8, pin_memory=device.type == "cuda")
    places = [(lane.data_ptr(), lane.shape[1]) for lane in lanes]
    if inward and rows_GY is not None:
        staged_GY.numpy()[:] = rows_GY  # the buffer may change: what is hashed is what is written
        move_pages(places, device, pages_G, staged_GY.to(device, non_blocking=True), None, outward=False)
    else:
        found_GY = torch.empty((count, width), dtype=torch.uint8, device=device)
        move_pages(places, device, pages_G, found_GY, None, outward=True)
        staged_GY.copy_(found_GY)
        if rows_GY is not None:
            rows_GY[:] = staged_GY.numpy()
    return host.hashed_pages([staged_GY], np.arange(count, dtype=np.int64), None, seed)
