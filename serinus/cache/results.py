"""What the cache answers with: plain data, one class per operation."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from serinus.cache.ledger import PageCounts, Pages
from serinus.cache.node import Lease

__all__ = ["CacheStats", "Eviction", "Insertion", "Match", "ResidentSlots", "RowView"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """A cached prefix, already pinned: the lease must be released once (`finish`, or `release`)."""

    lease: Lease
    """Keeps the prefix in place; `lease.end == length`."""
    length: int
    """Tokens found, a multiple of the page size; 0 = none."""
    pages: Pages
    """Their pages in order, length / page_size of them: write them into the row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Insertion:
    """A published piece of a sequence. Write `pages` into the row, then hand this to `commit_row`."""

    rid: str
    """Whose pages they were; empty where nothing was published."""
    from_pos: int
    """First position published."""
    end: int
    """One past the last one; a multiple of the page size, and `lease.end` where prefixes are kept."""
    pages: Pages
    """Canonical: the pages that hold positions [from_pos, end) from now on: the tree's."""
    duplicates: Pages
    """Those of the given pages that the tree did not need: still the request's, freed by `commit_row`."""
    lease: Lease
    """The request's lease, grown to `end`."""

    @property
    def changed(self) -> bool:
        """Whether the row must be rewritten (the canonical pages differ from those given)."""
        return len(self.duplicates) > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Eviction:
    """What an eviction brought."""

    freed: int
    """Pages that became free."""
    shortfall: int
    """Pages that were asked for and that nothing evictable could give."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidentSlots:
    """One stretch of the sweep: cached slots, with what the canary needs to check each of them."""

    slots: NDArray[np.int64]
    """page * page_size + offset."""
    positions: NDArray[np.int64]
    """Absolute position of the token in each slot."""
    previous: NDArray[np.int64]
    """Slot of the token before it in its sequence; 0 (padding) at position 0."""
    cursor: int
    """Where the next call goes on; 0 = the sweep is complete."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowView:
    """What a scheduler says of one running request, so that `sanity_check` can hold it against the cache."""

    rid: str
    lease: Lease
    pages: Pages
    """All pages of its row in order: those of the lease, then its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStats:
    """Gauges and counters of the cache; counters never go back."""

    page_count: int
    """Pages of the pool that can be owned (page 0 is not among them)."""
    page_size: int
    pages: PageCounts
    """Pages by state."""
    evictable_pages: int
    """Cached, unpinned and unheld."""
    protected_pages: int
    """Cached, but pinned by a lease or held."""
    held_pages: int
    """Pages with at least one named hold, whatever their state."""
    node_count: int
    """Nodes of the tree."""
    matched_tokens: int
    """Counter: tokens asked for in `match_prefix`."""
    hit_tokens: int
    """Counter: tokens it found."""
    inserted_pages: int
    """Counter: pages published."""
    duplicate_pages: int
    """Counter: pages freed because the tree already held their content."""
    evicted_pages: int
    """Counter: pages that eviction took from the tree."""
    sanity_checks: int
    """Counter: complete checks that passed."""
