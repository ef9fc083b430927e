"""cache: decides what KV is kept where. One tree of prefixes, every page owned; no torch, no bytes.

PrefixCache   match, allocate, insert, finish, hold, evict, walk, check (prefix.py)
RadixTree     prefixes, pins, which leaf goes first (tree.py, node.py, eviction.py)
PageLedger    who owns each page, checked at every move (ledger.py)
"""

from __future__ import annotations

from serinus.cache.eviction import POLICIES
from serinus.cache.ledger import LEGAL_MOVES, PageCounts, PageLedger, Pages, PageState
from serinus.cache.node import Lease, Tier
from serinus.cache.prefix import PrefixCache
from serinus.cache.ports import PageMover, PageStorage
from serinus.cache.results import (
    CacheGeometry,
    CacheNews,
    CacheStats,
    Eviction,
    Insertion,
    Loaded,
    LoadPlan,
    Match,
    NodeView,
    PartPages,
    PoolStats,
    PrefetchState,
    Probe,
    ResidentSlots,
    RowView,
    TreeView,
)

__all__ = [
    "LEGAL_MOVES",
    "POLICIES",
    "CacheGeometry",
    "CacheNews",
    "CacheStats",
    "Eviction",
    "Insertion",
    "Lease",
    "LoadPlan",
    "Loaded",
    "Match",
    "NodeView",
    "PageCounts",
    "PageLedger",
    "PageMover",
    "PageState",
    "PageStorage",
    "Pages",
    "PartPages",
    "PoolStats",
    "PrefetchState",
    "PrefixCache",
    "Probe",
    "ResidentSlots",
    "RowView",
    "Tier",
    "TreeView",
]
