"""check_counts: what the canary of a rank had to verify and what it did, by check; and what it did by sequence."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from serinus.canary.commands import CheckCount
from serinus.canary.lanes import PartLanes
from serinus.core.parts import Part
from serinus.kernels import StampLane, stamp_lanes

_PARTS: Final = len(Part)
_LANES: Final = len(StampLane)


def by_part(counts: Mapping[Part, NDArray[np.int64]], count: int) -> NDArray[np.int64]:
    """Slots that were verified of each of so many sequences, [len(Part), N]: -1 of parts that a rank has none of.
    `counts`: by sequence and lane; a slot counts that was looked at in all lanes."""
    checked_PN = np.empty((_PARTS, count), np.int64)
    checked_PN.fill(-1)
    for part, counts_N4 in counts.items():
        lanes = stamp_lanes(part)
        np.minimum.reduce(counts_N4 if len(lanes) == _LANES else counts_N4[:, lanes], 1, out=checked_PN[part])
    return checked_PN


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
