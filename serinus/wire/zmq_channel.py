"""Frames between processes over zmq (tcp:// or ipc://): a listening address, and one DEALER per connection we make.

What we connected: the monitor of its DEALER says DISCONNECTED, or CLOSED where the connection was refused, within
milliseconds of the peer's death. Reconnecting by zmq itself is off: a new connection is a new peer name, and that is
the caller's decision. What we accepted: tcp_listener.py, ipc_listener.py.

A frame travels as zmq parts exactly as the codec made them (no empty delimiter). Probes and empty frames are not
delivered. What a connection may keep of our memory before it is read is bounded; beyond it the sender waits.
"""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import zmq
from zmq.utils.monitor import recv_monitor_message

from serinus.core.clock import Clock, WallClock
from serinus.core.errors import ConfigError
from serinus.wire.channels import Arrived, ChannelEvent, Gone
from serinus.wire.codec import BODY_BYTES_MAX, PAYLOAD_BYTES_MAX, Parts
from serinus.wire.ipc_listener import PROBE_EVERY_S, IpcListener
from serinus.wire.tcp_listener import TcpListener
from serinus.wire.zmq_frames import LINGER_MS, MONITORED, configure, is_probe, receive, send

_QUEUED_MAX: Final = 64
"""Messages of a peer that we chose which zmq keeps for us: pages may come with each."""
_TCP_PATIENCE: Final = 3
"""So many times the longest silence is waited for where signs of life come from the peer's `poll`, and not from threads
of zmq: a call that holds the interpreter's lock delays it."""
_HANDSHAKE_MS: Final = 60_000
"""A listening peer answers zmq's greeting when its loop gets to it, which a long step delays."""


class Listener(Protocol):
    """A listening address and its connections."""

    address: str
    cut_off: Counter[str]

    @property
    def sockets(self) -> list[Any]: ...

    @property
    def wants_soon(self) -> bool: ...

    def take(self, ready: dict[Any, int], events: list[ChannelEvent]) -> None: ...

    def send(self, peer: str, parts: Parts) -> None: ...

    def trust(self, peer: str) -> None: ...

    def disconnect(self, peer: str) -> None: ...

    def close(self, linger_ms: int) -> None: ...


@dataclass(slots=True, kw_only=True)
class _Dialed:
    peer: str
    address: str
    socket: zmq.Socket[bytes]
    monitor: Any
    connected: bool = False


class ZmqChannel:
    """A Channel over zmq. Not thread safe: one loop owns it."""

    def __init__(
        self, bind: str = "", *, clock: Clock | None = None, silence_s: float = 0.0,
        message_bytes_max: int = BODY_BYTES_MAX + PAYLOAD_BYTES_MAX + 4096,
    ) -> None:  # fmt: skip
        """Ready to connect; with `bind` (tcp://host:port, port 0 = any; ipc://path) also to accept.

        Args:
            silence_s: a peer whose process stands still for so many seconds is Gone too; 0 = such a peer is waited for.
                zmq's own threads ask and answer, except at a listening tcp:// address, where `poll` does: call it from
                a thread that always gets to it; peers that connect there wait three times as long.
            message_bytes_max: of a trusted peer that connected over tcp://.
        Raises ConfigError where the address cannot be bound.
        """
        self._silence_s = silence_s
        self._context = zmq.Context()
        self._clock = clock or WallClock()
        self._poller = zmq.Poller()
        self._dialed: dict[str, _Dialed] = {}
        self._lost: deque[Gone] = deque()
        self._try_ipv6: set[str] = set()
        """Addresses that were not reached by IPv4 at the last attempt: a name may have an IPv6 address alone. zmq looks
        a name up for one of them, in its own thread, and says nothing where there is none."""
        self._listener: Listener | None = None
        self.address = ""
        if bind:
            self._listener = self._bind(bind, message_bytes_max)
            self.address = self._listener.address
            for socket in self._listener.sockets:
                self._poller.register(socket, zmq.POLLIN)

    def _bind(self, address: str, message_bytes_max: int) -> Listener:
        try:
            if address.startswith("tcp:"):
                return TcpListener(
                    self._context, address, clock=self._clock, silence_s=self._silence_s,
                    message_bytes_max=message_bytes_max,
                )  # fmt: skip
            return IpcListener(self._context, address, clock=self._clock, silence_s=self._silence_s)
        except zmq.ZMQError as error:
            self._context.term()
            raise ConfigError(f"wire: cannot listen at {address}: {error}, expected a free address") from None

    @property
    def cut_off(self) -> Counter[str]:
        """Connections of others that were ended here, by reason."""
        return Counter() if self._listener is None else self._listener.cut_off

    def sockets(self) -> list[Any]:
        """What to wait for; see wait_any. Changes with every connect and disconnect."""
        own = [] if self._listener is None else self._listener.sockets
        return own + [part for dialed in self._dialed.values() for part in (dialed.socket, dialed.monitor)]

    @property
    def wants_soon(self) -> bool:
        """True while `poll` should be called every few milliseconds (a peer may have died just now)."""
        return bool(self._lost) or (self._listener is not None and self._listener.wants_soon)

    # ---- Channel ------------------------------------------------------------------------------------------------

    def connect(self, peer: str, address: str) -> None:
        assert peer not in self._dialed, f"wire: peer name {peer} is in use, expected a new one"
        socket = self._context.socket(zmq.DEALER)
        patience = _TCP_PATIENCE if address.startswith("tcp:") else 1
        configure(socket, patience * self._silence_s, queued_max=_QUEUED_MAX)
        socket.setsockopt(zmq.RECONNECT_IVL, -1)
        socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
        by_ipv6 = "[" in address or address in self._try_ipv6
        socket.setsockopt(zmq.IPV6, int(by_ipv6))
        monitor = socket.get_monitor_socket(MONITORED)
        dialed = _Dialed(peer=peer, address=address, socket=socket, monitor=monitor)
        try:
            socket.connect(address)
        except zmq.ZMQError as error:
            _hang_up(dialed)
            self._lost.append(Gone(peer=peer, reason=f"cannot connect to {address}: {error}"))
            return
        self._dialed[peer] = dialed
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(monitor, zmq.POLLIN)

    def send(self, peer: str, parts: Parts) -> None:
        dialed = self._dialed.get(peer)
        if dialed is not None:
            with contextlib.suppress(zmq.Again):  # it broke just now: the next poll says so
                send(dialed.socket, parts)
        elif self._listener is not None:
            self._listener.send(peer, parts)

    def poll(self, timeout_s: float) -> list[ChannelEvent]:
        if self.wants_soon:
            timeout_s = min(timeout_s, PROBE_EVERY_S)
        ready = dict(self._poller.poll(max(0, round(timeout_s * 1000))))
        events: list[ChannelEvent] = []
        if self._listener is not None:
            self._listener.take(ready, events)
        if ready:
            for dialed in list(self._dialed.values()):
                if dialed.socket in ready or dialed.monitor in ready:
                    self._take_dialed(dialed, dialed.monitor in ready, events)
        while self._lost:
            events.append(self._lost.popleft())
        return events

    def trust(self, peer: str) -> None:
        if self._listener is not None:
            self._listener.trust(peer)

    def disconnect(self, peer: str) -> None:
        dialed = self._dialed.pop(peer, None)
        if dialed is not None:
            self._drop(dialed)
        elif self._listener is not None:
            self._listener.disconnect(peer)

    def close(self) -> None:
        for dialed in self._dialed.values():
            self._drop(dialed)
        self._dialed.clear()
        if self._listener is not None:
            self._listener.close(LINGER_MS)
            self._listener = None
        self._context.term()

    # ---- what we connected --------------------------------------------------------------------------------------

    def _drop(self, dialed: _Dialed) -> None:
        if not dialed.connected:
            self._try_ipv6 ^= {dialed.address}
        self._poller.unregister(dialed.socket)
        self._poller.unregister(dialed.monitor)
        _hang_up(dialed)

    def _take_dialed(self, dialed: _Dialed, news: bool, events: list[ChannelEvent]) -> None:
        reason = ""
        while news and not reason:
            try:
                event = recv_monitor_message(dialed.monitor, zmq.NOBLOCK)
            except zmq.Again:
                break
            if event["event"] == zmq.EVENT_CONNECTED:
                dialed.connected = True
            elif event["event"] == zmq.EVENT_DISCONNECTED or not dialed.connected:
                reason = "the connection broke" if dialed.connected else "the connection was refused"
        # What arrived before the end is delivered before the news of it.
        while parts := receive(dialed.socket, bounded=not reason, taken=len(events)):
            if not is_probe(parts):
                events.append(Arrived(peer=dialed.peer, parts=parts))
        if reason:
            del self._dialed[dialed.peer]
            self._drop(dialed)
            events.append(Gone(peer=dialed.peer, reason=reason))


def wait_any(channels: Sequence[ZmqChannel], timeout_s: float) -> None:
    """Wait until one of several channels has something to poll, or for timeout_s seconds."""
    if any(channel.wants_soon for channel in channels):
        timeout_s = min(timeout_s, PROBE_EVERY_S)
    poller = zmq.Poller()
    for channel in channels:
        for socket in channel.sockets():
            poller.register(socket, zmq.POLLIN)
    poller.poll(max(0, round(timeout_s * 1000)))


def _hang_up(dialed: _Dialed) -> None:
    dialed.socket.disable_monitor()
    dialed.monitor.close(0)
    dialed.socket.close(LINGER_MS)
