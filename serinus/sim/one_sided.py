"""The libraries under the product's one-sided backends, simulated: a peer's memory is read or written, but later.

`SimAgent` stands for an agent of NIXL, `SimTransferEngine` for an engine of Mooncake and `SimWriter` for the thread
that waits for it. What real ones do to us: bytes move while the process that asked is busy, some of a page before the
rest; a paused writer goes on when it wakes; a dead one has writes in flight; an operation is given up and moves bytes
still; only the end of an agent or engine stops what others began on its memory.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from serinus.core.rng import Rng
from serinus.pd import OneSided
from serinus.pd.backends import CudaIpcBackend, MooncakeBackend, NixlBackend, Strips
from serinus.pd.backends.mooncake import MooncakeLibrary
from serinus.pd.backends.nixl import NixlLibrary
from serinus.pd.backends.shm import Segments
from serinus.sim.timeline import Timeline

if TYPE_CHECKING:
    from serinus.sim.engine import SimEngine
    from serinus.sim.options import Options
    from serinus.sim.ports import CheckedStore

ONE_SIDED = {"push": MooncakeBackend, "pull": NixlBackend, "ipc": CudaIpcBackend}
"""By the way pages travel in a scenario."""
_MOVE_S = 0.001
_AGAIN_S = 0.2
_GROUPS_MAX = 3
"""Times at which the strips of one operation move."""

Bytes = NDArray[np.uint8]


class Card:
    """Memory of one rank as others reach it, from the start to the end of one agent or engine."""

    def __init__(self, fabric: Fabric, engine: SimEngine, rank: int, session: str) -> None:
        """`session`: how peers find it."""
        self.engine, self.rank, self.session = engine, rank, session
        self.process = engine.process
        self.alive = True
        self._fabric = fabric
        self._stores: Sequence[CheckedStore] = ()
        self._registered: list[range] = []
        fabric.cards[session] = self

    def register(self, address: int, byte_count: int) -> None:
        """Others may reach this."""
        self._stores = tuple(self.engine.stores[self.rank].values())
        self._registered.append(range(address, address + byte_count))

    def reaches(self, addresses: Sequence[int], byte_counts: Sequence[int]) -> bool:
        """Whether all of this was registered."""
        spans = zip(addresses, byte_counts, strict=True)
        return all(any(at in own and at + count - 1 in own for own in self._registered) for at, count in spans)

    def bytes_at(self, address: int, byte_count: int, *, reads: bool = False, writes: bool = False) -> Bytes:
        """A view of memory. Raises AssertionError: its pages may not be read, or written, now."""
        for store in self._stores:
            found = store.find(address, byte_count)
            if found is not None:
                view, pages = found
                if reads:
                    store.check_read(pages)
                if writes:
                    store.check_write(pages)
                return view
        if self.reaches([address], [byte_count]):  # of no pool: what is there is checked before it is used
            return np.ctypeslib.as_array((ctypes.c_uint8 * byte_count).from_address(address))
        raise AssertionError(f"sim: {self.session} has no memory at {address:#x}")

    def look(self) -> None:
        """Something that this rank had begun is over."""
        rank, links = self.rank, self.engine.links
        if rank:
            self.process.at(self._fabric.timeline.now_s, lambda: links.look(rank))
        else:
            self.process.wake()

    def end(self) -> None:
        """Nothing reaches it any more."""
        self.alive = False
        if self._fabric.cards.get(self.session) is self:
            del self._fabric.cards[self.session]


@dataclass(slots=True, kw_only=True, eq=False)
class Transfer:
    """Bytes that go from memory to memory; `own` is the side that asked."""

    own: Card
    session: str
    """Where the other side is."""
    pushes: bool
    """The bytes go to the other side."""
    over: Callable[[], None]
    """Told when nothing is left to be moved."""
    left: int = 0
    """Groups of strips still to be moved."""
    error: str = ""
    opened: Card | None = None
    """The other side, where it is memory that was opened: what becomes of its owner ends no read of it."""
    lost: bool = False
    """Its end is not awaited any more; what of it lands, lands."""
    in_flight: dict[int, list[Bytes]] = field(default_factory=dict)
    """Bytes of own strips that the network has already when their process is killed."""


class Fabric:
    """All memory of a cluster that others reach, and the transfers under way."""

    def __init__(self, timeline: Timeline, options: Options, rng: Rng) -> None:
        self.timeline = timeline
        self.options = options
        self.rng = rng
        self.calm = False
        self.blocked: set[tuple[str, str]] = set()
        """Pairs of engines between which nothing passes."""
        self.cards: dict[str, Card] = {}
        """Those that are alive, by session."""
        self.made = 0
        """Number of cards so far."""
        self.moving = 0
        """Groups of strips that are still to be moved, over all transfers."""
        self.lost_count = 0
        """Transfers that were given up while they moved bytes."""
        self.late_count = 0
        """Writes that landed after the process that asked for them was killed."""
        self._transfers: list[tuple[Transfer, list[Strips]]] = []

    def card(self, engine: SimEngine, rank: int, name: str) -> Card:
        """A new one, with a session of its own."""
        self.made += 1
        return Card(self, engine, rank, f"{name}:{self.made}")

    def begin(self, transfer: Transfer, strips: Strips) -> None:
        """Move these, group by group, each at a time of its own."""
        self._transfers = [(other, groups) for other, groups in self._transfers if other.left]
        addresses, others, counts = strips.local.tolist(), strips.remote.tolist(), strips.byte_counts.tolist()
        peer = transfer.opened or self.cards.get(transfer.session)
        if peer is None or not peer.reaches(others, counts) or not transfer.own.reaches(addresses, counts):
            transfer.error = f"nothing is registered at {transfer.session}"
            return
        groups = [
            Strips(local=strips.local[turn], remote=strips.remote[turn], byte_counts=strips.byte_counts[turn])
            for turn in (slice(at, None, _GROUPS_MAX) for at in range(min(len(addresses), _GROUPS_MAX)))
        ]
        transfer.left = len(groups)
        self.moving += len(groups)
        self._transfers.append((transfer, groups))
        at = 0.0
        for index, group in enumerate(groups):
            late = 0.0 if self.calm else self.options.write_late_s
            at = max(at, _MOVE_S + (self.rng.random() * late if late else 0.0))
            self.timeline.after(at, self._write if transfer.pushes else self._read, transfer, index, group, None)

    def loses(self, transfer: Transfer) -> bool:
        """Whether the library gives it up now; it moves bytes still."""
        chance = 0.0 if self.calm else self.options.lose_op
        if not transfer.left or transfer.lost or not chance or self.rng.random() >= chance:
            return False
        transfer.lost = True
        self.lost_count += 1
        return True

    def kill(self, engine: SimEngine) -> None:
        """The process is gone: its memory cannot be reached, and what its network card has taken over lands still."""
        for transfer, groups in self._transfers:
            if transfer.pushes and transfer.own.process is engine.process:
                transfer.in_flight = {index: _bytes_of(transfer.own, group) for index, group in enumerate(groups)}
        for card in list(self.cards.values()):
            if card.process is engine.process:
                card.end()

    # ---- what happens later -----------------------------------------------------------------------------------------

    def _over(self, transfer: Transfer, error: str = "") -> None:
        self.moving -= 1
        transfer.left -= 1
        transfer.error = transfer.error or error
        if not transfer.left:
            transfer.over()
            transfer.own.look()

    def _write(self, transfer: Transfer, index: int, group: Strips, captured: list[Bytes] | None) -> None:
        own, process, peer = transfer.own, transfer.own.process, self.cards.get(transfer.session)
        if peer is None:
            self._over(transfer, "the peer is gone")
            return
        if captured is None:
            if process.alive and self.timeline.now_s < process.paused_until:
                self.timeline.at(process.paused_until, self._write, transfer, index, group, None)
                return
            if process.alive:
                captured = _bytes_of(own, group, is_checked=not transfer.lost)
            elif (captured := transfer.in_flight.get(index)) is None:
                self._over(transfer)
                return
        if (own.engine.name, peer.engine.name) in self.blocked:
            self.timeline.after(_AGAIN_S, self._write, transfer, index, group, captured)
            return
        self.late_count += not process.alive
        _put(peer, group.remote, captured)
        self._over(transfer)

    def _read(self, transfer: Transfer, index: int, group: Strips, captured: None) -> None:
        own, peer = transfer.own, transfer.opened or self.cards.get(transfer.session)
        if not own.alive:
            self._over(transfer)
            return
        if peer is None:
            self._over(transfer, "the peer is gone")
            return
        if transfer.opened is None and (own.engine.name, peer.engine.name) in self.blocked:
            self.timeline.after(_AGAIN_S, self._read, transfer, index, group, None)
            return
        spans = zip(group.remote.tolist(), group.byte_counts.tolist(), strict=True)
        _put(own, group.local, [peer.bytes_at(at, count) for at, count in spans])
        self._over(transfer)


def _bytes_of(card: Card, group: Strips, *, is_checked: bool = False) -> list[Bytes]:
    """Copies of own strips; pages that are read must be held, where that is checked."""
    spans = zip(group.local.tolist(), group.byte_counts.tolist(), strict=True)
    return [card.bytes_at(at, count, reads=is_checked).copy() for at, count in spans]


def _put(card: Card, addresses: NDArray[np.int64], data: Sequence[Bytes]) -> None:
    for at, each in zip(addresses.tolist(), data, strict=True):
        card.bytes_at(at, len(each), writes=True)[:] = each


def one_sided(fabric: Fabric, engine: SimEngine, rank: int, kind: str, segments: Segments) -> OneSided:
    """The product's backend of one rank over the simulated library. `segments`: of its process."""
    tag = f"{engine.name}.{rank}"
    if kind == "ipc":
        from serinus.sim.device_memory import SimIpc

        return CudaIpcBackend(SimIpc(fabric, engine, rank), shares=engine.shape.role == "prefill", segments=segments)
    if kind == "pull":
        agent = partial(SimAgent, fabric, engine, rank)
        return NixlBackend(tag, NixlLibrary(agent=agent, config=lambda backends: backends, errors=(SimNixlError,)))
    library = MooncakeLibrary(
        engine=partial(SimTransferEngine, fabric, engine, rank), writer=partial(SimWriter, fabric),
        collect=lambda: None,
    )  # fmt: skip
    return MooncakeBackend(tag, library)


# ---- NIXL -----------------------------------------------------------------------------------------------------------


class SimNixlError(Exception):
    """What the package raises."""


@dataclass(slots=True, kw_only=True)
class _Handle:
    transfer: Transfer
    strips: Strips
    _released: bool = False

    def release(self) -> None:
        self._released = True


class SimAgent:
    """nixl_agent: it ends with the last reference to it."""

    def __init__(self, fabric: Fabric, engine: SimEngine, rank: int, name: str, config: list[str]) -> None:
        self.backends = dict.fromkeys(config)
        self._fabric = fabric
        self._card = fabric.card(engine, rank, name)

    def __del__(self) -> None:
        self._card.end()

    def register_memory(self, rows: Sequence[tuple[int, int, int, str]], memory: str, backends: list[str]) -> None:
        for address, byte_count, _device, _name in rows:
            self._card.register(address, byte_count)

    def get_agent_metadata(self) -> bytes:
        return self._card.session.encode()

    def add_remote_agent(self, metadata: bytes) -> bytes:
        """Raises SimNixlError: that agent has ended."""
        if metadata.decode() not in self._fabric.cards:
            raise SimNixlError(f"nothing is at {metadata!r}")
        return metadata

    def remove_remote_agent(self, name: str) -> None:
        """It is not read from any more."""

    def get_xfer_descs(self, rows: NDArray[np.uint64], memory: str) -> NDArray[np.uint64]:
        return rows

    def initialize_xfer(
        self, operation: str, local: NDArray[np.uint64], remote: NDArray[np.uint64], name: str, backends: list[str]
    ) -> _Handle:
        assert operation == "READ", f"sim: an operation {operation} of NIXL, expected reads"
        strips = Strips(
            local=local[:, 0].astype(np.int64), remote=remote[:, 0].astype(np.int64),
            byte_counts=local[:, 1].astype(np.int64),
        )  # fmt: skip
        transfer = Transfer(own=self._card, session=name, pushes=False, over=lambda: None)
        return _Handle(transfer=transfer, strips=strips)

    def transfer(self, handle: _Handle) -> str:
        self._fabric.begin(handle.transfer, handle.strips)
        return self._state(handle.transfer)

    def check_xfer_state(self, handle: _Handle) -> str:
        if self._fabric.loses(handle.transfer):
            return "ERR"
        return self._state(handle.transfer)

    def _state(self, transfer: Transfer) -> str:
        if transfer.left:
            return "PROC"
        return "ERR" if transfer.error else "DONE"


# ---- Mooncake -------------------------------------------------------------------------------------------------------


class SimTransferEngine:
    """TransferEngine: it ends with the last reference to it."""

    def __init__(self, fabric: Fabric, engine: SimEngine, rank: int) -> None:
        self._fabric, self._engine, self._rank = fabric, engine, rank
        self.card: Card | None = None

    def __del__(self) -> None:
        if self.card is not None:
            self.card.end()

    def initialize(self, host: str, metadata: str, protocol: str, device: str) -> int:
        self.card = self._fabric.card(self._engine, self._rank, host)
        return 0

    def register_memory(self, address: int, byte_count: int) -> int:
        assert self.card is not None, "sim: memory is registered before the engine is initialized"
        self.card.register(address, byte_count)
        return 0

    def get_rpc_port(self) -> int:
        assert self.card is not None, "sim: the engine is not initialized"
        return int(self.card.session.rpartition(":")[2])


class SimWrite:
    """One call of a transfer engine that writes, or reads, and waits."""

    def __init__(self, fabric: Fabric, transfer: Transfer, strips: Strips) -> None:
        self.transfer, self.strips = transfer, strips
        self.begun = False
        self._fabric = fabric
        self._cancelled = False

    def done(self) -> bool:
        if self.begun and self._fabric.loses(self.transfer):
            self.transfer.over()  # the call returns: the next one may be made
        return self._cancelled or self.returned

    @property
    def returned(self) -> bool:
        """The call was made and has returned."""
        return self.begun and (self.transfer.lost or not self.transfer.left)

    def cancel(self) -> bool:
        self._cancelled |= not self.begun
        return self._cancelled

    def cancelled(self) -> bool:
        return self._cancelled

    def result(self) -> int:
        return -1 if self.transfer.lost or self.transfer.error else 0


class SimWriter:
    """Writes to one peer, or reads from it, one after the other (pd.backends.mooncake.Writer)."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self._writes: deque[SimWrite] = deque()

    def submit(self, engine: SimTransferEngine, session: str, strips: Strips, *, reads: bool = False) -> SimWrite:
        assert engine.card is not None, "sim: the engine is not initialized"
        transfer = Transfer(own=engine.card, session=session, pushes=not reads, over=self._go_on)
        self._writes.append(SimWrite(self._fabric, transfer, strips))
        written = self._writes[-1]
        self._go_on()
        return written

    def end(self, *, wait: bool) -> None:
        """Those that were submitted are written still: no engine that writes is ever fenced."""

    def _go_on(self) -> None:
        while self._writes and self._writes[0].transfer.own.process.alive:
            first = self._writes[0]
            if not first.begun and not first.cancelled():
                first.begun = True
                self._fabric.begin(first.transfer, first.strips)
            if not first.cancelled() and not first.returned:
                return
            self._writes.popleft()
