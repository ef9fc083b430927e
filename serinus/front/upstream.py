"""A lean HTTP/1.1 client for the router: one connection per request, bodies streamed as they arrive.

Speaks to our own fronts only (uvicorn): bodies with a length, chunked, or up to the end of the connection. A whole
general-purpose client costs several times more per streamed token.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from urllib.parse import urlsplit

from serinus.core.errors import PeerGone

__all__ = ["Upstream", "UpstreamBroken", "fetch"]

_HEAD_BYTES_MAX = 64 << 10
_READ_BYTES = 256 << 10
_HEX = b"0123456789abcdefABCDEF"
_Headers = Sequence[tuple[str, str]]


class UpstreamBroken(PeerGone):
    """The engine's server could not be reached, or ended the connection before its answer was complete."""


class Upstream:
    """One request to one engine; an async context manager that closes the connection.

    Closing early is how the engine's front learns that nobody wants the answer.
    """

    def __init__(self, url: str, *, connect_s_max: float) -> None:
        parts = urlsplit(url)
        self.url = url
        self._host = parts.hostname or "127.0.0.1"
        self._port = parts.port or 80
        self._connect_s_max = connect_s_max
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self.status = 0
        """HTTP status of the answer."""
        self.headers: dict[str, str] = {}
        """Headers of the answer, names in lower case."""

    async def __aenter__(self) -> Upstream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    def abort(self) -> None:
        """Drop the connection; whoever reads from it gets UpstreamBroken."""
        if self._writer is not None:
            self._writer.transport.abort()

    async def send(self, method: str, path: str, headers: _Headers, body: bytes) -> None:
        """Send the request and read the head of the answer. Raises UpstreamBroken."""
        lines = [f"{method} {path} HTTP/1.1", f"host: {self._host}:{self._port}", "connection: close"]
        lines += [f"{name}: {value}" for name, value in headers]
        lines.append(f"content-length: {len(body)}\r\n\r\n")
        try:
            async with asyncio.timeout(self._connect_s_max):
                self._reader, self._writer = await asyncio.open_connection(
                    self._host, self._port, limit=_HEAD_BYTES_MAX
                )
            self._writer.write("\r\n".join(lines).encode("latin-1") + body)
            head = await self._reader.readuntil(b"\r\n\r\n")
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as err:
            raise UpstreamBroken(f"front: {self.url} does not answer ({err or type(err).__name__})") from err
        status_line, *rows = head[:-4].decode("latin-1").split("\r\n")
        version, _, rest = status_line.partition(" ")
        self.status = self._number(rest[:3] if version.startswith("HTTP/1.") else status_line[:40])
        for row in rows:
            name, _, value = row.partition(":")
            self.headers[name.strip().lower()] = value.strip()

    async def parts(self) -> AsyncIterator[bytes]:
        """The body as it arrives, all that is there at a time. Raises UpstreamBroken where it ends too early."""
        length = self.headers.get("content-length")
        if self.headers.get("transfer-encoding", "").lower() == "chunked":
            chunks = _Chunks()
            while not chunks.complete:
                data = chunks.feed(await self._read())
                if chunks.broken:
                    raise UpstreamBroken(f"front: {self.url} sent a chunk of size {chunks.broken!r}")
                if data:
                    yield data
        elif length is not None:
            left = self._number(length)
            while left > 0:
                data = await self._read()
                left -= len(data)
                yield data
        else:
            assert self._reader is not None, "front: a body before its request"
            while data := await self._reader.read(_READ_BYTES):
                yield data

    def _number(self, text: str) -> int:
        try:
            return int(text)
        except ValueError as err:
            raise UpstreamBroken(f"front: {self.url} sent {text!r} where HTTP has a number") from err

    async def _read(self) -> bytes:
        assert self._reader is not None, "front: a body before its request"
        try:
            data = await self._reader.read(_READ_BYTES)
        except OSError as err:
            raise UpstreamBroken(f"front: {self.url} broke off its answer ({err})") from err
        if not data:
            raise UpstreamBroken(f"front: {self.url} broke off its answer")
        return data

    async def body(self) -> bytes:
        """The whole body. Raises UpstreamBroken."""
        return b"".join([part async for part in self.parts()])


class _Chunks:
    """Takes the chunked encoding off a body (RFC 9112, section 7.1)."""

    __slots__ = ("_left", "_rest", "broken", "complete")

    def __init__(self) -> None:
        self._rest = b""
        self._left = 0
        """Bytes of the current chunk that are still to come, its line end included."""
        self.complete = False
        self.broken = b""
        """The chunk size that was none."""

    def feed(self, data: bytes) -> bytes:
        """The body bytes in `data`."""
        data = self._rest + data if self._rest else data
        out: list[bytes] = []
        at = 0
        while at < len(data):
            if self._left > 0:
                take = min(self._left, len(data) - at)
                out.append(data[at : at + min(take, max(self._left - 2, 0))])
                self._left -= take
                at += take
                continue
            end = data.find(b"\r\n", at)
            if end < 0:
                break
            text = data[at:end].split(b";", 1)[0].strip()
            if not text or text.strip(_HEX):
                self.broken = text or b"?"
                break
            size = int(text, 16)
            at = end + 2
            if size == 0:
                self.complete = True
                at = len(data)
                break
            self._left = size + 2
        self._rest = data[at:]
        return b"".join(out)


async def fetch(
    url: str, method: str, path: str, *, headers: _Headers = (), body: bytes = b"", s_max: float
) -> tuple[int, bytes]:
    """Status and body of one small request. Raises UpstreamBroken, also where it takes longer than `s_max` seconds."""
    try:
        async with asyncio.timeout(s_max), Upstream(url, connect_s_max=s_max) as upstream:
            await upstream.send(method, path, headers, body)
            return upstream.status, await upstream.body()
    except TimeoutError as err:
        raise UpstreamBroken(f"front: {url}{path} did not answer within {s_max} s") from err
