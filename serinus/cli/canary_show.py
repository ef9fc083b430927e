"""`serinus canary show`: what the canaries of running engines have found, engine by engine and request by request."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from serinus.cli.ask import ask_server, asking_parser, read_asked
from serinus.cli.canary_page import canary_page
from serinus.cli.canary_stories import PLANTED, incident_line, stories
from serinus.cli.parser import Command
from serinus.cli.show import check_folder, write_text
from serinus.core.clock import WallClock


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
        f"{_counted(view['sweep_passes'], 'sweep')}, {_counted(view['violations'], 'violation')} in "
        f"{_counted(view['incidents_total'], 'incident')}"
    ]
    lines += [
        f"  {each['violations']:>8,}  of rank {each['rank']}; {each['slots_checked']:,} of {each['slots_due']:,} slots"
        f" checked"
        for each in view.get("ranks", ())
    ]
    lines += [f"  {item['count']:>8,}  {item['reason']} by {item['tag']}" for item in view["counts"]]
    if view["injected_total"]:
        lines.append(f"  {view['injected_total']:>8,}  faults planted on purpose")
    for item in view["incidents"][-limit:]:
        users = ",".join(item["users"])
        lines.append(
            f"  {incident_line(item)}, request {item['client'] or item['rid'] or '-'!a}, owner {item['owner']!a},"
            f" users {users!a}, history {item['history']!a}"
        )
    return lines


def story_lines(views: Sequence[dict[str, Any]], limit: int) -> list[str]:
    """`stories` for a terminal."""
    lines = []
    for name, events in stories(views, limit):
        lines.append(f"request {name!a}")
        for event in events:
            step = f"step {event.step}: " if event.kind == PLANTED else ""
            lines.append(f"  {event.engine}: {step}{event.text}")
    return lines


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"
