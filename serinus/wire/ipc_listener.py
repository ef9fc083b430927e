"""Connections that others make to us over ipc://: processes of this user alone; its folder lets no one else in.

How the death of a peer is seen within milliseconds, and without a race: the ROUTER's monitor names a file descriptor,
which may belong to another connection by the time we look. So it only tells us to probe: an Ack frame goes to every
accepted peer, and ROUTER_MANDATORY refuses those that are gone. Probing goes on for a second, since the pipe ends
shortly after the news.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import Any, Final

import zmq
from zmq.utils.monitor import recv_monitor_message

from serinus.core.clock import Clock
from serinus.wire.channels import Arrived, ChannelEvent, Gone
from serinus.wire.codec import Parts
from serinus.wire.zmq_frames import MONITORED, PROBE, configure, is_probe, receive, send

PROBE_EVERY_S: Final = 0.005
_PROBE_S: Final = 1.0
_CLOSED_MAX: Final = 1024
_QUEUED_MAX: Final = 1 << 14
"""Messages of one connection that zmq keeps for us; the rest waits at its sender."""


class IpcListener:
    """A listening ipc:// address (Listener of zmq_channel.py). Not thread safe."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], address: str, *, clock: Clock, silence_s: float
    ) -> None:
        """Raises zmq.ZMQError: the address cannot be bound."""
        self._clock = clock
        self._names: dict[bytes, str] = {}
        """Routing id -> peer name."""
        self._ids: dict[str, bytes] = {}
        self._closed: dict[bytes, None] = {}
        """Routing ids that we hung up on: what still comes from them is dropped."""
        self._count = 0
        self.cut_off: Counter[str] = Counter()
        """Always empty: no connection is cut off here."""
        self._lost: deque[Gone] = deque()
        self._probe_until = -1.0
        self._probe_next = 0.0
        self._router: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        configure(self._router, silence_s, queued_max=_QUEUED_MAX)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        try:
            self._router.bind(address)
        except zmq.ZMQError:
            self._router.close(0)
            raise
        self._monitor: Any = self._router.get_monitor_socket(MONITORED)
        self.address = self._router.getsockopt_string(zmq.LAST_ENDPOINT)

    @property
    def sockets(self) -> list[Any]:
        """What to wait for."""
        return [self._router, self._monitor]

    @property
    def wants_soon(self) -> bool:
        """True while `take` should be called every few milliseconds."""
        return bool(self._lost) or self._clock.now() < self._probe_until

    def take(self, ready: dict[Any, int], events: list[ChannelEvent]) -> None:
        """What came, and the peers that are gone."""
        if self._monitor in ready:
            while True:
                try:
                    recv_monitor_message(self._monitor, zmq.NOBLOCK)
                except zmq.Again:
                    break
                self._probe_until = self._clock.now() + _PROBE_S
        if self._router in ready:
            while parts := receive(self._router, bounded=True, taken=len(events)):
                self._arrived(bytes(parts[0]), parts[1:], events)
        self._probe()
        events.extend(self._lost)
        self._lost.clear()

    def _arrived(self, routing_id: bytes, parts: list[Any], events: list[ChannelEvent]) -> None:
        if not parts or is_probe(parts) or routing_id in self._closed:
            return
        name = self._names.get(routing_id)
        if name is None:
            self._count += 1
            name = self._names[routing_id] = f"in-{self._count}"
            self._ids[name] = routing_id
        events.append(Arrived(peer=name, parts=parts))

    def _probe(self) -> None:
        now = self._clock.now()
        if now >= self._probe_until or now < self._probe_next:
            return
        self._probe_next = now + PROBE_EVERY_S
        for peer in list(self._ids):
            self.send(peer, PROBE)

    def send(self, peer: str, parts: Parts) -> None:
        """Queue a message. To a name that is gone: nothing happens."""
        routing_id = self._ids.get(peer)
        if routing_id is None:
            return
        try:
            self._router.send(routing_id, zmq.SNDMORE | zmq.NOBLOCK)
        except zmq.ZMQError as error:
            self.disconnect(peer)
            self._lost.append(Gone(peer=peer, reason=f"the connection broke ({error})"))
            return
        send(self._router, parts)

    def trust(self, peer: str) -> None:
        """A process that can connect here is trusted."""

    def disconnect(self, peer: str) -> None:
        """Take nothing from this peer any more; no Gone follows."""
        routing_id = self._ids.pop(peer, None)
        if routing_id is not None:
            del self._names[routing_id]
            self._closed[routing_id] = None
            while len(self._closed) > _CLOSED_MAX:
                del self._closed[next(iter(self._closed))]

    def close(self, linger_ms: int) -> None:
        """End all connections; what is queued still leaves."""
        self._router.disable_monitor()
        self._monitor.close(0)
        self._router.close(linger_ms)
