"""What the canaries of several engines know of one request, put together from the JSON of their `GET /canary`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

PLANTED, FOUND, TOLD = 0, 1, 2
"""Kinds of events, in the order in which they are told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryEvent:
    """What one engine knows of one request: a fault that was planted, one that was found, or what a peer told."""

    kind: int
    """PLANTED, FOUND or TOLD."""
    engine: str
    text: str
    """One line for a terminal, without the engine's name."""
    time: float = 0.0
    """Seconds since 1970; 0 = not known."""
    step: int | None = None
    """Of the engine; None = not known."""
    incident: dict[str, Any] | None = None
    """The record of `GET /canary`, of what was found."""


def stories(views: Sequence[dict[str, Any]], limit: int) -> list[tuple[str, list[CanaryEvent]]]:
    """What happened to each request over all engines, of the JSON of their /canary: the latest `limit` requests that
    something was found of, each with its events: faults, what was found in the order of time, and what other engines
    were told. A request is called as its client calls it, on every engine."""
    views = [view for view in views if view["mode"] != "none"]
    names = {told["xid"]: told["rid"] for view in views for told in view["told"]}
    for item in (item for view in views for item in view["incidents"]):
        names |= {item["rid"]: item["client"]} if item["client"] else {}
        names |= {item["handoff"]["xid"]: item["handoff"]["rid"]} if item["handoff"] else {}
    events: list[tuple[str, CanaryEvent]] = []
    for view in views:
        engine = view["engine"]
        for fault in view["injected"]:
            where = f"slot {fault['slot']}{_of_rank(fault)}, position {fault['position']}"
            text = f"{fault['mode']} planted on purpose, {where}"
            event = CanaryEvent(kind=PLANTED, engine=engine, step=fault["step"], text=text)
            events.append((names.get(fault["rid"], fault["rid"]), event))
        for item in view["incidents"]:
            handoff, rid = item["handoff"], names.get(item["rid"], item["rid"])
            event = CanaryEvent(
                kind=FOUND, engine=engine, step=item["first_step"], time=item["first_time"], incident=item,
                text=f"{incident_line(item)}{_handoff(handoff)}",
            )  # fmt: skip
            events.append((rid or (handoff["rid"] if handoff else ""), event))
        for told in view["told"]:
            text = f"was told by {told['by']}: {told['reason']!a}"
            events.append((told["rid"], CanaryEvent(kind=TOLD, engine=engine, text=text)))
    events.sort(key=lambda each: each[1].time)
    found = list(dict.fromkeys(name for name, event in events if name and event.kind != PLANTED))
    ordered = sorted((event for event in events), key=lambda each: (each[1].kind, each[1].time))
    return [(name, [event for other, event in ordered if other == name]) for name in found[-limit:]]


def incident_line(item: dict[str, Any]) -> str:
    """What was found, when and where."""
    return (
        f"{_steps(item)}: {'|'.join(item['reasons'])} by {','.join(item['tags'])}: slot {item['slot']}, page"
        f" {item['page']}{_of_rank(item)}, position {item['position']}"
    )


def _handoff(handoff: dict[str, str] | None) -> str:
    """Where the page came from, or went to."""
    if handoff is None:
        return ""
    way = f"filled by {handoff['from']!a}" if "from" in handoff else f"sent to {handoff['to']!a}"
    pieces = f", {handoff['pieces']}" if handoff["pieces"] else ""
    return f"; page {way}, handoff {handoff['xid']!a}{pieces}"


def _steps(item: dict[str, Any]) -> str:
    """When, and how often."""
    if item["count"] == 1:
        return f"step {item['first_step']}"
    return f"steps {item['first_step']} to {item['last_step']}, {item['count']:,} times"


def _of_rank(item: dict[str, Any]) -> str:
    """The rank with the damaged pool, where an engine has several ranks."""
    return f" of rank {item['rank']}" if item.get("rank") else ""
