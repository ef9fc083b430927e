"""How much of a matched path can be used, on the device alone and with the host: one rule for all parts.

FULL covers a prefix from position 0. Every other part has a rule: how many positions before the next one it must cover
(its window), or WHOLE. Reads nodes, changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from serinus.cache.node import FULL, Node
from serinus.cache.tree import Descent

__all__ = ["Coverage", "Rule", "cover", "lacking", "window_start"]

Rule = tuple[int, int]
"""A part beside FULL, and its window."""


@dataclass(slots=True)
class Coverage:
    """The longest usable prefixes of a descent; each ends with a node of its path, or inside its last, partial one."""

    device: int
    """Tokens usable now, without a load."""
    total: int
    """Tokens usable once the host's pages are loaded."""


def window_start(position: int, window: int) -> int:
    """First position whose KV computing `position` reads in a part with this window."""
    return max(0, position - window + 1)


def cover(found: Descent, rules: Sequence[Rule]) -> Coverage:
    """Hold the path of a descent from a root against what its nodes have where.

    Within a node only its far end matters: a part is there for a node as a whole, so a longer prefix of it is usable
    whenever a shorter one is. Cost: the nodes of the path, times the parts.
    """
    path = found.path if found.partial is None else [*found.path, found.partial]
    ends = [node.end for node in path]
    if found.partial is not None:
        ends[-1] = found.end
    on_device = 0
    for node in path:
        if not len(node.device[FULL]):
            break
        on_device += 1
    bad_here, bad_anywhere = set[int](), set[int]()
    for part, window in rules:
        gap = host_gap = 0  # ends of the last gap: on the device, on both tiers
        for at, node in enumerate(path):
            if not len(node.device[part]):
                gap = ends[at]
                if not len(node.host[part]):
                    host_gap = gap
            if gap and ends[at] < gap + window - 1:
                bad_here.add(at)
                if host_gap and ends[at] < host_gap + window - 1:
                    bad_anywhere.add(at)
    device = next((ends[at] for at in range(on_device - 1, -1, -1) if at not in bad_here), 0)
    total = next((ends[at] for at in range(len(path) - 1, -1, -1) if at not in bad_anywhere), 0)
    return Coverage(device, total)


def lacking(nodes: list[Node], end: int, rules: Sequence[Rule]) -> list[list[Node]]:
    """Of the nodes of a path up to `end`, by part (FULL first): those that the device lacks and `end` reads."""
    found = [[node for node in nodes if not len(node.device[FULL])]]
    for part, window in rules:
        start = window_start(end, window)
        found.append([node for node in nodes if node.end > start and not len(node.device[part])])
    return found
