"""cache: decides what KV is kept where. One tree of prefixes, every page owned; no torch, no bytes.

PrefixCache   match, allocate, insert, finish, hold, evict, walk, check (prefix.py)
RadixTree     prefixes, pins, which leaf goes first (tree.py, node.py, eviction.py)
PageLedger    who owns each page, checked at every move (ledger.py)
"""

from __future__ import annotations

from serinus.cache.eviction import POLICIES
from serinus.cache.ledger import LEGAL_MOVES, PageCounts, PageLedger, Pages, PageState
from serinus.cache.node import Lease
from serinus.cache.prefix import PrefixCache
from serinus.cache.results import CacheStats, Eviction, Insertion, Match, ResidentSlots, RowView

__all__ = [
    "LEGAL_MOVES",
    "POLICIES",
    "CacheStats",
    "Eviction",
    "Insertion",
    "Lease",
    "Match",
    "PageCounts",
    "PageLedger",
    "PageState",
    "Pages",
    "PrefixCache",
    "ResidentSlots",
    "RowView",
]
