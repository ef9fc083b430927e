"""What the canary of a rank had to verify and what it did, by check; and what it did by sequence."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Final

from serinus.canary.commands import CanaryAnswer, CheckCount
from serinus.canary.lanes import PartLanes
from serinus.core.parts import Part
from serinus.kernels import StampLane, stamp_lanes

_EVERY: Final = len(StampLane)
_LANES: Final = {part: stamp_lanes(part) for part in Part}


def by_part(counts: Mapping[Part, Sequence[int]]) -> list[list[int]]:
    """Slots that were verified of each sequence, by part, in the order of Part; empty for one that a rank has none of.
    `counts`: of one sequence after the other, by lane; a slot counts that was looked at in all lanes of its part."""
    return [_in_all_lanes(counts[part], lanes) if part in counts else [] for part, lanes in _LANES.items()]


def _in_all_lanes(words: Sequence[int], lanes: Sequence[StampLane]) -> list[int]:
    first, *others = (list(words[lane::_EVERY]) for lane in lanes)
    return first if others.count(first) == len(others) else list(map(min, first, *others))


def with_counts(
    answer: CanaryAnswer, parts: Collection[PartLanes], host_slots: int | None, seconds: float, total: int
) -> CanaryAnswer:
    """The answer with what was due and checked so far. `host_slots`: slots of the host tier that were checked, None =
    there is none. Waits for the device, once a part."""
    return replace(
        answer,
        slots_due=sum(lanes.due_slots for lanes in parts),
        slots_checked=sum(lanes.checked_slots() for lanes in parts),  # reads the counts anew, for what follows too
        checks=_by_check(parts, host_slots),
        seconds=seconds,
        total=total,
    )


def _by_check(parts: Collection[PartLanes], host_slots: int | None) -> tuple[CheckCount, ...]:
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
            checked=sum(ring.fewest(some) for ring, some in rings),
        )
        for check, rings in kinds.items()
    )  # fmt: skip
