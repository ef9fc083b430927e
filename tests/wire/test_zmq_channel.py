"""ZmqChannel: frames between sockets, and the death of a process noticed at once."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import zmq

from serinus.core.clock import Clock, ManualClock, WallClock
from serinus.core.errors import ConfigError
from serinus.wire import Arrived, ChannelEvent, Gone, ZmqChannel, wait_any
from tests.children import children

CLOCK = WallClock()

ECHO = """
import sys
from serinus.wire import Arrived, ZmqChannel
channel = ZmqChannel(sys.argv[2]) if sys.argv[1] == "bind" else ZmqChannel()
if sys.argv[1] == "connect":
    channel.connect("parent", sys.argv[2])
    channel.send("parent", [b"hello"])
print(channel.address, flush=True)
while True:
    for event in channel.poll(1.0):
        if isinstance(event, Arrived):
            channel.send(event.peer, event.parts)
"""


@pytest.fixture
def channels() -> Iterator[Callable[..., ZmqChannel]]:
    made: list[ZmqChannel] = []

    def make(bind: str = "", silence_s: float = 0.0, clock: Clock | None = None) -> ZmqChannel:
        made.append(ZmqChannel(bind, silence_s=silence_s, clock=clock))
        return made[-1]

    yield make
    for channel in made:
        channel.close()


@pytest.fixture
def echo() -> Iterator[Callable[[str, str], tuple[subprocess.Popen[str], str]]]:
    """Start a process that sends everything back; returns it and its address."""
    with children() as start:
        yield lambda how, address: start("-c", ECHO, how, address)


def until(channel: ZmqChannel, count: int = 1, seconds: float = 60.0) -> list[ChannelEvent]:
    """The next `count` events."""
    events: list[ChannelEvent] = []
    end = CLOCK.now() + seconds
    while len(events) < count:
        assert CLOCK.now() < end, f"{len(events)} of {count} events within {seconds} s: {events}"
        events.extend(channel.poll(0.2))
    return events


def test_frames_travel_both_ways_and_keep_their_parts(channels: Callable[..., ZmqChannel], tmp_path: Path) -> None:
    for address in ("tcp://127.0.0.1:0", f"ipc://{tmp_path}/s"):
        server, client = channels(address), channels()
        client.connect("server", server.address)
        client.send("server", [b"hello"])
        wait_any([server], 5.0)
        (hello,) = until(server)
        server.trust(hello.peer)
        big = np.arange(1 << 20, dtype=np.uint8)
        client.send("server", [b"head", big.data])
        (event,) = until(server)
        assert isinstance(event, Arrived)
        assert [bytes(part) for part in event.parts] == [b"head", big.tobytes()]
        frames = [[b"back"], [b"head", b"payload"], [b"head", big.data], [big.data, b"payload"], [big.data, big.data]]
        for frame in frames:
            server.send(event.peer, frame)
        for frame, answer in zip(frames, until(client, len(frames)), strict=True):
            assert isinstance(answer, Arrived)
            assert (answer.peer, [bytes(part) for part in answer.parts]) == ("server", [bytes(part) for part in frame])


def test_an_address_in_use_is_a_config_error(channels: Callable[..., ZmqChannel]) -> None:
    server = channels("tcp://127.0.0.1:0")
    with pytest.raises(ConfigError, match="cannot listen"):
        ZmqChannel(server.address)


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:1", "ipc:///nowhere/at/all", "nonsense"])
def test_a_refused_connection_is_gone_soon(channels: Callable[..., ZmqChannel], address: str) -> None:
    client = channels()
    client.connect("nobody", address)
    (event,) = until(client)
    assert isinstance(event, Gone)
    assert event.peer == "nobody"
    assert "refused" in event.reason or "cannot connect" in event.reason, "nobody waited for it in vain"
    client.send("nobody", [b"no effect"])


def test_a_name_that_is_not_reached_by_ipv4_is_tried_by_ipv6_and_by_ipv4_again(
    channels: Callable[..., ZmqChannel],
) -> None:
    client = channels()
    tried = []
    for attempt in range(4):
        client.connect(f"s#{attempt}", "tcp://localhost:1")
        tried.append(client.sockets()[0].getsockopt(zmq.IPV6))
        if attempt % 2:
            client.disconnect(f"s#{attempt}")  # as where no answer comes: zmq says nothing of a name without an address
        else:
            assert isinstance(until(client)[0], Gone)
    assert tried == [0, 1, 0, 1]


def test_a_name_that_is_tried_by_ipv6_is_reached_by_ipv4_where_it_has_no_other_address(
    channels: Callable[..., ZmqChannel],
) -> None:
    first, client = channels("tcp://127.0.0.1:0"), channels()
    address = first.address.replace("127.0.0.1", "localhost")
    first.close()
    client.connect("s#1", address)
    assert isinstance(until(client)[0], Gone)
    server = channels(first.address)
    client.connect("s#2", address)
    client.send("s#2", [b"ping"])
    while not (came := server.poll(1.0)):
        if client.poll(0.0):  # this machine's localhost is ::1 as well
            client.connect("s#3", address)
            client.send("s#3", [b"ping"])
    assert isinstance(came[0], Arrived)


@pytest.mark.slow
def test_a_killed_server_is_gone_though_no_silence_is_too_long(
    channels: Callable[..., ZmqChannel], echo: Callable[[str, str], tuple[subprocess.Popen[str], str]]
) -> None:
    """A channel without `silence_s` waits for ever for a peer that says nothing."""
    child, address = echo("bind", "tcp://127.0.0.1:0")
    client = channels()
    client.connect("s#1", address)
    client.send("s#1", [b"ping"])
    assert isinstance(until(client)[0], Arrived)
    os.kill(child.pid, signal.SIGKILL)
    assert until(client) == [Gone(peer="s#1", reason="the connection broke")]
    _, again = echo("bind", address)
    client.connect("s#2", again)
    client.send("s#2", [b"ping"])
    (event,) = until(client)
    assert isinstance(event, Arrived)
    assert event.peer == "s#2", "a new life of the same address is a new peer"


@pytest.mark.slow
def test_a_killed_client_is_gone_and_the_others_stay(
    channels: Callable[..., ZmqChannel], echo: Callable[[str, str], tuple[subprocess.Popen[str], str]]
) -> None:
    server = channels("tcp://127.0.0.1:0")
    child, _ = echo("connect", server.address)
    (first,) = until(server)
    echo("connect", server.address)
    (second,) = until(server)
    os.kill(child.pid, signal.SIGKILL)
    (event,) = until(server)
    assert isinstance(event, Gone)
    assert event.peer == first.peer
    server.send(second.peer, [b"still there?"])
    (answer,) = until(server)
    assert isinstance(answer, Arrived)
    assert (answer.peer, bytes(answer.parts[0])) == (second.peer, b"still there?")


@pytest.mark.slow
def test_dozens_of_connections_come_and_go_without_mixing_names(channels: Callable[..., ZmqChannel]) -> None:
    server = channels("tcp://127.0.0.1:0")
    alive = channels()
    alive.connect("s", server.address)
    alive.send("s", [b"I stay"])
    (stays,) = until(server)
    seen = {stays.peer}
    for life in range(40):
        visitor = ZmqChannel()
        visitor.connect("s", server.address)
        visitor.send("s", [b"%d" % life])
        (came,) = until(server)
        assert isinstance(came, Arrived)
        assert came.peer not in seen
        seen.add(came.peer)
        visitor.close()
        assert until(server) == [Gone(peer=came.peer, reason="the connection broke")]
    server.send(stays.peer, [b"you?"])
    (event,) = until(alive)
    assert isinstance(event, Arrived)
    assert bytes(event.parts[0]) == b"you?", "probes are not delivered"


def test_what_is_sent_over_a_connection_that_broke_just_now_is_dropped_and_the_end_is_told(
    channels: Callable[..., ZmqChannel],
) -> None:
    server, client = channels("tcp://127.0.0.1:0"), channels()
    client.connect("server", server.address)
    client.send("server", [b"hello"])
    while not server.poll(5.0):
        pass
    server.close()
    wait_any([client], 5.0)  # the news is there, and not yet taken
    for _ in range(1000):
        client.send("server", [b"more", b"parts"])
    ends: list[ChannelEvent] = []
    while not ends:
        ends = client.poll(5.0)
    assert [type(end) for end in ends] == [Gone]


def test_a_newcomer_has_its_time_only_while_the_listener_is_called(channels: Callable[..., ZmqChannel]) -> None:
    """An engine calls it once a step, and each of the answers of a greeting waits for that."""
    clock = ManualClock()
    server = channels("tcp://127.0.0.1:0", clock=clock)
    greeting = (b"\xff" + bytes(7) + b"\x01\x7f\x03\x01NULL").ljust(64, b"\0")
    ready = b"\x04\x1c\x05READY\x0bSocket-Type\0\0\0\x06DEALER"
    host, _, port = server.address.removeprefix("tcp://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=0.01) as raw:
        for said, answer_bytes in ((b"", 64), (greeting, len(ready))):
            raw.sendall(said)
            while answer_bytes:
                assert not server.poll(0.1)
                assert not server.cut_off
                with contextlib.suppress(TimeoutError):
                    answer_bytes -= len(raw.recv(answer_bytes))
            clock.advance(40.0)
        raw.sendall(ready + b"\0\x05hello")
        (hello,) = until(server)
        assert isinstance(hello, Arrived)
        assert not server.cut_off
        for _ in range(10):
            clock.advance(0.9)
            server.poll(0.0)
        assert server.cut_off == {"slow": 1}, "it says hello and is not trusted"


@pytest.mark.slow
def test_a_stopped_process_is_gone_after_the_longest_silence_and_a_busy_one_is_not(
    channels: Callable[..., ZmqChannel], echo: Callable[[str, str], tuple[subprocess.Popen[str], str]], tmp_path: Path
) -> None:
    server = channels(f"ipc://{tmp_path}/s", silence_s=1.0)
    child, _ = echo("connect", server.address)
    (first,) = until(server)
    watching = channels(silence_s=1.0)
    other, address = echo("bind", "tcp://127.0.0.1:0")
    watching.connect("other", address)
    watching.send("other", [b"ping"])
    assert isinstance(until(watching)[0], Arrived)
    assert not [*server.poll(1.3), *watching.poll(0.0)], "who says nothing and lives is there"
    for pid in (child.pid, other.pid):
        os.kill(pid, signal.SIGSTOP)
    (gone,) = until(server)
    assert isinstance(gone, Gone)
    assert gone.peer == first.peer
    assert until(watching) == [Gone(peer="other", reason="the connection broke")]
