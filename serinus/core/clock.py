"""Time as an argument: code that needs it is given a Clock. The only file that reads the machine's clocks."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """What a clock can say."""

    def now(self) -> float:
        """Seconds on a monotonic scale; only differences mean anything."""

    def unix(self) -> float:
        """Seconds since 1970, for people and for OpenAI's `created`."""


class WallClock:
    """A Clock that reads the machine's clocks."""

    now = staticmethod(time.monotonic)
    unix = staticmethod(time.time)


class ManualClock:
    """A clock that moves only when told; for tests and for the simulation."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def unix(self) -> float:
        return 1_700_000_000.0 + self._now

    def advance(self, seconds: float) -> None:
        assert seconds >= 0, f"core: a clock never goes back, got {seconds} s"
        self._now += seconds
