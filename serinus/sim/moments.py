"""What happened in a run, moment by moment, for a picture of it. Nothing in the world reads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from serinus.sim.timeline import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """One thing that happened to an engine, a request or a frame."""

    at: float
    """Virtual time, in seconds."""
    kind: str
    """asked, handoff, granted, landed, recomputed, token, end, sent; step, up, down, paused; frame, lost; fault."""
    engine: str = ""
    """Where it happened; of a frame, the engine that sent it."""
    rid: str = ""
    """The request, as its client calls it."""
    words: str = ""
    """How a request ended, the reason of a recomputation, where a frame goes, what a fault is."""
    until: float = 0.0
    """When it is over: a frame has arrived, a pause or a partition has ended. 0 = at once."""


class Note(Protocol):
    """Takes in what happens now."""

    def __call__(self, kind: str, engine: str, rid: str = "", words: str = "", until: float = 0.0) -> None: ...


def silent(kind: str, engine: str, rid: str = "", words: str = "", until: float = 0.0) -> None:
    """The note of a run that nothing is drawn of."""


def noting(moments: list[Moment], timeline: Timeline) -> Note:
    """A note that appends to `moments`, with the time of the timeline."""

    def note(kind: str, engine: str, rid: str = "", words: str = "", until: float = 0.0) -> None:
        moments.append(Moment(at=timeline.now_s, kind=kind, engine=engine, rid=rid, words=words, until=until))

    return note
