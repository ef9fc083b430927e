"""What passes between the scheduler and the handoff machines of `pd`, as plain data. Decides nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from serinus.core.request import Request, TokenLogprobs

__all__ = ["ChunkReady", "HandoffSpec", "Reservation"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffSpec:
    """Prefill side: for whom a prompt is computed."""

    xid: str
    """Name of the handoff."""
    held: int
    """Prompt tokens the decode engine has already; page aligned, at most prompt length - 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """Decode side: pages that a prefill engine may fill now: the request's own until landed, recompute or abort."""

    rid: str
    request: Request
    held: int
    """Prompt tokens found in the own cache; their pages are locked. Page aligned, at most prompt length - 1."""
    pages: NDArray[np.int32]
    """Pages for positions `held` up to the end of the prompt, in order; the last may be partly used."""

    @property
    def prompt(self) -> NDArray[np.int32]:
        """The whole prompt."""
        return self.request.prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkReady:
    """Prefill side: pages of a prompt whose KV is computed, canonical, and held (`transfer`) until drained."""

    rid: str
    xid: str
    first_page_index: int
    """Index of the first of `pages` among the pages that decode granted: 0 is the page of position `held`."""
    pages: NDArray[np.int32]
    """Page ids of this engine, in order; at least one."""
    last: bool = False
    """All pages are announced now; `token` is set."""
    token: int | None = None
    """The first generated token."""
    logprobs: TokenLogprobs | None = None
    """Its log-probabilities, where asked for."""
    cached_tokens: Mapping[str, int] = field(default_factory=dict)
    """In the last one: tokens beyond `held` that this engine found cached, by tier."""
    queue_seconds: float = 0.0
    """In the last one: from arrival to the first step that worked for it."""
    compute_seconds: float = 0.0
    """In the last one: from that step to the last."""
