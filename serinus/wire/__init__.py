"""wire: how processes talk. Messages, their frames, a reliable link, channels (zmq, in-process), a post office on top.

`encode`/`decode` turn messages into frames and back; a `Channel` moves frames; `ReliableLink` makes a stream of them
lossless; `Post` is all three together: messages out, letters in. Message types live in `serinus.wire.messages`,
translations to `core` data in `serinus.wire.convert`. Knows nothing of schedulers, caches or models; never pickles.
"""

from __future__ import annotations

from serinus.wire.channels import Arrived, Channel, ChannelEvent, Gone, LocalChannel, LocalHub
from serinus.wire.codec import Buffer, Frame, Parts, decode, encode
from serinus.wire.link import Outgoing, ReliableLink
from serinus.wire.post import Letter, Post
from serinus.wire.zmq_channel import ZmqChannel, wait_any

__all__ = [
    "Arrived",
    "Buffer",
    "Channel",
    "ChannelEvent",
    "Frame",
    "Gone",
    "Letter",
    "LocalChannel",
    "LocalHub",
    "Outgoing",
    "Parts",
    "Post",
    "ReliableLink",
    "ZmqChannel",
    "decode",
    "encode",
    "wait_any",
]
