"""wire: how processes talk. Messages, their frames, a reliable link, channels (zmq, in-process), a mailbox on top.

`encode`/`decode` turn messages into frames and back; a `Channel` moves frames; `ReliableLink` makes a stream of them
lossless; `Mailbox` joins all three: messages to and from named peers. Message types live in `serinus.wire.messages`;
those of `core` travel inside them as they are. Knows nothing of schedulers, caches or models; never pickles.
"""

from serinus.wire.channels import Arrived, Channel, ChannelEvent, Gone, LocalChannel, LocalHub
from serinus.wire.codec import Buffer, Frame, Parts, decode, encode
from serinus.wire.link import LinkFrame, ReliableLink
from serinus.wire.mailbox import Mailbox, PeerMessage
from serinus.wire.objects import Forms, Item, ObjectReader, ObjectWriter, PackedForm
from serinus.wire.zmq_channel import ZmqChannel, wait_any

__all__ = [
    "Arrived",
    "Buffer",
    "Channel",
    "ChannelEvent",
    "Forms",
    "Frame",
    "Gone",
    "Item",
    "LinkFrame",
    "LocalChannel",
    "LocalHub",
    "Mailbox",
    "ObjectReader",
    "ObjectWriter",
    "PackedForm",
    "Parts",
    "PeerMessage",
    "ReliableLink",
    "ZmqChannel",
    "decode",
    "encode",
    "wait_any",
]
