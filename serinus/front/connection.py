"""The HTTP connections of a server: how many there may be, and how long each may keep it waiting.

A connection is uvicorn's, with head and body of an answer in one write. Knows nothing of requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from serinus.core.errors import ConfigError
from serinus.core.log import get_logger
from serinus.front.exchange import CHUNK_WRITER, UNAVAILABLE, error_json

_log = get_logger("front")

_JOINED_BYTES_MAX = 64 << 10
"""A longer body is written after its head: copying it would cost more than the second write."""
_LEAVING_MAX = 64
"""Refused connections that get time to read why; more are cut off."""
_LEAVING_S = 1.0
_SWEEP_COUNT = 2048
"""Connections that one sweep looks at: about 2 ms."""
_TRY_EVERY_S = 0.25
"""Between two searches for idle connections, each of which looks at all of them."""
SAID_EVERY_S = 60.0
"""Between two lines of the log that say the same of connections."""
_IDLE_S_MIN = 1.0
"""A client may still be writing its first request on a connection that is younger."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """What the connections of one server may take of it. Raises ConfigError."""

    count_max: int
    """Connections that are open at a time; one more is answered 503."""
    idle_s_max: float = 75.0
    """Seconds between two requests, and before the first."""
    head_s_max: float = 20.0
    """Seconds from the first byte of a request to the end of its head."""
    body_s_max: float = 60.0
    """Seconds between two pieces of a request's body."""
    unread_s_max: float = 300.0
    """Seconds that a client takes none of its answer, once the buffers are full."""

    def __post_init__(self) -> None:
        if self.count_max < 1:
            raise ConfigError(f"front: count_max is {self.count_max}, expected at least 1 connection")


def _ignored() -> None:
    """Of a table without metrics."""


class ConnectionTable(ServerState):
    """The open connections of one server. All times are those of the loop's clock."""

    def __init__(self, limits: ConnectionLimits) -> None:
        super().__init__()
        self.limits = limits
        self.on_refused: Callable[[], None] = _ignored
        """Told of each connection that is answered 503."""
        self.on_timed_out: Callable[[], None] = _ignored
        """Told of each connection that is closed because its client kept the server waiting."""
        self.leaving: dict[HttpConnection, float] = {}
        """Refused connections that are still open, and since when."""
        self._said_at = self._tried_at = -SAID_EVERY_S
        self._to_sweep: list[HttpConnection] = []

    def admit(self, now: float) -> bool:
        """Whether one more connection fits; makes room by closing connections without a request, the idlest first."""
        count_max = self.limits.count_max
        if len(self.connections) >= count_max and now - self._tried_at >= _TRY_EVERY_S:
            self._tried_at = now
            self._close_idle(now, max(1, count_max // 8))
        fits = len(self.connections) < count_max
        if not fits:
            self.on_refused()
            if now - self._said_at >= SAID_EVERY_S:
                self._said_at = now
                _log.warning("front: %d connections are open, as many as may be; further ones get 503", count_max)
        return fits

    def _close_idle(self, now: float, count: int) -> None:
        idle = [each for each in self._open() if each.idle_since is not None and now - each.idle_since >= _IDLE_S_MIN]
        for connection in sorted(idle, key=lambda each: each.idle_since or 0.0)[:count]:
            self.connections.discard(connection)  # its descriptor is given back in the loop's next turn
            connection.transport.close()

    def sweep(self, now: float) -> None:
        """Look at some connections, and close those that kept the server waiting for too long.

        To be called ten times a second: sixteen thousand connections are looked at within one.
        """
        self._to_sweep = self._to_sweep or self._open()
        looked_at, self._to_sweep = self._to_sweep[:_SWEEP_COUNT], self._to_sweep[_SWEEP_COUNT:]
        for connection in looked_at:
            if connection in self.connections and connection.overdue(now):
                self.on_timed_out()
                connection.time_out()
        for refused in [each for each, since in self.leaving.items() if now - since >= _LEAVING_S]:
            refused.transport.abort()

    def end_leaving(self) -> None:
        """Cut off refused connections that are still open."""
        for refused in list(self.leaving):
            refused.transport.abort()

    def _open(self) -> list[HttpConnection]:
        return [each for each in self.connections if isinstance(each, HttpConnection)]


class HttpConnection(H11Protocol):
    """One connection of an HttpServer; between the bytes of its client it costs the server no timer."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        assert isinstance(server_state, ConnectionTable), f"front: a connection of {server_state!r}"
        self._table = server_state
        self._since = self.loop.time()
        """When the client's turn began: the connection, an answer's end, a head's first byte, a body's last piece."""
        self._head_begun = False
        self._unread_since: float | None = None
        self._refused = False
        self.app_state = {**app_state, CHUNK_WRITER: self._write_chunk}

    # ---- asyncio's calls ---------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if self._table.admit(self.loop.time()):
            super().connection_made(_JoiningTransport(transport, self.loop))
            return
        self._refused, self.transport = True, transport
        transport.write(_answer(503, "Service Unavailable", "overloaded_error", "front: too many connections"))
        if len(self._table.leaving) >= _LEAVING_MAX:
            transport.close()
            return
        # Closing while the client's bytes are unread would take the answer back from it.
        self._table.leaving[self] = self.loop.time()
        if transport.can_write_eof():
            transport.write_eof()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        if self._receiving_body:
            self._since = self.loop.time()
        elif not self._head_begun and self._between_requests:
            self._head_begun, self._since = True, self.loop.time()
        super().data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._refused:
            self._table.leaving.pop(self, None)
        else:
            super().connection_lost(exc)

    def pause_writing(self) -> None:
        self._unread_since = self.loop.time()
        super().pause_writing()

    def resume_writing(self) -> None:
        self._unread_since = None
        super().resume_writing()

    # ---- uvicorn's ---------------------------------------------------------------------------------------------

    def on_response_complete(self) -> None:
        self._head_begun, self._since = False, self.loop.time()
        super().on_response_complete()

    def _write_chunk(self, data: bytes) -> bool:
        """Send a piece of an answer that is streamed in chunks; False: it must go through uvicorn, for now or at all.

        That saves a quarter of what a streamed token costs: h11 checks each piece, though its state does not change.
        """
        cycle = self.cycle
        if not data or not cycle.response_started or cycle.response_complete:
            return False
        if cycle.disconnected or self.flow.write_paused:
            return False
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True

    # ---- limits ------------------------------------------------------------------------------------------------

    @property
    def _between_requests(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    @property
    def _receiving_body(self) -> bool:
        """Whether the client owes a part of a body that the app is still to see."""
        return not self._between_requests and self.cycle.more_body and not self.flow.read_paused

    @property
    def idle_since(self) -> float | None:
        """Since when there has been no request and no part of one; None while there is."""
        return self._since if self._between_requests and not self._head_begun else None

    def overdue(self, now: float) -> bool:
        """Whether the client has kept the server waiting for too long."""
        limits = self._table.limits
        if self._unread_since is not None:
            return now - self._unread_since > limits.unread_s_max
        if self._between_requests:
            return now - self._since > (limits.head_s_max if self._head_begun else limits.idle_s_max)
        return self._receiving_body and now - self._since > limits.body_s_max

    def time_out(self) -> None:
        """Close an overdue connection, with 408 where a request has begun and no answer has."""
        if self._unread_since is not None:
            self.transport.abort()  # what the client does not read is not worth waiting for
            return
        if (self._head_begun or not self._between_requests) and self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            message = "front: the request did not arrive in time"
            self.transport.write(_answer(408, "Request Timeout", "invalid_request_error", message))
        self.transport.close()


def _answer(status: int, phrase: str, kind: str, message: str) -> bytes:
    """A whole answer, after which the connection is closed."""
    body = error_json(message, kind, code=UNAVAILABLE if status == 503 else None)
    head = f"HTTP/1.1 {status} {phrase}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
    return head.encode() + b"retry-after: 1\r\nconnection: close\r\n\r\n" + body


class _JoiningTransport(asyncio.Transport):
    """Keeps the head of an answer until its body is written, or until the loop's next turn where none is.

    Two small writes are two packets and two system calls.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._transport = transport
        self._loop = loop
        self._head = b""

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        if self._head:
            head, self._head = self._head, b""
            if len(data) <= _JOINED_BYTES_MAX:
                self._transport.write(head + data)
                return
            self._transport.write(head)
        elif data[:7] == b"HTTP/1.":
            self._head = bytes(data)
            self._loop.call_soon(self._flush)
            return
        self._transport.write(data)

    def _flush(self) -> None:
        head, self._head = self._head, b""
        if head:
            self._transport.write(head)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def abort(self) -> None:
        self._transport.abort()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)
