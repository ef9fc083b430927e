"""Frames: what goes in comes out, and nothing that comes in can hurt."""

from __future__ import annotations

import struct
import zlib
from dataclasses import replace
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serinus.core.errors import FrameError
from serinus.core.parts import PageSpan, Part
from serinus.core.request import FinishReason, Request, TokenDelta, TokenLogprobs, Usage
from serinus.core.trace import SpanRecord
from serinus.testing.builders import make_request
from serinus.wire import decode, encode
from serinus.wire.arrays import to_extension
from serinus.wire.codec import BODY_BYTES_MAX, HEAD_BYTES
from serinus.wire.messages import (
    Abort,
    AbortAck,
    AbortGrant,
    Ack,
    Confirm,
    ConfirmOk,
    Data,
    DataOk,
    Done,
    DoneOk,
    Drained,
    EngineCall,
    EngineEnd,
    Expired,
    Fail,
    Generate,
    Grant,
    Hello,
    HelloAgain,
    HelloOk,
    Keepalive,
    KvFound,
    LayoutSignature,
    Message,
    Prepare,
    RankExit,
    RankHello,
    RankWelcome,
    Spans,
    Tokens,
)

LAYOUT = LayoutSignature(model="m", kv_dtype="bfloat16", page_size=16, layer_count=2, kv_head_count=2, head_size=8)
REQUEST = make_request(
    "r", [1, 2, 3], seed=-4, cache_salt="tenant", priority=-(1 << 31), arrival=5.0, top_k=3, stop_token_ids=(4,),
    logit_bias={7: 1.5},
)  # fmt: skip
SPAN = PageSpan(part=Part.SWA, first=2, pages=np.array([4, 5, 6], np.int32))
DATA = Data(xid="x.0", grant=1, piece=0, first=0, digests=b"\xff" * 16, byte_count=64)
MESSAGES: tuple[Message, ...] = (
    Ack(),
    Generate(request=REQUEST),
    Abort(rid="r", reason="gone"),
    EngineCall(call=3, what="metrics"),
    Tokens(
        deltas=(
            TokenDelta(
                rid="r",
                token_ids=(1, 2),
                logprobs=(TokenLogprobs(logprob=-0.5, top_ids=(3,), top_logprobs=(-0.1,)),),
                finish=FinishReason.LENGTH,
                usage=Usage(prompt_tokens=5, completion_tokens=2, cached_tokens={"host": 4}),
            ),
        )
    ),
    Hello(engine="d", role="decode", layout=LAYOUT, backends=("shm", "tcp")),
    HelloOk(engine="p", role="prefill", backend="shm", layout=LAYOUT),
    Keepalive(grant_floor=9, load=1, turn=2),
    Prepare(xid="x.0", grant=1, request=REQUEST, held=0),
    Prepare(xid="x.0", grant=1, request=REQUEST, held=0, spans=(SPAN,), digest_seed=(1 << 63) - 1),
    Grant(xid="x.0", grant=1, spans=(SPAN,), digest_seed=(1 << 63) - 1),
    DATA,
    DataOk(xid="x.0", grant=1, piece=0),
    Done(xid="x.0", grant=1, token=5, piece_count=1, page_count=2, byte_count=64, cached_tokens={"device": 16}),
    DoneOk(xid="x.0", grant=1),
    Fail(xid="x.0", code="aborted", reason="client"),
    HelloAgain(nonce=b"n" * 34),
    AbortGrant(grant=7, floor=3, xid="x.0"),
    AbortAck(grant=7, ranks=(0, 1, 2, 3)),
    Confirm(xid="x.0", grant=7),
    ConfirmOk(xid="x.0", grant=7),
    Expired(xid="x.0", grant=7),
    Drained(xid="x.0", grant=7),
    KvFound(xid="x.0", rid="r", part=1, position=8, reason="KV integrity"),
    RankHello(rank=3, pid=77, host="here", settings='{"memory": {}}', mac=b"m" * 16),
    RankWelcome(store="127.0.0.1:4000"),
    RankExit(reason="ConfigError: no model", code=2, suffers=True),
    EngineEnd(reason="TP1 PP0 died of SIGKILL", code=3),
    Spans(
        spans=(
            SpanRecord(
                name="handoff",
                traceparent="00-1-2-01",
                start=1.0,
                end=2.5,
                attributes={"pages": 3},
                parts=(("grant", 1.0, 2.0),),
                error="late",
            ),
        )
    ),
)


def _plain(message: Message) -> Any:
    """Dicts and lists all the way down; two messages with arrays in them cannot be compared by `==`."""
    return msgspec.to_builtins(message, enc_hook=lambda array: [array.dtype.str, array.tolist()])


def _body_of(message: Message) -> bytes:
    return msgspec.msgpack.encode(message, enc_hook=to_extension)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_a_message_comes_out_as_it_went_in(message: Message) -> None:
    parts = encode(message, incarnation=(1 << 63) + 5, seq=7, ack=6)
    frame = decode(parts)
    assert (frame.incarnation, frame.seq, frame.ack) == ((1 << 63) + 5, 7, 6)
    assert type(frame.message) is type(message)
    assert _plain(frame.message) == _plain(message)
    assert len(parts) == 1
    assert frame.payload.nbytes == 0


def test_a_payload_is_passed_on_without_a_copy() -> None:
    payload = np.arange(64, dtype=np.uint8)
    parts = encode(DATA, 1, 1, payload.data)
    frame = decode(parts)
    payload[3] = 99
    assert frame.payload[3] == 99, "the decoded payload is a view of what was given to encode"


def test_a_frame_may_come_as_one_buffer() -> None:
    assert decode(encode(Ack(), 4, 2)[0]).seq == 2


@given(st.lists(st.binary(max_size=200), max_size=4))
def test_random_bytes_are_a_counted_reject(parts: list[bytes]) -> None:
    with pytest.raises(FrameError):
        decode(parts)


@given(st.sampled_from(MESSAGES), st.data())
def test_a_flipped_bit_is_always_noticed(message: Message, data: st.DataObject) -> None:
    frame = bytearray(encode(message, 5, 6)[0])
    bit = data.draw(st.integers(0, len(frame) * 8 - 1))
    frame[bit // 8] ^= 1 << (bit % 8)
    with pytest.raises(FrameError):
        decode(frame)


@given(st.sampled_from(MESSAGES), st.data())
def test_a_truncated_or_longer_frame_is_always_noticed(message: Message, data: st.DataObject) -> None:
    frame = bytes(encode(message, 5, 6)[0])
    cut = data.draw(st.integers(0, len(frame) - 1))
    for wrong in (frame[:cut], frame + b"\0"):
        with pytest.raises(FrameError):
            decode(wrong)
    with pytest.raises(FrameError, match="payload"):
        decode([frame, b"unannounced"])


VERSION = encode(Ack())[0][4]


def _forged(body: bytes, kind: int, *, body_bytes: int | None = None, payload_bytes: int = 0) -> bytes:
    """A frame whose CRC is right, whatever it says."""
    length = len(body) if body_bytes is None else body_bytes
    head = struct.pack("<4sBBHIQQQQ", b"SRNS", VERSION, kind, 0, length, payload_bytes, 1, 1, 0)
    return head + struct.pack("<I", zlib.crc32(body, zlib.crc32(head))) + body


TYPES: tuple[Any, ...] = get_args(Message)


@pytest.mark.parametrize("length", [0, 3, BODY_BYTES_MAX + 1, (1 << 32) - 1])
def test_an_announced_length_is_never_believed(length: int) -> None:
    with pytest.raises(FrameError, match="length"):
        decode(_forged(b"\x80", 0, body_bytes=length))


def test_a_huge_announced_payload_is_never_believed() -> None:
    with pytest.raises(FrameError, match="payload"):
        decode(_forged(msgspec.msgpack.encode(Ack()), TYPES.index(Ack), payload_bytes=(1 << 64) - 1))


@pytest.mark.parametrize("opening", [b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff"])
def test_a_huge_container_inside_is_a_reject_and_allocates_nothing(opening: bytes) -> None:
    for kind in range(len(TYPES)):
        with pytest.raises(FrameError, match="body"):
            decode(_forged(opening, kind))
    body = b"\x82\xa4type\xa5Grant\xa5pages" + opening
    with pytest.raises(FrameError, match="body"):
        decode(_forged(body, TYPES.index(Grant)))


def test_a_body_of_another_type_than_announced_is_a_reject() -> None:
    body = msgspec.msgpack.encode(DataOk(xid="x", grant=1, piece=0))
    with pytest.raises(FrameError, match="body"):
        decode(_forged(body, TYPES.index(DoneOk)))


@pytest.mark.parametrize("kind", [len(TYPES), 255])
def test_an_unknown_type_is_a_reject(kind: int) -> None:
    with pytest.raises(FrameError, match="type"):
        decode(_forged(b"\x80", kind))


def _decode_or_reason(frame: bytes) -> tuple[Message | None, str]:
    try:
        return decode(frame).message, ""
    except FrameError as error:
        return None, error.reason


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=8,
)


@pytest.mark.slow
@given(st.sampled_from(MESSAGES), st.data())
def test_wrong_types_in_a_body_are_a_reject_or_a_legal_message(message: Message, data: st.DataObject) -> None:
    body = target = msgspec.msgpack.decode(_body_of(message))
    while inner := [value for value in target.values() if isinstance(value, dict) and value]:
        if data.draw(st.booleans()):
            break
        target = data.draw(st.sampled_from(inner))
    fields = sorted(set(target) - {"type"}, key=str)
    if fields:
        target[data.draw(st.sampled_from(fields))] = data.draw(PLAIN)
    found, reason = _decode_or_reason(_forged(msgspec.msgpack.encode(body), TYPES.index(type(message))))
    assert (type(found) is type(message)) != (reason == "body")


@given(st.binary(max_size=300), st.integers(0, len(TYPES) - 1))
def test_any_body_with_a_right_crc_is_a_message_or_a_reject(body: bytes, kind: int) -> None:
    found, reason = _decode_or_reason(_forged(body, kind))
    assert isinstance(found, TYPES[kind]) != (reason == "body")


def test_a_message_too_big_to_send_is_refused_at_home() -> None:
    prompt = np.zeros(BODY_BYTES_MAX // 4 + 1, np.int32)
    with pytest.raises(FrameError, match="too_big"):
        encode(Generate(request=replace(make_request("r", [1]), prompt=prompt)))


def test_the_head_is_as_long_as_the_docs_say() -> None:
    assert HEAD_BYTES == 4 + 1 + 1 + 2 + 4 + 8 + 8 + 8 + 8 + 4


def _decoded_request(request: Request) -> Request:
    message = decode(encode(Generate(request=request))).message
    assert isinstance(message, Generate)
    return message.request


def test_a_request_that_travelled_is_the_same_request() -> None:
    come = _decoded_request(REQUEST)
    assert come.prompt.dtype == np.int32
    assert come.prompt.tolist() == [1, 2, 3]
    assert replace(come, prompt=REQUEST.prompt) == REQUEST


def _request_body(**changes: object) -> bytes:
    """A Generate whose request has other values than its types allow."""
    body = msgspec.msgpack.decode(_body_of(Generate(request=REQUEST)))
    for name, value in changes.items():
        target = body["request"]["sampling"] if name in body["request"]["sampling"] else body["request"]
        target[name] = value
    return msgspec.msgpack.encode(body)


def _shown(value: object) -> str:
    """A value in the name of a test, which is the same in every process."""
    if isinstance(value, msgspec.msgpack.Ext):
        return f"Ext({value.code}, {value.data!r})"[:60]
    return str(value)[:60]


@pytest.mark.parametrize(
    "wrong",
    [
        {"rid": "r" * 257},
        {"rid": 7},
        {"priority": 1 << 31},
        {"cache_salt": "s" * 257},
        {"prefill_address": "a" * 257},
        {"seed": 1.5},
        {"temperature": "hot"},
        {"temperature": -1.0},
        {"top_p": 0.0},
        {"stop": ["x" * 1025]},
        {"stop": ["x"] * 65},
        {"stop_token_ids": [1] * 1025},
        {"stop_token_ids": [-1]},
        {"logit_bias": dict.fromkeys(range((1 << 16) + 1), 0.0)},
        {"prompt": b"\0\0\0\0"},
        {"prompt": [1, 2]},
        {"prompt": msgspec.msgpack.Ext(2, b"\0\0\0")},
        {"prompt": msgspec.msgpack.Ext(3, bytes(8))},
        {"prompt": msgspec.msgpack.Ext(99, bytes(8))},
        {"prompt": msgspec.msgpack.Ext(34, struct.pack("<II", 1, 2) + bytes(8))},
        {"prompt": msgspec.msgpack.Ext(34, struct.pack("<II", 1 << 31, 1 << 31) + bytes(8))},
        {"prompt": msgspec.msgpack.Ext(34, b"\1")},
    ],
    ids=lambda wrong: ", ".join(f"{name} {_shown(value)}" for name, value in wrong.items()),
)
def test_a_request_beyond_its_limits_is_a_reject(wrong: dict[str, Any]) -> None:
    kind = TYPES.index(Generate)
    assert isinstance(decode(_forged(_request_body(), kind)).message, Generate)
    with pytest.raises(FrameError, match="body"):
        decode(_forged(_request_body(**wrong), kind))


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("part", 3),
        ("part", -1),
        ("first", 1.5),
        ("pages", [1, 2]),
        ("pages", b"\0\0\0\0"),
        ("pages", msgspec.msgpack.Ext(3, bytes(8))),
        ("pages", msgspec.msgpack.Ext(2, b"\0\0\0")),
    ],
    ids=_shown,
)
def test_a_span_beyond_its_limits_is_a_reject(field: str, wrong: object) -> None:
    body = msgspec.msgpack.decode(_body_of(Grant(xid="x", grant=1, spans=(SPAN,))))
    assert isinstance(decode(_forged(msgspec.msgpack.encode(body), TYPES.index(Grant))).message, Grant)
    body["spans"][0][field] = wrong
    with pytest.raises(FrameError, match="body"):
        decode(_forged(msgspec.msgpack.encode(body), TYPES.index(Grant)))


def test_more_spans_than_there_can_be_are_a_reject() -> None:
    with pytest.raises(FrameError, match="body"):
        decode(encode(Grant(xid="x", grant=1, spans=(SPAN,) * 9)))


def test_a_huge_container_inside_a_delta_is_a_reject_and_allocates_nothing() -> None:
    for name in ("token_ids", "logprobs", "prompt_logprobs"):
        delta = b"\x82\xa3rid\xa1r" + msgspec.msgpack.encode(name) + b"\xdd\xff\xff\xff\xff"
        with pytest.raises(FrameError, match="body"):
            decode(_forged(b"\x82\xa4type\xa6Tokens\xa6deltas\x91" + delta, TYPES.index(Tokens)))


def test_an_array_that_cannot_travel_is_refused_at_home() -> None:
    with pytest.raises(FrameError, match="expected plain data"):
        encode(Generate(request=replace(REQUEST, prompt=np.zeros(3, np.complex128))))
