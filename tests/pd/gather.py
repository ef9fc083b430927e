"""What a device gathers, for tests without one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class Gather:
    """A Pull that moves when it is told to; what is left of an owner can be read all the same."""

    move: Callable[[], bytes]
    found: bytes = b""
    seconds: float = 0.25

    def done(self) -> bool:
        return bool(self.found)

    def sums(self) -> bytes:
        self.found = self.found or self.move()
        return self.found
