"""`serinus cache`: what a running engine, or every engine behind a router, has cached where, as a text tree."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from serinus.cli.ask import ask_server, asking_parser, read_asked
from serinus.cli.parser import Command

_TIERS = (("device", "device"), ("host", "host"))
_GB = 10**9


def run(command: Command, words: Sequence[str]) -> int:
    """Ask and print. Exit code 1 where an engine does not answer."""
    arguments = read_asked(asking_parser(command, path="/cache", limit=40, of="nodes of the tree"), words)
    view = ask_server(arguments, "/cache", mark="tree", params={"limit": arguments.limit})
    if arguments.json:
        print(json.dumps(view, indent=2))
        return 0
    engines = view.get("engines", [{"cache": view}])
    failed = False
    for index, member in enumerate(engines):
        if index:
            print()
        if "cache" not in member:
            failed = True
            print(f"{member['url']} ({member['kind']}) did not answer: {member.get('error', '')!a}")
            continue
        for line in cache_lines(member["cache"], where=member.get("url", "")):
            print(line)
    return 1 if failed or not engines else 0


def cache_lines(view: dict[str, Any], *, where: str = "") -> Iterator[str]:
    """The JSON of one engine's /cache for people. Texts that clients chose are shown as ASCII, quoted."""
    size = view.get("page_size", 1)
    yield f"{view['engine']} ({view['role']}){f' at {where}' if where else ''}, pages of {size} tokens"
    for pool in view["pools"]:
        name, bad = f"{pool['tier']} {pool['part']}", pool.get("quarantined", 0)
        yield (
            f"  {name:12}{pool['pages'] * size:>12,} tokens: {pool['cached'] * size:,} cached "
            f"({pool['evictable'] * size:,} evictable), {pool['request'] * size:,} of requests, "
            f"{pool['copy'] * size:,} in copies, {pool['free'] * size:,} free"
            + (f", {bad * size:,} in quarantine" if bad else "")
            + (f", {retired * size:,} retired" if (retired := pool.get("retired", 0)) else "")
        )
    if "storage" in view:
        held = view["storage"]
        yield (
            f"  {'storage':12}{held['pages']:>12,} pages, {held['bytes'] / _GB:.3f} GB; removed for room "
            f"{held['removed']:,}, found bad {held['bad']:,}"
        )
    yield from _tree_lines(view["tree"], size)


def _tree_lines(tree: dict[str, Any], size: int) -> Iterator[str]:
    nodes = tree["nodes"]
    shown = f", the first {len(nodes):,} of them" if len(nodes) < tree["total"] else ""
    yield f"  tree: {tree['total']:,} nodes{shown}"
    namespace: str | None = None
    for index, node in enumerate(nodes):
        if node["namespace"] != namespace:
            namespace = str(node["namespace"])
            if namespace:
                yield f"  namespace {namespace!a}"
        yield f"    {_branch(nodes, index)}{_node_text(node, size)}"


def _branch(nodes: Sequence[dict[str, Any]], index: int) -> str:
    """The lines before a node: whether it, and each node above it, has younger siblings further down."""
    depth = nodes[index]["depth"]
    parts = []
    for level in range(1, depth + 1):
        later = next((n["depth"] for n in nodes[index + 1 :] if n["depth"] <= level), -1)
        more = later == level
        parts.append(("├─ " if more else "└─ ") if level == depth else ("│  " if more else "   "))
    return "".join(parts)


def _node_text(node: dict[str, Any], size: int) -> str:
    held = []
    for tier, title in _TIERS:
        full, swa = node["pages"].get(tier, 0), node["pages"].get(f"{tier}_swa", 0)
        if full or swa:
            held.append(f"{title} {full}{f'+{swa} swa' if swa else ''}")
    facts = [f"hits {node['hits']}", f"idle {node['idle']:,} operations"]
    pins = node["pins"] + node["swa_pins"]
    if pins:
        facts.append(f"pins {node['pins']}{'+' + str(node['swa_pins']) + ' swa' if node['swa_pins'] else ''}")
    if node["busy"]:
        facts.append(f"copies {node['busy']}")
    head = " ".join(map(str, node["head"]))
    span = f"[{node['start']}, {node['end']}) node {node['id']}: {node['end'] - node['start']:,} tokens"
    where = ", ".join(held) or "nowhere"
    return f"{span}, pages {where}; {', '.join(facts)}; from {node['head_start']}: {head}"
