"""tier_bytes and transfer_bytes: one byte of the KV of a page in the host tier, or on its way to another engine."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from serinus.canary.perturb.plan import Injection
from serinus.core.parts import Part
from serinus.core.rng import Rng

__all__ = ["run"]

_MASK = 0x5A


def run(
    mode: str, rng: Rng, rows_GY: NDArray[np.uint8], pages: NDArray[np.integer], part: Part, step: int
) -> Injection | None:
    """Change the first byte of one of the pages `pages` (rows of the buffer); None where there is none."""
    if not len(pages) or not rows_GY.shape[1]:
        return None
    page = int(pages[rng.randrange(len(pages))])
    before = int(rows_GY[page, 0])
    rows_GY[page, 0] = before ^ _MASK
    return Injection(mode=mode, step=step, part=part.name, before=before, after=before ^ _MASK)
