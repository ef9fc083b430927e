"""A server that says what it is told to, in the loop of the test: for measuring the measurer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

__all__ = ["Asked", "chunked", "plain", "sse", "stub_server"]

Answer = list[bytes]
"""Parts of a response, written one after the other, each flushed."""


class Asked:
    """What came in: (method and path, headers, JSON body or None)."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str, Any]] = []

    def bodies(self, path: str) -> list[Any]:
        """Bodies of the requests to a path, in order."""
        return [body for line, _, body in self.requests if line.split(" ")[1] == path]


def plain(body: Any, status: int = 200) -> Answer:
    """A JSON answer with its length."""
    data = json.dumps(body).encode()
    return [f"HTTP/1.1 {status} X\r\nContent-Length: {len(data)}\r\n\r\n".encode(), data]


def chunked(parts: list[bytes]) -> Answer:
    """A streamed answer, one chunk per part."""
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    return [head, *(b"%x\r\n%s\r\n" % (len(part), part) for part in parts), b"0\r\n\r\n"]


def sse(events: list[Any]) -> list[bytes]:
    """Events as the parts of a stream, with OpenAI's end."""
    return [b"data: " + json.dumps(event).encode() + b"\n\n" for event in events] + [b"data: [DONE]\n\n"]


@asynccontextmanager
async def stub_server(answer: Callable[[str, Any], Answer]) -> AsyncIterator[tuple[int, Asked]]:
    """A server on a free port; `answer(path, body)` gives the parts of each response. Yields port and log."""
    asked = Asked()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = next((int(x.split(":")[1]) for x in head.split("\r\n") if x.lower().startswith("content-length")), 0)
        data = await reader.readexactly(length)
        body = json.loads(data) if data else None
        line = head.split("\r\n")[0]
        asked.requests.append((line, head, body))
        for part in answer(line.split(" ")[1], body):
            writer.write(part)
            await writer.drain()
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1], asked
    finally:
        server.close()
        await server.wait_closed()
