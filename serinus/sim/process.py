"""SimProcess: one run of the processes of one engine, from start to kill, as the timeline sees it.

What was planned in one run does not happen in the next one, and what comes due while the engine stands still happens
when it goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from serinus.sim.timeline import Timeline


class SimProcess:
    """Time of one run of an engine."""

    def __init__(self, timeline: Timeline, turn: Callable[[], None]) -> None:
        """`turn`: the engine looks around."""
        self.alive = True
        self.paused_until = 0.0
        self.busy_until = 0.0
        """The leader's thread does something until then."""
        self._timeline, self._turn = timeline, turn
        self._wake_at = float("inf")

    @property
    def now_s(self) -> float:
        """The time it is."""
        return self._timeline.now_s

    def at(self, when: float, act: Callable[..., None], *args: Any) -> None:
        """`act(*args)` happens then, or when the engine goes on after a pause; not after its end."""
        self._timeline.at(when, self._act, act, args)

    def _act(self, act: Callable[..., None], args: tuple[Any, ...]) -> None:
        if not self.alive:
            return
        if self.now_s < self.paused_until:
            self._timeline.at(self.paused_until, self._act, act, args)
            return
        act(*args)

    def wake(self, after_s: float = 0.0) -> None:
        """The engine looks around then, as soon as it is free."""
        at = max(self.now_s + after_s, self.busy_until, self.paused_until)
        if at < self._wake_at and self.alive:
            self._wake_at = at
            self._timeline.at(at, self._woken, at)

    def _woken(self, at: float) -> None:
        if not self.alive or at != self._wake_at:
            return
        self._wake_at = float("inf")
        if self.now_s < max(self.paused_until, self.busy_until):
            self.wake()
            return
        self._turn()
