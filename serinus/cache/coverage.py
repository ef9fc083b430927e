"""How much of a matched path can be used, on the device alone and with the host: one rule for all parts.

Every part has a rule: how many positions, the next one included, it must cover (its window), or WHOLE, as FULL must.
Reads nodes, changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from serinus.cache.effects import Descent
from serinus.cache.node import FULL, WHOLE, Node

Rule = tuple[int, int]
"""A part, and its window, or WHOLE."""


@dataclass(slots=True)
class Coverage:
    """The longest usable prefixes of a descent; each ends with a node of its path, or inside its last, partial one."""

    device: int
    """Tokens usable now, without a load."""
    total: int
    """Tokens usable once the host's pages are loaded."""


def window_start(position: int, window: int) -> int:
    """First position whose KV computing `position` reads in a part with this window."""
    return position - window + 1 if position >= window else 0


def cover(found: Descent, rules: Sequence[Rule]) -> Coverage:
    """Hold the path of a descent from a root against what its nodes have where.

    Within a node only its far end matters: a part is there for a node as a whole, so a longer prefix of it is usable
    whenever a shorter one is. A node that lacks a part spoils every prefix that ends less than the window behind it.
    Cost: the nodes of the path, times the parts.
    """
    path = found.path if found.partial is None else [*found.path, found.partial]
    device = total = 0
    device_from = total_from = 0  # the shortest prefix that no node so far spoils
    others = rules[1:]
    for node in path:
        end = node.end if node is not found.partial else found.end
        if not len(node.device[FULL]):  # then the host has it
            device_from = WHOLE
        for part, window in others:
            if not len(node.device[part]):
                spoiled = end + window - 1
                if spoiled > device_from:
                    device_from = spoiled
                if spoiled > total_from and not len(node.host[part]):
                    total_from = spoiled
        if end >= device_from:
            device = end
        if end >= total_from:
            total = end
    return Coverage(device, total)


def lacking(nodes: list[Node], end: int, rules: Sequence[Rule]) -> list[list[Node]]:
    """Of the nodes of a path up to `end`, by part: those that the device lacks and `end` reads."""
    found = []
    for part, window in rules:
        start = window_start(end, window)
        found.append([node for node in nodes if node.end > start and not len(node.device[part])])
    return found
