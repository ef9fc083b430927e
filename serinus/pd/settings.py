"""The settings of a handoff machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from serinus.core.errors import ConfigError, LayoutMismatch
from serinus.core.parts import Part
from serinus.pd.layout import RankLayout
from serinus.pd.modes import Capabilities, check_safe, known_capabilities
from serinus.wire.messages import LayoutSignature

Refusal: TypeAlias = Callable[[Sequence[bytes], Sequence[bytes], Sequence[tuple[int, int]]], str]


class Holds(Protocol):
    """Says, without a message, whether prefill still holds what it offered over a connection (pull)."""

    def begin(self) -> str:
        """Prefill: for a new connection, until `end`: where its peer finds it; empty = there is none."""

    def end(self, hold: str) -> None:
        """Prefill: it is over. Called before anything is given up that its peer may read."""

    def lasts(self, hold: str) -> bool:
        """Decode: whether it is not over; False too where that is not known."""


PIECE_BYTES_MAX = 64 << 20
"""No piece is larger: between two of them prefill looks whether the grant is still open."""
PIECE_PAGES_MAX = (1 << 16) - 1
"""No piece has more: a kernel has so many rows of programs at most, one for each page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffSettings:
    """What one engine is called, what its pages look like, and how long it waits.

    Raises ConfigError: a value out of range, a layout that cannot be, or a backend that no mode makes safe.
    """

    engine: str
    """Name of this engine, e.g. decode-0."""
    incarnation: int
    """Random id of this run of the process."""
    layout: LayoutSignature
    """What its KV looks like, all ranks together."""
    vocab_size: int
    """Token ids are below this."""
    backends: tuple[str, ...] = ("shm", "tcp")
    """Ways to move pages, best first; the first that both sides can use is taken."""
    capabilities: Mapping[str, Capabilities] = field(default_factory=dict)
    """Of backends other than local, shm and tcp."""
    endpoints: Mapping[str, tuple[bytes, ...]] = field(default_factory=dict)
    """How peers reach our memory, by backend, one text per rank; for one-sided backends."""
    refusals: Mapping[str, Refusal] = field(default_factory=dict)
    """Why our endpoints and those of a peer do not go together, in words, by backend (OneSided.refusal)."""
    holds: Mapping[str, Holds] = field(default_factory=dict)
    """By backend, where pages are pulled and both sides share memory."""
    host: str = ""
    """Identity of this machine (backends.host_identity()); shm needs the same on both sides, and not empty."""
    cluster_secret: str = field(default="", repr=False)
    """Both sides must know it; empty = there is none."""
    piece_bytes_max: int = 16 << 20
    """A Data message brings about so many bytes of one rank at most (always at least one page)."""
    staging_pieces: int = 1
    """Receiver-checked: so many pieces of a rank that does not lead may be asked to be staged and not be reported yet,
    as it hears of them between two steps. The leader's own rank stages up to piece_bytes_max at once."""
    park_tokens: int = 1 << 16
    """Prefill: finished prompts without a grant may keep pages for so many tokens; beyond it they are forgotten (their
    KV stays in the cache) and computed again when the grant comes."""
    lease_s: float = 60.0
    """Pull: prefill keeps a finished prompt's pages so long for decode to read."""
    abort_s_max: float = 10.0
    """Push: a peer that has not acknowledged an ABORT for so long is cut off."""
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
    """A lost peer is tried again after this; the wait doubles with each failure."""
    retry_s_max: float = 5.0
    """The longest wait before a lost peer is tried again."""
    forget_s: float = 600.0
    """A lost peer that no request asked for in so long is forgotten."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "piece_bytes_max", "incarnation", "staging_pieces"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"pd: {name} is {getattr(self, name)}, expected more than 0")
        if self.piece_bytes_max > PIECE_BYTES_MAX:
            raise ConfigError(f"pd: piece_bytes_max is {self.piece_bytes_max}, expected at most {PIECE_BYTES_MAX}")
        for name in (
            "connect_s_max", "handoff_s_max", "keepalive_s", "retry_s_min", "forget_s", "lease_s", "abort_s_max",
        ):  # fmt: skip
            if not getattr(self, name) > 0:
                raise ConfigError(f"pd: {name} is {getattr(self, name)}, expected more than 0 seconds")
        if self.silence_s_max <= self.keepalive_s:
            raise ConfigError(
                f"pd: silence_s_max is {self.silence_s_max}, expected more than keepalive_s = {self.keepalive_s}"
            )
        if self.park_tokens < 0:
            raise ConfigError(f"pd: park_tokens is {self.park_tokens}, expected 0 or more")
        if not self.backends:
            raise ConfigError("pd: no data backend, expected at least one of local, shm, tcp")
        for name in self.backends:
            check_safe(name, self.capabilities_of(name))
        try:
            RankLayout(self.layout)
        except LayoutMismatch as error:
            raise ConfigError(str(error)) from None

    def capabilities_of(self, backend: str) -> Capabilities:
        """What one of `backends` can do. Raises ConfigError: it is not known."""
        found = self.capabilities.get(backend) or known_capabilities(backend)
        if found is None:
            raise ConfigError(f"pd: unknown what backend {backend!r} can do, expected it among capabilities")
        return found

    def first_needed(self, part: Part, held: int, prompt_tokens: int) -> int:
        """The first position whose KV in `part` decode lacks: `held`, or where the window of the next token begins.
        Always below `prompt_tokens`: the last page travels."""
        window = self.layout.window if part is Part.SWA else 0
        return max(held, min(prompt_tokens - window + 1, prompt_tokens - 1)) if window else held
