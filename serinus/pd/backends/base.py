"""What a receiver-checked backend is: a place where one side puts bytes and the other finds them. Decides nothing.

The receiving process itself copies into its pages, so closing a grant needs no word from the sender. Backends that
reach into another process's memory: one_sided.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from serinus.core.errors import ConfigError, InvariantError
from serinus.pd.modes import Capabilities
from serinus.wire import Buffer


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """Room for some bytes, until released."""

    key: int
    """Names it in `release`."""
    room: NDArray[np.uint8]
    """Where to put the bytes; 1-d, writable."""
    shm_name: str = ""
    """For Data: where the receiver finds them..."""
    shm_offset: int = 0
    inline: bool = False
    """...or, where True, they travel as the payload of the frame."""


class Sender(Protocol):
    """The prefill side of one connection."""

    def stage(self, byte_count: int) -> Staged | None:
        """Room for so many bytes; None = none now (nothing changed)."""

    def release(self, key: int) -> None:
        """The receiver has taken (or dropped) them."""

    def close(self) -> None:
        """The connection ended: give everything back. What the receiver still maps stays readable to it."""


class Located(Protocol):
    """What says where staged bytes are: Data, and the order to take them in."""

    @property
    def byte_count(self) -> int: ...

    @property
    def shm_name(self) -> str: ...

    @property
    def shm_offset(self) -> int: ...


class Receiver(Protocol):
    """The decode side of one connection."""

    def fetch(self, data: Located, payload: Buffer) -> NDArray[np.uint8]:
        """The bytes of a Data message, or of the order that came of it, 1-d, read only, without a copy where possible.

        Raises:
            TransferFailed: they are not where the message says.
        """

    def close(self) -> None:
        """The connection ended: unmap what was mapped for it."""


class Backend(Protocol):
    """A way to move bytes between two processes."""

    name: str
    """local, shm or tcp."""
    capabilities: Capabilities

    def sender(self) -> Sender:
        """For a new connection. Raises TransferFailed: there is no memory for it."""

    def receiver(self) -> Receiver:
        """For a new connection."""


@dataclass(slots=True)
class ByteSpan:
    """A range of bytes, [start, end)."""

    start: int
    end: int


class SpanAllocator:
    """Hands out spans of a fixed area, lowest address first: a lightly used area stays mostly untouched memory."""

    def __init__(self, byte_count: int) -> None:
        if byte_count <= 0:
            raise ConfigError(f"pd: a staging area of {byte_count} bytes, expected more than 0")
        self._free = [ByteSpan(0, byte_count)]
        self._taken: dict[int, ByteSpan] = {}
        self._last_key = 0

    def take(self, byte_count: int) -> tuple[int, int] | None:
        """(key, offset) of a free span, 64-byte aligned; None = no room. Cost: O(free spans), a handful."""
        size = -(-byte_count // 64) * 64
        for index, span in enumerate(self._free):
            if span.end - span.start >= size:
                start = span.start
                span.start += size
                if span.start == span.end:
                    del self._free[index]
                self._last_key += 1
                self._taken[self._last_key] = ByteSpan(start, start + size)
                return self._last_key, start
        return None

    def give(self, key: int) -> None:
        """Take a span back. Raises InvariantError where it is not handed out."""
        span = self._taken.pop(key, None)
        if span is None:
            raise InvariantError(f"pd: staging span {key} is not handed out, expected one that is")
        index = next((i for i, free in enumerate(self._free) if free.start >= span.end), len(self._free))
        if index < len(self._free) and self._free[index].start == span.end:
            span.end = self._free.pop(index).end
        if index and self._free[index - 1].end == span.start:
            self._free[index - 1].end = span.end
        else:
            self._free.insert(index, span)
