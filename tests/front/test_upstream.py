"""The router's own HTTP client reads what servers send, however it is cut, and notices what is broken."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from serinus.front.upstream import Upstream, UpstreamBroken, fetch


async def others() -> None:
    """Let the server's side end."""
    await asyncio.gather(*(task for task in asyncio.all_tasks() if task is not asyncio.current_task()))


def ask(*answer: bytes) -> tuple[int, bytes]:
    """What `fetch` makes of a server that sends these pieces one by one and hangs up."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for piece in answer:
            writer.write(piece)
            await writer.drain()
        writer.close()

    async def run() -> tuple[int, bytes]:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            return await fetch(f"http://127.0.0.1:{port}", "GET", "/x", s_max=5)

    return asyncio.run(run())


def test_bodies_have_a_length_are_chunked_or_end_with_the_connection() -> None:
    assert ask(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi") == (200, b"hi")
    assert ask(b"HTTP/1.1 404 No\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n") == (404, b"hi")
    assert ask(b"HTTP/1.0 503 Busy\r\n\r\nhi there") == (503, b"hi there")
    assert ask(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n") == (200, b"")


def test_a_name_that_is_no_ascii_is_looked_up_and_said_as_dns_has_it() -> None:
    """One that there is not is a server that does not answer."""
    upstream = Upstream("http://日本.invalid:1", connect_s_max=5.0)
    assert (upstream._host, upstream._authority) == ("xn--wgv71a.invalid", "xn--wgv71a.invalid:1")


@pytest.mark.parametrize("extension", [b"", b";a=b"])
def test_a_chunked_answer_comes_out_whole_wherever_it_is_cut(extension: bytes) -> None:
    chunks = b"".join(b"%x%s\r\n%s\r\n" % (size, extension, b"y" * size) for size in (1, 30, 16))
    whole = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"
    assert ask(*(bytes([byte]) for byte in whole)) == (200, b"y" * 47)
    for cut in range(1, len(whole)):
        assert ask(whole[:cut], whole[cut:]) == (200, b"y" * 47)


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 200 OK\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhi",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n9\r\nhi",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhi\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\nhi\r\n",
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 many OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n",
    ],
)
def test_an_answer_that_breaks_off_or_is_none_is_an_error(answer: bytes) -> None:
    with pytest.raises(UpstreamBroken):
        ask(answer)


def test_no_server_and_a_silent_server_are_errors() -> None:
    async def refused() -> None:
        await fetch("http://127.0.0.1:1", "GET", "/", s_max=5)

    async def mute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            await reader.read()
        writer.close()

    async def silent() -> None:
        server = await asyncio.start_server(mute, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            try:
                await fetch(f"http://127.0.0.1:{port}", "GET", "/", s_max=0.05)
            finally:
                await others()

    for case in (refused, silent):
        with pytest.raises(UpstreamBroken, match="front: http"):
            asyncio.run(case())


def test_an_aborted_request_wakes_its_reader() -> None:
    async def run() -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhi")
            with suppress(ConnectionError):
                await reader.read()
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            upstream = Upstream(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", connect_s_max=5)
            await upstream.send("GET", "/", [], b"")
            parts = upstream.parts()
            assert await anext(parts) == b"hi"
            upstream.abort()
            with pytest.raises(UpstreamBroken):
                await anext(parts)
            await others()

    asyncio.run(run())
