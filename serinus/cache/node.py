"""A node of the radix tree, and the lease that keeps its path in place. Plain data: the tree moves it."""

from __future__ import annotations

from enum import IntEnum
from typing import Final

import numpy as np
from numpy.typing import NDArray

from serinus.cache.ledger import Pages
from serinus.core.parts import Part

TOKEN_BYTES = 4
NO_PAGES: Pages = np.empty(0, np.int32)
PartPages = tuple[Pages, ...]
"""By part, with an entry for each number up to the highest part of the cache. Never empty: index FULL is there."""
FAR = 1 << 62
WHOLE: Final = 1 << 62
"""The window of a part that must cover the whole prefix: longer than any sequence."""
NO_PRIORITY: Final = -(1 << 62)
"""Of a node at which no request has ended: less important than all."""
FULL: Final = int(Part.FULL)
"""As an index: looking a member of an enum up costs more than the list does."""


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

    `start` and `end` are absolute positions: they survive splits, so positions that were noted elsewhere stay right.
    A part that has nothing for this span on a tier has an empty array there; FULL on the device without a part of a
    sliding window is a tombstone. Tuples by part are never written, but replaced: nodes share those that say nothing.
    """

    __slots__ = (
        "alive", "born", "busy", "chain", "children", "device", "device_children", "end", "hashes", "held", "hit_count",
        "hits_given", "host", "id", "key", "last_use", "leases", "loading", "parent", "pins", "priority", "queued",
        "start", "storing", "tokens", "uses", "wanted", "window_pins",
        "window_use",
    )  # fmt: skip

    def __init__(
        self, *, node_id: int, parent: Node | None, tokens: memoryview, device: PartPages, host: PartPages,
        start: int, key: bytes, born: int, held: tuple[int, ...], windows: int,
    ) -> None:  # fmt: skip
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
        self.device = device
        """Its pages on the device, one per page_size tokens; views of what was inserted."""
        self.host = host
        """Its pages on the host; never without FULL there."""
        self.pins = 0
        """Leases on this node plus its pinned children; above 0 it stays."""
        self.leases = 0
        """Leases anchored here, and plans to load up to here."""
        self.window_pins = [0] * windows
        """By part with a window, leases whose window reaches this node: its device pages of that part stay."""
        self.window_use = [born] * windows
        """By part with a window, the latest operation whose window reached this node."""
        self.busy = 0
        """Copies and load plans over this span: nothing of it goes before they end."""
        self.storing = 0
        """Storage writes that read its host pages: giving those up would free nothing."""
        self.loading = 0
        """Bit per part: its device pages are being filled, and still in state COPY."""
        self.held = held
        """By part, device pages of this node with holds: evicting the node would not make them free."""
        self.born = born
        """Operation that made it."""
        self.last_use = born
        """Latest operation that ended here, or in a descendant that is gone: all that counts once it is a leaf."""
        self.hit_count = 0
        """Matches that ended here, or in a descendant that is gone from the device."""
        self.hits_given = 0
        """Of those, how many its parent knows of, from the times when it left the device before."""
        self.priority = NO_PRIORITY
        """Highest priority of a request that ended here, or for which the storage brought it."""
        self.uses = 1
        """Requests that published or matched it; counted where there is a host tier."""
        self.wanted = 0
        """Whether the dirty queue has it: 0 no, 1 if there is room, 2 whatever it costs the host."""
        self.queued = 0
        """Bit per eviction queue: whether that queue has an entry for it."""
        self.hashes: bytes | None = None
        """16 bytes per page, chained over the prefix; made when first asked for."""
        self.chain: int | None = None
        """The chain hash of all tokens before it, as the canary's stamps have it; made when first asked for."""
        self.alive = True
        """False once it left the tree."""

    def token_ids(self) -> NDArray[np.int32]:
        """Its tokens as int32, without a copy."""
        return np.frombuffer(self.tokens, np.int32)

    def __repr__(self) -> str:
        text = ", ".join(
            f"{tier} {Part(part).name}={pages[:4].tolist()}"
            for tier, parts in (("device", self.device), ("host", self.host))
            for part, pages in enumerate(parts)
            if len(pages)
        )
        return f"Node({self.id}, {self.start}:{self.end}, pins={self.pins}, {text or 'nowhere'}...)"


class Span:
    """Nodes of one path by position, [start, anchor.end): splits cut nodes, never a span. Its maker ends it."""

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


class LeaseWindow:
    """What a lease pins of one part with a sliding window."""

    __slots__ = ("edge", "first", "want")

    def __init__(self, want: int) -> None:
        self.want = want
        """First position whose KV of this part the request still reads."""
        self.first = FAR
        """Nodes of the path that start here or later carry a window pin of this lease."""
        self.edge = FAR
        """Where the first of them ends: before `want` gets there, no pin can go."""


class Lease:
    """A promise that the prefix [0, end) of one sequence stays where it is, until released, once.

    Parts that cover the whole prefix from position 0; a part with a window from the start of the node that holds the
    first position its window reaches (nodes keep or lose such a part as a whole).
    """

    __slots__ = ("anchor", "live", "plan", "priority", "rid", "sound_end", "windows")

    def __init__(self, anchor: Node, priority: int = 0) -> None:
        self.anchor = anchor
        """The node that ends where the lease ends."""
        self.live = True
        self.rid = ""
        """The request it serves; known from its first insert on."""
        self.priority = priority
        self.sound_end: int | None = None
        """Where its KV stops being good because a load failed; None = it is all good."""
        self.windows: tuple[LeaseWindow, ...] = ()
        """One for each part with a window, in the order of the parts."""
        self.plan: Span | None = None
        """Nodes that a load would fill: kept as they are until the plan is used or dropped."""

    @property
    def end(self) -> int:
        """Tokens kept in place, from position 0; a multiple of the page size."""
        return self.anchor.end

    def __repr__(self) -> str:
        return f"Lease({self.rid or 'unbound'}, 0:{self.end}{'' if self.live else ', released'})"
