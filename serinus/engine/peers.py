"""Peers: the connections of an engine to other engines, as the driver of its role (or of a bare port) uses them.

    messages = peers.receive()
    deltas = role.turn(now, messages, turns)
    peers.deliver(role.take_outgoing())

The process loop, pairs of engines in tests and the simulation all move messages this way. Frames that were refused and
frames that were sent again are counted here; a role knows neither.
"""

from __future__ import annotations

from collections.abc import Sequence

from serinus.core.metrics import Metrics
from serinus.engine.wire_counts import BadFrames
from serinus.pd import AttachPeer, ClosePeer, OpenPeer, PeerAction, Send
from serinus.wire import Gone, Mailbox, PeerMessage, ZmqChannel


class Peers:
    """A mailbox, in the terms of a role. Not thread safe."""

    def __init__(self, mailbox: Mailbox, channels: Sequence[ZmqChannel] = ()) -> None:
        """Takes the mailbox over; `channels`: what to wait on for messages, while idle."""
        self.mailbox = mailbox
        self.channels = channels
        self._bad_frames = BadFrames()
        self._cut = BadFrames("wire_connections_cut")

    def receive(self, timeout_s: float = 0.0) -> list[PeerMessage | Gone]:
        """Messages and lost connections; waits up to `timeout_s` for the first."""
        return self.mailbox.poll(timeout_s)

    def deliver(self, outgoing: Sequence[PeerAction]) -> None:
        """Pass on what a role or a port wants to tell peers, in order."""
        for action in outgoing:
            match action:
                case Send():
                    self.mailbox.send(action.peer, action.message, action.payload)
                case OpenPeer():
                    self.mailbox.connect(action.peer, action.address)
                case AttachPeer():
                    self.mailbox.trust(action.peer)
                case ClosePeer():
                    self.mailbox.disconnect(action.peer)

    def refresh(self, metrics: Metrics) -> None:
        """Bring the counters of frames up to now, for a scrape."""
        self._bad_frames.refresh(metrics, self.mailbox.rejects)
        for channel in self.channels:
            self._cut.refresh(metrics, channel.cut_off)
        metrics.set("wire_retransmits", self.mailbox.resent_count)

    def close(self) -> None:
        """End all connections; what is queued still leaves."""
        self.mailbox.close()
