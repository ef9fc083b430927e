"""Eviction policies: which cached prefix goes first when room is needed.

A policy is a rank of cached nodes; the cache evicts the lowest rank among the nodes that may go. Knows no tree, no
pages and no tiers: a new policy is one function and one entry here; the flag, the docs and the tests of the cache
follow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol


class CachedNode(Protocol):
    """What a policy knows of a cached node: a run of pages that several requests may share."""

    id: int
    """Order of creation; makes ranks distinct."""
    born: int
    """Number of the cache operation that made the node."""
    last_use: int
    """Number of the latest operation that ended there, or in a descendant that has left."""
    hit_count: int
    """Matches that ended there, or in a descendant that has left."""
    priority: int
    """Highest priority of a request that ended there: the more important, the higher."""


EvictionRank = Callable[[CachedNode], tuple[int, int]]
"""Lowest goes first. The rank of a node must never sink: the queues repair entries that stand too far in front only."""


def _lru(node: CachedNode) -> tuple[int, int]:
    return node.last_use, node.id


def _lfu(node: CachedNode) -> tuple[int, int]:
    return node.hit_count, node.last_use


def _fifo(node: CachedNode) -> tuple[int, int]:
    return node.born, node.id


def _priority(node: CachedNode) -> tuple[int, int]:
    return node.priority, node.last_use


EVICTION_POLICIES: Mapping[str, EvictionRank] = {"lru": _lru, "lfu": _lfu, "fifo": _fifo, "priority": _priority}
"""By name, as --radix-eviction-policy takes it."""
