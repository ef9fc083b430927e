"""req_to_token: one row entry of a running request is pointed at another active slot; bytes stay as they are."""

from __future__ import annotations

from serinus.canary.hook import StepChecks
from serinus.canary.lanes import PartLanes
from serinus.canary.perturb.plan import Injection
from serinus.canary.perturb.slot_picker import pick_active
from serinus.core.rng import Rng

__all__ = ["run"]


def run(rng: Rng, lanes: PartLanes, checks: StepChecks) -> Injection | None:
    """None where fewer than two slots are active."""
    victim, other = pick_active(rng, lanes, checks), pick_active(rng, lanes, checks)
    if victim is None or other is None or other.slot == victim.slot or other.position == victim.position:
        return None
    lanes.table_RC[victim.row, victim.position] = other.slot
    return Injection(
        mode="req_to_token", step=checks.step, part=lanes.part.name, slot=other.slot, position=victim.position,
        rid=checks.rids[victim.sequence], before=victim.slot, after=other.slot,
    )  # fmt: skip
