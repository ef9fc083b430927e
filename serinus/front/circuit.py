"""Circuit: no requests for a while for an engine that fails them again and again, though it says that it is well.

Closed: requests go there. After so many failures in a row it opens: none go there for some time. Then it is half open:
one at a time goes there; so many successes in a row close it, a failure opens it again. Pure: time is an argument.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class CircuitState(StrEnum):
    """Whether requests go to an engine."""

    CLOSED = "closed"
    HALF_OPEN = "half_open"
    OPEN = "open"


@dataclass(frozen=True, slots=True, kw_only=True)
class CircuitLimits:
    """When circuits open and close."""

    failures: int = 5
    """Failures in a row that open one; 0 = none ever opens."""
    successes: int = 2
    """Successes in a row that close one that is half open."""
    open_s: float = 30.0
    """Seconds that one stays open."""


class Circuit:
    """That of one engine."""

    def __init__(self, limits: CircuitLimits) -> None:
        self._limits = limits
        self._failures = 0
        self._successes = 0
        self._opened_at: float | None = None
        self._trying = False

    def state(self, now: float) -> CircuitState:
        """What it is now."""
        if self._opened_at is None:
            return CircuitState.CLOSED
        return CircuitState.OPEN if now - self._opened_at < self._limits.open_s else CircuitState.HALF_OPEN

    def lets_in(self, now: float) -> bool:
        """Whether a request may go there now."""
        state = self.state(now)
        return state is CircuitState.CLOSED or (state is CircuitState.HALF_OPEN and not self._trying)

    def sent(self, now: float) -> None:
        """A request goes there; `succeeded`, `failed` or `left` follows, with this time. Where the circuit has opened
        since, they say nothing new."""
        self._trying = self.state(now) is CircuitState.HALF_OPEN

    def succeeded(self, sent_at: float) -> None:
        """The engine answered a request."""
        if self._is_old(sent_at):
            return
        self._trying = False
        self._failures = 0
        if self._opened_at is not None:
            self._successes += 1
            if self._successes >= self._limits.successes:
                self._opened_at, self._successes = None, 0

    def left(self, sent_at: float) -> None:
        """The request ended without saying anything of the engine: the client went, or there was no room."""
        if not self._is_old(sent_at):
            self._trying = False

    def failed(self, now: float, sent_at: float) -> bool:
        """The engine failed a request; True where that opens the circuit."""
        if self._is_old(sent_at):
            return False
        self._trying = False
        self._failures += 1
        self._successes = 0
        opens = self._opened_at is not None or 0 < self._limits.failures <= self._failures
        if opens:
            self._opened_at, self._failures = now, 0
        return opens

    def _is_old(self, sent_at: float) -> bool:
        return self._opened_at is not None and sent_at <= self._opened_at
