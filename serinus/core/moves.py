"""Copies of pages between the tiers of one engine, as plain data: `cache` decides them, `pool` carries them out."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from serinus.core.parts import Part


class MoveKind(Enum):
    """Source and target of a copy."""

    BACKUP = "backup"
    """From device to host memory."""
    LOAD = "load"
    """Host to device, layer by layer: forward passes that begin later wait for each layer before they read it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One part of a copy. Moves with the same `op` end together, all of them or none."""

    op: int
    """Number of the copy, from 1; never used twice in one engine."""
    kind: MoveKind
    """The same in all moves of one op."""
    part: Part
    source: NDArray[np.int32]
    """Page ids of the tier it reads; pinned until the copy has ended."""
    target: NDArray[np.int32]
    """As many page ids of the tier it fills; in state COPY until the copy has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveDone:
    """A copy has ended: its sources are no longer read, its targets no longer written."""

    op: int
    ok: bool
    """Whether every target page holds the bytes of its source."""
    error: str = ""
    """In words, where it failed."""
    seconds: float = 0.0
    """How long it took; beside an accelerator its pages alone, without the wait for its turn."""
    byte_count: int = 0
    """Bytes that were moved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageOrigin:
    """What consecutive pages, as a storage reads or writes them, are the KV of."""

    before: bytes
    """Key of the page before the first one; of a sequence's first page, what stands in its place (PageKeys.seed)."""
    start: int
    """Position of their first token."""
    tokens: NDArray[np.int32]
    """All of their tokens, whole pages."""
    chain: int | None = None
    """The chain hash of all tokens before them (core.stamps); None = not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageDone:
    """A storage operation has ended: its host pages are no longer read or written."""

    op: int
    present: tuple[NDArray[np.bool_], ...] = ()
    """Of a query: for each part asked for, which keys are stored."""
    good: int = 0
    """Of a read: leading pages whose bytes came whole and verified. Of a write: pages that are stored now. Of a
    removal: pages that were there and are not any more."""
    bad: tuple[int, ...] = ()
    """Of a read or a write: indices of pages whose bytes are not those that their stamps vouch for. They were not
    stored, or are stored no more."""
    error: str = ""
    """In words, where something failed; the pages beyond `good` count as missing."""
    seconds: float = 0.0
    """How long it took."""
    byte_count: int = 0
    """Bytes that were moved."""
