"""What a canary is told at birth."""

from __future__ import annotations

from dataclasses import dataclass

from serinus.core.errors import ConfigError

__all__ = ["CanarySettings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CanarySettings:
    """How much is checked, how often. Raises ConfigError."""

    page_size: int
    window: int | None = None
    """Positions a token sees in part SWA, itself included; None where there is no such part."""
    real_data: str = "none"
    """none | partial | all: which KV bytes are digested."""
    stride: int = 1
    """1 = every page of every request in every step; N = each at least once in N steps."""
    plans_open: int = 1
    """Plans that the scheduler may have open at a time: a running request is in one of so many."""
    sweep_interval: int = 0
    """Steps between two sweeps of cached pages; 0 = never."""
    sweep_slots: int = 4096
    """Slots of one sweep."""
    ring_rows: int = 1024
    """Violations whose detail is kept between two readings."""
    entries_max: int = 1 << 18
    """Slots verified by one launch; more are verified by several."""

    def __post_init__(self) -> None:
        if self.real_data not in ("none", "partial", "all"):
            raise ConfigError(f"canary: real data is {self.real_data!r}, expected none, partial or all")
        for name in ("stride", "plans_open", "sweep_slots", "ring_rows", "entries_max"):
            if getattr(self, name) < 1:
                raise ConfigError(f"canary: {name} is {getattr(self, name)}, expected at least 1")
        if self.sweep_interval < 0:
            raise ConfigError(f"canary: sweep interval is {self.sweep_interval}, expected 0 (off) or more")
