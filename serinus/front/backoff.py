"""Pauses between tries: each twice as long as the one before, up to a bound, less a random part. Pure."""

from __future__ import annotations

from serinus.core.rng import Rng

_FACTOR = 2.0


class Backoff:
    """How long a request waits before it is tried again where all engines had it."""

    def __init__(self, rng: Rng, *, first_s: float, most_s: float) -> None:
        """`first_s`, `most_s`: the first pause, and the longest."""
        self._rng = rng
        self._first_s = first_s
        self._most_s = most_s

    def pause_s(self, pauses: int) -> float:
        """Seconds of the next pause after so many; between half and all of its length, so that requests that failed
        together are not tried together."""
        whole = min(self._most_s, self._first_s * _FACTOR ** min(pauses, 64))
        return whole * (0.5 + 0.5 * self._rng.random())
