"""What every channel offers: frames to named peers, frames from them, and the event that one is gone.

A peer name stands for one connection. The side that connects chooses it; an accepted connection gets one (`in-1`,
`in-2`...). A connection that broke is never repaired: the name is Gone, once, and connecting again takes a new name. So
no frame of an old connection can be taken for one of a new one. Knows nothing of messages.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Protocol

from serinus.core.errors import ConfigError
from serinus.wire.codec import Parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived:
    """A frame came from a peer."""

    peer: str
    parts: Parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Gone:
    """The connection ended: the process died, refused, was unreachable. The last event of this peer name."""

    peer: str
    reason: str


ChannelEvent = Arrived | Gone


class Channel(Protocol):
    """Moves frames; never blocks except in `poll`, never raises for what a peer did."""

    def connect(self, peer: str, address: str) -> None:
        """Start a connection to `address` under a new name. Failure arrives as Gone."""

    def send(self, peer: str, parts: Parts) -> None:
        """Queue a frame. To a name that is gone: nothing happens."""

    def poll(self, timeout_s: float) -> list[ChannelEvent]:
        """What happened; waits up to timeout_s seconds for the first event."""

    def trust(self, peer: str) -> None:
        """A peer that connected to us is known from now on: what binds strangers does not bind it. Unknown names are
        ignored."""

    def disconnect(self, peer: str) -> None:
        """End a connection from this side; no Gone follows. Unknown names are ignored."""

    def close(self) -> None:
        """End everything; what is queued still leaves within a second at most."""


class LocalHub:
    """Where the LocalChannels of one process find each other; addresses are `local://name`."""

    def __init__(self) -> None:
        self._bound: dict[str, LocalChannel] = {}

    def channel(self, address: str = "") -> LocalChannel:
        """A new channel, reachable at `address` where given. Raises ConfigError where that is taken."""
        channel = LocalChannel(self)
        if address:
            if address in self._bound:
                raise ConfigError(f"wire: address {address} is in use, expected a free one")
            self._bound[address] = channel
        return channel

    def find(self, address: str) -> LocalChannel | None:
        """The channel that listens at an address; None = there is none."""
        return self._bound.get(address)

    def forget(self, channel: LocalChannel) -> None:
        """Free the address of a closed channel."""
        self._bound = {address: bound for address, bound in self._bound.items() if bound is not channel}


@dataclass(slots=True, kw_only=True)
class _Far:
    channel: LocalChannel
    peer: str


class LocalChannel:
    """A channel inside one process and one thread: parts are passed by reference; `poll` never waits."""

    def __init__(self, hub: LocalHub) -> None:
        self._hub = hub
        self._far: dict[str, _Far] = {}
        self._closed: set[str] = set()
        self._events: deque[ChannelEvent] = deque()
        self._accepted = 0

    def connect(self, peer: str, address: str) -> None:
        assert peer not in self._far, f"wire: peer name {peer} is in use, expected a new one"
        other = self._hub.find(address)
        if other is None:
            self._events.append(Gone(peer=peer, reason=f"no channel listens at {address}"))
            return
        other._accepted += 1
        name = f"in-{other._accepted}"
        self._far[peer] = _Far(channel=other, peer=name)
        other._far[name] = _Far(channel=self, peer=peer)

    def send(self, peer: str, parts: Parts) -> None:
        far = self._far.get(peer)
        if far is not None:
            far.channel._events.append(Arrived(peer=far.peer, parts=tuple(parts)))

    def poll(self, timeout_s: float) -> list[ChannelEvent]:
        events = [event for event in self._events if event.peer not in self._closed]
        self._events.clear()
        self._closed.clear()
        return events

    def trust(self, peer: str) -> None:
        """All are of this process."""

    def disconnect(self, peer: str) -> None:
        far = self._far.pop(peer, None)
        self._closed.add(peer)  # what it sent before is not delivered any more
        if far is not None and far.channel._far.pop(far.peer, None) is not None:
            far.channel._events.append(Gone(peer=far.peer, reason="the other side closed the connection"))

    def close(self) -> None:
        for peer in list(self._far):
            self.disconnect(peer)
        self._hub.forget(self)
