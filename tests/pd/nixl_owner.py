"""A process with pages on a GPU, which others read by nixl: python nixl_owner.py PAGES STRIP_BYTES

Prints its endpoint and the sums of all its pages but the padding, in hexadecimal, and lives until it is killed.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

if str(Path(__file__).resolve().parents[2]) not in sys.path:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from serinus.core.ids import new_incarnation
from serinus.core.parts import Part
from serinus.pd.backends import CudaDriver, NixlBackend, Region

LANES = 2
SEED = 7
"""Of the sums that are printed."""


def made(pages: int, strip_bytes: int) -> Tensor:
    """Bytes on the GPU by lane, page and place in it, the same in every process."""
    generator = torch.Generator("cuda").manual_seed(1)
    return torch.randint(0, 256, (LANES, pages, strip_bytes), dtype=torch.uint8, device="cuda", generator=generator)


def backend_over(memory: Tensor) -> NixlBackend:
    """One whose pool this is."""
    backend = NixlBackend(f"test-{new_incarnation()}", device=CudaDriver())
    lanes, pages, strip_bytes = memory.shape
    region = Region(
        part=Part.FULL, address=memory.data_ptr(), lane_count=lanes, lane_stride=pages * strip_bytes,
        strip_bytes=strip_bytes, page_count=pages,
    )  # fmt: skip
    backend.register([region])
    return backend


if __name__ == "__main__":
    memory = made(*map(int, sys.argv[1:]))
    owner = backend_over(memory)
    sums = owner.digests(Part.FULL, np.arange(1, memory.shape[1], dtype=np.int32), SEED)
    assert sums is not None
    print(owner.endpoint.hex(), sums.hex(), flush=True)
    signal.pause()
