"""What the cache is built from and answers with: plain data, one class per operation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from serinus.cache.ledger import PageCounts, Pages
from serinus.cache.node import NO_PAGES, Lease, Tier
from serinus.core.errors import ConfigError
from serinus.core.parts import Part

__all__ = [
    "CacheGeometry",
    "CacheNews",
    "CacheStats",
    "Eviction",
    "Insertion",
    "LoadPlan",
    "Loaded",
    "Match",
    "NodeView",
    "PartPages",
    "PoolStats",
    "PrefetchState",
    "Probe",
    "ResidentSlots",
    "RowView",
    "TreeView",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheGeometry:
    """How many pages of which size there are, by tier and part. Counts include page 0 (padding); 0 = no such pool."""

    page_size: int
    """Tokens per page, a power of two from 1 to 128."""
    full_pages: int
    """Device pages of FULL, the part every model has."""
    swa_pages: int = 0
    """Device pages of SWA; 0 where no layer slides."""
    window: int | None = None
    """Positions a token of SWA sees, itself included; set exactly where there are SWA pages."""
    host_full_pages: int = 0
    """Host pages of FULL; 0 = no host tier."""
    host_swa_pages: int = 0
    """Host pages of SWA."""
    read_batch_pages: int = 64
    """Pages of one storage read at most: a prefetch of more reads several times, and can be cut between them."""

    def __post_init__(self) -> None:
        if self.read_batch_pages < 1:
            raise ConfigError(f"cache: read_batch_pages is {self.read_batch_pages}, expected at least 1")
        if self.page_size not in (1, 2, 4, 8, 16, 32, 64, 128):
            raise ConfigError(f"cache: page_size is {self.page_size}, expected a power of two from 1 to 128")
        if self.full_pages < 2:
            raise ConfigError(f"cache: page_count is {self.full_pages}, expected at least 2 (page 0 is padding)")
        for name in ("swa_pages", "host_full_pages", "host_swa_pages"):
            count = getattr(self, name)
            if count < 0 or count == 1:
                raise ConfigError(f"cache: {name} is {count}, expected 0, or at least 2 (page 0 is padding)")
        if (self.window is None) != (self.swa_pages == 0):
            raise ConfigError(
                f"cache: window is {self.window} with {self.swa_pages} SWA pages, expected both or neither"
            )
        if self.window is not None and self.window < 1:
            raise ConfigError(f"cache: window is {self.window}, expected at least 1 position, the token itself")
        if bool(self.host_swa_pages) != bool(self.host_full_pages and self.swa_pages):
            raise ConfigError(
                f"cache: host_swa_pages is {self.host_swa_pages}, expected pages exactly where there are host pages"
                f" ({self.host_full_pages}) and SWA pages ({self.swa_pages})"
            )

    @property
    def parts(self) -> tuple[Part, ...]:
        """The parts of the model."""
        return (Part.FULL, Part.SWA) if self.swa_pages else (Part.FULL,)

    def pools(self) -> dict[tuple[Tier, Part], int]:
        """Pages of each pool that exists."""
        counts = {
            (Tier.DEVICE, Part.FULL): self.full_pages,
            (Tier.DEVICE, Part.SWA): self.swa_pages,
            (Tier.HOST, Part.FULL): self.host_full_pages,
            (Tier.HOST, Part.SWA): self.host_swa_pages,
        }
        return {pool: count for pool, count in counts.items() if count}


@dataclass(frozen=True, slots=True, kw_only=True)
class PartPages:
    """Device pages of one request, by part."""

    full: Pages
    swa: Pages = field(default_factory=lambda: NO_PAGES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """How much of some tokens is cached; nothing was pinned."""

    device: int
    """Tokens that `match_prefix` would give, page aligned."""
    total: int
    """Tokens that device and host could give together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """What the host could add to a match. Its pages stay where they are until `load_back`, or the end of the lease."""

    end: int
    """Tokens that are usable after the load; a multiple of the page size."""
    full: int
    """Device pages of FULL that it needs."""
    swa: int
    """Device pages of SWA that it needs."""
    tokens: int
    """Tokens that it adds to the match."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """A cached prefix, already pinned: the lease must be released once (`finish`, or `release`)."""

    lease: Lease
    """Keeps the prefix in place; `lease.end == length`."""
    length: int
    """Tokens found, a multiple of the page size; 0 = none."""
    pages: Pages
    """Their FULL pages in order, length / page_size of them: write them into the row."""
    swa_first: int
    """Index of the first SWA page that computing position `length` reads; length / page_size without that part."""
    swa_pages: Pages = field(default_factory=lambda: NO_PAGES)
    """SWA pages [swa_first, length / page_size), in order."""
    load: LoadPlan | None = None
    """What `load_back` could add; None = nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A load that was submitted: its pages may be read by every forward pass that begins later."""

    length: int
    """Tokens usable now, `lease.end`."""
    first: int
    """Index of the first of `pages`: where the match ended."""
    pages: Pages
    """FULL pages [first, length / page_size), in order."""
    swa_first: int
    """Index of the first of `swa_pages`, as in Match."""
    swa_pages: Pages
    """SWA pages [swa_first, length / page_size), in order: all that computing position `length` reads."""
    op: int
    """Number of the copy; 0 where others had loaded everything meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Insertion:
    """A published piece of a sequence. Write `pages` and `swa_pages` into the rows, then hand this to `commit_row`."""

    rid: str
    """Whose pages they were; empty where nothing was published."""
    from_pos: int
    """First position published."""
    end: int
    """One past the last one; a multiple of the page size, and `lease.end` where prefixes are kept."""
    pages: Pages
    """Canonical: the FULL pages that hold positions [from_pos, end) from now on: the tree's."""
    duplicates: Pages
    """Those of the given FULL pages that the tree did not need: still the request's, freed by `commit_row`."""
    lease: Lease
    """The request's lease, grown to `end`."""
    swa_first: int = 0
    """Index of the first of `swa_pages`."""
    swa_pages: Pages = field(default_factory=lambda: NO_PAGES)
    """Canonical SWA pages [swa_first, end / page_size)."""
    swa_duplicates: Pages = field(default_factory=lambda: NO_PAGES)
    """Those of the given SWA pages that the tree did not need."""

    @property
    def changed(self) -> bool:
        """Whether a row must be rewritten (the canonical pages differ from those given)."""
        return len(self.duplicates) > 0 or len(self.swa_duplicates) > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Eviction:
    """What an eviction brought."""

    freed: int
    """Pages that became free: nobody reads or writes them any more."""
    shortfall: int
    """Pages that were asked for and that nothing evictable could give."""


class PrefetchState(Enum):
    """How far the storage prefetch of a request is."""

    NONE = "none"
    """There is none."""
    QUERY = "query"
    """The storage is asked what it has."""
    READ = "read"
    """Host pages are taken, the storage fills them."""
    GRAFT = "graft"
    """Over: all that was found hangs in the tree."""
    CUT = "cut"
    """Over: what had come at the deadline hangs in the tree."""
    MISS = "miss"
    """Over: nothing came of it."""

    @property
    def over(self) -> bool:
        """Whether a request need not wait for it."""
        return self not in (PrefetchState.QUERY, PrefetchState.READ)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheNews:
    """What became known in one `poll`."""

    failed_loads: tuple[Lease, ...] = ()
    """Their KV from `lease.sound_end` on never came: finish them, nothing is published, and compute again."""
    ended_loads: tuple[int, ...] = ()
    """Numbers of the loads that ended, well or not."""
    prefetched: tuple[str, ...] = ()
    """Requests whose prefetch came to an end."""
    in_flight: int = 0
    """Copies and storage operations that have not ended: an idle engine goes on polling while there are any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidentSlots:
    """One stretch of the sweep: cached slots, with what the canary needs to check each of them."""

    slots: NDArray[np.int64]
    """page * page_size + offset."""
    positions: NDArray[np.int64]
    """Absolute position of the token in each slot."""
    previous: NDArray[np.int64]
    """Slot of the token before it in its sequence; 0 (padding) at position 0, and where that one is not resident."""
    cursor: int
    """Where the next call goes on; 0 = the sweep is complete."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowView:
    """What a scheduler says of one running request, so that `sanity_check` can hold it against the cache."""

    rid: str
    lease: Lease
    pages: Pages
    """All FULL pages of its row in order: those of the lease, then its own."""
    swa_first: int = 0
    """Index of the first of `swa_pages`."""
    swa_pages: Pages = field(default_factory=lambda: NO_PAGES)
    """Its SWA pages in order: those of the lease, then its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStats:
    """One pool: the pages of one tier and part."""

    page_count: int
    """Pages that can be owned (page 0 is not among them)."""
    pages: PageCounts
    """Pages by state."""
    cached: int
    """Pages that nodes list."""
    evictable: int
    """Cached pages that could be made free now; on the host an upper bound while copies run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStats:
    """Gauges and counters of the cache; counters never go back."""

    page_count: int
    """Device FULL pages that can be owned (page 0 is not among them)."""
    page_size: int
    pages: PageCounts
    """Device FULL pages by state."""
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
    """Counter: tokens it found on the device."""
    inserted_pages: int
    """Counter: FULL pages published."""
    duplicate_pages: int
    """Counter: FULL pages freed because the tree already held their content."""
    evicted_pages: int
    """Counter: FULL pages that eviction took from the device, dropped and demoted alike."""
    sanity_checks: int
    """Counter: complete checks that passed."""
    pools: Mapping[tuple[Tier, Part], PoolStats] = field(default_factory=dict)
    """Every pool of device and host."""
    backup_tokens: int = 0
    """Counter: tokens copied to the host."""
    backup_seconds: float = 0.0
    """Counter: time those copies took."""
    loaded_tokens: int = 0
    """Counter: tokens loaded back."""
    load_seconds: float = 0.0
    """Counter: time those copies took."""
    failed_copies: int = 0
    """Counter: copies that failed, either way."""
    dropped_tokens: int = 0
    """Counter: tokens that left the device without the host copy that the policy wanted: the host had no room."""
    demoted_pages: int = 0
    """Counter: FULL pages that left the device and stayed on the host."""
    swa_evicted_pages: int = 0
    """Counter: device SWA pages that eviction took alone (tombstones)."""
    host_evicted_pages: int = 0
    """Counter: host FULL pages that eviction took, duplicates included."""
    eviction_seconds: float = 0.0
    """Counter: time spent evicting from the device, waiting for write-backs included; 0 without a clock."""
    prefetched_tokens: int = 0
    """Counter: tokens that prefetches grafted."""
    stored_tokens: int = 0
    """Counter: tokens written to the storage."""
    sanity_steps: int = 0
    """Counter: nodes that incremental checks passed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """One node of a TreeView."""

    depth: int
    """Nodes above it; a namespace's first nodes have 0."""
    namespace: str
    start: int
    end: int
    head: tuple[int, ...]
    """Its first token ids, 8 at most."""
    pages: Mapping[str, int]
    """Pages by tier and part: "device", "device_swa", "host", "host_swa"; only those that it has."""
    pins: int
    """Leases on it, and pinned children."""
    swa_pins: int
    hits: int
    last_use: int
    busy: int
    """Copies and load plans that need it as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeView:
    """What is cached where, as far as the limit allowed; parents before children."""

    nodes: tuple[NodeView, ...]
    total: int
    """Nodes there are; more than `nodes` shows where it was cut."""
    now: int
    """The operation counter, to compare `last_use` with."""
