"""HTTP connections: what leaves in one write, how many there may be, how long each may keep the server waiting."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from typing import Any

import h11
import httpx
import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

from serinus.core import descriptors
from serinus.core.addresses import http_url
from serinus.front import RouterSettings, bind, create_router_app, router_limits
from serinus.front.connection import ConnectionLimits, ConnectionTable, HttpConnection
from serinus.front.exchange import ClientGone, HttpExchange
from serinus.front.metrics import HttpMetrics
from serinus.front.server import engine_limits
from serinus.front.upstream import fetch
from serinus.testing.running_front import RunningFront, serving

POST = b"POST /x HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}"


class Wire(asyncio.Transport):
    """A transport that keeps what is written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.written = asyncio.Event()
        self.closed = self.aborted = self.eof = False

    def write(self, data: Any) -> None:
        if data:
            self.writes.append(bytes(data))
            self.written.set()

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = self.aborted = True

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.eof = True

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


Handler = Callable[[HttpExchange], Coroutine[Any, Any, None]]
LIMITS = ConnectionLimits(count_max=100, idle_s_max=75, head_s_max=20, body_s_max=60, unread_s_max=300)


class Listener:
    """Connections before an app of one handler."""

    def __init__(self, handler: Handler, limits: ConnectionLimits = LIMITS) -> None:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await handler(HttpExchange(scope, receive, send, body_bytes_max=1 << 20))

        self.config = uvicorn.Config(app, lifespan="off", ws="none", log_config=None, access_log=False)
        self.table = ConnectionTable(limits)
        self.metrics = HttpMetrics(engine="e", role="unified")
        self.metrics.watch_connections(self.table)

    def accept(self) -> tuple[HttpConnection, Wire]:
        connection, wire = HttpConnection(self.config, self.table, {}), Wire()
        connection.connection_made(wire)
        return connection, wire

    def counted(self, stem: str) -> float:
        """A metric of the connections."""
        where = {"engine": "e", "role": "unified", "rank": "front"}
        value = self.metrics.registry.get_sample_value(f"serinus:http_connections{stem}", where)
        assert value is not None, stem
        return value

    def sweep(self, seconds: float) -> None:
        """Look at all connections as if `seconds` had passed."""
        self.table.sweep(asyncio.get_running_loop().time() + seconds)


def connected(handler: Handler) -> tuple[HttpConnection, Wire]:
    return Listener(handler).accept()


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


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_a_streamed_answer_is_framed_as_its_client_reads_it(version: str) -> None:
    pieces = [b"data: 1\n\n", b": still here\n\n", b"x" * 70_000, b"data: 2\n\n"]

    async def handler(exchange: HttpExchange) -> None:
        await exchange.open_stream()
        for piece in pieces:
            await exchange.push(piece)
        await exchange.end(b"data: [DONE]\n\n")

    async def scene() -> bytes:
        connection, wire = connected(handler)
        connection.data_received(POST.replace(b"HTTP/1.1", f"HTTP/{version}".encode()))
        await until_idle(connection)
        return b"".join(wire.writes)

    reader = h11.Connection(h11.CLIENT)
    reader.send(h11.Request(method="POST", target="/x", headers=[("host", "x"), ("content-length", "0")]))
    reader.send(h11.EndOfMessage())
    reader.receive_data(asyncio.run(scene()))
    reader.receive_data(b"")
    events = list(until_ended(reader))
    body = b"".join(bytes(event.data) for event in events if isinstance(event, h11.Data))
    assert body == b"".join(pieces) + b"data: [DONE]\n\n"
    assert isinstance(events[-1], h11.EndOfMessage)


def until_ended(reader: h11.Connection) -> Iterator[object]:
    """What comes up to the end of a message."""
    while True:
        event = reader.next_event()
        yield event
        if isinstance(event, h11.EndOfMessage):
            return


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


# ---- limits ---------------------------------------------------------------------------------------------------------


async def answer_body(exchange: HttpExchange) -> None:
    await exchange.json(await exchange.body())


def test_a_connection_without_a_request_is_closed() -> None:
    async def story() -> None:
        listener = Listener(answer_body)
        (_, silent), (kept, asked) = listener.accept(), listener.accept()
        kept.data_received(POST)
        await until_idle(kept)
        listener.sweep(40)  # as much time again may pass in this test itself
        assert not silent.closed
        assert not asked.closed
        listener.sweep(76)
        assert silent.closed
        assert silent.writes == []
        assert asked.closed
        assert listener.counted("_timed_out_total") == 2

    asyncio.run(story())


@pytest.mark.parametrize(("sent", "limit"), [(POST[:20], 20), (POST[:-1], 60)])
def test_a_request_that_does_not_arrive_is_answered_408(sent: bytes, limit: int) -> None:
    async def story() -> None:
        seen = []

        async def handler(exchange: HttpExchange) -> None:
            try:
                await exchange.body()
            except ClientGone as err:
                seen.append(err)

        listener = Listener(handler)
        connection, wire = listener.accept()
        connection.data_received(sent)
        listener.sweep(limit / 2)
        assert not wire.closed
        listener.sweep(limit + 1)
        assert wire.closed
        assert b"".join(wire.writes).startswith(b"HTTP/1.1 408 Request Timeout\r\n")
        connection.connection_lost(None)
        await until_idle(connection)
        assert len(seen) == (limit == 60)

    asyncio.run(story())


def test_bytes_of_a_head_that_come_one_by_one_win_no_time() -> None:
    async def story() -> None:
        listener = Listener(answer_body)
        connection, wire = listener.accept()
        began = connection._since
        for byte in POST[:20]:
            connection.data_received(bytes([byte]))
        listener.table.sweep(began + 21)
        assert wire.closed

    asyncio.run(story())


def test_a_request_that_is_being_answered_has_all_the_time_it_takes() -> None:
    async def story() -> None:
        go = asyncio.Event()

        async def handler(exchange: HttpExchange) -> None:
            await exchange.body()
            await go.wait()
            await exchange.text("at last")

        listener = Listener(handler)
        connection, wire = listener.accept()
        connection.data_received(POST)
        listener.sweep(1e6)
        assert not wire.closed
        go.set()
        await until_idle(connection)
        assert wire.writes[0].endswith(b"at last")

    asyncio.run(story())


def test_a_client_that_reads_nothing_of_its_answer_is_cut_off() -> None:
    async def story() -> None:
        paused = asyncio.Event()

        async def handler(exchange: HttpExchange) -> None:
            await exchange.body()
            await exchange.open_stream()
            await paused.wait()
            await exchange.push(b"data: x\n\n")
            await exchange.end()

        listener = Listener(handler)
        connection, wire = listener.accept()
        connection.data_received(POST)
        await wire.written.wait()
        connection.pause_writing()
        paused.set()
        listener.sweep(150)
        assert not wire.aborted
        listener.sweep(301)
        assert wire.aborted
        connection.connection_lost(None)
        await until_idle(connection)

    asyncio.run(story())


def test_the_connection_that_is_one_too_many_is_told_so(caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        go = asyncio.Event()

        async def handler(exchange: HttpExchange) -> None:
            await exchange.body()
            await go.wait()
            await exchange.text("")

        listener = Listener(handler, replace(LIMITS, count_max=2))
        busy = [listener.accept() for _ in range(2)]
        for connection, _ in busy:
            connection.data_received(POST)
        refused = [listener.accept() for _ in range(100)]
        for connection, wire in refused:
            head, _, body = b"".join(wire.writes).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
            assert json.loads(body)["error"]["type"] == "overloaded_error"
            connection.data_received(POST)
        assert [wire.closed for _, wire in refused] == [False] * 64 + [True] * 36, "some get time to read it"
        listener.sweep(1.5)
        assert all(wire.closed for _, wire in refused)
        for connection, _ in refused:
            connection.connection_lost(None)
        assert not listener.table.leaving
        assert (listener.counted("_refused_total"), listener.counted("")) == (100, 2)
        go.set()
        for connection, wire in busy:
            await until_idle(connection)
            assert wire.writes[0].startswith(b"HTTP/1.1 200")

    with caplog.at_level("WARNING", logger="serinus"):
        asyncio.run(story())
    assert len(caplog.records) == 1, caplog.text


def test_idle_connections_give_way_to_new_ones() -> None:
    async def story() -> None:
        listener = Listener(answer_body, replace(LIMITS, count_max=16))
        idle = [listener.accept() for _ in range(16)]
        for connection, _ in idle:
            connection._since -= 10
        _, wire = listener.accept()
        assert wire.writes == []
        assert sum(old.closed for _, old in idle) == 2
        assert (listener.counted("_refused_total"), listener.counted("")) == (0, 15)

    asyncio.run(story())


def test_the_soft_limit_of_descriptors_is_raised_and_never_lowered(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"now": (1024, 4096)}
    monkeypatch.setattr(descriptors.resource, "getrlimit", lambda _: limits["now"])
    monkeypatch.setattr(descriptors.resource, "setrlimit", lambda _, pair: limits.update(now=pair))
    assert descriptors.raise_descriptor_limit() == 4096
    assert limits["now"] == (4096, 4096)
    limits["now"] = (100_000, 200_000)
    assert descriptors.raise_descriptor_limit() == 100_000
    limits["now"] = (1024, descriptors.resource.RLIM_INFINITY)
    assert descriptors.raise_descriptor_limit() == 65_536
    limits["now"] = (1024, 1024)
    assert engine_limits().count_max == 768
    assert router_limits().count_max == 384


# ---- IPv6 -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_engine_and_its_router_speak_ipv6(front: RunningFront) -> None:
    inner = create_router_app(RouterSettings(decode_urls=(front.url,), poll_s=0.02))
    with serving(inner, host="::1") as engine:  # to the outer router the inner one is an engine
        url = http_url("::1", engine.port)
        while not inner.state.router.fleet.decode[0].alive:
            httpx.get(f"{url}/server_info")
        status, body = asyncio.run(fetch(url, "GET", "/v1/models", s_max=30))
        assert (status, json.loads(body)["data"][0]["id"]) == (200, "canary")
        outer = create_router_app(RouterSettings(decode_urls=(url,), poll_s=0.02))
        with serving(outer, host="[::1]") as router:
            url = http_url("::1", router.port)
            while not outer.state.router.fleet.decode[0].alive:
                httpx.get(f"{url}/server_info")
            answer = httpx.post(f"{url}/v1/completions", json={"prompt": "x", "max_tokens": 1})
            assert answer.status_code == 200
