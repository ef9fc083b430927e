"""The HTTP/1.1 client of the router and of the load generator: one connection per request, bodies as they arrive.

h11 understands the protocol; this file moves the bytes. A general-purpose client costs several times more per token.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from urllib.parse import urlsplit

import h11

from serinus.core.addresses import host_port
from serinus.core.errors import PeerGone
from serinus.front.tls import client_tls

_HEAD_BYTES_MAX = 64 << 10
_READ_BYTES = 256 << 10
_Headers = Sequence[tuple[str, str]]


class UpstreamBroken(PeerGone):
    """The server could not be reached, or ended the connection before its answer was complete."""


class NotConnected(UpstreamBroken):
    """No connection came about: the server never saw the request."""


class Upstream:
    """One request to one server; an async context manager that closes the connection.

    Closing early tells the engine's front that the answer is not wanted any more.
    """

    def __init__(self, url: str, *, connect_s_max: float, ca_certs: str = "") -> None:
        """`url`: http(s)://host:port; what follows is ignored. `connect_s_max`: seconds that connecting may take.
        `ca_certs`: file of certificates by which https is trusted, besides the system's."""
        parts = urlsplit(url)
        self.url = url
        self._host = (parts.hostname or "127.0.0.1").encode("idna").decode()
        self._tls = client_tls(ca_certs) if parts.scheme == "https" else None
        self._port = parts.port or (80 if self._tls is None else 443)
        self._authority = host_port(self._host, self._port)
        self._connect_s_max = connect_s_max
        self._connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=_HEAD_BYTES_MAX)
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self.status = 0
        """HTTP status of the answer; 0 = none came yet."""
        self.headers: dict[str, str] = {}
        """Headers of the answer, names in lower case."""

    async def __aenter__(self) -> Upstream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    def abort(self) -> None:
        """Drop the connection; a task that reads from it gets UpstreamBroken."""
        if self._writer is not None:
            self._writer.transport.abort()

    async def send(self, method: str, path: str, headers: _Headers, body: bytes) -> None:
        """Send the request and read the head of the answer. Raises NotConnected, UpstreamBroken."""
        own = [("host", self._authority), ("connection", "close"), ("content-length", str(len(body)))]
        encoded = [(name.encode(), value.encode("latin-1")) for name, value in (*own, *headers)]  # as it was decoded
        request = h11.Request(method=method, target=path, headers=encoded)
        events: list[h11.Event] = [request, h11.Data(data=body), h11.EndOfMessage()]
        try:
            async with asyncio.timeout(self._connect_s_max):
                self._reader, self._writer = await asyncio.open_connection(self._host, self._port, ssl=self._tls)
        except (OSError, TimeoutError) as err:
            raise NotConnected(f"front: {self.url} does not answer ({err or type(err).__name__})") from err
        self._writer.write(b"".join(self._connection.send(event) or b"" for event in events))
        while True:
            event = self._next()
            if isinstance(event, h11.Response):
                break
            if event is h11.NEED_DATA:
                await self._read()
        self.status = event.status_code
        self.headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in event.headers}

    async def parts(self) -> AsyncIterator[bytes]:
        """The body as it arrives, all that is there at a time. Raises UpstreamBroken where it ends too early."""
        there: list[bytes] = []
        while True:
            event = self._next()
            if isinstance(event, h11.Data):
                there.append(event.data)
                continue
            if there:
                yield there[0] if len(there) == 1 else b"".join(there)
                there.clear()
            if event is not h11.NEED_DATA:
                return
            await self._read()

    async def body(self) -> bytes:
        """The whole body. Raises UpstreamBroken."""
        return b"".join([part async for part in self.parts()])

    def _next(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        try:
            return self._connection.next_event()
        except h11.RemoteProtocolError as err:
            raise UpstreamBroken(f"front: {self.url} broke off its answer ({err})") from err

    async def _read(self) -> None:
        assert self._reader is not None, "front: an answer before its request"
        try:
            self._connection.receive_data(await self._reader.read(_READ_BYTES))
        except OSError as err:
            raise UpstreamBroken(f"front: {self.url} broke off its answer ({err})") from err


async def fetch(
    url: str, method: str, path: str, *, headers: _Headers = (), body: bytes = b"", s_max: float, ca_certs: str = ""
) -> tuple[int, bytes]:
    """Status and body of one small request. Raises UpstreamBroken, also where it takes longer than `s_max` seconds."""
    try:
        async with asyncio.timeout(s_max), Upstream(url, connect_s_max=s_max, ca_certs=ca_certs) as upstream:
            await upstream.send(method, path, headers, body)
            return upstream.status, await upstream.body()
    except TimeoutError as err:
        raise UpstreamBroken(f"front: {url}{path} did not answer within {s_max} s") from err
