"""HTTP connections: what leaves in one write, without waiting for the other side."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from serinus.front import bind
from serinus.front.connection import HttpConnection
from serinus.front.exchange import HttpExchange
from serinus.testing.running_front import RunningFront

POST = b"POST /x HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}"


class Wire(asyncio.Transport):
    """A transport that keeps what is written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.written = asyncio.Event()
        self.closed = False

    def write(self, data: Any) -> None:
        if data:
            self.writes.append(bytes(data))
            self.written.set()

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


def connected(handler: Callable[[HttpExchange], Coroutine[Any, Any, None]]) -> tuple[HttpConnection, Wire]:
    """A connection before an app of one handler."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await handler(HttpExchange(scope, receive, send, body_bytes_max=1 << 20))

    config = uvicorn.Config(app, lifespan="off", ws="none", log_config=None, access_log=False)
    connection, wire = HttpConnection(config, ServerState(), {}), Wire()
    connection.connection_made(wire)
    return connection, wire


async def until_idle(connection: HttpConnection) -> None:
    await asyncio.gather(*connection.tasks)


def test_an_answer_leaves_with_its_head_in_one_write() -> None:
    async def story() -> None:
        connection, wire = connected(lambda exchange: exchange.json({"a": 1}))
        for count in (1, 2):
            connection.data_received(POST)
            await until_idle(connection)
            assert len(wire.writes) == count, wire.writes
            assert wire.writes[-1].startswith(b"HTTP/1.1 200 OK\r\n")
            assert wire.writes[-1].endswith(b'\r\n\r\n{"a":1}')

    asyncio.run(story())


def test_a_long_body_is_not_copied_behind_its_head() -> None:
    body = b"x" * (1 << 20)

    async def story() -> None:
        connection, wire = connected(lambda exchange: exchange.json(body))
        connection.data_received(POST)
        await until_idle(connection)
        assert len(wire.writes) == 2
        assert wire.writes[1] == body

    asyncio.run(story())


def test_a_stream_without_news_sends_its_head_at_once() -> None:
    async def story() -> None:
        go = asyncio.Event()

        async def handler(exchange: HttpExchange) -> None:
            await exchange.open_stream()
            await go.wait()
            await exchange.push(b"data: 1\n\n")
            await exchange.end()

        connection, wire = connected(handler)
        connection.data_received(POST)
        await wire.written.wait()
        assert wire.writes[0].endswith(b"\r\n\r\n")
        go.set()
        await until_idle(connection)
        assert b"data: 1\n\n" in wire.writes[1]

    asyncio.run(story())


def test_a_connection_that_closes_has_sent_its_answer() -> None:
    async def story() -> None:
        connection, wire = connected(lambda exchange: exchange.text("bye"))
        connection.data_received(POST.replace(b"host: x", b"host: x\r\nconnection: close"))
        await until_idle(connection)
        assert wire.closed
        assert b"".join(wire.writes).endswith(b"bye")

    asyncio.run(story())


@pytest.mark.slow
def test_no_answer_waits_for_the_acknowledgement_of_the_one_before(front: RunningFront) -> None:
    assert front.http.get("/health").status_code == 200
    accepted = [one.transport.get_extra_info("socket") for one in front.server.server_state.connections]
    assert accepted
    assert all(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for sock in accepted)


def test_a_listening_socket_names_its_protocol() -> None:
    with bind("127.0.0.1", 0) as sock:
        assert sock.proto == socket.IPPROTO_TCP
