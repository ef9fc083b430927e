"""What the ranks of one engine say to each other: headers go down, reports come up.

Orders and answers travel as (name, msgpack): which type a name stands for, and what it may hold, is the engine's
business (engine/ranks/codec.py). Large arrays lie in the frame's payload, one behind the other.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from serinus.wire.fields import Count, Mac, MessageBase, Name, Text

__all__ = ["RankHeader", "RankHello", "RankReport"]

Digest = Annotated[int, msgspec.Meta(ge=0)]
Item = tuple[Name, msgspec.Raw]
"""An order or an answer: its type's name, its fields."""
Written = tuple[Count, Name, Name, Annotated[bytes, msgspec.Meta(max_length=1 << 24)]]
"""A decision: number, kind, rid, payload as JSON."""


class RankHello(MessageBase, frozen=True, kw_only=True):
    """Follower -> leader, first of all."""

    rank: Count
    token: Mac
    """What only the ranks of this engine know."""


class RankHeader(MessageBase, frozen=True, kw_only=True):
    """Leader -> follower: parallel.StepHeader."""

    step: Count
    digest: Digest
    decisions: Annotated[tuple[Written, ...], msgspec.Meta(max_length=1 << 20)] = ()
    orders: Annotated[tuple[Item, ...], msgspec.Meta(max_length=1 << 16)] = ()


class RankReport(MessageBase, frozen=True, kw_only=True):
    """Follower -> leader: parallel.Report."""

    kind: Name
    step: Count = 0
    key: Name = ""
    reason: Text = ""
    body: Item | None = None
