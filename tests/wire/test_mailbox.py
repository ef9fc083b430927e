"""Mailbox: messages arrive once and in order; a peer of many bad frames is cut off."""

from __future__ import annotations

import zlib

import pytest

from serinus.core.clock import ManualClock
from serinus.core.errors import ConfigError
from serinus.wire import Arrived, Gone, LocalChannel, LocalHub, Mailbox, Parts, PeerMessage, decode, encode
from serinus.wire.codec import HEAD_BYTES
from serinus.wire.mailbox import BAD_FRAMES_MAX
from serinus.wire.messages import Ack, DoneOk, Keepalive


class Pair:
    """A mailbox that listens, one that connects to it, and the raw channel to do harm with."""

    def __init__(self) -> None:
        self.hub = LocalHub()
        self.clock = ManualClock(1.0)
        self.server_channel = self.hub.channel("local://server")
        self.server = Mailbox(self.server_channel, incarnation=11, clock=self.clock)
        self.client_channel = self.hub.channel()
        self.client = Mailbox(self.client_channel, incarnation=22, clock=self.clock)
        self.client.connect("s", "local://server")

    def raw(self) -> LocalChannel:
        channel = self.hub.channel()
        channel.connect("s", "local://server")
        return channel


def messages_of(mailbox: Mailbox) -> list[PeerMessage]:
    return [item for item in mailbox.poll(0) if isinstance(item, PeerMessage)]


def test_a_message_arrives_with_its_sender_and_payload() -> None:
    pair = Pair()
    pair.client.send("s", DoneOk(xid="x", grant=3), b"bytes")
    (received,) = messages_of(pair.server)
    assert (received.message, received.incarnation, bytes(received.payload)) == (DoneOk(xid="x", grant=3), 22, b"bytes")
    pair.server.send(received.peer, Keepalive(load=4))
    (answer,) = messages_of(pair.client)
    assert (answer.peer, answer.message, answer.incarnation) == ("s", Keepalive(load=4), 11)


def test_a_connection_to_an_address_without_a_listener_is_gone() -> None:
    pair = Pair()
    pair.client.connect("t", "local://nobody")
    assert [item for item in pair.client.poll(0) if isinstance(item, Gone)] == [
        Gone(peer="t", reason="no channel listens at local://nobody")
    ]


def test_the_end_of_one_side_is_news_to_the_other_once() -> None:
    pair = Pair()
    pair.client.send("s", Keepalive())
    peer = messages_of(pair.server)[0].peer
    pair.client.close()
    assert pair.server.poll(0) == [Gone(peer=peer, reason="the other side closed the connection")]
    assert pair.server.poll(0) == []
    pair.server.send(peer, Keepalive())  # no effect, no error


def test_an_address_is_bound_once() -> None:
    pair = Pair()
    with pytest.raises(ConfigError, match="in use"):
        pair.hub.channel("local://server")


def test_bad_frames_change_a_counter_and_then_end_the_connection() -> None:
    pair = Pair()
    bad = pair.raw()
    pair.client.send("s", Keepalive(load=1))
    assert len(messages_of(pair.server)) == 1
    for _ in range(BAD_FRAMES_MAX - 1):
        bad.send("s", [b"no frame of ours, certainly not, far too long for a short one"])
    assert pair.server.poll(0) == []
    assert pair.server.rejects["magic"] == BAD_FRAMES_MAX - 1
    bad.send("s", [b"short"])
    (gone,) = pair.server.poll(0)
    assert isinstance(gone, Gone)
    assert "bad frames" in gone.reason
    pair.client.send("s", Keepalive(load=2))
    assert [received.message for received in messages_of(pair.server)] == [Keepalive(load=2)], "others are not touched"


@pytest.mark.parametrize("version", [0, 1], ids=["bad frames", "another version"])
def test_what_came_together_with_the_frame_that_cut_its_sender_is_dropped(version: int) -> None:
    """Else it would be a new peer of the same name, which never ends: its connection has."""
    pair = Pair()
    raw, frame = pair.raw(), encode(Keepalive(load=1), incarnation=5, seq=1)
    for _ in range(1 if version else BAD_FRAMES_MAX):
        raw.send("s", of_version(frame[0][4] + 1, frame) if version else [b"short"])
    raw.send("s", frame)
    raw.send("s", of_version(frame[0][4] + 1, frame))
    (gone,) = pair.server.poll(0)
    assert isinstance(gone, Gone)
    assert not pair.server._lines
    assert pair.server.poll(0) == []


def test_a_frame_of_another_incarnation_is_no_part_of_the_stream() -> None:
    pair = Pair()
    raw = pair.raw()
    raw.send("s", encode(Keepalive(load=1), 5, 1))
    raw.send("s", encode(Keepalive(load=2), 6, 2))
    raw.send("s", encode(Keepalive(load=3), 5, 2))
    assert [received.message for received in messages_of(pair.server)] == [Keepalive(load=1), Keepalive(load=3)]
    assert pair.server.rejects == {"incarnation": 1}


def test_a_probe_says_nothing() -> None:
    pair = Pair()
    pair.raw().send("s", encode(Ack()))
    assert pair.server.poll(0) == []
    assert not pair.server.rejects


def test_frames_ahead_of_their_turn_are_kept_as_far_as_the_peer_is_known() -> None:
    """None of a stranger, a few of one that was greeted, pages of one that we connected to."""
    for trusted, kept in ((False, ()), (True, (2, 3, 4))):
        pair = Pair()
        raw = pair.raw()
        raw.send("s", encode(Keepalive(), 5, 1))
        (first,) = messages_of(pair.server)
        if trusted:
            pair.server.trust(first.peer)
        payload = bytes(300 << 10)
        for seq in (3, 4, 5, 6, 2):
            raw.send("s", encode(DoneOk(xid="x", grant=seq), 5, seq, payload if seq > 2 else b""))
        found = [received.message for received in messages_of(pair.server)]
        assert found == [DoneOk(xid="x", grant=seq) for seq in kept or (2,)] + [DoneOk(xid="x", grant=5)] * trusted


def test_pages_ahead_of_their_turn_are_kept_of_a_peer_that_we_connected_to() -> None:
    pair = Pair()
    pair.client.send("s", Keepalive())
    (first,) = messages_of(pair.server)
    payload = bytes(24 << 20)
    for seq in (2, 3, 4, 1):
        pair.server_channel.send(first.peer, encode(DoneOk(xid="x", grant=seq), 5, seq, payload if seq > 1 else b""))
    found = [received.message for received in messages_of(pair.client)]
    assert found == [DoneOk(xid="x", grant=seq) for seq in (1, 2, 3)], "the last one comes again"


class Forgetful(LocalChannel):
    """Loses every frame for a while."""

    deaf = False

    def send(self, peer: str, parts: Parts) -> None:
        if not self.deaf:
            super().send(peer, parts)


def test_what_was_lost_is_sent_again_when_it_goes_unacknowledged() -> None:
    hub, clock = LocalHub(), ManualClock(0.0)
    server = Mailbox(hub.channel("local://server"), incarnation=1, clock=clock)
    channel = Forgetful(hub)
    client = Mailbox(channel, incarnation=2, clock=clock, resend_s=1.0)
    client.connect("s", "local://server")
    channel.deaf = True
    client.send("s", DoneOk(xid="a", grant=1))
    channel.deaf = False
    client.send("s", DoneOk(xid="b", grant=2))
    assert messages_of(server) == [], "b waits for a"
    clock.advance(1.0)
    client.poll(0)
    assert client.resent_count == 2
    assert [received.message for received in messages_of(server)] == [
        DoneOk(xid="a", grant=1),
        DoneOk(xid="b", grant=2),
    ]


def test_frames_of_a_closed_name_are_not_delivered() -> None:
    pair = Pair()
    raw = pair.raw()
    raw.send("s", encode(Keepalive(), 5, 1))
    (event,) = pair.server_channel.poll(0)
    assert isinstance(event, Arrived)
    raw.send("s", encode(Keepalive(), 5, 2))
    pair.server_channel.disconnect(event.peer)
    assert pair.server_channel.poll(0) == []


def of_version(version: int, frame: Parts) -> Parts:
    """A frame as another version would make it, as far as can be told today: its CRC fits."""
    head = bytearray(frame[0])
    head[4] = version
    body = bytes(head[HEAD_BYTES:])
    head[HEAD_BYTES - 4 : HEAD_BYTES] = zlib.crc32(body, zlib.crc32(head[: HEAD_BYTES - 4])).to_bytes(4, "little")
    return (bytes(head), *frame[1:])


def test_a_peer_of_another_version_is_cut_at_once_and_both_sides_are_told_in_words() -> None:
    pair, ours = Pair(), encode(Keepalive(), incarnation=5, seq=1)[0][4]
    raw = pair.raw()
    raw.send("s", of_version(ours + 1, encode(Keepalive(), incarnation=5, seq=1)))
    (gone,) = pair.server.poll(0)
    assert isinstance(gone, Gone)
    assert gone.reason == f"it speaks another version of the frames: {ours + 1}, expected {ours}"
    assert pair.server.rejects == {"version": 1}
    answer, end = raw.poll(0)
    assert isinstance(answer, Arrived)  # one frame of ours, from which the other side learns the same
    assert decode(answer.parts).incarnation == 11
    assert isinstance(end, Gone)


def test_a_version_byte_that_changed_on_the_way_is_a_bad_frame_and_no_other_version() -> None:
    pair = Pair()
    raw = pair.raw()
    for _ in range(3):
        first = bytearray(encode(Keepalive(), incarnation=5, seq=1)[0])
        first[4] ^= 1
        raw.send("s", (bytes(first),))
    assert pair.server.poll(0) == []
    assert pair.server.rejects == {"crc": 3}
