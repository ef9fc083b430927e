"""real_kv_unused_cache: the first byte of a cached slot that no request uses, just before a sweep looks at it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from serinus.canary.lanes import PartLanes
from serinus.canary.perturb.damage import flip_byte
from serinus.canary.perturb.plan import Injection
from serinus.core.rng import Rng

__all__ = ["run"]


def run(rng: Rng, lanes: PartLanes, slots: NDArray[np.int64], step: int) -> Injection | None:
    """None where nothing is swept."""
    if not len(slots):
        return None
    slot = int(slots[rng.randrange(len(slots))])
    before, after = flip_byte(lanes, slot)
    return Injection(
        mode="real_kv_unused_cache", step=step, part=lanes.part.name, slot=slot, before=before, after=after
    )
