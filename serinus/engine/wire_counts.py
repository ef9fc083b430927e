"""What went wrong on the way to peers, for the metrics. The loop counts frames of fronts into the same series."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from serinus.core.metrics import Metrics

__all__ = ["WireCounts"]

_ELSEWHERE = "closed_grant"
"""Late data is no bad frame, and has a series of its own (kv_transfer_late_frames)."""


class WireCounts:
    """Totals of a port, added to the metrics as far as they are new."""

    def __init__(self) -> None:
        self._told: Counter[str] = Counter()

    def refresh(self, metrics: Metrics, *, rejects: Mapping[str, int], resent_count: int) -> None:
        """Bring wire_bad_frames and wire_retransmits up to these totals."""
        for reason, count in rejects.items():
            if reason != _ELSEWHERE and count > self._told[reason]:
                metrics.add("wire_bad_frames", count - self._told[reason], reason)
                self._told[reason] = count
        metrics.set("wire_retransmits", resent_count)
