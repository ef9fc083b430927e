"""HTTP/1.1 for a load generator: send one request, note when which bytes of the answer came, understand them later.

An asyncio Protocol that appends (time, bytes) to a list: some microseconds per token of client time. Knows nothing of
JSON, events or models.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from serinus.core.clock import Clock
from serinus.core.errors import ConfigError

__all__ = ["Arrival", "Exchange", "Target", "body_arrivals", "exchange"]

_END = b"0\r\n\r\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where the server is."""

    host: str
    port: int
    path: str = ""
    """What goes before every path, where the server is behind a proxy."""
    api_key: str = ""
    """Sent as a bearer token."""

    @classmethod
    def from_url(cls, url: str, api_key: str = "") -> Target:
        """Raises ConfigError for anything but http://host:port."""
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise ConfigError(f"bench: --base-url is {url!r}, expected http://host:port")
        return cls(host=parts.hostname, port=parts.port or 80, path=parts.path.rstrip("/"), api_key=api_key)

    def request(self, method: str, path: str, body: bytes) -> bytes:
        """The bytes of one request."""
        key = f"Authorization: Bearer {self.api_key}\r\n" if self.api_key else ""
        head = (
            f"{method} {self.path}{path} HTTP/1.1\r\nHost: {self.host}:{self.port}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\n{key}Content-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """Bytes of the body that came together."""

    time: float
    data: bytes


@dataclass(slots=True, kw_only=True)
class Exchange:
    """One request and what came back."""

    sent: float = 0.0
    """When the request was written."""
    ended: float = 0.0
    """When the last byte came, or the connection broke."""
    raw: list[tuple[float, bytes]] = field(default_factory=list)
    """What came, as it came."""
    failure: str = ""
    """Why there is no whole answer; empty where there is one."""


class _Catcher(asyncio.Protocol):
    """Notes what comes until the answer is whole or the connection ends."""

    def __init__(self, clock: Clock, done: asyncio.Future[None]) -> None:
        self._now = clock.now
        self._done = done
        self._tail = b""
        self._expected = 0
        self._head = b""
        self._received = 0
        self.raw: list[tuple[float, bytes]] = []
        self.whole = False

    def data_received(self, data: bytes) -> None:
        self.raw.append((self._now(), data))
        if self._expected:
            self._received += len(data)
            self._finish_if(self._received >= self._expected)
            return
        if self._tail or self._head is None:
            self._tail = (self._tail + data)[-len(_END) :]
            self._finish_if(self._tail == _END)
            return
        self._head += data
        end = self._head.find(b"\r\n\r\n")
        if end >= 0:
            self._headers_came(end + 4)

    def _headers_came(self, body_start: int) -> None:
        lower = self._head[:body_start].lower()
        place = lower.find(b"\r\ncontent-length:")
        if place >= 0:
            length = int(lower[place + 17 : lower.index(b"\r\n", place + 2)])
            self._expected, self._received = body_start + length, len(self._head)
            self._finish_if(self._received >= self._expected)
            return
        self._tail = (b"....." + self._head[body_start:])[-len(_END) :]
        self._finish_if(self._tail == _END)

    def _finish_if(self, whole: bool) -> None:
        if whole and not self._done.done():
            self.whole = True
            self._done.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._done.done():
            self._done.set_result(None)


async def exchange(
    target: Target, method: str, path: str, body: bytes, clock: Clock, *, s_max: float = 3600.0
) -> Exchange:
    """Send one request and wait for its whole answer. What goes wrong on the way is in `failure`, never raised."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()
    catcher = _Catcher(clock, done)
    result = Exchange(sent=clock.now(), raw=catcher.raw)
    try:
        transport, _ = await loop.create_connection(lambda: catcher, target.host, target.port)
    except OSError as error:
        result.ended = clock.now()
        result.failure = f"cannot connect to {target.host}:{target.port}: {error}"
        return result
    try:
        _send_at_once(transport)
        transport.write(target.request(method, path, body))
        await asyncio.wait_for(done, s_max)
    except TimeoutError:
        result.failure = f"no whole answer within {s_max} s"
    finally:
        transport.close()
    result.ended = catcher.raw[-1][0] if catcher.raw else clock.now()
    if not catcher.whole and not result.failure:
        result.failure = "the server closed the connection before its answer was whole"
    return result


def _send_at_once(transport: asyncio.WriteTransport) -> None:
    raw = transport.get_extra_info("socket")
    if raw is not None:
        with contextlib.suppress(OSError):  # a setting of speed only; some sockets do not have it
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def body_arrivals(result: Exchange) -> tuple[int, list[Arrival]]:
    """HTTP status, and the body's bytes with the time of their arrival, unchunked. Status 0 = no answer at all."""
    joined = b"".join(data for _, data in result.raw)
    end = joined.find(b"\r\n\r\n")
    if end < 0:
        return 0, []
    head = joined[:end].lower()
    status = int(joined[9:12])
    times = _Times(result.raw)
    if b"transfer-encoding: chunked" not in head:
        return status, [Arrival(time=times.at(len(joined) - 1), data=joined[end + 4 :])]
    arrivals: list[Arrival] = []
    place = end + 4
    while place < len(joined):
        line_end = joined.find(b"\r\n", place)
        if line_end < 0:
            break
        size = int(joined[place:line_end].split(b";")[0], 16)
        data = joined[line_end + 2 : line_end + 2 + size]
        if size == 0 or len(data) < size:
            break
        arrivals.append(Arrival(time=times.at(line_end + 1 + size), data=data))
        place = line_end + 2 + size + 2
    return status, arrivals


class _Times:
    """When the byte at an offset came; offsets are asked in rising order."""

    def __init__(self, raw: list[tuple[float, bytes]]) -> None:
        self._raw = raw
        self._index = 0
        self._upto = len(raw[0][1]) if raw else 0

    def at(self, offset: int) -> float:
        while offset >= self._upto and self._index + 1 < len(self._raw):
            self._index += 1
            self._upto += len(self._raw[self._index][1])
        return self._raw[self._index][0]
