"""One HTTP connection: uvicorn's, with head and body of an answer in one write.

Knows nothing of requests; the server makes one for each connection it accepts.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

__all__ = ["HttpConnection"]

_JOINED_BYTES_MAX = 64 << 10
"""A longer body is written after its head: copying it would cost more than the second write."""


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


class HttpConnection(H11Protocol):
    """One connection of an HttpServer."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(_JoiningTransport(transport, self.loop))
