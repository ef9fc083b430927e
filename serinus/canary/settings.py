"""How much the canary of a rank checks, and how often it logs."""

from __future__ import annotations

from dataclasses import dataclass

from serinus.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckSettings:
    """What a CanaryRank is told when it is made. Raises ConfigError: a value is outside of its range."""

    page_size: int
    window: int | None = None
    """Positions a token sees in part SWA, itself included; None where there is no such part."""
    real_data: str = "none"
    """none | partial | all: which KV bytes are digested."""
    stride: int = 1
    """1 = every page of every request in every step; N = each once in N steps of the request."""
    depth: int = 1
    """Plans that may be under way at a time."""
    is_swept: bool = False
    """Whether the leader has cached pages swept that no request uses."""
    stats_interval: int = 0
    """Steps between two log lines of statistics; 0 = none."""
    divergence_interval: int = 0
    """Steps between two log lines on how far sliding-window checks differ from full ones; 0 = none."""
    ring_rows: int = 1024
    """Violations of one step whose detail is kept."""
    entries_max: int = 1 << 18
    """Slots verified by one launch; more are verified by several."""

    def __post_init__(self) -> None:
        if self.real_data not in ("none", "partial", "all"):
            raise ConfigError(f"canary: real data is {self.real_data!r}, expected none, partial or all")
        for name in ("stride", "depth", "ring_rows", "entries_max"):
            if getattr(self, name) < 1:
                raise ConfigError(f"canary: {name} is {getattr(self, name)}, expected at least 1")
