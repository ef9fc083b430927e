"""A node of the radix tree, and the lease that keeps its path in place. Plain data: the tree moves it."""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from serinus.cache.ledger import Pages

__all__ = ["NO_PAGES", "TOKEN_BYTES", "Lease", "Node", "Tier"]

TOKEN_BYTES = 4
NO_PAGES: Pages = np.empty(0, np.int32)


class Tier(IntEnum):
    """Where KV can be."""

    DEVICE = 0
    """The pools that attention reads."""
    HOST = 1
    """Main memory, pinned where there is an accelerator."""
    STORAGE = 2
    """Outside the engine: files. Keeps no nodes."""


class Node:
    """A span of tokens that always comes after the same prefix, and the pages that hold its KV.

    `start` and `end` are absolute positions: they survive splits, so whoever remembers positions needs no migration.
    """

    __slots__ = (
        "alive", "born", "children", "end", "held", "hit_count", "id", "key", "last_use", "leases", "pages", "parent",
        "pins", "queued", "start", "tokens",
    )  # fmt: skip

    def __init__(
        self, *, node_id: int, parent: Node | None, tokens: memoryview, pages: Pages, start: int, key: bytes, born: int
    ) -> None:
        self.id = node_id
        """Its name in the ledger. A split may give it to the other half."""
        self.parent = parent
        self.tokens = tokens
        """Its ids, int32 in native order, as bytes: compared and split without a copy."""
        self.pages = pages
        """One per page_size tokens; a view of what was inserted."""
        self.start = start
        self.end = start + len(tokens) // TOKEN_BYTES
        self.key = key
        """The bytes of its first page: under it the parent's `children` has this node. A root's is its namespace."""
        self.children: dict[bytes, Node] = {}
        self.pins = 0
        """Leases on this node plus its pinned children; above 0 it stays."""
        self.leases = 0
        """Leases anchored here."""
        self.held = 0
        """Pages of this node with holds: evicting the node would not make them free."""
        self.born = born
        """Operation that made it."""
        self.last_use = born
        """Latest operation that ended here, or in a descendant that is gone: all that counts once it is a leaf."""
        self.hit_count = 0
        """Matches that ended here, or in a descendant that is gone."""
        self.queued = False
        """Whether the eviction queue has an entry for it."""
        self.alive = True
        """False once it left the tree."""

    def token_ids(self) -> NDArray[np.int32]:
        """Its tokens as int32, without a copy."""
        return np.frombuffer(self.tokens, np.int32)

    def __repr__(self) -> str:
        return f"Node({self.id}, {self.start}:{self.end}, pins={self.pins}, pages={self.pages[:4].tolist()}...)"


class Lease:
    """A promise that the prefix [0, end) of one sequence stays where it is, until released, once."""

    __slots__ = ("anchor", "live", "rid", "sound_end")

    def __init__(self, anchor: Node) -> None:
        self.anchor = anchor
        """The node that ends where the lease ends."""
        self.live = True
        self.rid = ""
        """The request it serves; known from its first insert on."""
        self.sound_end: int | None = None
        """Where its KV stops being good because a load failed; None = it is all good."""

    @property
    def end(self) -> int:
        """Tokens kept in place, from position 0; a multiple of the page size."""
        return self.anchor.end

    def __repr__(self) -> str:
        return f"Lease({self.rid or 'unbound'}, 0:{self.end}{'' if self.live else ', released'})"
