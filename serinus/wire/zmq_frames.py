"""Frames in and out of zmq's own sockets, and their options."""

from __future__ import annotations

from typing import Any, Final

import zmq

from serinus.wire.codec import BODY_BYTES_MAX, PAYLOAD_BYTES_MAX, Parts, encode
from serinus.wire.messages import Ack

MONITORED: Final = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_CONNECTED
LINGER_MS: Final = 500
PROBE: Final = encode(Ack())
"""A frame that carries no message."""
_COPY_BYTES_MAX: Final = 64 << 10
"""Below this zmq copies: keeping track of a buffer costs more."""
_BATCH_MAX: Final = 256
"""Frames taken from one socket before the others get their turn."""
_ASKS: Final = 5
"""Signs of life that are asked for within the longest silence."""


def configure(socket: zmq.Socket[bytes], silence_s: float, *, queued_max: int) -> None:
    """`queued_max`: messages of one connection that zmq keeps for us; beyond it its sender waits."""
    if silence_s:
        asks_ms = max(1, round(silence_s * 1000 / _ASKS))
        socket.setsockopt(zmq.HEARTBEAT_IVL, asks_ms)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, max(1, round(silence_s * 1000) - asks_ms))
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, queued_max)
    socket.setsockopt(zmq.MAXMSGSIZE, max(BODY_BYTES_MAX + 4096, PAYLOAD_BYTES_MAX))


def send(socket: zmq.Socket[bytes], parts: Parts) -> None:
    """Queue one message. Raises zmq.Again."""
    for index, part in enumerate(parts):
        size = part.nbytes if isinstance(part, memoryview) else len(part)
        more = zmq.SNDMORE if index < len(parts) - 1 else 0
        socket.send(part, more | zmq.NOBLOCK, copy=size < _COPY_BYTES_MAX)


def receive(socket: zmq.Socket[bytes], *, bounded: bool, taken: int) -> list[Any]:
    """The parts of one message; [] = none left, or (where bounded) enough for this turn."""
    if (bounded and taken >= _BATCH_MAX) or not has_message(socket):
        return []
    parts: list[Any] = [socket.recv(zmq.NOBLOCK)]  # a copy: the heads of frames are small, payloads come behind them
    while socket.getsockopt(zmq.RCVMORE):
        parts.append(socket.recv(zmq.NOBLOCK, copy=False).buffer)
    return parts


def has_message(socket: zmq.Socket[bytes]) -> bool:
    """Whether `recv` would give something: asking costs less than the exception that says no."""
    return bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)


def is_probe(parts: list[Any]) -> bool:
    """Whether a message says nothing: it only shows that there is a connection."""
    return len(parts) == 1 and (not len(parts[0]) or parts[0] == PROBE[0])
