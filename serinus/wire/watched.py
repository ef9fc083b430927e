"""What an engine shows to a front whose dashboard is open: one frame, as the body of an EngineReply."""

from __future__ import annotations

from typing import Final

import msgspec

CELL_IN_TRANSIT: Final = 3
"""The number of a page that a copy or a transfer fills or reads; the others are those of the ledger's states."""


class PoolCells(msgspec.Struct, frozen=True, kw_only=True):
    """All pages of one tier and part; page 0 is padding."""

    tier: str
    """device, host or storage."""
    part: str
    """Which layers have it: full or swa."""
    state: bytes
    """A byte a page: free 0, request 1, cached 2, in transit 3, quarantined 4, padding 5, retired 6."""
    seen: bytes = b""
    """u32 a page, little-endian: second of the frame's clock in which it was cached or verified last, where a canary
    notes that; empty = it is not noted here."""


class WatchFrame(msgspec.Struct, frozen=True, kw_only=True):
    """How an engine stands at one moment."""

    now: float
    """Of the engine's clock, to which all times of the sections belong."""
    pools: tuple[PoolCells, ...] = ()
    sections: dict[str, bytes] = msgspec.field(default_factory=dict)
    """JSON by name: about, health, rates, requests, ended, handoffs, incidents."""
