"""The listening side of ZMTP 3.1 (NULL mechanism) for one connection: bytes in, messages out, and what to answer.

What zmq's own listening sockets do not bound, this does: a message has two parts at most, and their sizes together are
limited, before a byte of them is kept. Pure: knows no socket and no clock. https://rfc.zeromq.org/spec/37/
"""

from __future__ import annotations

from typing import Final

from serinus.core.errors import FrameError
from serinus.wire.codec import Buffer, Parts

_GREETING_BYTES: Final = 64
_MECHANISM: Final = b"NULL".ljust(20, b"\0")
_SIGNATURE: Final = b"\xff" + bytes(7) + b"\x01\x7f"
_GREETING: Final = (_SIGNATURE + b"\x03\x01" + _MECHANISM).ljust(_GREETING_BYTES, b"\0")
_MORE, _LONG, _COMMAND = 1, 2, 4
_PARTS_MAX: Final = 2
"""As the codec makes them: a head, and a payload."""
_COMMAND_BYTES_MAX: Final = 512
_PING_NAME, _PONG_NAME, _READY_NAME = b"\x04PING", b"\x04PONG", b"\x05READY"
_CONTEXT_BYTES_MAX: Final = 16


def part_head(byte_count: int, *, more: bool, command: bool = False) -> bytes:
    """What goes before the bytes of one part."""
    flags = (_MORE if more else 0) | (_COMMAND if command else 0)
    if byte_count < 256:
        return bytes((flags, byte_count))
    return bytes((flags | _LONG,)) + byte_count.to_bytes(8, "big")


def _command(body: bytes) -> bytes:
    return part_head(len(body), more=False, command=True) + body


_READY: Final = _command(_READY_NAME + b"\x0bSocket-Type" + (6).to_bytes(4, "big") + b"ROUTER")
PING: Final = _command(_PING_NAME + bytes(2))
"""Asks the other side for a sign of life; any zmq socket answers by itself."""


class ZmtpReader:
    """What one connection sent so far and was not delivered: never more than `message_bytes_max` and one read."""

    def __init__(self, message_bytes_max: int) -> None:
        """`message_bytes_max`: of all parts of one message; may be changed between two calls."""
        self.message_bytes_max = message_bytes_max
        self._bytes = bytearray()
        self._needed = _GREETING_BYTES
        """Nothing can be done before so many bytes are there."""
        self._greeted = False
        self._ready = False
        self._parts: list[Buffer] = []
        self._part_bytes = 0
        """Of the parts that are there."""
        self.answer = _GREETING
        """To be sent now; the sender empties this."""
        self.count = 0
        """Messages and commands that were complete."""

    def feed(self, chunk: bytes) -> list[Parts]:
        """Take bytes in; returns the messages that are complete. Raises FrameError (`zmtp`): this is no peer of ours,
        or it sends what is larger than allowed; the connection is of no use any more."""
        self._bytes += chunk
        messages: list[Parts] = []
        at = 0
        while len(self._bytes) - at >= self._needed:
            if self._greeted:
                at = self._take_part(at, messages)
            else:
                self._check_greeting()
                at, self._needed, self._greeted = _GREETING_BYTES, 2, True
                self.answer += _READY
        del self._bytes[:at]
        return messages

    def _check_greeting(self) -> None:
        found = bytes(self._bytes[:_GREETING_BYTES])
        if found[0] != 0xFF or not found[9] & 1 or found[10] < 3 or found[12:32] != _MECHANISM:
            raise FrameError("zmtp", f"greeting {found[:16]!r}, expected that of ZMTP 3 without encryption")

    def _take_part(self, at: int, messages: list[Parts]) -> int:
        """Take one part where it is complete; returns where the next one begins, else sets how much is needed."""
        flags = self._bytes[at]
        head_bytes = 9 if flags & _LONG else 2
        if len(self._bytes) - at < head_bytes:
            self._needed = head_bytes
            return at
        byte_count = int.from_bytes(self._bytes[at + 1 : at + head_bytes], "big")
        self._check_part(flags, byte_count)
        if len(self._bytes) - at < head_bytes + byte_count:
            self._needed = head_bytes + byte_count
            return at
        end = at + head_bytes + byte_count
        body = bytes(memoryview(self._bytes)[at + head_bytes : end])
        self._needed = 2
        self.count += 1
        if flags & _COMMAND:
            self._obey(body)
            return end
        self._parts.append(body)
        self._part_bytes += byte_count
        if not flags & _MORE:
            messages.append(self._parts)
            self._parts, self._part_bytes = [], 0
        return end

    def _check_part(self, flags: int, byte_count: int) -> None:
        if flags & ~(_MORE | _LONG | _COMMAND) or (flags & _COMMAND and flags & _MORE):
            raise FrameError("zmtp", f"flags {flags:#x}")
        if flags & _COMMAND:
            if byte_count > _COMMAND_BYTES_MAX:
                raise FrameError("zmtp", f"a command of {byte_count} bytes, expected at most {_COMMAND_BYTES_MAX}")
            return
        if not self._ready:
            raise FrameError("zmtp", "a message before READY")
        if len(self._parts) + bool(flags & _MORE) >= _PARTS_MAX:
            raise FrameError("zmtp", f"a message of more than {_PARTS_MAX} parts")
        if self._part_bytes + byte_count > self.message_bytes_max:
            size = self._part_bytes + byte_count
            raise FrameError("zmtp", f"a message of {size} bytes, expected at most {self.message_bytes_max}")

    def _obey(self, body: bytes) -> None:
        if body.startswith(_READY_NAME):
            self._ready = True
        elif body.startswith(_PING_NAME):
            context = body[len(_PING_NAME) + 2 :][:_CONTEXT_BYTES_MAX]
            self.answer += _command(_PONG_NAME + context)
        elif not body.startswith(_PONG_NAME):
            raise FrameError("zmtp", f"command {body[:16]!r}, expected READY, PING or PONG")
