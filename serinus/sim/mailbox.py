"""SimMailbox: messages may overtake each other where the protocol allows it, and a piece may be lost."""

from __future__ import annotations

from typing import TYPE_CHECKING

from serinus.sim.network import SimChannel
from serinus.sim.one_sided import ONE_SIDED
from serinus.wire import Gone, Mailbox, PeerMessage
from serinus.wire.messages import AbortGrant, Data, DataOk, Fail, Grant, Keepalive, Prepare

if TYPE_CHECKING:
    from serinus.sim.engine import SimEngine

_RESEND_S = 0.3
_MAY_OVERTAKE = (Prepare, Grant, Fail, AbortGrant)


class SimMailbox(Mailbox):
    """The mailbox of one run of one engine."""

    def __init__(self, engine: SimEngine, channel: SimChannel, incarnation: int) -> None:
        super().__init__(channel, incarnation=incarnation, clock=engine.timeline, resend_s=_RESEND_S)
        self._engine = engine
        self._sim = channel
        self._held: list[tuple[float, PeerMessage]] = []
        self._late_xids: set[str] = set()
        """Handoffs whose PREPARE was overtaken."""

    def poll(self, timeout_s: float) -> list[PeerMessage | Gone]:
        engine, now = self._engine, self._engine.timeline.now_s
        late = 0.0 if engine.calm else engine.options.overtake
        found = super().poll(timeout_s)
        gone = {item.peer for item in found if isinstance(item, Gone)}
        self._held = [(at, item) for at, item in self._held if item.peer not in gone and item.peer in self._sim.wires]
        out: list[PeerMessage | Gone] = []
        for item in found:
            if isinstance(item, PeerMessage):
                if isinstance(item.message, Data) and self._loses(item.peer, item.message):
                    continue
                if late and self._waits(item, late):
                    at = now + engine.rng.random() * max(engine.options.late_s, 0.3)
                    self._held.append((at, item))
                    engine.process.at(at, engine.process.wake)
                    continue
                out.extend(self._ends_below(item))
            out.append(item)
        due = [item for at, item in self._held if at <= now or not late]
        if due:
            self._held = [(at, item) for at, item in self._held if at > now and late]
            for item in due:
                out.extend(self._ends_below(item))
                out.append(item)
        return out

    def _ends_below(self, letter: PeerMessage) -> list[PeerMessage]:
        """Ends that wait here and must come before a message with a floor: it says that no grant below is open, and
        was sent behind their FAIL, over a link that keeps the order."""
        message = letter.message
        if isinstance(message, Keepalive):
            floor = message.grant_floor
        elif isinstance(message, AbortGrant):
            floor = message.floor
        else:
            return []
        ends = [
            entry for entry in self._held
            if entry[1].peer == letter.peer and isinstance(entry[1].message, Fail) and entry[1].message.grant < floor
        ]  # fmt: skip
        self._held = [entry for entry in self._held if entry not in ends]
        return [item for _, item in ends]

    def _waits(self, letter: PeerMessage, chance: float) -> bool:
        """Whether a message is overtaken: often a PREPARE whose GRANT comes by itself, and then that one with it."""
        message = letter.message
        if not isinstance(message, _MAY_OVERTAKE):
            return False
        if isinstance(message, Fail) and message.reading:
            return False  # its DRAINED follows, and must find it there
        if isinstance(message, Grant) and message.xid in self._late_xids:
            chance = max(chance, 0.7)
        if isinstance(message, Prepare) and not message.spans and chance:
            chance = max(chance, 0.5)
        waits = self._engine.rng.random() < chance
        if waits and isinstance(message, Prepare):
            self._late_xids.add(message.xid)
        return waits

    def _loses(self, peer: str, data: Data) -> bool:
        """A piece that came is mislaid here, as if it had been dealt with."""
        engine = self._engine
        chance = 0.0 if engine.calm else engine.options.lose_piece
        if not chance or engine.rng.random() >= chance:
            return False
        engine.network.pieces_lost += 1
        if engine.world.backend not in ONE_SIDED:
            self.send(peer, DataOk(xid=data.xid, grant=data.grant, piece=data.piece, rank=data.rank))
        return True
