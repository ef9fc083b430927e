"""ZmtpReader: messages as zmq sends them, in pieces of any size; a reject for all else; never more than allowed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serinus.core.errors import FrameError
from serinus.wire.zmtp import ZmtpReader, part_head

GREETING = (b"\xff" + bytes(7) + b"\x01\x7f\x03\x01NULL").ljust(64, b"\0")
READY = b"\x04\x1c\x05READY\x0bSocket-Type\0\0\0\x06DEALER"
Messages = list[list[bytes]]


def stream(messages: Messages) -> bytes:
    """As a DEALER sends it."""
    out = [GREETING, READY]
    for parts in messages:
        for index, part in enumerate(parts):
            out += [part_head(len(part), more=index < len(parts) - 1), part]
    return b"".join(out)


def fed(reader: ZmtpReader, data: bytes, step: int) -> Messages:
    return [
        [bytes(part) for part in parts]
        for at in range(0, len(data), step)
        for parts in reader.feed(data[at : at + step])
    ]


part = st.binary(max_size=40) | st.integers(250, 600).map(bytes)


@given(messages=st.lists(st.lists(part, min_size=1, max_size=2), max_size=6), step=st.integers(1, 300))
def test_messages_arrive_as_they_were_sent_however_they_are_cut(messages: Messages, step: int) -> None:
    assert fed(ZmtpReader(2000), stream(messages), step) == messages


@given(
    data=st.binary(max_size=300),
    step=st.integers(1, 64),
    start=st.sampled_from([b"", GREETING, GREETING + READY, stream([[b"x"]])]),
)
def test_any_bytes_are_messages_or_a_reject(data: bytes, step: int, start: bytes) -> None:
    reader = ZmtpReader(100)
    reader.feed(start)
    try:
        found = fed(reader, data, step)
    except FrameError as error:
        reasons, found = {error.reason}, []
    else:
        reasons = set()
        assert len(reader._bytes) <= 100 + 512 + 64
    assert reasons <= {"zmtp"}
    assert all(sum(map(len, parts)) <= 100 and len(parts) <= 2 for parts in found)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"GET / HTTP/1.1\r\n".ljust(64), "greeting"),
        (GREETING.replace(b"NULL", b"CURV"), "greeting"),
        (GREETING + b"\0\x01x", "before READY"),
        (GREETING + READY + b"\x01\x01a\x01\x01b", "more than 2 parts"),
        (GREETING + READY + b"\x01\x40" + bytes(64) + b"\0\x40", "128 bytes, expected at most 100"),
        (GREETING + READY + part_head(1 << 40, more=False), "expected at most 100"),
        (GREETING + part_head(1 << 40, more=False, command=True), "a command of"),
        (GREETING + b"\x04\x05\x05OTHER"[:7], "command"),
        (GREETING + b"\x80\x01", "flags"),
    ],
)
def test_what_is_no_message_of_ours_is_refused_in_words(data: bytes, words: str) -> None:
    with pytest.raises(FrameError, match=words):
        ZmtpReader(100).feed(data)


def test_a_ping_is_answered_with_its_context_after_the_greeting_was() -> None:
    reader = ZmtpReader(100)
    assert len(reader.answer) == 64
    reader.answer = b""
    reader.feed(GREETING)
    assert reader.answer.startswith(b"\x04\x1c\x05READY")
    reader.answer = b""
    assert reader.feed(READY + b"\x04\x09\x04PING\0\x0aab") == []
    assert reader.answer == b"\x04\x07\x04PONGab"
