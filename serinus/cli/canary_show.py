"""`serinus canary show`: what the canaries of running engines have found, engine by engine and request by request."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from serinus.cli.ask import ask_server, asking_parser, read_asked
from serinus.cli.parser import Command
from serinus.cli.show import check_folder, write_text
from serinus.core.clock import WallClock

PLANTED, FOUND, TOLD = 0, 1, 2
"""Kinds of events, in the order in which they are told."""


def show(command: Command, words: Sequence[str]) -> int:
    """Print what the canaries of running engines have found. 0 = nothing, 1 = something, or no answer."""
    parser = asking_parser(command, path="/canary", limit=20, of="incidents")
    parser.add_argument("--html", metavar="FILE", help="write one self-contained page: each request across the engines")
    arguments = read_asked(parser, words)
    check_folder("--html", arguments.html)
    view = ask_server(arguments, "/canary", mark="mode")
    if arguments.json:
        print(json.dumps(view, indent=2))
    members = view.get("engines", [{"canary": view, "url": arguments.url}])
    if arguments.html:
        from serinus.cli.canary_page import canary_page

        write_text(arguments.html, canary_page(arguments.url, members, arguments.limit, WallClock().unix()))
    found = False
    for member in members:
        canary = member.get("canary")
        found |= canary is None or bool(canary.get("violations"))
        if not arguments.json:
            for line in canary_lines(member, arguments.limit):
                print(line)
    if not arguments.json and len(members) > 1:
        for line in story_lines([member["canary"] for member in members if member.get("canary")], arguments.limit):
            print(line)
    return 1 if found else 0


def canary_lines(member: dict[str, Any], limit: int) -> list[str]:
    """The JSON of one engine's /canary for people, `limit` incidents at most. Names that clients chose are quoted."""
    where, view = member.get("url", ""), member.get("canary")
    if view is None:
        return [f"{where} did not answer: {member.get('error', '')!a}"]
    if view["mode"] == "none":
        return [f"{where}: no canary (start it with --kv-canary log, raise or heal)"]
    lines = [
        f"{where}: mode {view['mode']}, real data {view['real_data']}, each slot once in {view['stride']} steps; "
        f"{view['steps']:,} steps, {view['slots_checked']:,} of {view['slots_due']:,} slots checked, "
        f"{view['sweep_passes']:,} sweeps, {view['violations']:,} violations in {view['incidents_total']:,} incidents"
    ]
    lines += [
        f"  {each['violations']:>8,}  of rank {each['rank']}; {each['slots_checked']:,} of {each['slots_due']:,} slots"
        f" checked"
        for each in view.get("ranks", ())
    ]
    lines += [f"  {item['count']:>8,}  {item['reason']} by {item['tag']}" for item in view["counts"]]
    if view["injected_total"]:
        lines.append(f"  {view['injected_total']:>8,}  faults planted on purpose (--kv-canary-perturb)")
    for item in view["incidents"][-limit:]:
        users = ",".join(item["users"])
        lines.append(
            f"  {_incident(item)}, request {item['client'] or item['rid'] or '-'!a}, owner {item['owner']!a},"
            f" users {users!a}, history {item['history']!a}"
        )
    return lines


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
                text=f"{_incident(item)}{_handoff(handoff)}",
            )  # fmt: skip
            events.append((rid or (handoff["rid"] if handoff else ""), event))
        for told in view["told"]:
            text = f"was told by {told['by']}: {told['reason']!a}"
            events.append((told["rid"], CanaryEvent(kind=TOLD, engine=engine, text=text)))
    events.sort(key=lambda each: each[1].time)
    found = list(dict.fromkeys(name for name, event in events if name and event.kind != PLANTED))
    ordered = sorted((event for event in events), key=lambda each: (each[1].kind, each[1].time))
    return [(name, [event for other, event in ordered if other == name]) for name in found[-limit:]]


def story_lines(views: Sequence[dict[str, Any]], limit: int) -> list[str]:
    """`stories` for a terminal."""
    lines = []
    for name, events in stories(views, limit):
        lines.append(f"request {name!a}")
        for event in events:
            step = f"step {event.step}: " if event.kind == PLANTED else ""
            lines.append(f"  {event.engine}: {step}{event.text}")
    return lines


def _incident(item: dict[str, Any]) -> str:
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
