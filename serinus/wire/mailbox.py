"""Messages to and from named peers: a channel, the codec and one ReliableLink per peer, put together.

Bad frames change nothing but a counter (`rejects`, by reason); after a few of them from one peer the connection is
dropped and the peer reported Gone. A peer that speaks another version of the frames is dropped at once: it gets one
frame of ours, from which it learns the same, and both sides report it. Knows nothing of what the messages mean.
Not thread safe: one loop owns it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Final

from serinus.core.clock import Clock
from serinus.core.errors import CapacityError, FrameError
from serinus.wire.channels import Channel, Gone
from serinus.wire.codec import Buffer, Frame, Parts, decode, encode
from serinus.wire.link import LinkFrame, ReliableLink
from serinus.wire.messages import Ack, Message

BAD_FRAMES_MAX: Final = 8
"""A peer that sends this many is cut off."""
_AHEAD_BYTES_CHOSEN: Final = 64 << 20
"""Kept of frames that came before their turn, of a peer that we connected to: pages come with them."""
_AHEAD_BYTES_TRUSTED: Final = 1 << 20
"""...of a peer that connected to us and was greeted. Of a stranger none are kept: they come again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerMessage:
    """A message of a peer: delivered once, and in the order of its sender."""

    peer: str
    """Name of the connection."""
    incarnation: int
    """Of the sender; the same for all messages of one connection."""
    message: Message
    payload: Buffer = b""
    """Bytes that came with it; with Data, pages."""


@dataclass(slots=True)
class _Line:
    link: ReliableLink[tuple[Message, Buffer], Frame]
    incarnation: int = 0
    bad_count: int = 0


class Mailbox:
    """Sends and receives the messages of one process; each arrives once and in order while its connection lives."""

    def __init__(self, channel: Channel, *, incarnation: int, clock: Clock, resend_s: float = 5.0) -> None:
        """Takes the channel over: only this mailbox may poll it.

        Args:
            incarnation: of this process; goes on every frame.
            resend_s: see ReliableLink.
        """
        self._channel = channel
        self._incarnation = incarnation
        self._clock = clock
        self._resend_s = resend_s
        self._lines: dict[str, _Line] = {}
        self._gone: list[Gone] = []
        self.rejects: Counter[str] = Counter()
        """Frames that were refused, by reason."""
        self.resent_count = 0
        """Frames that were sent again because no acknowledgement came."""

    def connect(self, peer: str, address: str) -> None:
        """Start a connection under a new name; failure arrives as Gone."""
        self._lines[peer] = self._line(_AHEAD_BYTES_CHOSEN)
        self._channel.connect(peer, address)

    def trust(self, peer: str) -> None:
        """A peer that connected to us was greeted: what binds strangers (tcp_listener.py) does not bind it."""
        line = self._lines.get(peer)
        if line is not None:
            line.link.ahead_bytes_max = max(line.link.ahead_bytes_max, _AHEAD_BYTES_TRUSTED)
            self._channel.trust(peer)

    def send(self, peer: str, message: Message, payload: Buffer = b"") -> None:
        """Send, reliably while the connection lives; no effect once it is gone. `payload` must not change meanwhile."""
        line = self._lines.get(peer)
        if line is None:
            return
        try:
            outgoing = line.link.send((message, payload), self._clock.now())
        except CapacityError as error:
            self._cut(peer, str(error))
            return
        self._transmit(peer, outgoing)

    def poll(self, timeout_s: float) -> list[PeerMessage | Gone]:
        """What came. Waits up to timeout_s for the first; answers and repeats what is due before it returns."""
        out: list[PeerMessage | Gone] = []
        for event in self._channel.poll(timeout_s if not self._gone else 0.0):
            if isinstance(event, Gone):
                if self._lines.pop(event.peer, None) is not None:
                    out.append(event)
            elif all(gone.peer != event.peer for gone in self._gone):  # else it was cut: this came together with why
                self._take(event.peer, event.parts, out)
        self.flush()
        out.extend(self._gone)
        self._gone.clear()
        return out

    def flush(self) -> None:
        """Send acknowledgements owed and repeat what went unacknowledged for too long."""
        now = self._clock.now()
        for peer, line in self._lines.items():
            for outgoing in line.link.due(now):
                self.resent_count += outgoing.item is not None
                self._transmit(peer, outgoing)

    def disconnect(self, peer: str) -> None:
        """End a connection from this side; no Gone follows."""
        if self._lines.pop(peer, None) is not None:
            self._channel.disconnect(peer)

    def close(self) -> None:
        """End all connections; what is queued still leaves."""
        self._lines.clear()
        self._channel.close()

    def _line(self, ahead_bytes_max: int) -> _Line:
        return _Line(link=ReliableLink(resend_s=self._resend_s, ahead_bytes_max=ahead_bytes_max))

    def _transmit(self, peer: str, outgoing: LinkFrame[tuple[Message, Buffer]]) -> None:
        message, payload = outgoing.item if outgoing.item is not None else (Ack(), b"")
        self._channel.send(peer, encode(message, self._incarnation, outgoing.seq, payload, outgoing.ack))

    def _take(self, peer: str, parts: Parts, out: list[PeerMessage | Gone]) -> None:
        line = self._lines.get(peer)
        if line is None:
            line = self._lines[peer] = self._line(0)
        try:
            frame = decode(parts)
            if not frame.incarnation and not frame.seq:
                return  # a probe of the connection; it carries no message
            if frame.incarnation != line.incarnation:
                if line.incarnation or not frame.incarnation:
                    raise FrameError("incarnation", f"{frame.incarnation}, expected {line.incarnation}")
                line.incarnation = frame.incarnation
        except FrameError as error:
            self.rejects[error.reason] += 1
            line.bad_count += 1
            if error.reason == "version":
                self._channel.send(peer, encode(Ack(), self._incarnation))
                versions = str(error).removeprefix("wire: version: ")
                self._cut(peer, f"it speaks another version of the frames: {versions}")
            elif line.bad_count >= BAD_FRAMES_MAX:
                self._cut(peer, f"{line.bad_count} bad frames, the last: {error}")
            return
        byte_count = sum(memoryview(part).nbytes for part in parts)
        for ready in line.link.receive(frame.seq, frame.ack, frame, byte_count):
            out.append(
                PeerMessage(peer=peer, incarnation=ready.incarnation, message=ready.message, payload=ready.payload)
            )

    def _cut(self, peer: str, reason: str) -> None:
        self.disconnect(peer)
        self._gone.append(Gone(peer=peer, reason=reason))
