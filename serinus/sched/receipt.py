"""The receipt of an answer: what a canary verified of the KV that it was computed on, and where that came from.

What was due is exact, at no cost for a step: the starts of a request's decode steps follow each other, so it is summed
up when the receipt is written. What was verified is what the ranks counted while they did it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from serinus.core.parts import Part
from serinus.core.request import KvIntegrity


def slots_due(starts_N: NDArray[np.int64], turn_size: int, stride: int, window: int | None) -> int:
    """Slots of one part that a canary verifies in decode steps with these starts: what canary.coverage has as due, and
    in each step the last slot read, which is held against the request's own chain hash. So many positions as
    `turn_size` have their turn together."""
    high = starts_N
    low = np.zeros_like(high) if window is None else np.maximum(0, high - window + 1)
    begin, end = low // turn_size, -(-high // turn_size)
    first = begin + (high - begin) % stride
    count = np.maximum(0, (end - first + stride - 1) // stride)
    last = first + (count - 1) * stride
    slots = count * turn_size
    slots -= np.where(count > 0, np.maximum(0, low - first * turn_size), 0)
    slots -= np.where(count > 0, np.maximum(0, (last + 1) * turn_size - high), 0)
    due = int(slots.sum()) + int((high > 0).sum())
    if window is not None:  # the slot that is read for the last time, and the one behind it, where their pages are not
        leaves = (high > low) & (high - low == window - 1)
        due += int((leaves & ((high - begin) % stride != 0)).sum())
        behind = leaves & (low + 1 < high)
        due += int((behind & ((high - (low + 1) // turn_size) % stride != 0)).sum())
    return due


@dataclass(slots=True)
class Checked:
    """How many slots of a request were to be verified, in steps that verify all it reads and in turns, and were."""

    slots: int = 0
    """Due; without the turns that are not closed."""
    found: int = 0
    """Counted by the ranks as they verified them."""
    turns_from: int = -1
    """In decode steps from this start on, as far as there were some, what has its turn was due, and is not counted in
    `slots`; -1 = in none."""
    repaired: Counter[str] = field(default_factory=Counter)
    """Tokens whose KV was given up by heals, by where it came from instead."""

    def whole(self, start: int, end: int, windows: Mapping[Part, int | None]) -> None:
        """All that a sequence reads before `start` was due, in a step that ended at `end`; turns are behind it."""
        read = sum(start if window is None else min(start, window - 1) for window in windows.values())
        self.slots += read + (len(windows) if start else 0)
        self.turns_from = end

    def close(self, computed: int, turn_size: int, stride: int, windows: Mapping[Part, int | None]) -> int:
        """Count the turns up to the step with start `computed` - 1; all slots due so far. Cost: a pass over the
        turns."""
        if 0 <= self.turns_from < computed:
            starts = np.arange(self.turns_from, computed)
            self.slots += sum(slots_due(starts, turn_size, stride, window) for window in windows.values())
        self.turns_from = -1
        return self.slots


def receipt(
    checked: Checked, slots: int, *, stride: int, horizon: int, sources: Mapping[str, int], peer: int, heals: list[str],
    chain: int,
) -> KvIntegrity:  # fmt: skip
    """Written when a request ends. `sources`: tokens of its KV found, by tier; `peer`: those that a handoff brought.
    Where fewer slots were verified than were due, no position is vouched for: which ones were not is unknown."""
    found = {tier: sources.get(tier, 0) for tier in ("device", "host", "storage")} | {"peer": peer}
    return KvIntegrity(
        coverage="full" if stride == 1 else f"rotating:{stride}",
        slots_due=slots,
        slots_checked=checked.found,
        horizon=horizon if checked.found >= slots else 0,
        sources=found | {"computed": max(0, horizon - sum(found.values()))},
        heals=len(heals),
        heal_reasons=tuple(heals),
        repaired_from={tier: count for tier, count in checked.repaired.items() if count},
        chain_hash=f"{chain & (1 << 64) - 1:016x}",
    )
