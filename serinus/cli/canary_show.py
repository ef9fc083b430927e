"""`serinus canary show`: what the canaries of running engines have found, engine by engine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from serinus.cli.ask import ask_arguments, ask_server
from serinus.cli.parser import Command

__all__ = ["canary_lines", "show"]


def show(command: Command, words: Sequence[str]) -> int:
    """Print what the canaries of running engines have found. 0 = nothing, 1 = something, or no answer."""
    arguments = ask_arguments(command, words, path="/canary", limit=20, of="incidents")
    view = ask_server(arguments, "/canary", mark="mode")
    if arguments.json:
        print(json.dumps(view, indent=2))
    members = view.get("engines", [{"canary": view, "url": arguments.url}])
    found = False
    for member in members:
        canary = member.get("canary")
        found |= canary is None or bool(canary.get("violations"))
        if not arguments.json:
            for line in canary_lines(member, arguments.limit):
                print(line)
    return 1 if found else 0


def canary_lines(member: dict[str, Any], limit: int) -> list[str]:
    """The JSON of one engine's /canary for people, `limit` incidents at most. Names that clients chose are quoted."""
    where, view = member.get("url", ""), member.get("canary")
    if view is None:
        return [f"{where} did not answer: {member.get('error', '')!a}"]
    if view["mode"] == "none":
        return [f"{where}: no canary (start it with --kv-canary log or raise)"]
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
            f"  {_steps(item)}: {'|'.join(item['reasons'])} by {','.join(item['tags'])}: slot {item['slot']}, page"
            f" {item['page']}{_of_rank(item)}, position {item['position']}, request {item['rid'] or '-'!a},"
            f" owner {item['owner']!a}, users {users!a}, history {item['history']!a}"
        )
    return lines


def _steps(item: dict[str, Any]) -> str:
    """When, and how often."""
    if item["count"] == 1:
        return f"step {item['first_step']}"
    return f"steps {item['first_step']} to {item['last_step']}, {item['count']:,} times"


def _of_rank(item: dict[str, Any]) -> str:
    """The rank with the damaged pool, where an engine has several ranks."""
    return f" of rank {item['rank']}" if item.get("rank") else ""
