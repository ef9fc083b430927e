"""Copies between device and host that have not ended: what they read, what they fill, how many pages are under way.

Each owns both ends: its targets are in state COPY, its span is busy. Only `end` gives both back.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from serinus.cache.ledger import Owner, Pages, copy_owner
from serinus.cache.node import NO_PAGES, Node, Span
from serinus.cache.tree import RadixTree
from serinus.core.errors import InvariantError
from serinus.core.moves import Move, MoveKind
from serinus.core.parts import Part

__all__ = ["Copy", "CopyTable"]


@dataclass(slots=True, eq=False)
class Copy:
    """One op: all its moves end together."""

    op: int
    kind: MoveKind
    span: Span
    """The nodes it reads and fills; busy until it has ended."""
    full: Pages = field(default_factory=lambda: NO_PAGES)
    """Targets in FULL, in order of position."""
    swa: Pages = field(default_factory=lambda: NO_PAGES)
    """Targets in SWA, in order of position."""
    full_source: Pages = field(default_factory=lambda: NO_PAGES)
    swa_source: Pages = field(default_factory=lambda: NO_PAGES)

    @property
    def owner(self) -> Owner:
        """Whose its targets are."""
        return copy_owner(self.op)

    def moves(self) -> list[Move]:
        """What the mover is told."""
        ends = ((Part.FULL, self.full_source, self.full), (Part.SWA, self.swa_source, self.swa))
        return [
            Move(op=self.op, kind=self.kind, part=part, source=source, target=target)
            for part, source, target in ends
            if len(target)
        ]


class CopyTable:
    """The copies in flight, by op, in the order of their submission."""

    def __init__(self, tree: RadixTree) -> None:
        self._tree = tree
        self._copies: dict[int, Copy] = {}
        self._next_op = 1
        self.pages = {MoveKind.BACKUP: 0, MoveKind.LOAD: 0}
        """FULL and SWA pages under way, by direction."""

    def take_op(self) -> int:
        """A number that no copy and no storage operation of this cache had before."""
        self._next_op += 1
        return self._next_op - 1

    def begin(self, copy: Copy) -> None:
        """The copy is about to be submitted: its span is busy from now on."""
        self._copies[copy.op] = copy
        self.pages[copy.kind] += len(copy.full) + len(copy.swa)
        self._tree.set_busy(copy.span, 1)

    def get(self, op: int) -> Copy:
        """The copy with this number. Raises InvariantError if there is none in flight."""
        copy = self._copies.get(op)
        if copy is None:
            raise InvariantError(f"cache: C2 copy {op} is done, expected one of {list(self._copies)[:16]}")
        return copy

    def end(self, copy: Copy) -> None:
        """The copy has ended and its targets have found their owners: its span is free again."""
        del self._copies[copy.op]
        self.pages[copy.kind] -= len(copy.full) + len(copy.swa)
        self._tree.set_busy(copy.span, -1)

    def over(self, nodes: list[Node]) -> list[int]:
        """The copies that need some of these nodes, oldest first. Cost: the copies in flight and their spans."""
        wanted = set(map(id, nodes))
        return [op for op, copy in self._copies.items() if any(id(node) in wanted for node in copy.span.nodes())]

    def nodes(self) -> list[Node]:
        """The nodes that copies need."""
        return [node for copy in self._copies.values() for node in copy.span.nodes()]

    def all(self) -> list[Copy]:
        """Those in flight, oldest first."""
        return list(self._copies.values())

    def __len__(self) -> int:
        return len(self._copies)
