"""LoadProgress: lines of the log while weights are read for long, and one when they are there."""

from __future__ import annotations

from serinus.core.clock import Clock
from serinus.core.log import get_logger

_log = get_logger("engine")
_EVERY_S = 5.0
"""Seconds from line to line."""


class LoadProgress:
    """Told of bytes; says how many there are, of how many, and how fast they came."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._began = self._last = clock.now()
        self._done = 0

    def __call__(self, done: int, total: int) -> None:
        """So many bytes of weight files were taken, of so many that they have (of all ranks)."""
        self._done, now = done, self._clock.now()
        if now - self._last >= _EVERY_S:
            self._last = now
            percent = 100 * done // max(total, 1)
            scale, unit = (1e9, "GB") if total >= 1e8 else (1e6, "MB")
            _log.info(
                "loading weights: %d %%, %.1f of %.1f %s%s", percent, done / scale, total / scale, unit, self._rate(now)
            )

    def end(self) -> None:
        """All weights are packed."""
        if self._done:
            now = self._clock.now()
            size = f"{self._done / 1e9:.2f} GB" if self._done >= 1e8 else f"{self._done / 1e6:.1f} MB"
            _log.info("weights: %s in %.1f s%s", size, now - self._began, self._rate(now))

    def _rate(self, now: float) -> str:
        spent = now - self._began
        return f", {self._done / spent / 1e9:.1f} GB/s" if spent > 0 and self._done >= 1e8 else ""
