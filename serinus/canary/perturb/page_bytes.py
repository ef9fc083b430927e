"""tier_bytes and transfer_bytes: one bit of a page in the host tier, or on its way to another engine."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from serinus.canary.perturb.damage import PageShape, flip_page_bit
from serinus.canary.perturb.plan import Injection, Place
from serinus.core.parts import Part
from serinus.core.rng import Rng


def run(
    mode: str, rng: Rng, rows_GY: NDArray[np.uint8], pages: NDArray[np.integer], part: Part, step: int,
    shape: PageShape, place: Place, *, is_last_whole: bool,
) -> Injection | None:  # fmt: skip
    """Change one bit of one of the pages `pages` (rows of the buffer); None where there is none.

    `is_last_whole`: every slot of the last page holds a token; else only its first one surely does.
    """
    if not len(pages) or not rows_GY.shape[1]:
        return None
    number = rng.randrange(len(pages))
    slot = rng.randrange(shape.page_size) if is_last_whole or number + 1 < len(pages) else 0
    page = int(pages[number])
    before, after = flip_page_bit(rows_GY[page], shape.offset(place, slot), place.bit)
    return Injection(
        mode=mode, step=step, part=part.name, slot=slot, page=page, before=before, after=after, place=place
    )
