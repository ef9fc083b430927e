"""real_kv_unused_cache: one bit of a cached slot that no request uses, anywhere in the tree; only sweeps find it."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from serinus.canary.lanes import PartLanes
from serinus.canary.perturb.damage import flip_bit
from serinus.canary.perturb.plan import Injection, Place
from serinus.core.rng import Rng


def run(
    rng: Rng, lanes: PartLanes, pages: NDArray[np.integer], page_size: int, step: int, place: Place,
    spared: Collection[int],
) -> Injection | None:  # fmt: skip
    """`pages`: all cached pages that no request uses. None where there are none but those of the slots `spared`."""
    spared_pages = {slot // page_size for slot in spared}
    free = [int(page) for page in pages if int(page) not in spared_pages]
    if not free:
        return None
    slot = rng.choice(free) * page_size + rng.randrange(page_size)
    before, after = flip_bit(lanes, slot, place)
    return Injection(
        mode="real_kv_unused_cache", step=step, part=lanes.part.name, slot=slot, before=before, after=after, place=place
    )
