"""A node of the radix tree, and the lease that keeps its path in place. Plain data: the tree moves it."""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from serinus.cache.ledger import Pages

__all__ = ["NO_PAGES", "TOKEN_BYTES", "Lease", "Node", "Span", "Tier"]

TOKEN_BYTES = 4
NO_PAGES: Pages = np.empty(0, np.int32)
FAR = 1 << 62


class Tier(IntEnum):
    """Where KV can be."""

    DEVICE = 0
    """The pools that attention reads."""
    HOST = 1
    """Main memory, pinned where there is an accelerator."""
    STORAGE = 2
    """Outside the engine: files. Keeps no nodes."""


class Node:
    """A span of tokens that always comes after the same prefix, and the pages that hold its KV, by tier and part.

    `start` and `end` are absolute positions: they survive splits, so whoever remembers positions needs no migration.
    A tier and part that has nothing for this span has an empty array.
    """

    __slots__ = (
        "alive", "born", "busy", "children", "device_children", "end", "hashes", "held", "hit_count", "hits_given",
        "host", "host_swa", "id", "key", "last_use", "leases", "loading", "pages", "parent", "pins", "priority",
        "queued", "start", "storing", "swa", "swa_held", "swa_pins", "swa_use", "tokens", "uses", "wanted",
    )  # fmt: skip

    def __init__(
        self, *, node_id: int, parent: Node | None, tokens: memoryview, pages: Pages, start: int, key: bytes, born: int
    ) -> None:
        self.id = node_id
        """Its name in the ledgers. A split may give it to the other half."""
        self.parent = parent
        self.tokens = tokens
        """Its ids, int32 in native order, as bytes: compared and split without a copy."""
        self.start = start
        self.end = start + len(tokens) // TOKEN_BYTES
        self.key = key
        """The bytes of its first page: under it the parent's `children` has this node. A root's is its namespace."""
        self.children: dict[bytes, Node] = {}
        self.device_children = 0
        """Children with FULL on the device: without any, this node is where FULL on the device ends."""
        self.pages = pages
        """FULL on the device, one per page_size tokens; a view of what was inserted."""
        self.swa: Pages = NO_PAGES
        """SWA on the device; empty where FULL is there = a tombstone."""
        self.host: Pages = NO_PAGES
        """FULL on the host."""
        self.host_swa: Pages = NO_PAGES
        """SWA on the host; never without FULL there."""
        self.pins = 0
        """Leases on this node plus its pinned children; above 0 it stays."""
        self.leases = 0
        """Leases anchored here, and plans to load up to here."""
        self.swa_pins = 0
        """Leases whose window reaches this node: its device SWA stays."""
        self.busy = 0
        """Copies and load plans over this span: nothing of it goes before they end."""
        self.storing = 0
        """Storage writes that read its host pages: giving those up would free nothing."""
        self.loading = 0
        """Bit per part: its device pages are being filled, and still in state COPY."""
        self.held = 0
        """Device FULL pages of this node with holds: evicting the node would not make them free."""
        self.swa_held = 0
        """Device SWA pages with holds."""
        self.born = born
        """Operation that made it."""
        self.last_use = born
        """Latest operation that ended here, or in a descendant that is gone: all that counts once it is a leaf."""
        self.hit_count = 0
        """Matches that ended here, or in a descendant that is gone from the device."""
        self.hits_given = 0
        """Of those, how many its parent knows of, from the times when it left the device before."""
        self.priority = 0
        """Highest priority of a request that ended here."""
        self.swa_use = born
        """Latest operation whose window reached this node."""
        self.uses = 1
        """Requests that published or matched it; counted where there is a host tier."""
        self.wanted = 0
        """Whether the dirty queue has it: 0 no, 1 if there is room, 2 whatever it costs the host."""
        self.queued = 0
        """Bit per eviction queue: whether that queue has an entry for it."""
        self.hashes: bytes | None = None
        """16 bytes per page, chained over the prefix; made when first asked for."""
        self.alive = True
        """False once it left the tree."""

    def token_ids(self) -> NDArray[np.int32]:
        """Its tokens as int32, without a copy."""
        return np.frombuffer(self.tokens, np.int32)

    def __repr__(self) -> str:
        tiers = {"device": self.pages, "swa": self.swa, "host": self.host, "host_swa": self.host_swa}
        text = ", ".join(f"{name}={pages[:4].tolist()}" for name, pages in tiers.items() if len(pages))
        return f"Node({self.id}, {self.start}:{self.end}, pins={self.pins}, {text or 'nowhere'}...)"


class Span:
    """Nodes of one path by position, [start, anchor.end): splits cut nodes, never a span. Whoever makes one ends it."""

    __slots__ = ("anchor", "start")

    def __init__(self, anchor: Node, start: int) -> None:
        self.anchor = anchor
        """The node that ends where the span ends."""
        self.start = start
        """First position: where a node began when the span was made, and begins ever since."""

    def nodes(self) -> list[Node]:
        """Its nodes now, the last one first."""
        found = []
        node: Node | None = self.anchor
        while node is not None and node.parent is not None and node.start >= self.start:
            found.append(node)
            node = node.parent
        return found


class Lease:
    """A promise that the prefix [0, end) of one sequence stays where it is, until released, once.

    FULL from position 0; SWA from the start of the node that holds `swa_want` (nodes keep or lose SWA as a whole).
    """

    __slots__ = ("anchor", "live", "plan", "priority", "rid", "sound_end", "swa_edge", "swa_from", "swa_want")

    def __init__(self, anchor: Node, priority: int = 0) -> None:
        self.anchor = anchor
        """The node that ends where the lease ends."""
        self.live = True
        self.rid = ""
        """The request it serves; known from its first insert on."""
        self.priority = priority
        self.sound_end: int | None = None
        """Where its KV stops being good because a load failed; None = it is all good."""
        self.swa_want = 0
        """First position whose SWA its request still reads."""
        self.swa_from = FAR
        """Nodes of the path that start here or later carry an SWA pin of this lease."""
        self.swa_edge = FAR
        """Where the first of them ends: before `swa_want` gets there, no pin can go."""
        self.plan: Span | None = None
        """Nodes that a load would fill: kept as they are until the plan is used or dropped."""

    @property
    def end(self) -> int:
        """Tokens kept in place, from position 0; a multiple of the page size."""
        return self.anchor.end

    def __repr__(self) -> str:
        return f"Lease({self.rid or 'unbound'}, 0:{self.end}{'' if self.live else ', released'})"
