"""The parts of a model's KV (classes of attention layers, each with its own page space), and pages as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Part(IntEnum):
    """A class of attention layers. Every model has FULL (of no layers, and so no bytes, where all of them slide)."""

    FULL = 0
    """Layers that see every position. The tree is built on it."""
    SWA = 1
    """Layers that see a sliding window: the last `window` positions, the token itself included."""
    LATENT = 2
    """Layers with one compressed row for each position, of all heads, which is key and value (multi-head latent
    attention). They see every position."""

    @property
    def halves(self) -> int:
        """Rows of a position in each layer: keys and values, or one that is both."""
        return 1 if self is Part.LATENT else 2


@dataclass(slots=True)
class PageSpan:
    """Consecutive pages of one sequence in one part. Not frozen, and made by position in hot paths, for its cost alone
    (several are made for each request and step); nothing changes one."""

    part: Part
    first: int
    """Index of the first page in its sequence: position // page_size."""
    pages: NDArray[np.int32]
    """Page ids of that part's pool, in order."""

    @property
    def end(self) -> int:
        """One past the index of the last page."""
        return self.first + len(self.pages)


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnPages:
    """A request's tokens, and the pages it has, by part."""

    tokens: NDArray[np.int32]
    """Its known tokens, from position 0."""
    spans: tuple[PageSpan, ...]
    """One for each part of the model."""
    row: int = 0
    """The row of req_to_token that names them on every rank, where a step has read it; 0 = there is none."""


class PageStore(Protocol):
    """The pages of one part on one rank: pool.DevicePool, or anything of its shape."""

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers of the part."""

    def read_pages(self, pages: NDArray[np.integer], out: NDArray[np.uint8]) -> object:
        """Copy pages into out[G, page_bytes]."""

    def write_pages(self, pages: NDArray[np.integer], data: NDArray[np.uint8]) -> None:
        """Fill pages from data[G, page_bytes] (may be read only)."""
