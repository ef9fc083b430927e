"""Supervision of the processes of one engine: ranks report, learn the addresses, send why they end.

It has its own connection beside the ranks' line (ranks.py): it must work before there is a line and after it broke.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from serinus.core.bounds import Count, Name, Text
from serinus.wire.fields import Mac, MessageBase

__all__ = ["WatchEnd", "WatchExit", "WatchHello", "WatchWelcome"]


class WatchHello(MessageBase, frozen=True, kw_only=True):
    """Rank -> leader, first of all."""

    rank: Count
    pid: Count
    host: Name
    settings: Annotated[str, msgspec.Meta(max_length=1 << 16)]
    """What all ranks must agree on, as JSON."""
    mac: Mac = b""
    """Of the rank and its settings under the cluster's secret, where there is one."""


class WatchWelcome(MessageBase, frozen=True, kw_only=True):
    """Leader -> rank, once all ranks have reported: the addresses."""

    control: Name
    """Address of the leader's line to its ranks."""
    store: Name
    """host:port of the store where tensors' groups are made."""
    token: Mac
    """A secret of the ranks of this engine."""


class WatchExit(MessageBase, frozen=True, kw_only=True):
    """Rank -> leader: why it ends."""

    reason: Text
    code: Count
    """Exit code: 2 its settings are wrong, 3 anything else."""
    suffers: bool = False
    """It ends because of another rank, and does not know which."""


class WatchEnd(MessageBase, frozen=True, kw_only=True):
    """Leader -> rank: the engine ends."""

    reason: Text
    code: Count
