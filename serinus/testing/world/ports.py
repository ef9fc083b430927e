"""The real ports of pd on simulated ranks: settings, stores that check every access, backends, and what has landed.

Where bytes are staged, an engine of several ranks has a crew (crew.py). One-sided backends go from pool to pool off the
line; the world's engines use them with several ranks all the same, in one thread, for the sake of the protocol.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from serinus.core.parts import Part
from serinus.core.rng import MASK64, splitmix64
from serinus.core.stamps import STAMP_FIELDS, STAMP_LANES
from serinus.pd import (
    Backend,
    DecodePort,
    DecodeResult,
    Landed,
    LocalBackend,
    PdSettings,
    PeerChanged,
    PrefillPort,
    Quarantine,
    TcpBackend,
)
from serinus.testing.world.crew import SimCrew
from serinus.testing.world.guard import check_landed
from serinus.testing.world.one_sided import CAPABILITIES, Fabric, SimOneSided
from serinus.testing.world.storage import Folder
from serinus.wire import Gone, Letter, Post
from serinus.wire.messages import AbortGrant, Data, DataOk, Fail, Grant, LayoutSignature, Prepare

if TYPE_CHECKING:
    from serinus.testing.world.engine import Engine
    from serinus.testing.world.network import SimChannel

__all__ = ["RESEND_S", "Shared", "SimDecodePort", "SimPost", "SimPrefillPort"]

RESEND_S = 0.3

_STAGING_BYTES = 1 << 12


class Shared:
    """What the engines of a cluster share: names that never repeat, staging memory, the one-sided fabric."""

    def __init__(self, seed: int, backend: str, fabric: Fabric) -> None:
        self._seed = seed
        self.backend = backend
        self.fabric = fabric
        self.local = LocalBackend(_STAGING_BYTES)
        self._minted = 0
        self.folders: dict[tuple[int, int, int], Folder] = {}
        """What is stored, by page size, tensor and pipeline ranks of the engines that share it."""

    def incarnation(self, name: str, life: int) -> int:
        """Of one life of one engine."""
        value = self._seed & MASK64
        for byte in f"{name}/{life}".encode():
            value = splitmix64(value ^ byte)
        return value >> 1 | 1

    def mint(self) -> str:
        """A name that nobody else gets."""
        self._minted += 1
        return f"x{self._minted}"

    @property
    def idle(self) -> bool:
        """Nothing is staged or under way."""
        return not self.local.staged_count and not self.fabric.moving

    def unrest(self) -> str:
        """What is."""
        return f"{self.local.staged_count} pieces are staged, {self.fabric.moving} pages are being moved"


def _arguments(engine: Engine, post: Post, shared: Shared) -> dict[str, Any]:
    world, shape, name = engine.world, engine.shape, shared.backend
    layout = LayoutSignature(
        model="toy", kv_dtype="float32", page_size=shape.page_size, layer_count=world.layers,
        kv_head_count=world.heads, head_size=2, tp=shape.tp, pp=shape.pp, window=world.window,
        stamp_bytes=STAMP_LANES * STAMP_FIELDS * 8 if world.canary else 0, stamp_data=world.canary,
        layer_parts=bytes(Part.SWA if letter == "S" else Part.FULL for letter in world.slides),
    )  # fmt: skip
    page_bytes = max(own.page_bytes for rank in engine.ranks for own in rank.parts.values())
    settings = PdSettings(
        engine=engine.name, incarnation=engine.incarnation, layout=layout, vocab_size=world.vocab_size,
        backends=(name,), capabilities={name: CAPABILITIES[name]} if name in CAPABILITIES else {}, host="here",
        piece_bytes_max=2 * page_bytes, park_tokens=24, lease_s=12.0, abort_s_max=9.0,
        connect_s_max=10.0, handoff_s_max=30.0, keepalive_s=1.0, silence_s_max=5.0, retry_s_min=0.2, retry_s_max=1.0,
        cluster_secret=world.secret, staging_pieces=1 if len(engine.ranks) == 1 else 3,
    )  # fmt: skip
    arguments: dict[str, Any] = {
        "settings": settings, "post": post, "clock": engine.timeline, "mint": shared.mint
    }  # fmt: skip
    stores = engine.stores
    if name in CAPABILITIES:
        ends = [SimOneSided(shared.fabric, engine, rank.number, name) for rank in engine.ranks]
        followers = [[end] for end in ends[1:]]
        return {**arguments, "store": stores, "backends": ends[:1], "follower_backends": followers}
    backend: Backend = shared.local if name == "local" else TcpBackend(_STAGING_BYTES)
    if len(engine.ranks) == 1:
        return {**arguments, "store": stores, "backends": [backend]}
    engine.crew = SimCrew(engine, layout, backend)
    return {**arguments, "crew": engine.crew, "backends": [backend]}


_MAY_OVERTAKE = (Prepare, Grant, Fail, AbortGrant)


class SimPost(Post):
    """A post office whose letters may overtake each other where the protocol allows it, and that may lose a piece."""

    def __init__(self, engine: Engine, channel: SimChannel) -> None:
        super().__init__(channel, incarnation=engine.incarnation, clock=engine.timeline, resend_s=RESEND_S)
        self._engine = engine
        self._sim = channel
        self._held: list[tuple[float, Letter]] = []
        self._late_xids: set[str] = set()
        """Handoffs whose PREPARE was overtaken."""

    def poll(self, timeout_s: float) -> list[Letter | Gone]:
        engine, now = self._engine, self._engine.timeline.now_s
        late = 0.0 if engine.calm else engine.options.overtake
        found = super().poll(timeout_s)
        gone = {item.peer for item in found if isinstance(item, Gone)}
        self._held = [(at, item) for at, item in self._held if item.peer not in gone and item.peer in self._sim.wires]
        out: list[Letter | Gone] = []
        for item in found:
            if isinstance(item, Letter) and isinstance(item.message, Data) and self._loses(item.peer, item.message):
                continue
            if late and isinstance(item, Letter) and self._waits(item, late):
                at = now + engine.rng.random() * max(engine.options.late_s, 0.3)
                self._held.append((at, item))
                engine.timeline.at(at, engine.wake)
                continue
            out.append(item)
        due = [item for at, item in self._held if at <= now or not late]
        if due:
            self._held = [(at, item) for at, item in self._held if at > now and late]
            out.extend(due)
        return out

    def _waits(self, letter: Letter, chance: float) -> bool:
        """Whether a letter is overtaken; the GRANT often together with its PREPARE."""
        message = letter.message
        if not isinstance(message, _MAY_OVERTAKE):
            return False
        if isinstance(message, Fail) and message.reading:
            return False  # its DRAINED follows, and must find it there
        if isinstance(message, Grant) and message.xid in self._late_xids:
            chance = max(chance, 0.7)
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
        if engine.world.backend not in CAPABILITIES:
            self.send(peer, DataOk(xid=data.xid, grant=data.grant, piece=data.piece, rank=data.rank))
        return True


class SimDecodePort(DecodePort):
    """Looks at what has landed before the engine does."""

    def __init__(self, engine: Engine, post: Post, shared: Shared) -> None:
        super().__init__(**_arguments(engine, post, shared))
        self._engine = engine

    def poll(self, timeout_s: float, *, load: int = 0, turn: int = 0) -> list[DecodeResult]:
        results = super().poll(timeout_s, load=load, turn=turn)
        for result in results:
            if isinstance(result, Landed):
                check_landed(self._engine, result.rid)
            elif isinstance(result, Quarantine):
                self._engine.network.quarantined += 1
            elif isinstance(result, PeerChanged) and result.state == "down":
                self._engine.network.peers_lost[result.reason[:40]] += 1
        return results

    def ungranted(self) -> list[str]:
        """Handoffs that wait to be bootstrapped: a prefill engine's matter."""
        return []


class SimPrefillPort(PrefillPort):
    """The same, of a prefill engine."""

    def __init__(self, engine: Engine, post: Post, shared: Shared) -> None:
        super().__init__(**_arguments(engine, post, shared))

    def ungranted(self) -> list[str]:
        """Handoffs that wait for their grant."""
        return self.machine.ungranted
