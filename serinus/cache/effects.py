"""What methods of the tree return: how far tokens agree, what a split or an eviction did (for the pools to apply)."""

from __future__ import annotations

from dataclasses import dataclass

from serinus.cache.node import Node, PartPages


@dataclass(slots=True)
class Descent:
    """How far a path of the tree agrees with some tokens, whatever the tier."""

    node: Node
    """The last node that agrees entirely (or the one it began at)."""
    end: int
    """Position up to which tokens agree, on a page border; inside `partial` where that is set."""
    partial: Node | None
    """The child of `node` that agrees for its first pages only."""
    path: list[Node]
    """The nodes that agree entirely, in order, without the one it began at."""


@dataclass(slots=True)
class Split:
    """Effect of a split: the pages of `moved` changed their node."""

    upper: Node
    """The new node: the first half. The old node object is the second half and keeps leases and children."""
    lower: Node
    moved: Node
    """The shorter half, which has the new id."""
    old_id: int
    """The id under which the ledgers have its pages so far."""


@dataclass(slots=True)
class Victims:
    """Effect of an eviction from the device."""

    taken: list[tuple[int, PartPages]]
    """Node by node: its id, and those of its pages that left the tree."""
    hashes: list[bytes]
    """Of the FULL pages; only of nodes that have theirs."""
    pages: int
    """FULL pages that left."""
    freed: int
    """Pages without holds of the part that was asked for: they become free."""
