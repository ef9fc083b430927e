"""The prefill engines that a decode engine knows: which are up, being tried, or not to be asked. Pure.

A peer is an address; each attempt to reach it is a connection with a name of its own (`address#n`), so news of an old
attempt changes nothing. A lost peer is suspect: no request waits for it until a HELLO of ours is answered again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum

import msgspec

from serinus.core.addresses import PEERS_MAX
from serinus.pd.actions import AttachPeer, ClosePeer, DecodeAction, FencePeer, OpenPeer, PeerChanged, Send
from serinus.pd.events import Tick
from serinus.pd.layout import RankLayout, Routes
from serinus.pd.modes import Mode
from serinus.pd.pulse import Pulse
from serinus.pd.secret import greeting_mac, is_genuine
from serinus.pd.settings import HandoffSettings
from serinus.wire.messages import Hello, HelloAgain, HelloOk, Keepalive


class PeerState(Enum):
    """CONNECTING -> UP | DOWN | REFUSED; UP -> DOWN; DOWN and REFUSED -> CONNECTING after a while."""

    CONNECTING = "connecting"
    """HELLO is on its way."""
    UP = "up"
    """HELLO was answered with welcome."""
    DOWN = "down"
    """Lost; tried again at retry_at."""
    REFUSED = "refused"
    """Cannot work with us; tried again, seldom."""


@dataclass(slots=True, kw_only=True)
class Peer:
    """One prefill engine, as this decode engine knows it."""

    address: str
    wanted_at: float
    """When a request last asked for it."""
    pulse: Pulse
    name: str = ""
    """Of the current (or last) connection."""
    state: PeerState = PeerState.DOWN
    suspect: bool = False
    """Was lost and has not answered since."""
    slow: bool = False
    """In CONNECTING: has not answered for as long as a request waits; it is not lost for that."""
    since: float = 0.0
    """When the state began."""
    failures: int = 0
    """Attempts that failed since it was up last."""
    retry_at: float = 0.0
    """In DOWN and REFUSED."""
    pinned: bool = False
    """Never forgotten (a configured address)."""
    reason: str = ""
    """Why it is DOWN or REFUSED."""
    engine: str = ""
    backend: str = ""
    load: int = 0
    """Requests running or waiting there: as it said, and what least_loaded gave it since."""
    queue_s: float = 0.0
    """Seconds until it would begin with another prompt: as it said, and what was sent there since."""
    token_s: float = 0.0
    """Seconds of a prompt token there, as it says itself; 0 = not known."""
    layout: RankLayout | None = None
    """Of its ranks, once it was greeted."""
    routes: Routes | None = None
    """Own ranks that take what its ranks send, once it was greeted."""
    mode: Mode = Mode.RECEIVER_CHECKED
    hold: str = ""
    """Pull: says whether it still holds what it offered over this connection; empty = it is asked."""
    fencing: str = ""
    """Name of the connection that is being cut off from our memory: no new one is opened before that is done."""
    nonce: bytes = b""
    """What the answer to our HELLO must cover..."""
    proved: bool = False
    """...and whether we have proved ourselves on this connection."""

    @property
    def refusal(self) -> tuple[str, str]:
        """(code, reason) why it should not be asked now; ("", "") = ask."""
        if self.state is PeerState.CONNECTING and self.slow and not self.suspect:
            return "peer_slow", "no answer yet, it may be in a long step"
        if self.state is PeerState.UP or (self.state is PeerState.CONNECTING and not self.suspect):
            return "", ""
        return "refused" if self.state is PeerState.REFUSED else "peer_gone", self.reason


class Registry:
    """All peers of one decode engine. Methods append what must be done to `out`."""

    def __init__(self, settings: HandoffSettings, mint_nonce: Callable[[], bytes]) -> None:
        """`mint_nonce`: fresh bytes, never the same twice."""
        self._settings = settings
        self._mint_nonce = mint_nonce
        self._peers: dict[str, Peer] = {}
        self._names: dict[str, Peer] = {}
        self._attempts = 0
        self._step_s = 0.0
        self._endpoints = dict(settings.endpoints)

    def __iter__(self) -> Iterator[Peer]:
        return iter(self._peers.values())

    def at(self, address: str) -> Peer | None:
        """The peer of an address, if known."""
        return self._peers.get(address)

    def named(self, name: str) -> Peer | None:
        """The peer whose current connection has this name."""
        return self._names.get(name)

    def want(self, address: str, now: float, out: list[DecodeAction], *, pinned: bool = False) -> Peer | None:
        """The peer at an address, being connected if it is new; None where there are too many already."""
        peer = self._peers.get(address)
        if peer is None:
            if len(self._peers) >= PEERS_MAX and not self._make_room(out):
                return None
            pulse = Pulse(ticked_at=now, said_at=now)
            peer = self._peers[address] = Peer(address=address, wanted_at=now, pulse=pulse)
            self._open(peer, now, out)
        peer.wanted_at = now
        peer.pinned = peer.pinned or pinned
        return peer

    def _make_room(self, out: list[DecodeAction]) -> bool:
        """Forget the peer that is of least use: of those that no request may wait for, the one that was asked for
        longest ago; one that is being tried again only where all are. None that is configured or being cut off."""
        spare = [
            peer
            for peer in self._peers.values()
            if peer.state is not PeerState.UP and peer.refusal[0] and not (peer.pinned or peer.fencing)
        ]
        if not spare:
            return False
        goes = min(spare, key=lambda peer: (peer.state is PeerState.CONNECTING, peer.wanted_at))
        if goes.state is PeerState.CONNECTING:
            self._names.pop(goes.name, None)
            out.append(ClosePeer(peer=goes.name))
        del self._peers[goes.address]
        return True

    def prove(self, peer: Peer, message: HelloAgain, out: list[DecodeAction]) -> str:
        """It wants a MAC: greet it again with one. Returns why that cannot be, in words."""
        if not self._settings.cluster_secret:
            return "it wants a cluster secret, and there is none here"
        if peer.proved:
            return "it asked for the cluster secret twice"
        peer.proved = True
        hello = self._hello(peer)
        mac = greeting_mac(self._settings.cluster_secret, hello, self._settings.incarnation, message.nonce)
        out.append(Send(peer=peer.name, message=msgspec.structs.replace(hello, mac=mac)))
        return ""

    def welcome(self, peer: Peer, message: HelloOk, incarnation: int, now: float, out: list[DecodeAction]) -> bool:
        """HELLO was answered. False = with something we cannot accept; the peer is refused then."""
        reason = self._unwelcome(peer, message, incarnation)
        if reason:
            self.refuse(peer, reason, now, out)
            return False
        peer.state, peer.since, peer.failures, peer.suspect, peer.reason = PeerState.UP, now, 0, False, ""
        peer.engine, peer.backend = message.engine, message.backend
        peer.slow, peer.pulse.said_at, peer.pulse.step_s = False, now, message.step_s_max
        peer.layout, peer.mode, peer.hold = RankLayout(message.layout), Mode(message.mode), message.hold
        slices = self._settings.capabilities_of(message.backend).slices
        peer.routes = Routes(peer.layout, RankLayout(self._settings.layout), slices=slices)
        out.append(
            AttachPeer(
                peer=peer.name, backend=message.backend, layout=message.layout, endpoints=message.endpoints, sends=True
            )
        )  # fmt: skip
        out.append(self._news(peer, "up", ""))
        return True

    def _unwelcome(self, peer: Peer, message: HelloOk, incarnation: int) -> str:
        settings = self._settings
        if settings.cluster_secret and not is_genuine(settings.cluster_secret, message, incarnation, peer.nonce):
            return "it does not know the cluster secret"
        if message.role != "prefill":
            return f"its role is {message.role!r}, expected 'prefill'"
        if message.backend not in settings.backends:
            return f"it chose the data backend {message.backend!r}, expected one of {', '.join(settings.backends)}"
        capabilities = settings.capabilities_of(message.backend)
        reason = capabilities.objection(settings.layout, message.layout)
        if reason:
            return reason
        mode = capabilities.between(RankLayout(message.layout), RankLayout(settings.layout)).value
        return "" if message.mode == mode else f"its mode for {message.backend} is {message.mode!r}, expected {mode!r}"

    def fence(self, peer: Peer, out: list[DecodeAction]) -> None:
        """Cut its last connection off from our memory, before a new one is opened."""
        peer.fencing = peer.name
        ranks = len(peer.layout.shards) if peer.layout is not None else 0
        out.append(FencePeer(peer=peer.name, backend=peer.backend, ranks=ranks))

    def fenced(self, name: str) -> Peer | None:
        """That is done; the peer whose connection it was, None = it was not awaited."""
        for peer in self._peers.values():
            if peer.fencing == name:
                peer.fencing = ""
                return peer
        return None

    def moved(self, backend: str, endpoints: tuple[bytes, ...]) -> None:
        """Our memory is reached in another way from now on."""
        self._endpoints[backend] = endpoints

    def refuse(self, peer: Peer, reason: str, now: float, out: list[DecodeAction]) -> None:
        """It cannot work with us: hang up, try again seldom."""
        self._leave(peer, PeerState.REFUSED, reason, now, out)
        peer.retry_at = now + 6 * self._settings.retry_s_max
        out.append(ClosePeer(peer=peer.name))

    def lose(self, peer: Peer, reason: str, now: float, out: list[DecodeAction], *, hang_up: bool) -> None:
        """The connection is of no use any more: try again after a wait that doubles."""
        self._leave(peer, PeerState.DOWN, reason, now, out)
        wait = min(self._settings.retry_s_min * 2.0 ** min(peer.failures - 1, 30), self._settings.retry_s_max)
        peer.retry_at = now + wait
        if hang_up:
            out.append(ClosePeer(peer=peer.name))

    def tick(
        self, event: Tick, now: float, floor: Callable[[str], int], out: list[DecodeAction]
    ) -> list[Peer]:  # fmt: skip
        """Keep alive, retry, forget; returns the peers that time says are gone (lost already).

        `floor`: lowest grant still alive of the peer of an address.
        """
        self._step_s = event.step_s
        lost: list[Peer] = []
        for peer in list(self._peers.values()):
            peer.pulse.tick(now)
            if peer.state in (PeerState.UP, PeerState.CONNECTING):
                if peer.pulse.is_gone(self._settings.silence_s_max, self._settings.handoff_s_max):
                    self.lose(peer, f"silent for {peer.pulse.silent_s:.0f} s", now, out, hang_up=True)
                    lost.append(peer)
                elif peer.state is PeerState.CONNECTING:
                    self._wait(peer, now, out)
                elif peer.pulse.must_speak(now, self._settings.keepalive_s):
                    keepalive = Keepalive(
                        grant_floor=floor(peer.address), load=event.load, turn=event.turn, step_s_max=event.step_s
                    )
                    out.append(Send(peer=peer.name, message=keepalive))
            elif peer.fencing:
                continue
            elif not peer.pinned and now - peer.wanted_at > self._settings.forget_s:
                del self._peers[peer.address]
            elif now >= peer.retry_at:
                self._open(peer, now, out)
        return lost

    def _wait(self, peer: Peer, now: float, out: list[DecodeAction]) -> None:
        """It has not answered yet. Of a configured one that never has, that is told once: its address may be wrong."""
        was_slow, peer.slow = peer.slow, now - peer.since > self._settings.connect_s_max
        if peer.pinned and peer.slow and not was_slow and not peer.failures:
            reason = f"no answer for {now - peer.since:.0f} s, expected the control port of a prefill engine there"
            out.append(self._news(peer, peer.state.value, reason))

    def _open(self, peer: Peer, now: float, out: list[DecodeAction]) -> None:
        self._attempts += 1
        peer.name = f"{peer.address}#{self._attempts}"
        peer.state, peer.since, peer.slow = PeerState.CONNECTING, now, False
        peer.pulse = Pulse(ticked_at=now, said_at=now, step_s=peer.pulse.step_s)
        self._names[peer.name] = peer
        peer.nonce = self._mint_nonce() if self._settings.cluster_secret else b""
        peer.proved = False
        out.append(OpenPeer(peer=peer.name, address=peer.address))
        out.append(Send(peer=peer.name, message=self._hello(peer)))

    def _hello(self, peer: Peer) -> Hello:
        settings = self._settings
        return Hello(
            engine=settings.engine,
            role="decode",
            layout=settings.layout,
            backends=settings.backends,
            host=settings.host,
            endpoints={name: self._endpoints.get(name, ()) for name in settings.backends if name in self._endpoints},
            address=peer.address,
            nonce=peer.nonce,
            step_s_max=self._step_s,
        )

    def _leave(self, peer: Peer, state: PeerState, reason: str, now: float, out: list[DecodeAction]) -> None:
        self._names.pop(peer.name, None)
        is_news = peer.state is PeerState.UP or not peer.failures or peer.reason != reason
        peer.state, peer.since, peer.suspect, peer.slow, peer.reason = state, now, True, False, reason
        peer.failures += 1
        peer.load, peer.queue_s, peer.token_s = 0, 0.0, 0.0
        if is_news:
            out.append(self._news(peer, state.value, reason))

    def _news(self, peer: Peer, state: str, reason: str) -> PeerChanged:
        return PeerChanged(
            peer=peer.name,
            engine=peer.engine,
            address=peer.address,
            state=state,
            reason=reason,
            backend=peer.backend,
        )
