"""How much of a matched path can be used, on the device alone and with the host: one rule for all parts.

A prefix of length L is usable when FULL covers [0, L) and SWA covers the window that computing position L reads. Reads
nodes, changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from serinus.cache.node import Node
from serinus.cache.tree import Descent

__all__ = ["Coverage", "cover", "lacking", "window_start"]


@dataclass(slots=True)
class Coverage:
    """The longest usable prefixes of a descent; each ends with a node of its path, or inside its last, partial one."""

    device: int
    """Tokens usable now."""
    total: int
    """Tokens usable once the host's pages are loaded."""


def window_start(position: int, window: int | None) -> int:
    """First position whose SWA computing `position` reads."""
    return position if window is None else max(0, position - window + 1)


def cover(found: Descent, window: int | None) -> Coverage:
    """Hold the path of a descent from a root against what its nodes have where.

    Within a node only its far end matters: SWA is there for a node as a whole, so a longer prefix of it is usable
    whenever a shorter one is. Cost: the nodes of the path.
    """
    path = found.path if found.partial is None else [*found.path, found.partial]
    device = total = device_gap = total_gap = 0
    on_device = True
    for node in path:
        end = node.end if node is not found.partial else found.end
        if on_device and not len(node.pages):
            on_device = False
        if window is None:
            total = end
            if on_device:
                device = end
            continue
        if not len(node.swa):
            device_gap = end
            if not len(node.host_swa):
                total_gap = end
        if not total_gap or end >= total_gap + window - 1:
            total = end
        if on_device and (not device_gap or end >= device_gap + window - 1):
            device = end
    return Coverage(device, total)


def lacking(nodes: list[Node], end: int, window: int | None) -> tuple[list[Node], list[Node]]:
    """Of the nodes of a path up to `end`: those without device FULL, and those without device SWA in the window."""
    full = [node for node in nodes if not len(node.pages)]
    if window is None:
        return full, []
    start = window_start(end, window)
    return full, [node for node in nodes if node.end > start and not len(node.swa)]
