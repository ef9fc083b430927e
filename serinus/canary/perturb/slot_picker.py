"""slot_picker: the one place that chooses the slot that is damaged."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from serinus.canary.hook import StepChecks
from serinus.canary.lanes import PartLanes
from serinus.core.rng import Rng
from serinus.models import ForwardBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Victim:
    """The slot to damage, of one sequence of the step."""

    sequence: int
    """Index in the step's work."""
    row: int
    position: int
    slot: int


_TRIES = 8
"""Draws of a slot that was not damaged yet."""


def pick_active(rng: Rng, lanes: PartLanes, checks: StepChecks, spared: Collection[int] = ()) -> Victim | None:
    """A slot that the step reads and does not write, none of `spared`; None where none was drawn. Reads the table:
    waits for a device."""
    for _ in range(_TRIES):
        victim = _drawn(rng, lanes, checks)
        if victim is not None and victim.slot not in spared:
            return victim
    return None


def _drawn(rng: Rng, lanes: PartLanes, checks: StepChecks) -> Victim | None:
    _, rows, lows, highs, *_ = checks.reads[lanes.part]
    reading = np.flatnonzero(highs > lows).tolist()
    if not reading:
        return None
    sequence = rng.choice(reading)
    row, low, high = (int(values[sequence]) for values in (rows, lows, highs))
    position = rng.randrange(low, high)
    slot = int(lanes.table_RC[row, position])
    return Victim(sequence=sequence, row=row, position=position, slot=slot) if slot else None


def pick_written(rng: Rng, lanes: PartLanes, batch: ForwardBatch) -> Victim | None:
    """A slot that the step wrote, and that the next one reads (the last position of a sequence)."""
    ends = (batch.attention.q_starts_B1[1:] - 1).tolist()
    sequence = rng.randrange(len(ends))
    at = ends[sequence]
    slot = int(batch.slots_of(lanes.part)[at])
    if not slot:
        return None
    row, position = int(batch.attention.rows_B[sequence]), int(batch.positions_T[at])
    return Victim(sequence=sequence, row=row, position=position, slot=slot)
