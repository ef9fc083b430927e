"""Where the checks of a rank begin: counts of a warm-up are forgotten, and what a GPU compiles for checks outside of
steps (at arrival, at the end, in the sweep) is compiled."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import torch

from serinus.canary.hook import CanaryHook, Entries
from serinus.canary.lanes import PartLanes
from serinus.kernels import StampLane

_COUNTS: Final = (1, 256, 4096)
"""Slots of a call: kernels cut more of them otherwise."""


@torch.inference_mode()
def begin_checks(hook: CanaryHook, parts: Iterable[PartLanes]) -> None:
    """Check from now on; nothing was due, checked or found so far."""
    for lanes in parts:
        if lanes.watch.is_staged:
            _rehearse(hook, lanes)
        for ring in (*lanes.rings, lanes.arriving, lanes.ending):
            ring.begin_anew()
        lanes.counts.expire()


def _rehearse(hook: CanaryHook, lanes: PartLanes) -> None:
    """Verify so many slots of which none is to be checked: no count goes up."""
    for count in _COUNTS:
        slots_E = torch.zeros(count, dtype=torch.int64, device=lanes.table_RC.device)
        nowhere_E = torch.full_like(slots_E, -1)
        entries = Entries(slots_E=slots_E, positions_E=nowhere_E, previous_E=nowhere_E, sequences_E=slots_E)
        counts_N4 = slots_E.new_zeros((1, len(StampLane)))
        for lane in (StampLane.HEAD_K, StampLane.TAIL_K):
            hook.verify_now(lanes, lane, entries, slots_E, lanes.arriving, counts_N4)
        hook.verify_now(lanes, StampLane.TAIL_K, entries, slots_E, lanes.sweeping)
