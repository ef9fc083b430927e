"""What an engine does about handoffs, by role: nothing (unified), asks for prompts (decode), computes them (prefill).

The engine sees one protocol, `Handoffs`; messages of peers come in and go out as data, time is an argument. `pd` agrees
and has pages moved, the scheduler keeps pages and queues; a role connects the two (decode_role.py, prefill_role.py).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from serinus.core.handoff import HandoffFinding
from serinus.core.metrics import Metrics
from serinus.core.request import Request, TokenDelta
from serinus.engine.wire_counts import BadFrames, Rarely
from serinus.pd import HandoffPort, PeerAction, Shutdown
from serinus.sched import ChunkReady, Scheduler
from serinus.wire import Gone, PeerMessage

HandoffEars = Callable[[object, Sequence[object], float], None]
"""Takes an event of a handoff machine, the actions that came of it, and the time."""


class Handoffs(Protocol):
    """The loop's view of a role. Methods that return here do nothing in a role that does not say otherwise."""

    def admit(self, request: Request, now: float) -> None:
        """A request of this engine's own front: queue it, here or for a handoff. Raises what `Scheduler.add` raises."""

    def turn(self, now: float, messages: Sequence[PeerMessage | Gone], turns: int) -> list[TokenDelta]:
        """Messages of peers, timers, reservations; deltas that no step brought."""

    def take_outgoing(self) -> list[PeerAction]:
        """What peers are to be told, since the last call, in order; to be taken after every turn."""

    def computed(self, chunks: Sequence[ChunkReady], now: float) -> None:
        """A step computed pages for decode engines."""

    @property
    def is_staging(self) -> bool:
        """Pages of a step that was committed are still to be read here: end the turn, and plan the next step later."""

    def aborted(self, rid: str, now: float, *, code: str = "aborted", reason: str = "") -> None:
        """A request is about to be ended: no peer may write its pages when this returns.

        `code`, `reason`: what its peer is told: aborted, its own timeout, or kv_canary with the violation in words."""
        return

    def can_ask_again(self, rid: str) -> bool:
        """Whether the prefill engine that computed a request's prompt can be asked for it once more, as the KV of that
        became wrong here."""

    def tell(self, finding: HandoffFinding, now: float) -> None:
        """The canary found wrong KV on a page that a handoff moved: say so to the other engine."""

    def asked_by_peers(self) -> list[str]:
        """Ids of the requests that decode engines asked for."""

    def wait_s(self, longest_s: float) -> float:
        """How long the loop may sleep, at most `longest_s`."""

    def peers(self) -> list[dict[str, Any]]:
        """The connected engines, for /server_info."""

    def tap(self, hear: HandoffEars | None) -> None:
        """Tell this every event of the handoff machine, with what came of it; None = tell nothing any more."""
        return

    def refresh(self, metrics: Metrics) -> None:
        """Bring the counters of handoffs up to now, for a scrape."""
        return

    def drain(self, now: float) -> None:
        """Take nothing new from peers; what is under way goes on. May be called again."""
        return

    def shut_down(self, now: float) -> None:
        """Tell the peers that this engine stops."""
        return

    def close(self) -> None:
        """Give shared memory back."""
        return


class NoHandoffs(Handoffs):
    """The role of a unified engine, which hands nothing over: what is not here does nothing."""

    is_staging = False

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def admit(self, request: Request, now: float) -> None:
        self._scheduler.add(request)

    def turn(self, now: float, messages: Sequence[PeerMessage | Gone], turns: int) -> list[TokenDelta]:
        return []

    def take_outgoing(self) -> list[PeerAction]:
        return []

    def computed(self, chunks: Sequence[ChunkReady], now: float) -> None:
        assert not chunks, f"engine: {len(chunks)} chunks for peers, expected none in a unified engine"

    def can_ask_again(self, rid: str) -> bool:
        return False

    def tell(self, finding: HandoffFinding, now: float) -> None:
        assert not finding, f"engine: {finding}, expected none in a unified engine"

    def asked_by_peers(self) -> list[str]:
        return []

    def wait_s(self, longest_s: float) -> float:
        return longest_s

    def peers(self) -> list[dict[str, Any]]:
        return []


class PortRole(Handoffs):
    """What the roles of a decode and of a prefill engine do alike: they tell the handoff machine behind their port what
    happens, and do what it asks for."""

    def __init__(self, port: HandoffPort[Any]) -> None:
        self.port = port
        self._rejects = BadFrames()
        self._rarely = Rarely()

    def take_outgoing(self) -> list[PeerAction]:
        return self.port.take_outgoing()

    def tell(self, finding: HandoffFinding, now: float) -> None:
        self._handle(finding, now)

    def wait_s(self, longest_s: float) -> float:
        return min(longest_s, self.port.wait_s)

    def tap(self, hear: HandoffEars | None) -> None:
        self.port.tap = hear

    def shut_down(self, now: float) -> None:
        self._handle(Shutdown(), now)

    def close(self) -> None:
        self.port.close()

    def _handle(self, event: Any, now: float) -> None:
        """Tell the machine, and do what comes of it."""
        self._act(self.port.handle(event, now), now)

    @abstractmethod
    def _act(self, results: Sequence[Any], now: float) -> None:
        """Do what the machine asks for."""
