"""Any process that reaches an engine's port can send it bytes: its memory stays small, honest peers are served."""

from __future__ import annotations

import re
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from serinus.core.clock import WallClock
from serinus.core.ids import new_incarnation
from serinus.pd import Landed
from serinus.pd.clients import CLIENTS_MAX
from serinus.wire import Arrived, Mailbox, PeerMessage, ZmqChannel, encode
from serinus.wire.messages import DoneOk, Hello, HelloNo, HelloOk, Keepalive
from serinus.wire.tcp_listener import STRANGER_BYTES_MAX, STRANGER_MESSAGES_MAX, STRANGERS_MAX
from tests.pd.peer import DecodePeer, Ends

CLOCK = WallClock()
PROGRAM = str(Path(__file__).with_name("peer.py"))
FLOOD_BYTES = 192 << 20
"""What each stranger tries to send."""
GROWTH_BYTES_MAX = 48 << 20
GREETING = (b"\xff" + bytes(7) + b"\x01\x7f\x03\x01NULL").ljust(64, b"\0")
READY = b"\x04\x1c\x05READY\x0bSocket-Type\0\0\0\x06DEALER"

pytestmark = pytest.mark.slow


class Prefill:
    """A prefill engine in a process of its own."""

    def __init__(self) -> None:
        words = [sys.executable, PROGRAM, "prefill", "tcp", "tcp://127.0.0.1:0", "all"]
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()

    def peak_bytes(self) -> int:
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(r"VmHWM:\s+(\d+) kB", text)
        assert found is not None
        return int(found[1]) << 10

    def raw(self) -> socket.socket:
        host, _, port = self.address.removeprefix("tcp://").rpartition(":")
        return socket.create_connection((host, int(port)), timeout=2.0)


@contextmanager
def running() -> Iterator[Prefill]:
    engine = Prefill()
    try:
        yield engine
    finally:
        engine.process.kill()
        engine.process.wait()
        assert engine.process.stdout is not None
        engine.process.stdout.close()


@pytest.fixture(scope="module")
def prefill() -> Iterator[Prefill]:
    with running() as engine:
        yield engine


@pytest.fixture
def own_prefill() -> Iterator[Prefill]:
    """One that no other test has connected to: it may not have seen yet that those are gone."""
    with running() as engine:
        yield engine


@pytest.fixture
def honest(prefill: Prefill) -> Iterator[Callable[[str], None]]:
    """Has a prompt handed over; it must land, within bounds that only a dead engine misses."""
    peer = DecodePeer("tcp")

    def hand_over(rid: str) -> None:
        peer.ask(rid, prefill.address, 100)
        peer.until(lambda: not peer.asked)
        assert isinstance(peer.results[-1], Landed), peer.results[-1]

    hand_over("before")
    yield hand_over
    hand_over("after")
    peer.close()


def flood(raw: socket.socket, first: bytes, again: bytes) -> int:
    """Send `first`, then `again` for ever; returns how much went out until it ended: refused, or not read any more."""
    sent = 0
    try:
        raw.sendall(first)
        while sent < FLOOD_BYTES:
            raw.sendall(again)
            sent += len(again)
    except OSError:  # reset, broken, or no progress for two seconds
        return sent
    return sent


def long_part(flags: int, byte_count: int) -> bytes:
    return struct.pack(">BQ", flags | 2, byte_count)


MORE = 1
ATTACKS = {
    "no ZMTP at all": (b"", b"GET / HTTP/1.1\r\n" * 4096),
    "parts without an end": (GREETING + READY, long_part(MORE, 1 << 16) + bytes(1 << 16)),
    "a part of a gigabyte": (GREETING + READY + long_part(0, 1 << 30), bytes(1 << 16)),
    "commands without an end": (GREETING + READY, b"\x04\x07\x04PING\0\0" * 4096),
    "a command of a gigabyte": (GREETING + long_part(4, 1 << 30), bytes(1 << 16)),
    "small messages without an end": (GREETING + READY, (b"\0\x40" + bytes(64)) * 1024),
}


@pytest.mark.parametrize("how", ATTACKS)
def test_a_stranger_is_cut_off_before_it_costs_memory(
    prefill: Prefill, honest: Callable[[str], None], how: str
) -> None:
    before = prefill.peak_bytes()
    with prefill.raw() as raw:
        sent = flood(raw, *ATTACKS[how])
    assert sent < FLOOD_BYTES
    honest("meanwhile")
    assert prefill.peak_bytes() - before < GROWTH_BYTES_MAX


def test_a_stranger_that_sends_frames_ahead_of_their_turn_has_none_of_them_kept(
    prefill: Prefill, honest: Callable[[str], None]
) -> None:
    """It speaks our frames, and says nothing that could be answered: the first of its stream is missing."""
    before = prefill.peak_bytes()
    body = encode(DoneOk(xid="x", grant=1), 77, 2)[0]
    payload = bytes(STRANGER_BYTES_MAX - len(body))
    for _ in range(10):
        stranger = ZmqChannel()
        stranger.connect("p", prefill.address)
        for seq in range(2, 2 + 2 * STRANGER_MESSAGES_MAX):
            stranger.send("p", encode(DoneOk(xid="x", grant=seq), 77, seq, payload))
        end = CLOCK.now() + 60
        while not any(not isinstance(event, Arrived) for event in stranger.poll(0.05)):
            assert CLOCK.now() < end, "it was not cut off"
        stranger.close()
    honest("meanwhile")
    assert prefill.peak_bytes() - before < GROWTH_BYTES_MAX


def test_a_crowd_that_says_nothing_does_not_keep_a_newcomer_out(
    prefill: Prefill, honest: Callable[[str], None]
) -> None:
    before = prefill.peak_bytes()
    crowd = [prefill.raw() for _ in range(4 * STRANGERS_MAX)]
    newcomer = DecodePeer("tcp")
    newcomer.ask("new", prefill.address, 100)
    newcomer.until(lambda: not newcomer.asked)
    assert isinstance(newcomer.results[-1], Landed)
    newcomer.close()
    honest("meanwhile")
    ended = 0
    for raw in crowd:
        raw.settimeout(0.01)
        with raw:
            try:
                while raw.recv(4096):
                    pass
                ended += 1
            except TimeoutError:
                continue
            except ConnectionError:
                ended += 1
    assert ended >= 3 * STRANGERS_MAX
    assert prefill.peak_bytes() - before < GROWTH_BYTES_MAX


class Crowd:
    """Connections that were greeted, over one channel: a channel for each would need thousands of descriptors."""

    def __init__(self) -> None:
        self.incarnation = new_incarnation()
        self.channel = ZmqChannel()
        self.mailbox = Mailbox(self.channel, incarnation=self.incarnation, clock=CLOCK)

    def __enter__(self) -> Crowd:
        return self

    def __exit__(self, *exc: object) -> None:
        self.mailbox.close()

    def greet(self, prefill: Prefill, engine: str) -> HelloOk | HelloNo:
        """Connect as an engine of this name; the answer to its HELLO. Those that were greeted before give signs of life
        meanwhile, however long that takes."""
        settings = Ends.of("tcp", shares=False).settings(engine, 1)
        self.mailbox.connect(engine, prefill.address)
        hello = Hello(engine=engine, role="decode", layout=settings.layout, backends=settings.backends, host="")
        self.mailbox.send(engine, hello)
        while True:  # the time-out of the test ends it
            for event in self.mailbox.poll(1.0):
                assert isinstance(event, PeerMessage), event
                if isinstance(event.message, Keepalive):
                    self.mailbox.send(event.peer, event.message)
                elif isinstance(event.message, (HelloOk, HelloNo)):
                    assert event.peer == engine
                    return event.message


def test_a_greeted_peer_that_sends_frames_ahead_of_their_turn_has_few_kept(
    prefill: Prefill, honest: Callable[[str], None]
) -> None:
    """Without a cluster secret any process can be greeted."""
    with Crowd() as crowd:
        assert isinstance(crowd.greet(prefill, "d"), HelloOk)
        before = prefill.peak_bytes()
        payload = bytes(8 << 20)
        for seq in range(3, 27):
            frame = encode(DoneOk(xid="x", grant=seq), crowd.incarnation, seq, payload)
            crowd.channel.send("d", frame)
        honest("meanwhile")
    assert prefill.peak_bytes() - before < GROWTH_BYTES_MAX


def test_so_many_decode_engines_are_greeted_and_one_more_is_refused(own_prefill: Prefill) -> None:
    with Crowd() as crowd:
        for number in range(CLIENTS_MAX):
            assert isinstance(crowd.greet(own_prefill, f"d{number}"), HelloOk)
        last = crowd.greet(own_prefill, "one more")
    assert isinstance(last, HelloNo)
    assert "expected fewer" in last.reason
