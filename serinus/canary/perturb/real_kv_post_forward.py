"""real_kv_post_forward: one bit of a slot that this forward pass wrote, after its TAIL stamp was written."""

from __future__ import annotations

from serinus.canary.hook import StepChecks
from serinus.canary.lanes import PartLanes
from serinus.canary.perturb.damage import flip_bit
from serinus.canary.perturb.plan import Injection, Place
from serinus.canary.perturb.slot_picker import pick_written
from serinus.core.rng import Rng
from serinus.models import ForwardBatch


def run(rng: Rng, lanes: PartLanes, checks: StepChecks, batch: ForwardBatch, place: Place) -> Injection | None:
    """None where the sequence it chose wrote padding only."""
    victim = pick_written(rng, lanes, batch)
    if victim is None:
        return None
    before, after = flip_bit(lanes, victim.slot, place)
    return Injection(
        mode="real_kv_post_forward", step=checks.step, part=lanes.part.name, slot=victim.slot,
        position=victim.position, rid=checks.rids[victim.sequence], before=before, after=after, place=place,
    )  # fmt: skip
