"""The decode engines that a prefill engine serves: greeting, keepalives, and what is under way for each. Pure."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from serinus.core.parts import PageSpan, Part
from serinus.pd.actions import AttachPeer, ClosePeer, PeerChanged, PrefillAction, Send
from serinus.pd.events import Tick
from serinus.pd.layout import RankLayout, Routes, difference
from serinus.pd.modes import Mode
from serinus.pd.pulse import Pulse
from serinus.pd.secret import greeting_mac, is_genuine
from serinus.pd.settings import HandoffSettings
from serinus.wire.messages import Grant, Hello, HelloAgain, HelloNo, HelloOk, Keepalive, Prepare

TOMBSTONES_MAX: Final = 1 << 16
"""Closed grants above a client's floor, and grants that came before their PREPARE; a client with more is cut off."""
EARLY_BYTES_MAX: Final = 16 << 20
"""Of the pages of a client's grants that came before their PREPARE; a client with more is cut off. A grant of a million
tokens in pages of 16 takes half a megabyte."""
CLIENTS_MAX: Final = 128
"""Decode engines greeted at one time: each may have memory of ours for its messages and for what it is sent."""
_STRANGERS_MAX: Final = 256
"""Connections that were asked for the secret and have not answered."""


@dataclass(slots=True, kw_only=True)
class HeldChunk:
    """The pages of one ChunkReady: released together."""

    spans: tuple[PageSpan, ...]
    left: int = 0
    """How many of its pieces, counted per rank, have pages that may still be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Some pages of a chunk, as they travel in one Data message per rank."""

    xid: str
    number: int
    """0, 1, 2... within the handoff."""
    part: Part
    first: int
    """Index of the first page in the prompt."""
    pages: NDArray[np.int32]
    chunk: HeldChunk


@dataclass(slots=True, kw_only=True)
class Lane:
    """What one source rank moves for one client, in order."""

    rank: int
    outbox: deque[Piece] = field(default_factory=deque)
    """To be moved, in order."""
    moving: deque[Piece] = field(default_factory=deque)
    """Asked to be staged, offered or written, and not yet reported; a rank reports in the order it was asked in."""
    moving_bytes: int = 0
    """What all of them have together."""
    again: deque[Piece] = field(default_factory=deque)
    """One found no room, the others were asked for after it: all again, once nothing is moving."""
    is_full: bool = False
    """No room for the next piece until the peer takes one."""


@dataclass(slots=True, kw_only=True)
class Client:
    """One greeted decode engine: one connection."""

    peer: str
    engine: str
    incarnation: int
    address: str
    """Where it connected to, as it says."""
    backend: str
    mode: Mode
    layout: RankLayout
    pulse: Pulse
    lanes: tuple[Lane, ...]
    staged: set[tuple[str, int, int]] = field(default_factory=set)
    """(xid, piece, rank) sent and not yet taken; receiver-checked."""
    live: dict[int, str] = field(default_factory=dict)
    """xid of each handoff under way, by its grant."""
    hold: str = ""
    """Pull: what it reads to learn whether we still hold what we offered; empty = it asks."""
    floor: int = 0
    """Grants below it are over, as the client says."""
    closed: set[int] = field(default_factory=set)
    """Tombstones: grants at or above the floor that have ended here, or were ended before they came."""
    early: dict[int, Grant | Prepare] = field(default_factory=dict)
    """Grants that came before their PREPARE."""
    early_bytes: int = 0
    """What the pages of these take."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Source ranks that move pages for it."""
        return tuple(lane.rank for lane in self.lanes)

    def is_over(self, grant: int) -> bool:
        """Whether a grant has ended, however its messages arrive: it is never used again."""
        return grant < self.floor or grant in self.closed

    def close_grant(self, grant: int) -> None:
        """This grant is over: its number is never used again."""
        self.take_early(grant)
        if grant >= self.floor:
            self.closed.add(grant)

    def keep_early(self, message: Grant | Prepare) -> bool:
        """Keep a grant until its PREPARE comes. False = more than EARLY_BYTES_MAX would be kept, and it is not."""
        self.take_early(message.grant)
        size = _page_bytes(message)
        if self.early_bytes + size > EARLY_BYTES_MAX:
            return False
        self.early[message.grant] = message
        self.early_bytes += size
        return True

    def take_early(self, grant: int) -> Grant | Prepare | None:
        """The grant that came before its PREPARE, which is not kept any more; None = none did."""
        message = self.early.pop(grant, None)
        if message is not None:
            self.early_bytes -= _page_bytes(message)
        return message

    def raise_floor(self, floor: int) -> None:
        """What is known of grants below the floor may go."""
        if floor > self.floor:
            self.floor = floor
            self.closed = {grant for grant in self.closed if grant >= floor}
            for grant in [grant for grant in self.early if grant < floor]:
                self.take_early(grant)


def _page_bytes(message: Grant | Prepare) -> int:
    return sum(span.pages.nbytes for span in message.spans)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choice:
    """How pages travel between two engines."""

    backend: str = ""
    reason: str = ""
    """Why not at all, in words; empty = by `backend`."""
    passed: str = ""
    """Why not by one that both prefer."""


class Clients:
    """All greeted clients. Methods append what must be done to `out`."""

    def __init__(self, settings: HandoffSettings, mint_nonce: Callable[[], bytes]) -> None:
        """`mint_nonce`: fresh bytes, never the same twice."""
        self._settings = settings
        self._mint_nonce = mint_nonce
        self._rank_count = settings.layout.tp * settings.layout.pp
        self._clients: dict[str, Client] = {}
        self._strangers: OrderedDict[str, bytes] = OrderedDict()
        """Nonces that connections were asked to prove themselves with."""
        self._step_s = 0.0

    def __iter__(self) -> Iterator[Client]:
        return iter(list(self._clients.values()))

    def get(self, peer: str) -> Client | None:
        """The greeted client of a connection."""
        return self._clients.get(peer)

    def proves_itself(self, peer: str, incarnation: int, hello: Hello, out: list[PrefillAction]) -> bool:
        """Whether it knows the cluster secret (or none is asked for); if not, it is asked, or refused."""
        secret = self._settings.cluster_secret
        if not secret:
            return True
        nonce = self._strangers.pop(peer, b"")
        if not hello.mac and not nonce:
            nonce = self._strangers[peer] = self._mint_nonce()
            if len(self._strangers) > _STRANGERS_MAX:
                self._strangers.popitem(last=False)
            out.append(Send(peer=peer, message=HelloAgain(nonce=nonce)))
            return False
        if is_genuine(secret, hello, incarnation, nonce):
            return True
        self.refuse(peer, hello, "you do not know the cluster secret", out)
        return False

    def greet(self, peer: str, incarnation: int, hello: Hello, now: float, out: list[PrefillAction]) -> None:
        """Answer a HELLO: welcome, or no and why."""
        settings = self._settings
        choice = self._choose_backend(hello)
        backend, reason = choice.backend, choice.reason
        if hello.role != "decode":
            reason = f"role is {hello.role!r}, expected 'decode'"
        elif len(self._clients) >= CLIENTS_MAX:
            reason = f"{CLIENTS_MAX} decode engines are connected already, expected fewer"
        if reason:
            self.refuse(peer, hello, reason, out)
            return
        layout = RankLayout(hello.layout)
        mode = settings.capabilities_of(backend).between(RankLayout(settings.layout), layout)
        holds = settings.holds.get(backend) if mode is Mode.PULL else None
        hold = holds.begin() if holds is not None else ""
        self._clients[peer] = Client(
            peer=peer, engine=hello.engine, incarnation=incarnation, address=hello.address, backend=backend, mode=mode,
            layout=layout, hold=hold, pulse=Pulse(ticked_at=now, said_at=now, step_s=hello.step_s_max),
            lanes=tuple(Lane(rank=rank) for rank in range(self._rank_count)),
        )  # fmt: skip
        welcome = HelloOk(
            engine=settings.engine, role="prefill", backend=backend, mode=mode.value, layout=settings.layout,
            endpoints=settings.endpoints.get(backend, ()), hold=hold, step_s_max=self._step_s,
        )  # fmt: skip
        if settings.cluster_secret:
            mac = greeting_mac(settings.cluster_secret, welcome, settings.incarnation, hello.nonce)
            welcome = msgspec.structs.replace(welcome, mac=mac)
        endpoints = hello.endpoints.get(backend, ())
        out.append(AttachPeer(peer=peer, backend=backend, layout=hello.layout, endpoints=endpoints))
        out.append(Send(peer=peer, message=welcome))
        news = f"pages travel by {backend}, as {choice.passed}" if choice.passed else ""
        out.append(self._news(peer, hello.engine, "up", news, backend))

    def refuse(self, peer: str, hello: Hello, reason: str, out: list[PrefillAction]) -> None:
        """Refuse a HELLO in words and hang up."""
        out.append(Send(peer=peer, message=HelloNo(reason=f"pd: {reason}")))
        out.append(self._news(peer, hello.engine, "refused", reason, ""))
        out.append(ClosePeer(peer=peer))

    def _choose_backend(self, hello: Hello) -> _Choice:
        """The first backend that both have and that works between them."""
        settings = self._settings
        reason = difference(settings.layout, hello.layout, we_send=True)
        if reason:
            return _Choice(reason=reason)
        reasons: list[str] = []
        for name in hello.backends:
            if name in settings.backends:
                reason = self._objection(name, hello)
                if not reason:
                    return _Choice(backend=name, passed="; ".join(reasons))
                reasons.append(reason)
        ours, theirs = ", ".join(settings.backends), ", ".join(hello.backends)
        return _Choice(reason="; ".join(reasons) or f"no common data backend: {ours} here, {theirs} there")

    def _objection(self, name: str, hello: Hello) -> str:
        """Why a backend that both have does not work between them; empty = it does."""
        settings = self._settings
        capabilities = settings.capabilities_of(name)
        if capabilities.same_host and (not hello.host or hello.host != settings.host):
            return f"{name} works within one machine and namespace of processes, and these are two"
        reason = capabilities.objection(settings.layout, hello.layout, we_send=True)
        if reason:
            return reason
        refusal = settings.refusals.get(name)
        if refusal is None:
            return ""
        ours, theirs = settings.endpoints.get(name, ()), hello.endpoints.get(name, ())
        reason = refusal(ours, theirs, Routes(RankLayout(settings.layout), RankLayout(hello.layout)).pairs)
        return f"{name}: {reason}" if reason else ""

    def remove(self, peer: str, reason: str, out: list[PrefillAction]) -> None:
        """Forget a client whose connection is over; its handoffs end behind this."""
        client = self._clients.pop(peer)
        if client.hold:
            self._settings.holds[client.backend].end(client.hold)
        out.append(self._news(peer, client.engine, "down", reason, client.backend))

    def forget_stranger(self, peer: str) -> None:
        """A connection that was never greeted ended."""
        self._strangers.pop(peer, None)

    def tick(self, event: Tick, now: float, out: list[PrefillAction]) -> list[Client]:
        """Keep alive; returns those that were silent for too long."""
        self._step_s = event.step_s
        keepalive = Keepalive(
            load=event.load, turn=event.turn, step_s_max=event.step_s, queue_s=event.queue_s, token_s=event.token_s
        )  # fmt: skip
        silent: list[Client] = []
        for client in self._clients.values():
            client.pulse.tick(now)
            if client.pulse.is_gone(self._settings.silence_s_max, self._settings.handoff_s_max):
                silent.append(client)
            elif client.pulse.must_speak(now, self._settings.keepalive_s):
                out.append(Send(peer=client.peer, message=keepalive))
        return silent

    def _news(
        self, peer: str, engine: str, state: Literal["up", "down", "refused"], reason: str, backend: str
    ) -> PeerChanged:
        return PeerChanged(peer=peer, engine=engine, address="", state=state, reason=reason, backend=backend)
