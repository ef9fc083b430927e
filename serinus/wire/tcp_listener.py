"""Connections that others make to us over tcp://: strangers cost little memory, however they behave.

zmq's own listening sockets keep all parts of a message until its last one came, have no bound on the number of
connections, and cannot hang up. So zmq only moves bytes here (a STREAM socket: its reads of 8 KiB are bounded per
connection, the rest stays in the sender's socket), and ZMTP is spoken by zmtp.py. The other side is a plain DEALER.

An accepted connection is a stranger's until `trust`: it may send a few small messages, has a few seconds, and there
are a few of them; where one more comes, one of them goes (one that said nothing rather than one that did). Those that
are trusted may send messages of `message_bytes_max`. A peer that does not read what it is sent is cut off as well.
"""

from __future__ import annotations

import math
import socket
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

import zmq

from serinus.core.addresses import bare_host, tcp_url
from serinus.core.clock import Clock
from serinus.core.errors import FrameError
from serinus.wire.channels import Arrived, ChannelEvent, Gone
from serinus.wire.codec import Buffer, Parts
from serinus.wire.zmq_frames import has_message
from serinus.wire.zmtp import PING, ZmtpReader, part_head

STRANGERS_MAX: Final = 64
"""Connections that were not trusted yet."""
STRANGER_BYTES_MAX: Final = 128 << 10
"""Of one message of a stranger: a HELLO with the memory descriptors of a one-sided backend fits."""
STRANGER_MESSAGES_MAX: Final = 16
"""Messages and commands of a stranger."""
STRANGER_S_MAX: Final = 10.0
"""A stranger is trusted within this, or goes. Only time in which we listened counts..."""
_LISTENED_S_MAX: Final = 1.0
"""...of that between two calls of `take` so much: a greeting takes several answers of ours, each of which waits for the
end of a step of the engine."""
LEAVE_S_MAX: Final = 10.0
"""A peer that we end the connection of has this long to read what was sent and hang up."""
_READS_QUEUED_MAX: Final = 16
"""Reads (of 8 KiB) of one connection that zmq keeps for us."""
_UNREAD_MAX: Final = 1 << 16
"""Writes to one connection that zmq keeps until the peer reads."""
_READS_MAX: Final = 256
"""Reads taken before other sockets get their turn."""
_COPY_BYTES_MAX: Final = 64 << 10
"""Below this zmq copies: keeping track of a buffer costs more."""
_ASKS: Final = 5
"""Signs of life that are asked for within the longest silence, and may be owed."""


@dataclass(slots=True, kw_only=True)
class _Connection:
    routing_id: bytes
    since: float
    """In seconds that we listened."""
    reader: ZmtpReader = field(default_factory=lambda: ZmtpReader(STRANGER_BYTES_MAX))
    peer: str = ""
    """Its name; empty = it sent no message yet."""
    trusted: bool = False
    owed: int = 0
    """Signs of life that it was asked for since it sent something."""


class TcpListener:
    """A listening tcp:// address (Listener of zmq_channel.py). Not thread safe."""

    wants_soon = False

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], address: str, *, clock: Clock, silence_s: float,
        message_bytes_max: int,
    ) -> None:  # fmt: skip
        """`message_bytes_max`: of all parts of one message of a trusted peer. Raises zmq.ZMQError: the address cannot
        be bound."""
        self._clock = clock
        self._ask_s = silence_s / _ASKS
        self._asked_at = self._taken_at = clock.now()
        self._listened_s = 0.0
        self._message_bytes_max = message_bytes_max
        self._connections: dict[bytes, _Connection] = {}
        self._peers: dict[str, _Connection] = {}
        self._strangers: dict[bytes, _Connection] = {}
        """Of those, the ones that are not trusted, oldest first."""
        self._leaving: dict[bytes, float] = {}
        """Connections that are over for us, and since when, oldest first: nothing is read of them any more. Their peers
        hang up once they have read what was sent: if we did, zmq would drop what they have not read."""
        self._named = 0
        self._ended: list[Gone] = []
        self.cut_off: Counter[str] = Counter()
        """Connections that were ended here, by reason."""
        self._socket: zmq.Socket[bytes] = context.socket(zmq.STREAM)
        self._socket.setsockopt(zmq.LINGER, 500)
        self._socket.setsockopt(zmq.RCVHWM, _READS_QUEUED_MAX)
        self._socket.setsockopt(zmq.SNDHWM, _UNREAD_MAX)
        address = _bindable(address)
        self._socket.setsockopt(zmq.IPV6, int("[" in address))
        try:
            self._socket.bind(address)
        except zmq.ZMQError:
            self._socket.close(0)
            raise
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    @property
    def sockets(self) -> list[Any]:
        """What to wait for."""
        return [self._socket]

    def take(self, ready: dict[Any, int], events: list[ChannelEvent]) -> None:
        """What came, and the peers that are gone. Called in every turn, whether the socket is ready or not."""
        now = self._clock.now()
        self._listened_s += min(now - self._taken_at, _LISTENED_S_MAX)
        self._taken_at = now
        if self._socket in ready:
            for _ in range(_READS_MAX):
                if not has_message(self._socket):
                    break
                routing_id, chunk = self._socket.recv(zmq.NOBLOCK), self._socket.recv(zmq.NOBLOCK)
                self._read(routing_id, chunk, events)
        for routing_id, since in list(self._leaving.items()):
            if now - since <= LEAVE_S_MAX and len(self._leaving) <= STRANGERS_MAX:
                break  # the others began to leave later
            self._end(routing_id)
        for stranger in list(self._strangers.values()):
            if self._listened_s - stranger.since <= STRANGER_S_MAX:
                break  # the others are younger
            self._cut(stranger, f"it was not greeted within {STRANGER_S_MAX:g} s", "slow")
        if self._ask_s and now - self._asked_at >= self._ask_s:
            self._asked_at = now
            self._ask()
        events.extend(self._ended)
        self._ended.clear()

    def send(self, peer: str, parts: Parts) -> None:
        """Queue a message. To a name that is gone: nothing happens."""
        connection = self._peers.get(peer)
        if connection is None:
            return
        last = len(parts) - 1
        together: list[Buffer] = []
        for index, part in enumerate(parts):
            size = part.nbytes if isinstance(part, memoryview) else len(part)
            together.append(part_head(size, more=index < last))
            if size < _COPY_BYTES_MAX:
                together.append(part)
            else:
                self._write(connection, b"".join(together))
                self._write(connection, part)
                together.clear()
        if together:
            self._write(connection, b"".join(together))

    def trust(self, peer: str) -> None:
        """This peer was greeted: it is no stranger any more."""
        connection = self._peers.get(peer)
        if connection is not None:
            connection.trusted = True
            connection.reader.message_bytes_max = self._message_bytes_max
            self._strangers.pop(connection.routing_id, None)

    def disconnect(self, peer: str) -> None:
        """Nothing is taken of this peer any more; it is hung up on if it does not, soon. No Gone follows."""
        connection = self._peers.get(peer)
        if connection is not None:
            self._forget(connection)
            self._leaving[connection.routing_id] = self._clock.now()

    def close(self, linger_ms: int) -> None:
        """End all connections; what is queued still leaves."""
        self._socket.close(linger_ms)

    # ---- one connection ---------------------------------------------------------------------------------------------

    def _read(self, routing_id: bytes, chunk: bytes, events: list[ChannelEvent]) -> None:
        connection = self._connections.get(routing_id)
        if routing_id in self._leaving:
            if not chunk:
                del self._leaving[routing_id]
        elif not chunk:  # zmq's news that a connection began, or ended
            if connection is None:
                self._begin(routing_id)
            else:
                self._forget(connection)
                if connection.peer:
                    events.append(Gone(peer=connection.peer, reason="the connection broke"))
        elif connection is not None:  # else we ended it meanwhile
            self._feed(connection, chunk, events)

    def _feed(self, connection: _Connection, chunk: bytes, events: list[ChannelEvent]) -> None:
        connection.owed = 0
        try:
            messages = connection.reader.feed(chunk)
        except FrameError as error:
            self._cut(connection, str(error), error.reason)
            return
        self._answer(connection)
        for parts in messages:
            if not connection.peer:
                self._named += 1
                connection.peer = f"in-{self._named}"
                self._peers[connection.peer] = connection
            events.append(Arrived(peer=connection.peer, parts=parts))
        if not connection.trusted and connection.reader.count > STRANGER_MESSAGES_MAX:
            self._cut(connection, f"{connection.reader.count} messages before it was greeted", "talkative")

    def _begin(self, routing_id: bytes) -> None:
        if len(self._strangers) >= STRANGERS_MAX:
            oldest = next(iter(self._strangers.values()))
            goes = next((each for each in self._strangers.values() if not each.peer), oldest)
            self._cut(goes, f"{STRANGERS_MAX} others wait to be greeted", "crowded")
        connection = _Connection(routing_id=routing_id, since=self._listened_s)
        self._connections[routing_id] = self._strangers[routing_id] = connection
        self._answer(connection)

    def _answer(self, connection: _Connection) -> None:
        if connection.reader.answer:
            answer, connection.reader.answer = connection.reader.answer, b""
            self._write(connection, answer)

    def _write(self, connection: _Connection, data: Any) -> None:
        size = data.nbytes if isinstance(data, memoryview) else len(data)
        try:
            self._socket.send(connection.routing_id, zmq.SNDMORE | zmq.NOBLOCK)
        except zmq.Again:
            self._cut(connection, f"it does not read: {_UNREAD_MAX} writes wait", "unread")
            return
        except zmq.ZMQError:
            return  # it is gone: the news of it is under way
        self._socket.send(data, zmq.NOBLOCK, copy=size < _COPY_BYTES_MAX)

    def _ask(self) -> None:
        for connection in list(self._connections.values()):
            if connection.owed >= _ASKS:
                self._cut(connection, "it gives no sign of life", "silent")
            elif connection.trusted:
                connection.owed += 1
                self._write(connection, PING)

    def _cut(self, connection: _Connection, reason: str, kind: str) -> None:
        """Hang up on a peer at once; reported as Gone where it was named."""
        self.cut_off[kind] += 1
        if self._connections.get(connection.routing_id) is connection:
            self._forget(connection)
            self._end(connection.routing_id)
            if connection.peer:
                self._ended.append(Gone(peer=connection.peer, reason=reason))

    def _end(self, routing_id: bytes) -> None:
        """Have zmq end a connection; where it takes nothing now, not even that, in a later turn."""
        self._leaving.pop(routing_id, None)
        try:
            self._socket.send_multipart([routing_id, b""], zmq.NOBLOCK)
        except zmq.Again:
            self._leaving[routing_id] = -math.inf
        except zmq.ZMQError:
            return  # it is gone already

    def _forget(self, connection: _Connection) -> None:
        self._connections.pop(connection.routing_id, None)
        self._strangers.pop(connection.routing_id, None)
        self._peers.pop(connection.peer, None)


def _bindable(address: str) -> str:
    """zmq listens at addresses and interfaces alone: the name of a machine is looked up here, as IPv4 where it has such
    an address: zmq does so where it connects."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    named = not (host == "*" or bare_host(host) != host or host in [name for _index, name in socket.if_nameindex()])
    if not (named and port.isdecimal()):
        return address
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            found = socket.getaddrinfo(host, None, family, socket.SOCK_STREAM)
        except OSError:
            continue
        return tcp_url(str(found[0][4][0]), int(port))
    return address  # zmq's error names it
