"""Damage at exactly these moments: before or after the calls in which pages come, are read, are judged and go."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from serinus.canary import CanaryLead, CanaryRank
from serinus.canary.hook import CanaryHook
from serinus.core.rng import Rng
from serinus.pool import DevicePool
from serinus.sched.page_allocator import PageAllocator
from serinus.selftest import EngineDriver, EnginePair

from .little_memory import TIERS, alike_page, answer_all, flip_page

MOMENTS: dict[str, tuple[type, str, bool]] = {
    "came by handoff and verified": (CanaryLead, "arrived", True),
    "found cached": (PageAllocator, "match", True),
    "being loaded from the host": (PageAllocator, "load", True),
    "planned to be read": (CanaryRank, "begin", True),
    "before HEAD is verified": (CanaryHook, "before", True),
    "read, and not verified": (CanaryHook, "after", False),
    "verified in the step": (CanaryHook, "after", True),
    "about to be judged": (CanaryLead, "judge", False),
    "about to be published": (PageAllocator, "_insert", False),
    "published": (PageAllocator, "_insert", True),
    "about to be behind the window": (PageAllocator, "advance", False),
    "about to be verified at its end": (CanaryLead, "check", False),
    "verified at its end": (CanaryLead, "check", True),
    "about to be given back": (PageAllocator, "release", False),
    "about to be copied to the host": (DevicePool, "copy_out", False),
    "its stamps about to be copied to the host": (DevicePool, "copy_stamps_out", False),
    "copied from the host": (DevicePool, "copy_in", True),
    "its stamps copied from the host": (DevicePool, "copy_stamps_in", True),
    "about to be sent, or landed": (DevicePool, "hashed_pages", True),
}
"""The call, and whether the damage comes behind it."""
FAULTS = 12


class Strikes:
    """Damages pages of running requests, or those that a pool copies, at some of the calls."""

    def __init__(self, patch: pytest.MonkeyPatch, moment: str, seed: int) -> None:
        self.count = self._calls = 0
        self._rng = Rng(seed)
        self._drivers: tuple[EngineDriver, ...] = ()
        owner, name, is_behind = MOMENTS[moment]
        original, strike = getattr(owner, name), self._strike

        def call(this: Any, *args: Any, **more: Any) -> Any:
            if not is_behind:
                strike(this, args)
            found = original(this, *args, **more)
            if is_behind:
                strike(this, args)
            return found

        patch.setattr(owner, name, call)

    def begun(self, pair: EnginePair) -> None:
        self._drivers = pair.prefill, pair.decode

    def _strike(self, this: Any, args: tuple[Any, ...]) -> None:
        self._calls += 1
        rng = self._rng
        if not self._drivers or self.count >= FAULTS or rng.random() > max(0.2, 1 / self._calls):
            return
        driver = rng.choice(self._drivers)
        pools = {part: pool for part, pool in driver.built.pools.items() if pool.page_bytes}
        if isinstance(this, DevicePool):
            pool, pages = this, np.asarray(args[0]).tolist()
        else:
            states = driver.engine.scheduler._states
            named = {getattr(each, "rid", each if isinstance(each, str) else "") for each in args}
            named.update(*(each for each in args if isinstance(each, dict)))
            states = [state for rid, state in states.items() if rid in named] or list(states.values())
            rows = [row for state in states for row in state.rows if row.end > row.first and row.part in pools]
            if not rows:
                return
            row = rng.choice(rows)
            pool, pages = pools[row.part], row.pages[row.first : row.end].tolist()
        if pages:
            damage: Callable[[DevicePool, int, Rng], None] = rng.choice((alike_page, flip_page))
            damage(pool, rng.choice(pages), rng)
            self.count += 1


@pytest.mark.proof
@pytest.mark.parametrize("moment", list(MOMENTS))
@pytest.mark.parametrize("stride", [4, 16])
def test_no_answer_is_wrong_whatever_becomes_wrong_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str, stride: int
) -> None:
    strikes = Strikes(monkeypatch, moment, seed=5)
    left = answer_all(tmp_path, seed=5, stride=stride, storms=True, begun=strikes.begun, **TIERS)
    assert strikes.count, "nothing was struck at this moment"
    assert left["found"] or strikes.count < 4, "none of it was found"
