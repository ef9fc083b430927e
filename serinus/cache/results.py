"""What the cache is built from and answers with: plain data, one class per operation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from serinus.cache.ledger import PageCounts, Pages
from serinus.cache.node import NO_PAGES, TOKEN_BYTES, WHOLE, Lease, Node, Tier
from serinus.core.errors import ConfigError
from serinus.core.moves import PageOrigin
from serinus.core.parts import PageSpan, Part
from serinus.core.times import TimeCounts


@dataclass(frozen=True, slots=True, kw_only=True)
class PartGeometry:
    """One part of a cache: how many pages it has, and how much of a prefix it must cover for the prefix to be usable.

    Counts include page 0, which is padding.
    """

    pages: int
    """Pages on the device."""
    host_pages: int = 0
    """Pages on the host; 0 = no host tier."""
    window: int | None = None
    """Positions that a token sees, itself included; None = all before it: the part covers whole prefixes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheGeometry:
    """How many pages of which size there are, by part: the one table that says which parts a cache has.

    Raises ConfigError for counts and windows that cannot work.
    """

    page_size: int
    """Tokens per page, a power of two from 1 to 128."""
    parts: Mapping[Part, PartGeometry]
    """FULL, which every model has and which covers whole prefixes, and any others; kept in the order of their
    numbers."""
    read_batch_pages: int = 64
    """Pages of one storage read at most: a prefetch of more reads several times, and can be cut between them."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", dict(sorted(self.parts.items())))
        if self.read_batch_pages < 1:
            raise ConfigError(f"cache: read_batch_pages is {self.read_batch_pages}, expected at least 1")
        if self.page_size not in (1, 2, 4, 8, 16, 32, 64, 128):
            raise ConfigError(f"cache: page_size is {self.page_size}, expected a power of two from 1 to 128")
        if Part.FULL not in self.parts or self.full.window is not None:
            raise ConfigError(f"cache: parts are {dict(self.parts)}, expected FULL among them, without a window")
        for part, shape in self.parts.items():
            if shape.pages < 2:
                raise ConfigError(f"cache: {part.name} has {shape.pages} pages, expected at least 2 (1 is padding)")
            if shape.host_pages < 0 or shape.host_pages == 1:
                raise ConfigError(
                    f"cache: {part.name} has {shape.host_pages} host pages, expected 0, or at least 2 (page 0 is"
                    " padding)"
                )
            if bool(shape.host_pages) != self.tiered:
                raise ConfigError(
                    f"cache: {part.name} has {shape.host_pages} host pages and FULL {self.full.host_pages}, expected"
                    " every part on the host, or none"
                )
            if part is Part.SWA and shape.window is None:
                raise ConfigError(
                    f"cache: {part.name} has no window, expected one: it is the part of layers that slide"
                )
            if shape.window is not None and shape.window < 1:
                raise ConfigError(
                    f"cache: the window of {part.name} is {shape.window}, expected at least 1 position (the token)"
                )

    @property
    def full(self) -> PartGeometry:
        """The part that the tree is built on."""
        return self.parts[Part.FULL]

    @property
    def tiered(self) -> bool:
        """Whether there is a host tier."""
        return self.full.host_pages > 0

    @property
    def rules(self) -> tuple[tuple[int, int], ...]:
        """The parts, FULL first, each with its window, or WHOLE."""
        return tuple((int(part), WHOLE if shape.window is None else shape.window) for part, shape in self.parts.items())

    def pools(self) -> dict[tuple[Tier, Part], int]:
        """Pages of each pool that exists."""
        counts = {(Tier.DEVICE, part): shape.pages for part, shape in self.parts.items()}
        counts |= {(Tier.HOST, part): shape.host_pages for part, shape in self.parts.items()}
        return {pool: count for pool, count in counts.items() if count}


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """How much of some tokens is cached; nothing was pinned."""

    device: int
    """Tokens that `match_prefix` would give, page aligned."""
    total: int
    """Tokens that device and host could give together."""


@dataclass(slots=True)
class LoadPlan:
    """What the host could add to a match. Its pages stay where they are until `load_back`, or the end of the lease.
    Not frozen, and made by position, as PageSpan."""

    end: int
    """Tokens that are usable after the load; a multiple of the page size."""
    pages: tuple[int, ...]
    """Device pages that it needs, of each part in the order of the parts."""
    tokens: int
    """Tokens that it adds to the match."""


@dataclass(slots=True)
class Match:
    """A cached prefix, already pinned: the lease must be released once (`finish`, or `release`). Not frozen, and made
    by position, as PageSpan."""

    lease: Lease
    """Keeps the prefix in place; `lease.end == length`."""
    length: int
    """Tokens found, a multiple of the page size; 0 = none."""
    spans: tuple[PageSpan, ...]
    """Their pages, of each part: write them into the row. FULL from page 0 on; a part with a window from the first page
    on that computing position `length` reads."""
    load: LoadPlan | None = None
    """What `load_back` could add; None = nothing."""

    @property
    def pages(self) -> Pages:
        """The FULL pages, length / page_size of them."""
        return self.spans[0].pages


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A load that was submitted: its pages may be read by every forward pass that begins later."""

    length: int
    """Tokens usable now, `lease.end`."""
    spans: tuple[PageSpan, ...]
    """Pages up to there, of each part: of one that covers whole prefixes from the end of the match on; of one with a
    window all that computing position `length` reads."""
    op: int
    """Number of the copy; 0 where other requests had loaded everything meanwhile."""

    @property
    def pages(self) -> Pages:
        """The FULL pages behind the match."""
        return self.spans[0].pages


@dataclass(slots=True)
class InsertedPart:
    """What an insertion did with the pages of one part. Not frozen, as PageSpan."""

    part: Part
    first: int
    """Index of the first of them."""
    canonical: list[Pages]
    """The pages that hold the published positions from now on, in order: the tree's."""
    duplicates: list[Pages]
    """The given pages that the tree did not need: still the request's, freed by `commit_row`."""


@dataclass(slots=True)
class Insertion:
    """A published piece of a sequence. Where it `changed`, write the pages of `spans` into the rows; then hand it to
    `commit_row`. Not frozen, as PageSpan."""

    rid: str
    """The request that gave its pages; empty where nothing was published."""
    end: int
    """One past the last position published; a multiple of the page size, and `lease.end` where prefixes are kept."""
    parts: Sequence[InsertedPart]
    """In the order of the parts."""
    lease: Lease
    """The request's lease, grown to `end`."""

    @property
    def changed(self) -> bool:
        """Whether a row must be rewritten (the canonical pages differ from those given)."""
        return any(each.duplicates for each in self.parts)

    @property
    def spans(self) -> tuple[PageSpan, ...]:
        """The canonical pages of each part; of a part with a window from the first page on that the request gave."""
        return tuple([PageSpan(each.part, each.first, join(each.canonical)) for each in self.parts])

    @property
    def duplicates(self) -> tuple[Pages, ...]:
        """The duplicates of each part."""
        return tuple([join(each.duplicates) for each in self.parts])

    @property
    def pages(self) -> Pages:
        """The canonical FULL pages."""
        return join(self.parts[0].canonical)

    def __str__(self) -> str:
        return f"insertion of {self.rid or 'no request'} from page {self.parts[0].first} up to position {self.end}"


def join(arrays: list[Pages]) -> Pages:
    """Some pages in one array."""
    if len(arrays) == 1:
        return arrays[0]
    return np.concatenate(arrays) if arrays else NO_PAGES


class PrefetchState(Enum):
    """How far the storage prefetch of a request is."""

    NONE = "none"
    """The request has no prefetch."""
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
class Condemned:
    """What was condemned with a page whose KV is wrong: itself, and all that was computed behind it."""

    tokens: int
    """Tokens that no request finds any more."""
    pages: Mapping[Part, Pages]
    """The device pages of it, by part."""
    salt: str = ""
    """The namespace of what was cached..."""
    prefix: bytes = b""
    """...and its tokens from position 0 through the first condemned page, int32; empty where nothing was cached."""
    kept: int = 0
    """Tokens whose copies on the host were found sound and stay cached there."""

    @property
    def prefix_tokens(self) -> int:
        """The number of tokens of `prefix`."""
        return len(self.prefix) // TOKEN_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCopy:
    """What the host has of one node."""

    node: Node
    spans: tuple[PageSpan, ...]
    """Its host pages, by part, FULL first."""
    origin: PageOrigin
    """What they are the KV of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidentSlots:
    """One stretch of the sweep: cached slots, with what the canary needs to check each of them."""

    slots: NDArray[np.int64]
    """page * page_size + offset."""
    positions: NDArray[np.int64]
    """Absolute position of the token in each slot."""
    previous: NDArray[np.int64]
    """Slot of the token before it in its sequence; 0 (padding) at position 0, and where that one is not resident."""
    tokens: NDArray[np.int32]
    """The token of each slot, as the tree has it."""
    cursor: int
    """Where the next call goes on; 0 = the sweep is complete."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowView:
    """What a scheduler says of one running request, so that `sanity_check` can hold it against the cache."""

    rid: str
    lease: Lease
    spans: tuple[PageSpan, ...]
    """All pages of its row, of each part in order: those of the lease, then its own. FULL from page 0 on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStats:
    """One pool: the pages of one tier and part."""

    page_count: int
    """Pages that can be owned (page 0 is not among them)."""
    pages: PageCounts
    """How many pages are in each state."""
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
    held_pages: int
    """Pages with at least one named hold, whatever their state."""
    hit_tokens: int
    """Counter: tokens that placed requests found on the device."""
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
    backup_times: TimeCounts = field(default_factory=TimeCounts)
    """Seconds of those copies."""
    loaded_tokens: int = 0
    """Counter: tokens loaded back."""
    load_times: TimeCounts = field(default_factory=TimeCounts)
    """Seconds of those copies."""
    failed_copies: int = 0
    """Counter: copies that failed, either way."""
    dropped_tokens: int = 0
    """Counter: tokens that left the device without the host copy that the policy wanted: the host had no room."""
    demoted_pages: int = 0
    """Counter: FULL pages that left the device and stayed on the host."""
    window_evicted_pages: int = 0
    """Counter: device pages of parts with a window that eviction took alone (tombstones)."""
    host_evicted_pages: int = 0
    """Counter: host FULL pages that eviction took, duplicates included."""
    eviction_times: TimeCounts = field(default_factory=TimeCounts)
    """Seconds of evictions from the device, waiting for write-backs included; none without a clock."""
    prefetched_tokens: int = 0
    """Counter: tokens that prefetches grafted."""
    stored_tokens: int = 0
    """Counter: tokens written to the storage."""
    removed_pages: int = 0
    """Counter: stored pages that were removed as what this engine condemned, or what continued it."""
    sanity_steps: int = 0
    """Counter: nodes that incremental checks passed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """One node of a TreeView; its fields are those that `/cache` tells."""

    id: int
    """Its name in the ledgers; a split may give it to the other half."""
    depth: int
    """Nodes above it; a namespace's first nodes have 0."""
    namespace: str
    start: int
    end: int
    head_start: int
    """The first position at which it differs from all its siblings; `start` where it has none."""
    head: tuple[int, ...]
    """Its token ids from there on, 8 at most."""
    pages: Mapping[str, int]
    """Pages by tier and part: "device", "device_swa", "host", "host_swa" ...; only those that it has."""
    pins: int
    """Leases on it, and pinned children."""
    swa_pins: int
    """Leases whose window reaches it, in any part with one."""
    hits: int
    """Matches that ended here, or in a descendant that is gone from the device."""
    idle: int
    """Operations of the cache since the latest one that ended here."""
    busy: int
    """Copies and load plans that need it as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeView:
    """What is cached where, as far as the limit allowed; parents before children."""

    nodes: tuple[NodeView, ...]
    total: int
    """Nodes there are; more than `nodes` shows where it was cut."""
