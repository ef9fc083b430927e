"""real_kv: one bit of the KV of a slot on the device.

used            a slot that a running request reads, never one that this step writes
post_forward    a slot that this forward pass wrote, after its TAIL stamp was written
unused_cache    a cached slot that no request uses, anywhere in the tree; only sweeps find it
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from serinus.canary.hook import StepChecks
from serinus.canary.lanes import PartLanes
from serinus.canary.perturb.damage import flip_bit
from serinus.canary.perturb.plan import Injection, Place
from serinus.canary.perturb.slot_picker import Victim, pick_active, pick_written
from serinus.core.rng import Rng
from serinus.models import ForwardBatch


def used(rng: Rng, lanes: PartLanes, checks: StepChecks, place: Place, spared: Collection[int]) -> Injection | None:
    """None where no request reads anything but the slots `spared`."""
    return _flipped("real_kv_used", lanes, checks, place, pick_active(rng, lanes, checks, spared))


def post_forward(rng: Rng, lanes: PartLanes, checks: StepChecks, batch: ForwardBatch, place: Place) -> Injection | None:
    """None where the sequence it chose wrote padding only."""
    return _flipped("real_kv_post_forward", lanes, checks, place, pick_written(rng, lanes, batch))


def _flipped(mode: str, lanes: PartLanes, checks: StepChecks, place: Place, victim: Victim | None) -> Injection | None:
    if victim is None:
        return None
    before, after = flip_bit(lanes, victim.slot, place)
    return Injection(
        mode=mode, step=checks.step, part=lanes.part.name, slot=victim.slot, position=victim.position,
        rid=checks.rids[victim.sequence], before=before, after=after, place=place,
    )  # fmt: skip


def unused_cache(
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
