"""real_kv_used: one bit of a slot that a running request reads, never one that this step writes."""

from __future__ import annotations

from collections.abc import Collection

from serinus.canary.hook import StepChecks
from serinus.canary.lanes import PartLanes
from serinus.canary.perturb.damage import flip_bit
from serinus.canary.perturb.plan import Injection, Place
from serinus.canary.perturb.slot_picker import pick_active
from serinus.core.rng import Rng


def run(rng: Rng, lanes: PartLanes, checks: StepChecks, place: Place, spared: Collection[int]) -> Injection | None:
    """None where no request reads anything but the slots `spared`."""
    victim = pick_active(rng, lanes, checks, spared)
    if victim is None:
        return None
    before, after = flip_bit(lanes, victim.slot, place)
    return Injection(
        mode="real_kv_used", step=checks.step, part=lanes.part.name, slot=victim.slot, position=victim.position,
        rid=checks.rids[victim.sequence], before=before, after=after, place=place,
    )  # fmt: skip
