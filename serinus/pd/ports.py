"""The border between the pure machines and the world: posts messages, moves pages, hands the rest to the engine.

One port per engine and role. Everything happens in the caller's thread, inside `poll` and `handle`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from serinus.core.clock import Clock
from serinus.core.errors import ConfigError, TransferFailed
from serinus.pd.backends import Backend, Receiver, Sender
from serinus.pd.decode import DecodeSide
from serinus.pd.events import (
    AbortPrefill,
    AddPrefill,
    ClosePeer,
    Copied,
    CopyIn,
    DecodeEvent,
    Landed,
    OpenPeer,
    PartStaged,
    PeerChanged,
    PeerLost,
    PrefillDrained,
    PrefillEvent,
    Received,
    Recompute,
    ReleaseChunk,
    Send,
    StageFull,
    StagePart,
    Tick,
    Unstage,
)
from serinus.pd.integrity import digest_pages, first_bad_page
from serinus.pd.prefill import PrefillSide
from serinus.pd.pulse import Pace
from serinus.pd.settings import PdSettings
from serinus.wire import Letter, Post

__all__ = ["TICK_S", "DecodePort", "DecodeResult", "PageStore", "PrefillPort", "PrefillResult"]

TICK_S = 0.25
"""An idle loop polls at least this often."""

DecodeResult: TypeAlias = Landed | Recompute | PeerChanged
"""What a decode engine must act on."""
PrefillResult: TypeAlias = AddPrefill | AbortPrefill | PrefillDrained | ReleaseChunk | PeerChanged
"""What a prefill engine must act on."""


class PageStore(Protocol):
    """Where pages live: pool.DevicePool, or anything of its shape."""

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers."""
        ...

    def read_pages(self, pages: NDArray[np.integer], out: NDArray[np.uint8]) -> object:
        """Copy pages into out[G, page_bytes]."""
        ...

    def write_pages(self, pages: NDArray[np.integer], data: NDArray[np.uint8]) -> None:
        """Fill pages from data[G, page_bytes] (may be read only)."""
        ...


Event = TypeVar("Event")
Result = TypeVar("Result")


class _Port(ABC, Generic[Event, Result]):
    """What both ports do alike: take letters in turn, tell the machine the time, count."""

    machine: DecodeSide | PrefillSide

    def __init__(
        self, settings: PdSettings, *, post: Post, backends: Sequence[Backend], store: PageStore, clock: Clock
    ) -> None:
        _check(settings, backends, store)
        self._post = post
        self._backends = {backend.name: backend for backend in backends}
        self._store = store
        self._clock = clock
        self._pace = Pace()
        self._ticked_at = -1.0

    def poll(self, timeout_s: float, *, load: int = 0, turn: int = 0) -> list[Result]:
        """Wait up to timeout_s for news (0 = do not wait), deal with it, and return what the engine must act on.

        `load`, `turn`: see events.Tick. Pages that came are copied in here: that is the time it takes.
        """
        out: list[Result] = []
        self._pace.look(self._clock.now())
        for item in self._post.poll(timeout_s):
            if isinstance(item, Letter):
                event: Received | PeerLost = Received(
                    peer=item.peer, incarnation=item.incarnation, message=item.message, payload=item.payload
                )
            else:
                self._let_go(item.peer)
                event = PeerLost(peer=item.peer, reason=item.reason)
            self._run(event, out)
        now = self._clock.now()
        if now - self._ticked_at >= TICK_S / 2:
            self._ticked_at = now
            self._run(Tick(load=load, turn=turn, step_s=self._pace.longest_s), out)
        self._post.flush()
        return out

    def handle(self, event: Event) -> list[Result]:
        """Give the machine an event of the engine; chunks that were computed are copied out here."""
        out: list[Result] = []
        self._run(event, out)
        return out

    @property
    def rejects(self) -> Counter[str]:
        """Frames refused and messages dropped without effect, by reason."""
        return self._post.rejects + self.machine.rejects

    @property
    def resent_count(self) -> int:
        """Frames that were sent again."""
        return self._post.resent_count

    def close(self) -> None:
        """End all connections; give Shutdown first, so that the peers hear of it."""
        for peer in self._held():
            self._let_go(peer)
        self._post.close()

    @abstractmethod
    def _run(self, event: Event | Received | PeerLost | Tick, out: list[Result]) -> None:
        """Give one event to the machine and perform what it asks."""

    @abstractmethod
    def _held(self) -> list[str]:
        """Peers for which memory is held."""

    @abstractmethod
    def _let_go(self, peer: str) -> None:
        """Give it back."""


class DecodePort(_Port[DecodeEvent, DecodeResult]):
    """The decode side of one engine; events: StartHandoff, CancelHandoff, WantPeer, Shutdown."""

    def __init__(
        self, settings: PdSettings, *, post: Post, backends: Sequence[Backend], store: PageStore, clock: Clock
    ) -> None:
        """Takes the post over. Raises ConfigError where settings, backends and store disagree."""
        super().__init__(settings, post=post, backends=backends, store=store, clock=clock)
        self.machine: DecodeSide = DecodeSide(settings)
        self._receivers: dict[str, Receiver] = {}

    def _run(self, event: DecodeEvent, out: list[DecodeResult]) -> None:
        events: deque[DecodeEvent] = deque((event,))
        while events:
            for action in self.machine.handle(events.popleft(), self._clock.now()):
                match action:
                    case Send():
                        self._post.send(action.peer, action.message, action.payload)
                    case CopyIn():
                        events.appendleft(self._copy_in(action))
                    case OpenPeer():
                        self._post.connect(action.peer, action.address)
                    case ClosePeer():
                        self._let_go(action.peer)
                        self._post.disconnect(action.peer)
                    case Landed() | Recompute() | PeerChanged():
                        out.append(action)

    def _copy_in(self, action: CopyIn) -> Copied:
        """Copy first, then digest the source: bytes that changed under our hands cannot pass."""
        start = self._clock.now()
        data = action.data
        try:
            found = self._receiver(action.peer).fetch(data, action.payload)
        except TransferFailed as error:
            return Copied(xid=action.xid, chunk=data.chunk, error=str(error), code="transfer")
        rows = found.reshape(len(action.pages), self._store.page_bytes)
        self._store.write_pages(action.pages, rows)
        bad = first_bad_page(rows, action.digest_seed, data.digests)
        seconds = self._clock.now() - start
        if bad is not None:
            reason = f"pd: page {data.first + bad} is not what was sent (digest differs)"
            return Copied(xid=action.xid, chunk=data.chunk, seconds=seconds, error=reason, code="digest")
        return Copied(xid=action.xid, chunk=data.chunk, seconds=seconds)

    def _receiver(self, peer: str) -> Receiver:
        receiver = self._receivers.get(peer)
        if receiver is None:
            name = next(p.backend for p in self.machine.peers if p.name == peer)
            receiver = self._receivers[peer] = self._backends[name].receiver()
        return receiver

    def _held(self) -> list[str]:
        return list(self._receivers)

    def _let_go(self, peer: str) -> None:
        receiver = self._receivers.pop(peer, None)
        if receiver is not None:
            receiver.close()


@dataclass(slots=True, kw_only=True)
class _Dock:
    """What is staged for one peer."""

    sender: Sender
    keys: dict[tuple[str, int], int] = field(default_factory=dict)


class PrefillPort(_Port[PrefillEvent, PrefillResult]):
    """The prefill side of one engine; events: ChunkComputed, EndPrefill, Drain, Shutdown."""

    def __init__(
        self, settings: PdSettings, *, post: Post, backends: Sequence[Backend], store: PageStore, clock: Clock
    ) -> None:
        """Takes the post over; its channel must accept connections. Raises ConfigError where things disagree."""
        super().__init__(settings, post=post, backends=backends, store=store, clock=clock)
        self.machine: PrefillSide = PrefillSide(settings)
        self._docks: dict[str, _Dock] = {}

    @property
    def staged_count(self) -> int:
        """Parts staged and not yet taken, over all peers."""
        return sum(len(dock.keys) for dock in self._docks.values())

    def _run(self, event: PrefillEvent, out: list[PrefillResult]) -> None:
        events: deque[PrefillEvent] = deque((event,))
        while events:
            for action in self.machine.handle(events.popleft(), self._clock.now()):
                match action:
                    case Send():
                        self._post.send(action.peer, action.message, action.payload)
                    case StagePart():
                        events.append(self._stage(action))
                    case Unstage():
                        self._unstage(action)
                    case ClosePeer():
                        self._let_go(action.peer)
                        self._post.disconnect(action.peer)
                    case _:
                        out.append(action)

    def _stage(self, action: StagePart) -> PartStaged | StageFull:
        dock = self._docks.get(action.peer)
        if dock is None:
            dock = self._docks[action.peer] = _Dock(sender=self._backends[action.backend].sender())
        size = self._store.page_bytes
        staged = dock.sender.stage(len(action.pages) * size)
        if staged is None:
            return StageFull(peer=action.peer, xid=action.xid, part=action.part)
        dock.keys[action.xid, action.part] = staged.key
        rows = staged.room.reshape(len(action.pages), size)
        self._store.read_pages(action.pages, rows)
        return PartStaged(
            peer=action.peer,
            xid=action.xid,
            part=action.part,
            digests=digest_pages(rows, action.digest_seed),
            byte_count=staged.room.nbytes,
            payload=staged.room.data if staged.inline else b"",
            shm_name=staged.shm_name,
            shm_offset=staged.shm_offset,
        )

    def _unstage(self, action: Unstage) -> None:
        dock = self._docks.get(action.peer)
        if dock is not None:
            dock.sender.release(dock.keys.pop((action.xid, action.part)))

    def _held(self) -> list[str]:
        return list(self._docks)

    def _let_go(self, peer: str) -> None:
        dock = self._docks.pop(peer, None)
        if dock is not None:
            dock.sender.close()


def _check(settings: PdSettings, backends: Sequence[Backend], store: PageStore) -> None:
    names = tuple(backend.name for backend in backends)
    if names != settings.backends:
        raise ConfigError(f"pd: settings name the backends {settings.backends}, expected {names}, those given")
    if store.page_bytes != settings.page_bytes:
        raise ConfigError(f"pd: settings say {settings.page_bytes} bytes a page, the pool {store.page_bytes}")
