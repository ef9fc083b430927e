"""Bad frames and messages, for the metrics, and a limit to what they write into the log."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from serinus.core.metrics import Metrics

_ELSEWHERE = "closed_grant"
"""Late data is no bad frame, and has a series of its own (kv_transfer_late_frames)."""
_LINES_MAX = 10
"""Lines of each kind per _EVERY_S seconds."""
_EVERY_S = 10.0


class BadFrames:
    """Totals by reason, added to a metric as far as they are new."""

    def __init__(self, metric: str = "wire_bad_frames") -> None:
        self._metric = metric
        self._told: Counter[str] = Counter()

    def refresh(self, metrics: Metrics, rejects: Mapping[str, int]) -> None:
        """Bring the metric up to these totals."""
        for reason, count in rejects.items():
            if reason != _ELSEWHERE and count > self._told[reason]:
                metrics.add(self._metric, count - self._told[reason], reason)
                self._told[reason] = count


class Rarely:
    """Keeps a bad peer from filling the log: so many lines of a kind per stretch of time, the rest is only counted."""

    def __init__(self) -> None:
        self._said: dict[str, tuple[float, int]] = {}

    def says(self, kind: str, now: float) -> bool:
        """Whether a line of this kind may be written now. Kinds are few: codes, never words of a peer."""
        since, count = self._said.get(kind, (now, 0))
        if now - since >= _EVERY_S:
            since, count = now, 0
        self._said[kind] = since, count + 1
        return count < _LINES_MAX
