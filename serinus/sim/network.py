"""The network of the world: frames between engines, and everything an adversary does to them.

`SimChannel` is a `wire.Channel`: the real Mailbox, codec and ReliableLink run on top of it. Knows nothing of messages.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from serinus.core.rng import Rng
from serinus.sim.moments import Note, silent
from serinus.sim.options import Options
from serinus.sim.timeline import Timeline
from serinus.wire import Arrived, Buffer, ChannelEvent, Gone

_LOST_MAX = 2
_SEQ = slice(28, 36)
"""Where the sequence number lies in a frame (wire/codec.py)."""
_DELAY_S = 0.0005
"""What a frame takes at least."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Wire:
    """One connection: both ends, by their channels and the names they know it by."""

    ends: tuple[SimChannel, SimChannel]
    names: tuple[str, str]
    open: list[bool] = field(default_factory=lambda: [True, True])
    last_at: list[float] = field(default_factory=lambda: [0.0, 0.0])
    """When the last frame towards each end arrives, while nothing is reordered."""

    lost: dict[tuple[int, int], int] = field(default_factory=dict)
    """Times that a frame (by side and sequence number) was lost."""

    def may_drop(self, side: int, frame: tuple[Buffer, ...]) -> bool:
        """No frame is lost more than a few times, so that what only the network does has an end within a known time."""
        number = int.from_bytes(frame[0][_SEQ], "little")
        count = self.lost[side, number] = self.lost.get((side, number), 0) + 1
        return count <= _LOST_MAX or number == 0


class Network:
    """All connections; one per cluster."""

    def __init__(self, timeline: Timeline, options: Options, rng: Rng, note: Note = silent) -> None:
        self._timeline = timeline
        self._note = note
        self._options = options
        self._rng = rng
        self._bound: dict[str, SimChannel] = {}
        self.calm = False
        """The adversary has stopped."""
        self.blocked: set[tuple[str, str]] = set()
        """(from, to) pairs of engines between which frames vanish."""
        self.peers_lost: Counter[str] = Counter()
        """Prefill engines that a decode engine gave up, by reason."""
        self.quarantined = 0
        """Closed grants, the pages of which a peer could still write."""
        self.damaged: Counter[str] = Counter()
        """Times that KV was damaged without an error, by kind."""
        self.pieces_lost = 0
        """Pieces that a prefill engine announced as sent and never sent."""
        self.frame_count = 0
        """Frames sent so far."""
        self.drop_at: set[int] = set()
        """Frames, by number, that are lost."""
        self.repeat_at: set[int] = set()
        """Frames, by number, that come twice."""

    def bind(self, channel: SimChannel) -> None:
        """From now on `channel` is reached at its address."""
        self._bound[channel.address] = channel

    def connect(self, channel: SimChannel, peer: str, address: str) -> None:
        """A new connection, or the news that nothing listens there."""
        other = self._bound.get(address)
        if other is None or other.closed:
            self._timeline.after(_DELAY_S, channel.arrive, Gone(peer=peer, reason=f"nothing listens at {address}"))
            return
        other.accepted += 1
        name = f"in-{other.accepted}"
        wire = _Wire(ends=(channel, other), names=(peer, name))
        channel.wires[peer] = (wire, 0)
        other.wires[name] = (wire, 1)

    def send(self, wire: _Wire, side: int, parts: Sequence[Buffer]) -> None:
        """A frame leaves `side`; the adversary decides when, how often and in which shape it arrives."""
        self.frame_count += 1
        number = self.frame_count
        source, target = wire.ends[side], wire.ends[1 - side]
        if number in self.drop_at:
            self._note("lost", source.engine, words=target.engine)
            return
        frame: tuple[Buffer, ...] = tuple(bytes(part) for part in parts)
        options, rng = self._options, self._rng
        if number in self.repeat_at:
            self._arrive_later(wire, 1 - side, frame, 0.01)
        if self.calm:
            self._in_order(wire, 1 - side, frame, _DELAY_S)
            return
        if (source.engine, target.engine) in self.blocked:
            self._note("lost", source.engine, words=target.engine)
            return
        if options.drop and rng.random() < options.drop and wire.may_drop(side, frame):
            self._note("lost", source.engine, words=target.engine)
            return
        if options.corrupt and rng.random() < options.corrupt:
            frame = _flip(frame, rng)
        delay = _DELAY_S + rng.random() * options.delay_s
        if options.duplicate and rng.random() < options.duplicate:
            self._arrive_later(wire, 1 - side, frame, delay + rng.random() * options.late_s)
        if options.reorder and rng.random() < options.reorder:
            self._arrive_later(wire, 1 - side, frame, delay + rng.random() * options.late_s)
        else:
            self._in_order(wire, 1 - side, frame, delay)

    def _in_order(self, wire: _Wire, side: int, frame: tuple[Buffer, ...], delay: float) -> None:
        at = max(wire.last_at[side], self._timeline.now_s + delay)
        wire.last_at[side] = at
        self._send_at(at, wire, side, frame)

    def _arrive_later(self, wire: _Wire, side: int, frame: tuple[Buffer, ...], delay: float) -> None:
        self._send_at(self._timeline.now_s + delay, wire, side, frame)

    def _send_at(self, at: float, wire: _Wire, side: int, frame: tuple[Buffer, ...]) -> None:
        self._note("frame", wire.ends[1 - side].engine, words=wire.ends[side].engine, until=at)
        self._timeline.at(at, self._deliver, wire, side, frame)

    def _deliver(self, wire: _Wire, side: int, frame: tuple[Buffer, ...]) -> None:
        if wire.open[side]:
            wire.ends[side].arrive(Arrived(peer=wire.names[side], parts=frame))

    def hang_up(self, wire: _Wire, side: int) -> None:
        """One end is closed; the other one hears of it after what was sent before, if it can be reached at all."""
        wire.open[side] = False
        far = 1 - side
        if wire.open[far] and (wire.ends[side].engine, wire.ends[far].engine) not in self.blocked:
            at = max(wire.last_at[far], self._timeline.now_s + _DELAY_S)
            self._timeline.at(at, self._tell_gone, wire, far)

    def _tell_gone(self, wire: _Wire, side: int) -> None:
        if wire.open[side]:
            wire.open[side] = False
            channel, name = wire.ends[side], wire.names[side]
            channel.wires.pop(name, None)
            channel.arrive(Gone(peer=name, reason="the other side closed the connection"))


def _flip(frame: tuple[Buffer, ...], rng: Rng) -> tuple[Buffer, ...]:
    """The frame with one bit changed."""
    index = rng.randrange(len(frame))
    part = bytearray(frame[index])
    part[rng.randrange(len(part))] ^= 1 << rng.randrange(8)
    return (*frame[:index], bytes(part), *frame[index + 1 :])


class SimChannel:
    """The channel of one run of one engine."""

    def __init__(self, network: Network, engine: str, address: str, wake: Callable[[], None]) -> None:
        """`address`: where others connect to; empty = nowhere. `wake` is called when something arrived."""
        self._network = network
        self._wake = wake
        self.engine = engine
        self.address = address
        self.wires: dict[str, tuple[_Wire, int]] = {}
        self.accepted = 0
        self.closed = False
        self._events: deque[ChannelEvent] = deque()
        if address:
            network.bind(self)

    def arrive(self, event: ChannelEvent) -> None:
        """Something came; the engine looks at it when it gets to it."""
        if not self.closed:
            self._events.append(event)
            self._wake()

    def connect(self, peer: str, address: str) -> None:
        self._network.connect(self, peer, address)

    def send(self, peer: str, parts: Sequence[Buffer]) -> None:
        found = self.wires.get(peer)
        if found is not None and not self.closed:
            self._network.send(*found, parts)

    def poll(self, timeout_s: float) -> list[ChannelEvent]:
        events = list(self._events)
        self._events.clear()
        return events

    def trust(self, peer: str) -> None:
        """There are no strangers here."""

    def disconnect(self, peer: str) -> None:
        found = self.wires.pop(peer, None)
        if found is not None:
            self._network.hang_up(*found)
            self._events = deque(event for event in self._events if event.peer != peer)

    def close(self) -> None:
        for peer in list(self.wires):
            self.disconnect(peer)
        self.closed = True
        self._events.clear()
