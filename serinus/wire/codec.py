"""One framed format for every message between processes. The parser is total: a Frame, or a FrameError with a reason.

A frame is one or two parts: the head (with the message inside) and, where the message brings bytes, the payload as a
part of its own, so that megabytes of KV are never copied into a bigger buffer. Knows nothing of sockets or peers.

    part 0: magic 4s | version u8 | type u8 | zero u16 | body length u32 | payload length u64 | incarnation u64
            | seq u64 | ack u64 | crc32 u32 over all of part 0 but itself | body (msgpack)
    part 1: payload, absent where its length is 0; covered by the digests in Data, not by the CRC

Little-endian. Lengths are checked against what arrived, and against the limits, before anything is allocated.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, get_args

import msgspec

from serinus.core.errors import FrameError, SerinusError
from serinus.wire.arrays import from_extension, to_extension
from serinus.wire.messages import Message

Buffer = bytes | bytearray | memoryview
"""Anything that lies in memory byte by byte."""
Parts = Sequence[Buffer]
"""A frame as it travels."""

BODY_BYTES_MAX: Final = 64 << 20
"""No message is longer than this."""
PAYLOAD_BYTES_MAX: Final = 1 << 30
"""No payload is longer than this."""

_MAGIC: Final = b"SRNS"
_VERSION: Final = 13
_HEAD: Final = struct.Struct("<4sBBHIQQQQ")
_CRC: Final = struct.Struct("<I")
HEAD_BYTES: Final = _HEAD.size + _CRC.size
"""Bytes before the body."""

# Position in the union is the type number: append new messages at the end of an existing version.
_TYPES: Final[tuple[Any, ...]] = get_args(Message)
_NUMBERS: Final = {kind: number for number, kind in enumerate(_TYPES)}
_DECODERS: Final = tuple(msgspec.msgpack.Decoder(kind, dec_hook=from_extension) for kind in _TYPES)
_ENCODER: Final = msgspec.msgpack.Encoder(enc_hook=to_extension)


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """The content of a frame."""

    message: Message
    incarnation: int
    """Incarnation of the sender."""
    seq: int
    """Place in the sender's stream, from 1; 0 = outside of it (may be lost or repeated)."""
    ack: int
    """The sender has received all of our stream up to here."""
    payload: memoryview
    """Bytes that came with the message; a view of the arrived part, not a copy."""


def encode(message: Message, incarnation: int = 0, seq: int = 0, payload: Buffer = b"", ack: int = 0) -> list[Buffer]:
    """A message as the parts to send: one, or two where there is a payload (passed on as it is, not copied).

    Raises:
        FrameError: the body or the payload is above its limit (`too_big`).
    Cost: one msgpack encoding and one copy of the body.
    """
    body = _ENCODER.encode(message)
    size = _byte_count(payload)
    if len(body) > BODY_BYTES_MAX or size > PAYLOAD_BYTES_MAX:
        raise FrameError("too_big", f"body {len(body)}, payload {size} bytes")
    head = _HEAD.pack(_MAGIC, _VERSION, _NUMBERS[type(message)], 0, len(body), size, incarnation, seq, ack)
    crc = zlib.crc32(body, zlib.crc32(head))
    first = b"".join((head, _CRC.pack(crc), body))
    return [first, payload] if size else [first]


def decode(parts: Parts | Buffer) -> Frame:
    """The message in a frame; also takes a frame without payload as one buffer.

    Raises:
        FrameError: with one of the reasons parts, short, magic, version, type, length, payload, crc, body. Nothing
            else, whatever the bytes are. `version`: the sender speaks another version, and always will.
    """
    if isinstance(parts, (bytes, bytearray, memoryview)):
        parts = (parts,)
    if not 1 <= len(parts) <= 2:
        raise FrameError("parts", f"{len(parts)}, expected 1 or 2")
    first = memoryview(parts[0]).cast("B")
    if len(first) < HEAD_BYTES:
        raise FrameError("short", f"{len(first)} bytes, expected at least {HEAD_BYTES}")
    magic, version, kind, zero, body_bytes, payload_bytes, incarnation, seq, ack = _HEAD.unpack_from(first)
    if magic != _MAGIC:
        raise FrameError("magic", repr(magic))
    if version != _VERSION:
        _check_version(first, version)
    if kind >= len(_TYPES) or zero:
        raise FrameError("type", f"{kind} ({zero})")
    if body_bytes != len(first) - HEAD_BYTES or body_bytes > BODY_BYTES_MAX:
        raise FrameError("length", f"body of {body_bytes} bytes announced, {len(first) - HEAD_BYTES} came")
    payload = memoryview(parts[1]).cast("B") if len(parts) == 2 else memoryview(b"")
    if payload_bytes != len(payload) or payload_bytes > PAYLOAD_BYTES_MAX:
        raise FrameError("payload", f"{payload_bytes} bytes announced, {len(payload)} came")
    body = first[HEAD_BYTES:]
    if _CRC.unpack_from(first, _HEAD.size)[0] != zlib.crc32(body, zlib.crc32(first[: _HEAD.size])):
        raise FrameError("crc")
    try:
        message = _DECODERS[kind].decode(body)
    except (msgspec.MsgspecError, SerinusError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise FrameError("body", f"{_TYPES[kind].__name__}: {str(error)[:200]}") from None
    return Frame(message=message, incarnation=incarnation, seq=seq, ack=ack, payload=payload)


def _check_version(first: memoryview, version: int) -> None:
    """Raises FrameError: version; or crc, where the frame is of our version and that byte changed on its way."""
    mended = bytearray(first)
    mended[len(_MAGIC)] = _VERSION
    if _CRC.unpack_from(mended, _HEAD.size)[0] == zlib.crc32(mended[HEAD_BYTES:], zlib.crc32(mended[: _HEAD.size])):
        raise FrameError("crc", "the version changed on the way")
    raise FrameError("version", f"{version}, expected {_VERSION}")


def _byte_count(payload: Buffer) -> int:
    return payload.nbytes if isinstance(payload, memoryview) else len(payload)
