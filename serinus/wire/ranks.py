"""Messages between the leader of an engine and each other rank, over their one connection (ranks/links.py).

A rank says hello and is welcomed; then headers go down and answers come up, until the rank says why it ends, or the
leader that the engine ends. Commands and answers travel as (name, msgpack): which type a name stands for, and what it
may hold, is listed in ranks/codec.py. Large arrays lie in the frame's payload, one behind the other.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from serinus.core.bounds import Count, Name, Text
from serinus.wire.fields import Mac, MessageBase
from serinus.wire.objects import Item

Digest = Annotated[int, msgspec.Meta(ge=0)]


class RankHello(MessageBase, frozen=True, kw_only=True):
    """Rank -> leader, first of all."""

    rank: Count
    pid: Count
    host: Name
    settings: Annotated[str, msgspec.Meta(max_length=1 << 16)]
    """What all ranks must agree on, as JSON."""
    mac: Mac = b""
    """Of the rank and its settings under the cluster's secret, where there is one."""


class RankWelcome(MessageBase, frozen=True, kw_only=True):
    """Leader -> rank, once the leader is ready for it."""

    store: Name
    """host:port of the store where tensors' groups are made."""


class RankHeader(MessageBase, frozen=True, kw_only=True):
    """Leader -> rank: the next commands on this rank's line."""

    number: Count
    digest: Digest
    """Of this header and all before it on this line."""
    commands: Annotated[tuple[Item, ...], msgspec.Meta(max_length=1 << 16)] = ()


class RankAnswers(MessageBase, frozen=True, kw_only=True):
    """Answers of a rank to the leader."""

    answers: Annotated[tuple[Item, ...], msgspec.Meta(max_length=1 << 16)] = ()
    failure: Text = ""
    """Why this rank cannot go on; empty = it does."""


class RankExit(MessageBase, frozen=True, kw_only=True):
    """Rank -> leader: why its process ends."""

    reason: Text
    code: Count
    """Exit code: 2 its settings are wrong, 3 anything else."""
    suffers: bool = False
    """It ends because of another rank, and does not know which."""


class EngineEnd(MessageBase, frozen=True, kw_only=True):
    """Leader -> rank: it is refused, or the engine ends."""

    reason: Text
    code: Count
