"""What an engine does about handoffs, by role: nothing (unified), asks for prompts (decode), computes them (prefill).

The loop sees one face, `Handoffs`. `pd` agrees, its ports move bytes, the scheduler keeps pages and queues; a role only
carries word from one to the other. The two that do something have files of their own: decode_role.py, prefill_role.py.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Protocol

from serinus.core.metrics import Metrics
from serinus.core.request import Request, TokenDelta
from serinus.sched import ChunkReady, Scheduler
from serinus.wire import ZmqChannel

__all__ = ["Handoffs", "NoHandoffs"]


class Handoffs(Protocol):
    """The loop's view of a role."""

    channels: Sequence[ZmqChannel]
    """What to wait on while idle."""

    def admit(self, request: Request) -> None:
        """A request of this engine's own front: queue it, here or for a handoff. Raises what `Scheduler.add` raises."""
        ...

    def turn(self, now: float, turns: int) -> list[TokenDelta]:
        """Letters of peers, timers, reservations; deltas that no step brought."""
        ...

    def computed(self, chunks: Sequence[ChunkReady], now: float) -> None:
        """A step computed pages for decode engines."""
        ...

    def aborted(self, rid: str, now: float) -> None:
        """A request is about to be aborted: nobody may write its pages when this returns."""
        ...

    def asked_by_peers(self) -> list[str]:
        """Ids of the requests that decode engines asked for."""
        ...

    def ungranted(self) -> Collection[str]:
        """Those of them that wait for their grant: a queue of its own on every rank."""
        ...

    def wait_s(self, longest_s: float) -> float:
        """How long the loop may sleep, at most `longest_s`."""
        ...

    def peers(self) -> list[dict[str, Any]]:
        """Who is connected, for /server_info."""
        ...

    def refresh(self, metrics: Metrics) -> None:
        """Bring the counters of handoffs up to now, for a scrape."""
        ...

    def drain(self) -> None:
        """Take nothing new from peers; what is under way goes on. May be called again."""
        ...

    def shut_down(self, now: float) -> None:
        """Tell the peers that this engine stops."""
        ...

    def close(self) -> None:
        """Give sockets and shared memory back."""
        ...


class NoHandoffs:
    """A unified engine."""

    channels: Sequence[ZmqChannel] = ()

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def admit(self, request: Request) -> None:
        self._scheduler.add(request)

    def turn(self, now: float, turns: int) -> list[TokenDelta]:
        return []

    def computed(self, chunks: Sequence[ChunkReady], now: float) -> None:
        assert not chunks, f"engine: {len(chunks)} chunks for peers, expected none in a unified engine"

    def aborted(self, rid: str, now: float) -> None:
        """Nobody else writes its pages."""

    def asked_by_peers(self) -> list[str]:
        return []

    def ungranted(self) -> Collection[str]:
        return ()

    def wait_s(self, longest_s: float) -> float:
        return longest_s

    def peers(self) -> list[dict[str, Any]]:
        return []

    def refresh(self, metrics: Metrics) -> None:
        """Nothing to count."""

    def drain(self) -> None:
        """Nobody else asks."""

    def shut_down(self, now: float) -> None:
        """Nobody to tell."""

    def close(self) -> None:
        """Nothing to give back."""
