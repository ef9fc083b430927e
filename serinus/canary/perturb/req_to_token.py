"""req_to_token: one row entry of a running request is pointed at another active slot; bytes stay as they are.

The other slot holds another position, or, every second time, the same position of another request: only the chain of
hashes tells those two apart.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from serinus.canary.hook import StepChecks
from serinus.canary.lanes import PartLanes
from serinus.canary.perturb.plan import Injection
from serinus.canary.perturb.slot_picker import Victim, pick_active
from serinus.core.rng import Rng
from serinus.kernels import StampLane

_TRIES: Final = 16


def run(rng: Rng, lanes: PartLanes, checks: StepChecks, number: int) -> Injection | None:
    """Fault number `number` of this mode; None where no two slots were drawn that differ as they must."""
    for _ in range(_TRIES):
        victim = pick_active(rng, lanes, checks)
        if victim is None:
            return None
        other = _twin(rng, lanes, checks, victim) if number % 2 else pick_active(rng, lanes, checks)
        if other is None or other.slot == victim.slot or (other.position == victim.position) != bool(number % 2):
            continue
        lanes.table_RC[victim.row, victim.position] = other.slot
        return Injection(
            mode="req_to_token", step=checks.step, part=lanes.part.name, slot=other.slot, position=victim.position,
            rid=checks.rids[victim.sequence], before=victim.slot, after=other.slot,
        )  # fmt: skip
    return None


def _twin(rng: Rng, lanes: PartLanes, checks: StepChecks, victim: Victim) -> Victim | None:
    """The same position of another request whose tokens before it are others; None where there is none.

    A window's first position has no slot before it to be chained to, and in turns a window's other positions become
    its first before theirs comes: nothing is promised for them."""
    _, rows, lows, highs, strides, _ = checks.reads[lanes.part]
    low, stride = int(lows[victim.sequence]), int(strides[victim.sequence])
    if low and victim.position - low < stride:
        return None
    others = np.flatnonzero((lows <= victim.position) & (highs > victim.position) & (rows != victim.row))
    if not victim.position or not len(others):
        return None
    sequence = int(rng.choice(others.tolist()))
    row = int(rows[sequence])
    slot = int(lanes.table_RC[row, victim.position])
    stamps_S4 = lanes.stamps_LS4[StampLane.HEAD_K]
    if not slot or bool((stamps_S4[slot, 2] == stamps_S4[victim.slot, 2]).item()):
        return None  # the same tokens before it: nothing would be wrong
    return Victim(sequence=sequence, row=row, position=victim.position, slot=slot)
