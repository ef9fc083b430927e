"""real_kv_used: the first byte of a slot that a running request reads, never one that this step writes."""

from __future__ import annotations

from serinus.canary.hook import StepChecks
from serinus.canary.lanes import PartLanes
from serinus.canary.perturb.damage import flip_byte
from serinus.canary.perturb.plan import Injection
from serinus.canary.perturb.slot_picker import pick_active
from serinus.core.rng import Rng

__all__ = ["run"]


def run(rng: Rng, lanes: PartLanes, checks: StepChecks) -> Injection | None:
    """None where no request reads anything."""
    victim = pick_active(rng, lanes, checks)
    if victim is None:
        return None
    before, after = flip_byte(lanes, victim.slot)
    return Injection(
        mode="real_kv_used", step=checks.step, part=lanes.part.name, slot=victim.slot, position=victim.position,
        rid=checks.rids[victim.sequence], before=before, after=after,
    )  # fmt: skip
