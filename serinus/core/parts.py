"""The parts of a model's KV: classes of attention layers, each with its own page space."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

__all__ = ["PageSpan", "Part"]


class Part(IntEnum):
    """A class of attention layers. Every model has FULL (of no layers, and so no bytes, where all of them slide)."""

    FULL = 0
    """Layers that see every position. The tree is built on it."""
    SWA = 1
    """Layers that see a sliding window: the last `window` positions, the token itself included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageSpan:
    """Consecutive pages of one sequence in one part."""

    part: Part
    first: int
    """Index of the first page in its sequence: position // page_size."""
    pages: NDArray[np.int32]
    """Page ids of that part's pool, in order."""

    @property
    def end(self) -> int:
        """One past the index of the last page."""
        return self.first + len(self.pages)
