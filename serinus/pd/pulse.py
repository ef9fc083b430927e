"""Keepalives of one peer: when to send one, and how long it was silent.

Silence is counted only over time in which we listened: a tick that comes late (a long step, a stopped process) adds one
second at most, so our own pause never looks like the death of all peers. A peer that computes is silent too: it
tells how long its steps take, and is given four of them.
"""

from __future__ import annotations

from dataclasses import dataclass

_TICK_S_MAX = 1.0
_STEPS = 4
"""A peer may be silent for so many of its longest steps."""
_STILL_S = 5.0
_STILL_KEEPALIVES = 3
"""A peer that says nothing for so long, for so many keepalives, and for one of its longest steps, stands still."""
_LATELY_S = 600.0
"""A long step is remembered for at least this, at most twice this."""


@dataclass(slots=True, kw_only=True)
class Pace:
    """How long our own steps take: the time between two looks at our messages, the longest one lately."""

    looked_at: float | None = None
    since: float = 0.0
    """When `now_s` began to count."""
    now_s: float = 0.0
    before_s: float = 0.0

    @property
    def longest_s(self) -> float:
        """Seconds; 0 = nothing seen yet."""
        return max(self.now_s, self.before_s)

    def look(self, now: float) -> None:
        """Messages are looked at now."""
        if self.looked_at is None:
            self.since = now
        else:
            if now - self.since > _LATELY_S:
                self.since, self.before_s, self.now_s = now, self.now_s, 0.0
            self.now_s = max(self.now_s, now - self.looked_at)
        self.looked_at = now


@dataclass(slots=True, kw_only=True)
class Pulse:
    """Silence and keepalives of one connection."""

    ticked_at: float
    said_at: float
    silent_s: float = 0.0
    step_s: float = 0.0
    """The longest step of the peer, as it says itself."""

    def is_gone(self, silence_s_max: float, longest_s: float) -> bool:
        """True where it was silent for longer than its steps explain; never patient beyond `longest_s`."""
        return self.silent_s > max(silence_s_max, min(_STEPS * self.step_s, longest_s))

    def stands_still(self, every_s: float) -> bool:
        """Whether it was silent for longer than a step and some lost keepalives (one is due `every_s`) explain: what it
        owes may not come for long, and it may still be there."""
        return self.silent_s > max(_STILL_S, _STILL_KEEPALIVES * every_s) + self.step_s

    def heard(self) -> None:
        """A message came: the silence is over."""
        self.silent_s = 0.0

    def tick(self, now: float) -> None:
        """Count the silence since the last tick."""
        self.silent_s += min(max(0.0, now - self.ticked_at), _TICK_S_MAX)
        self.ticked_at = now

    def must_speak(self, now: float, every_s: float) -> bool:
        """True once per interval: a keepalive is due now."""
        if now - self.said_at < every_s:
            return False
        self.said_at = now
        return True
