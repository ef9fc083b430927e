"""What both handoff machines are told at birth."""

from __future__ import annotations

from dataclasses import dataclass

from serinus.core.errors import ConfigError
from serinus.wire.messages import LayoutSignature

__all__ = ["PdSettings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PdSettings:
    """Who this engine is, what its pages look like, and how long it waits. Raises ConfigError."""

    engine: str
    """Name of this engine, e.g. decode-0."""
    incarnation: int
    """Of this process."""
    layout: LayoutSignature
    """What its KV looks like."""
    page_bytes: int
    """Bytes of one page over all layers."""
    vocab_size: int
    """Token ids are below this."""
    backends: tuple[str, ...] = ("shm", "tcp")
    """Ways to move pages, best first; the first that both sides can use is taken."""
    host: str = ""
    """Identity of this machine (backends.host_identity()); shm needs the same on both sides, and not empty."""
    part_bytes_max: int = 8 << 20
    """A Data message brings about so many bytes at most (always at least one page)."""
    connect_s_max: float = 10.0
    """A request waits so many seconds for HELLO_OK, then it is computed here; the peer itself, which may be in a long
    step, is given silence_s_max."""
    handoff_s_max: float = 300.0
    """Seconds one handoff may take (the wait in prefill's queue included)."""
    keepalive_s: float = 1.0
    """Seconds between two signs of life."""
    silence_s_max: float = 60.0
    """A peer that is silent for so long is gone, unless it announced steps that explain it (four of its longest, up to
    handoff_s_max). A killed process is noticed at once whatever this says; this is for a hung one."""
    retry_s_min: float = 0.25
    """A lost peer is tried again after this; the wait doubles with each failure..."""
    retry_s_max: float = 5.0
    """...up to this."""
    forget_s: float = 600.0
    """A lost peer that nobody asked for in so long is forgotten."""

    def __post_init__(self) -> None:
        for name in ("page_bytes", "vocab_size", "part_bytes_max", "incarnation"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"pd: {name} is {getattr(self, name)}, expected more than 0")
        for name in ("connect_s_max", "handoff_s_max", "keepalive_s", "retry_s_min", "forget_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"pd: {name} is {getattr(self, name)}, expected more than 0 seconds")
        if self.silence_s_max <= self.keepalive_s:
            raise ConfigError(
                f"pd: silence_s_max is {self.silence_s_max}, expected more than keepalive_s = {self.keepalive_s}"
            )
        if not self.backends:
            raise ConfigError("pd: no data backend, expected at least one of local, shm, tcp")
