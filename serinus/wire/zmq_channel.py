"""Frames between processes over zmq (tcp:// or ipc://): one ROUTER that accepts, one DEALER per connection we make.

How the death of a peer is seen within milliseconds, and without a race:
- what we connected: the monitor of its DEALER says DISCONNECTED, or CLOSED where the connection was refused.
  Reconnecting by zmq itself is off: a new connection is a new peer name, and that is the caller's decision;
- what we accepted: the ROUTER's monitor names a file descriptor, which may belong to another connection by the time we
  look. So it only tells us to probe: an Ack frame goes to every accepted peer, and ROUTER_MANDATORY refuses those that
  are gone. Probing goes on for a second, since the pipe ends shortly after the news.

A frame travels as zmq parts exactly as the codec made them (no empty delimiter). Probes and empty frames are not
delivered.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import zmq
from zmq.utils.monitor import recv_monitor_message

from serinus.core.clock import Clock, WallClock
from serinus.core.errors import ConfigError
from serinus.wire.channels import Arrived, ChannelEvent, Gone
from serinus.wire.codec import BODY_BYTES_MAX, PAYLOAD_BYTES_MAX, Parts, encode
from serinus.wire.messages import Ack

__all__ = ["ZmqChannel", "wait_any"]

_MONITORED: Final = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_CONNECTED
_COPY_BYTES_MAX: Final = 64 << 10
"""Below this zmq copies: keeping track of a buffer costs more."""
_BATCH_MAX: Final = 256
"""Frames taken from one socket before the others get their turn."""
_PROBE_S: Final = 1.0
_PROBE_EVERY_S: Final = 0.005
_LINGER_MS: Final = 500
_ASKS: Final = 5
"""Signs of life that are asked for within the longest silence."""


@dataclass(slots=True, kw_only=True)
class _Dialed:
    peer: str
    socket: zmq.Socket[bytes]
    monitor: Any
    connected: bool = False


@dataclass(slots=True)
class _Accepted:
    names: dict[bytes, str] = field(default_factory=dict)
    """Routing id -> peer name."""
    ids: dict[str, bytes] = field(default_factory=dict)
    closed: dict[bytes, None] = field(default_factory=dict)
    """Routing ids that we hung up on: what still comes from them is dropped."""
    count: int = 0


class ZmqChannel:
    """A Channel over zmq. Not thread safe: one loop owns it."""

    def __init__(self, bind: str = "", *, clock: Clock | None = None, silence_s: float = 0.0) -> None:
        """Ready to connect; with `bind` (tcp://host:port, port 0 = any; ipc://path) also to accept.

        `silence_s`: a peer whose process stands still for so many seconds is Gone too. zmq's own threads ask and
        answer, so a process that is merely busy is not; 0 = such a peer is waited for.
        Raises ConfigError where the address cannot be bound.
        """
        self._silence_s = silence_s
        self._context = zmq.Context()
        self._clock = clock or WallClock()
        self._poller = zmq.Poller()
        self._dialed: dict[str, _Dialed] = {}
        self._accepted = _Accepted()
        self._lost: deque[Gone] = deque()
        self._router: zmq.Socket[bytes] | None = None
        self._router_monitor: Any = None
        self._probe_until = -1.0
        self._probe_next = 0.0
        self._probe = encode(Ack())
        self.address = ""
        if bind:
            self._bind(bind)

    def _bind(self, address: str) -> None:
        router = self._context.socket(zmq.ROUTER)
        _configure(router, self._silence_s)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        try:
            router.bind(address)
        except zmq.ZMQError as error:
            router.close(0)
            self._context.term()
            raise ConfigError(f"wire: cannot listen at {address}: {error}, expected a free address") from None
        self._router = router
        self._router_monitor = router.get_monitor_socket(_MONITORED)
        self.address = router.getsockopt_string(zmq.LAST_ENDPOINT)
        self._poller.register(router, zmq.POLLIN)
        self._poller.register(self._router_monitor, zmq.POLLIN)

    def sockets(self) -> list[Any]:
        """What to wait for; see wait_any. Changes with every connect and disconnect."""
        own = [self._router, self._router_monitor] if self._router is not None else []
        return own + [part for dialed in self._dialed.values() for part in (dialed.socket, dialed.monitor)]

    @property
    def wants_soon(self) -> bool:
        """True while `poll` should be called every few milliseconds (a peer may have died just now)."""
        return bool(self._lost) or self._clock.now() < self._probe_until

    # ---- Channel ------------------------------------------------------------------------------------------------

    def connect(self, peer: str, address: str) -> None:
        assert peer not in self._dialed, f"wire: peer name {peer} is in use, expected a new one"
        socket = self._context.socket(zmq.DEALER)
        _configure(socket, self._silence_s)
        socket.setsockopt(zmq.RECONNECT_IVL, -1)
        monitor = socket.get_monitor_socket(_MONITORED)
        dialed = _Dialed(peer=peer, socket=socket, monitor=monitor)
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
                _send(dialed.socket, parts)
            return
        routing_id = self._accepted.ids.get(peer)
        if routing_id is not None:
            self._send_accepted(peer, routing_id, parts)

    def poll(self, timeout_s: float) -> list[ChannelEvent]:
        if self.wants_soon:
            timeout_s = min(timeout_s, _PROBE_EVERY_S)
        ready = dict(self._poller.poll(max(0, round(timeout_s * 1000))))
        events: list[ChannelEvent] = []
        if ready:
            self._take_accepted(ready, events)
            for dialed in list(self._dialed.values()):
                if dialed.socket in ready or dialed.monitor in ready:
                    self._take_dialed(dialed, dialed.monitor in ready, events)
        self._probe_accepted()
        while self._lost:
            events.append(self._lost.popleft())
        return events

    def disconnect(self, peer: str) -> None:
        dialed = self._dialed.pop(peer, None)
        if dialed is not None:
            self._drop(dialed)
        routing_id = self._accepted.ids.pop(peer, None)
        if routing_id is not None:
            del self._accepted.names[routing_id]
            self._accepted.closed[routing_id] = None
            while len(self._accepted.closed) > 1024:
                del self._accepted.closed[next(iter(self._accepted.closed))]

    def close(self) -> None:
        for dialed in self._dialed.values():
            self._drop(dialed)
        self._dialed.clear()
        if self._router is not None:
            self._router.disable_monitor()
            self._router_monitor.close(0)
            self._router.close(_LINGER_MS)
            self._router = None
        self._context.term()

    # ---- what we connected --------------------------------------------------------------------------------------

    def _drop(self, dialed: _Dialed) -> None:
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
        while parts := _receive(dialed.socket, bounded=not reason, taken=len(events)):
            if not self._is_probe(parts):
                events.append(Arrived(peer=dialed.peer, parts=parts))
        if reason:
            del self._dialed[dialed.peer]
            self._drop(dialed)
            events.append(Gone(peer=dialed.peer, reason=reason))

    # ---- what we accepted ---------------------------------------------------------------------------------------

    def _take_accepted(self, ready: dict[Any, int], events: list[ChannelEvent]) -> None:
        if self._router is None:
            return
        if self._router_monitor in ready:
            while True:
                try:
                    recv_monitor_message(self._router_monitor, zmq.NOBLOCK)
                except zmq.Again:
                    break
                self._probe_until = self._clock.now() + _PROBE_S
        if self._router not in ready:
            return
        while parts := _receive(self._router, bounded=True, taken=len(events)):
            routing_id = bytes(parts[0])
            if len(parts) < 2 or self._is_probe(parts[1:]) or routing_id in self._accepted.closed:
                continue
            name = self._accepted.names.get(routing_id)
            if name is None:
                self._accepted.count += 1
                name = f"in-{self._accepted.count}"
                self._accepted.names[routing_id] = name
                self._accepted.ids[name] = routing_id
            events.append(Arrived(peer=name, parts=parts[1:]))

    def _is_probe(self, parts: list[Any]) -> bool:
        return len(parts) == 1 and (not len(parts[0]) or parts[0] == self._probe[0])

    def _probe_accepted(self) -> None:
        now = self._clock.now()
        if now >= self._probe_until or now < self._probe_next:
            return
        self._probe_next = now + _PROBE_EVERY_S
        for peer, routing_id in list(self._accepted.ids.items()):
            self._send_accepted(peer, routing_id, self._probe)

    def _send_accepted(self, peer: str, routing_id: bytes, parts: Parts) -> None:
        assert self._router is not None, "wire: an accepted peer without a listening socket"
        try:
            self._router.send(routing_id, zmq.SNDMORE | zmq.NOBLOCK)
        except zmq.ZMQError as error:
            self.disconnect(peer)
            self._lost.append(Gone(peer=peer, reason=f"the connection broke ({error})"))
            return
        _send(self._router, parts)


def wait_any(channels: Sequence[ZmqChannel], timeout_s: float) -> None:
    """Wait until one of several channels has something to poll, or for timeout_s seconds."""
    if any(channel.wants_soon for channel in channels):
        timeout_s = min(timeout_s, _PROBE_EVERY_S)
    poller = zmq.Poller()
    for channel in channels:
        for socket in channel.sockets():
            poller.register(socket, zmq.POLLIN)
    poller.poll(max(0, round(timeout_s * 1000)))


def _configure(socket: zmq.Socket[bytes], silence_s: float) -> None:
    if silence_s:
        asks_ms = max(1, round(silence_s * 1000 / _ASKS))
        socket.setsockopt(zmq.HEARTBEAT_IVL, asks_ms)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, max(1, round(silence_s * 1000) - asks_ms))
    socket.setsockopt(zmq.LINGER, _LINGER_MS)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, max(BODY_BYTES_MAX + 4096, PAYLOAD_BYTES_MAX))


def _send(socket: zmq.Socket[bytes], parts: Parts) -> None:
    for index, part in enumerate(parts):
        size = part.nbytes if isinstance(part, memoryview) else len(part)
        more = zmq.SNDMORE if index < len(parts) - 1 else 0
        socket.send(part, more | zmq.NOBLOCK, copy=size < _COPY_BYTES_MAX)


def _receive(socket: zmq.Socket[bytes], *, bounded: bool, taken: int) -> list[Any]:
    """The parts of one message; [] = none left, or (where bounded) enough for this turn."""
    if bounded and taken >= _BATCH_MAX:
        return []
    try:
        frames = socket.recv_multipart(zmq.NOBLOCK, copy=False)
    except zmq.Again:
        return []
    return [frame.buffer for frame in frames]


def _hang_up(dialed: _Dialed) -> None:
    dialed.socket.disable_monitor()
    dialed.monitor.close(0)
    dialed.socket.close(_LINGER_MS)
