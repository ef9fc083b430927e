"""How the processes of one engine find and watch each other: ranks report, learn where everything is, say why they end.

Besides the ranks' own line (ranks.py), as it must work before there is one and after it broke.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from serinus.wire.fields import Count, Mac, MessageBase, Name, Text

__all__ = ["WatchEnd", "WatchHello", "WatchWelcome", "WatchWords"]


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
    """Leader -> rank, once all ranks have reported: where everything is."""

    control: Name
    """Address of the leader's line to its ranks."""
    store: Name
    """host:port of the store where tensors' groups are made."""
    token: Mac
    """What only the ranks of this engine know."""


class WatchWords(MessageBase, frozen=True, kw_only=True):
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
