"""The decode engines a prefill engine serves: greeting, signs of life, and what is queued and staged for each. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from serinus.pd.events import ClosePeer, PeerChanged, PrefillAction, Send, Tick
from serinus.pd.layout import difference
from serinus.pd.pulse import Pulse
from serinus.pd.settings import PdSettings
from serinus.wire.messages import Hello, HelloNo, HelloOk, Keepalive

__all__ = ["Client", "Clients", "Part"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Some pages of a chunk, as they travel in one Data message."""

    xid: str
    number: int
    """0, 1, 2... within the handoff."""
    first: int
    """Index of the first page among the granted ones."""
    pages: NDArray[np.int32]
    ends: NDArray[np.int32] | None
    """With the last part of a chunk: all pages of that chunk."""


@dataclass(slots=True, kw_only=True)
class Client:
    """One greeted decode engine: one connection."""

    peer: str
    engine: str
    incarnation: int
    backend: str
    pulse: Pulse
    grant_last: int = 0
    """Grants only grow."""
    outbox: deque[Part] = field(default_factory=deque)
    """Parts to stage, in order."""
    staging: Part | None = None
    """Asked to be staged, not yet reported."""
    is_full: bool = False
    """No room for the next part until the peer takes one."""
    staged: set[tuple[str, int]] = field(default_factory=set)
    """(xid, part) sent and not yet taken."""


class Clients:
    """All of them. Methods append what must be done to `out`."""

    def __init__(self, settings: PdSettings) -> None:
        self._settings = settings
        self._clients: dict[str, Client] = {}
        self._step_s = 0.0

    def __iter__(self) -> Iterator[Client]:
        return iter(list(self._clients.values()))

    def get(self, peer: str) -> Client | None:
        """The greeted client of a connection."""
        return self._clients.get(peer)

    def greet(self, peer: str, incarnation: int, hello: Hello, now: float, out: list[PrefillAction]) -> None:
        """Answer a HELLO: welcome, or no and why."""
        settings = self._settings
        backend = self._backend_for(hello)
        reason = difference(settings.layout, hello.layout)
        if hello.role != "decode":
            reason = f"role is {hello.role!r}, expected 'decode'"
        elif not reason and not backend:
            reason = f"no common data backend: {', '.join(settings.backends)} here, {', '.join(hello.backends)} there"
        if reason:
            out.append(Send(peer=peer, message=HelloNo(reason=f"pd: {reason}")))
            out.append(self._news(peer, hello.engine, "refused", reason, "", incarnation))
            out.append(ClosePeer(peer=peer))
            return
        pulse = Pulse(ticked_at=now, said_at=now, step_s=hello.step_s_max)
        client = Client(peer=peer, engine=hello.engine, incarnation=incarnation, backend=backend, pulse=pulse)
        self._clients[peer] = client
        welcome = HelloOk(
            engine=settings.engine, role="prefill", backend=backend, layout=settings.layout, step_s_max=self._step_s
        )
        out.append(Send(peer=peer, message=welcome))
        out.append(self._news(peer, hello.engine, "up", "", backend, incarnation))

    def _backend_for(self, hello: Hello) -> str:
        same_host = bool(hello.host) and hello.host == self._settings.host
        for name in hello.backends:
            if name in self._settings.backends and (name != "shm" or same_host):
                return name
        return ""

    def remove(self, peer: str, reason: str, out: list[PrefillAction]) -> None:
        """Forget a client."""
        client = self._clients.pop(peer)
        out.append(self._news(peer, client.engine, "down", reason, client.backend, client.incarnation))

    def tick(self, event: Tick, now: float, out: list[PrefillAction]) -> list[Client]:
        """Keep alive; returns those that were silent for too long."""
        self._step_s = event.step_s
        keepalive = Keepalive(load=event.load, turn=event.turn, step_s_max=event.step_s)
        silent: list[Client] = []
        for client in self._clients.values():
            client.pulse.tick(now)
            if client.pulse.is_gone(self._settings.silence_s_max, self._settings.handoff_s_max):
                silent.append(client)
            elif client.pulse.must_speak(now, self._settings.keepalive_s):
                out.append(Send(peer=client.peer, message=keepalive))
        return silent

    def _news(
        self,
        peer: str,
        engine: str,
        state: Literal["up", "down", "refused"],
        reason: str,
        backend: str,
        incarnation: int,
    ) -> PeerChanged:
        return PeerChanged(
            peer=peer, engine=engine, address="", state=state, reason=reason, backend=backend, incarnation=incarnation
        )
