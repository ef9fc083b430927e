"""check_counts: what the canary of a rank had to verify and what it did, by check."""

from __future__ import annotations

from collections.abc import Collection

from serinus.canary.commands import CheckCount
from serinus.canary.lanes import PartLanes
from serinus.kernels import StampLane


def check_counts(parts: Collection[PartLanes], host_slots: int | None) -> tuple[CheckCount, ...]:
    """Slots due and checked by each check; `host_slots`: those of the host tier, None = there is none. Waits for the
    device."""
    head, tail = tuple(StampLane)[:2], tuple(StampLane)[2:]
    kinds = {
        "head": [(lanes.running, head) for lanes in parts],
        "tail": [(lanes.running, tail) for lanes in parts],
        "arrival": [(lanes.arriving, head + tail) for lanes in parts],
        "end": [(lanes.ending, head + tail) for lanes in parts],
        "sweep": [(lanes.sweeping, tail) for lanes in parts],
        "stored": [(lanes.stored, tail) for lanes in parts],
    }
    counts = () if host_slots is None else (CheckCount(check="host", due=host_slots, checked=host_slots),)
    return counts + tuple(
        CheckCount(
            check=check, due=sum(ring.due for ring, _ in rings),
            checked=sum(int(ring.checked_L[list(set(ring.lanes) & set(some))].min()) for ring, some in rings),
        )
        for check, rings in kinds.items()
    )  # fmt: skip
