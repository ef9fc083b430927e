"""cache: decides what KV is kept where. One tree of prefixes, three tiers, every page owned; no torch, no bytes.

PrefixCache      match, load, allocate, insert, finish, hold, evict, poll, prefetch, walk, check (prefix.py)
RadixTree        prefixes, what each node has where, pins, which node goes first (tree.py, node.py, eviction.py)
PagePools          pages by tier and part: PageLedger (the owner of each page, checked at every move) and sweep index
TierController   copies between device and host, write policies, storage (tiers.py and what it joins)
"""

from serinus.cache.events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent
from serinus.cache.kept_copies import CheckedCopies
from serinus.cache.ledger import PageCounts, PageLedger, Pages, PageState
from serinus.cache.node import Lease, Tier
from serinus.cache.ports import PageMover, PageStorage
from serinus.cache.prefix import PrefixCache
from serinus.cache.results import (
    CacheGeometry,
    CacheNews,
    CacheStats,
    Condemned,
    Insertion,
    LoadPlan,
    Match,
    PartGeometry,
    PrefetchState,
    Probe,
    ResidentSlots,
    RowView,
)

__all__ = [
    "AllBlocksCleared",
    "BlockRemoved",
    "BlockStored",
    "CacheGeometry",
    "CacheNews",
    "CacheStats",
    "CheckedCopies",
    "Condemned",
    "Insertion",
    "KvEvent",
    "Lease",
    "LoadPlan",
    "Match",
    "PageCounts",
    "PageLedger",
    "PageMover",
    "PageState",
    "PageStorage",
    "Pages",
    "PartGeometry",
    "PrefetchState",
    "PrefixCache",
    "Probe",
    "ResidentSlots",
    "RowView",
    "Tier",
]
