"""Messages between the ranks of one engine: headers go down, answers come up.

Commands and answers travel as (name, msgpack): which type a name stands for, and what it may hold, is listed in
ranks/codec.py. Large arrays lie in the frame's payload, one behind the other.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from serinus.core.bounds import Count, Name, Text
from serinus.wire.fields import Mac, MessageBase

__all__ = ["RankAnswers", "RankHeader", "RankHello"]

Digest = Annotated[int, msgspec.Meta(ge=0)]
Item = tuple[Name, msgspec.Raw]
"""A command or an answer: its type's name, its fields."""


class RankHello(MessageBase, frozen=True, kw_only=True):
    """Follower -> leader, first of all."""

    rank: Count
    token: Mac
    """A secret that only the ranks of this engine know."""


class RankHeader(MessageBase, frozen=True, kw_only=True):
    """Leader -> follower: the next commands on this rank's line."""

    number: Count
    digest: Digest
    """Of this header and all before it on this line."""
    commands: Annotated[tuple[Item, ...], msgspec.Meta(max_length=1 << 16)] = ()


class RankAnswers(MessageBase, frozen=True, kw_only=True):
    """Answers of a follower to the leader."""

    answers: Annotated[tuple[Item, ...], msgspec.Meta(max_length=1 << 16)] = ()
    failure: Text = ""
    """Why this rank cannot go on; empty = it does."""
