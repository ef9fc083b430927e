"""Copies between device and host that have not ended: what they read, what they fill, how many pages are under way.

Each owns both ends: its targets are in state COPY, its span is busy. Only `end` gives both back.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from serinus.cache.ledger import Owner, Pages, copy_owner
from serinus.cache.node import Node, Span
from serinus.cache.tree import RadixTree
from serinus.core.errors import InvariantError
from serinus.core.moves import Move, MoveKind
from serinus.core.parts import Part


@dataclass(slots=True, eq=False)
class Copy:
    """One op: all its moves end together."""

    op: int
    kind: MoveKind
    span: Span
    """The nodes it reads and fills; busy until it has ended."""
    moves: list[Move] = field(default_factory=list)
    """What the mover is told: one move for each part, sources and targets in order of position."""

    @property
    def owner(self) -> Owner:
        """The owner of its targets while it is in flight."""
        return copy_owner(self.op)

    @property
    def page_count(self) -> int:
        """Pages under way, of all parts."""
        return sum(len(move.target) for move in self.moves)

    def count(self, part: Part) -> int:
        """Pages of one part under way."""
        return sum(len(move.target) for move in self.moves if move.part is part)


class CopyTable:
    """The copies in flight, by op, in the order of their submission."""

    def __init__(self, tree: RadixTree) -> None:
        self._tree = tree
        self._copies: dict[int, Copy] = {}
        self._next_op = 1
        self.pages = {MoveKind.BACKUP: 0, MoveKind.LOAD: 0}
        """Pages under way, by direction."""

    def take_op(self) -> int:
        """A number that no copy and no storage operation of this cache had before."""
        self._next_op += 1
        return self._next_op - 1

    def begin(self, copy: Copy) -> None:
        """The copy is about to be made: its span is busy from now on, so that none of it goes to make room for it."""
        self._copies[copy.op] = copy
        self._tree.set_busy(copy.span, 1)

    def add(self, copy: Copy, part: Part, source: Pages, target: Pages) -> None:
        """The copy, which has begun, moves these pages of a part."""
        copy.moves.append(Move(op=copy.op, kind=copy.kind, part=part, source=source, target=target))
        self.pages[copy.kind] += len(target)

    def get(self, op: int) -> Copy:
        """The copy with this number. Raises InvariantError if there is none in flight."""
        copy = self._copies.get(op)
        if copy is None:
            raise InvariantError(f"cache: C2 copy {op} is done, expected one of {list(self._copies)[:16]}")
        return copy

    def end(self, copy: Copy) -> None:
        """The copy has ended and its targets have found their owners: its span is free again."""
        del self._copies[copy.op]
        self.pages[copy.kind] -= copy.page_count
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
