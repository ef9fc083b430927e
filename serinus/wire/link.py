"""A stream of messages that loss, repetition and reordering of frames can only slow down.

One ReliableLink per connection and side: numbers what is sent, keeps it until the other side has it, sends it again
when that takes too long, and hands what arrives over once and in order. Pure: `now` is an argument, frames are what
`send`, `due` and `receive` return. Knows nothing of messages, bytes or sockets.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import Generic, TypeVar

from serinus.core.errors import CapacityError

S = TypeVar("S")
R = TypeVar("R")


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFrame(Generic[S]):
    """A frame to send."""

    seq: int
    """0 where it only acknowledges."""
    ack: int
    item: S | None
    """None where it only acknowledges."""


@dataclass(slots=True, kw_only=True)
class _Waiting(Generic[S]):
    item: S
    sent_at: float
    tries: int = 1


class ReliableLink(Generic[S, R]):
    """One side of a connection: S is what it sends, R what it receives."""

    def __init__(
        self,
        *,
        resend_s: float = 5.0,
        resend_s_max: float = 20.0,
        window_max: int = 1 << 16,
        ahead_max: int = 4096,
        ahead_bytes_max: int = 64 << 20,
        ack_s: float = 0.02,
    ) -> None:
        """Nothing sent, nothing received.

        Args:
            resend_s: seconds without acknowledgement before a frame is sent again; doubles with every try. Over TCP
                nothing is lost while the connection lives, hence the long default.
            resend_s_max: the doubling ends here.
            window_max: frames kept for resending; one more raises CapacityError.
            ahead_max: frames kept that came before their turn; those further ahead are dropped (and come again).
            ahead_bytes_max: likewise, for the sum of their sizes; may be changed later.
            ack_s: an acknowledgement waits so long for a frame that takes it along; one for a repeated frame does not.
        """
        self._resend_s = resend_s
        self._resend_s_max = resend_s_max
        self._window_max = window_max
        self._ahead_max = ahead_max
        self.ahead_bytes_max = ahead_bytes_max
        self._seq = 0
        self._waiting: OrderedDict[int, _Waiting[S]] = OrderedDict()
        self._received = 0
        self._ahead: dict[int, tuple[R, int]] = {}
        """Items that came before their turn, and their sizes."""
        self._ahead_bytes = 0
        self._ack_s = ack_s
        self._ack_owed = False
        self._ack_at = -math.inf
        """When it is due; inf = `due` has not been asked since it is owed."""
        self._look_at = math.inf
        """No frame can be due before: saves looking at every one of them in every turn."""
        self.resent_count = 0

    @property
    def received(self) -> int:
        """All of the other side's stream up to here has arrived."""
        return self._received

    def send(self, item: S, now: float) -> LinkFrame[S]:
        """The next frame of our stream. Raises CapacityError where window_max frames are unacknowledged."""
        if len(self._waiting) >= self._window_max:
            raise CapacityError(f"wire: {len(self._waiting)} frames unacknowledged, expected fewer")
        self._seq += 1
        self._waiting[self._seq] = _Waiting(item=item, sent_at=now)
        self._look_at = min(self._look_at, now + self._resend_s)
        self._ack_owed = False
        return LinkFrame(seq=self._seq, ack=self._received, item=item)

    def receive(self, seq: int, ack: int, item: R, byte_count: int = 0) -> list[R]:
        """Take a frame in; returns what is now in order (often one item, sometimes none or several).

        `byte_count`: memory that the item keeps while it waits for its turn.
        """
        self._acknowledged(ack)
        if seq == 0:
            return []
        if not self._ack_owed:
            self._ack_owed, self._ack_at = True, math.inf
        if seq <= self._received or seq in self._ahead:
            self._ack_at = -math.inf  # the other side does not know
            return []
        if seq != self._received + 1:
            if len(self._ahead) < self._ahead_max and self._ahead_bytes + byte_count <= self.ahead_bytes_max:
                self._ahead[seq] = (item, byte_count)
                self._ahead_bytes += byte_count
            return []
        self._received = seq
        ready = [item]
        while self._received + 1 in self._ahead:
            self._received += 1
            waited, size = self._ahead.pop(self._received)
            self._ahead_bytes -= size
            ready.append(waited)
        return ready

    def due(self, now: float, limit: int = 64) -> list[LinkFrame[S]]:
        """Frames to send now: those unacknowledged for too long, and an acknowledgement if one is owed."""
        out = self._overdue(now, limit) if now >= self._look_at else []
        if out:
            self._ack_owed = False
        elif self._ack_owed and now >= self._ack_at:
            out.append(LinkFrame(seq=0, ack=self._received, item=None))
            self._ack_owed = False
        elif self._ack_owed and self._ack_at == math.inf:
            self._ack_at = now + self._ack_s
        return out

    def _overdue(self, now: float, limit: int) -> list[LinkFrame[S]]:
        out: list[LinkFrame[S]] = []
        self._look_at = math.inf
        for seq, waiting in self._waiting.items():
            due_at = waiting.sent_at + self._patience_s(waiting.tries)
            if now >= due_at and len(out) < limit:
                waiting.sent_at = now
                waiting.tries += 1
                due_at = now + self._patience_s(waiting.tries)
                self.resent_count += 1
                out.append(LinkFrame(seq=seq, ack=self._received, item=waiting.item))
            self._look_at = min(self._look_at, due_at)
        return out

    def _patience_s(self, tries: int) -> float:
        return min(self._resend_s * 2.0 ** min(tries - 1, 30), self._resend_s_max)

    def _acknowledged(self, ack: int) -> None:
        if ack > self._seq:
            return  # acknowledges a frame that was never sent: ignored
        while self._waiting and next(iter(self._waiting)) <= ack:
            self._waiting.popitem(last=False)
