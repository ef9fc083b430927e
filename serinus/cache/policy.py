"""Write policies: when a node's pages are copied to the host, two numbers each; and which settings fit together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from serinus.cache.node import Node
from serinus.cache.ports import PageMover, PageStorage
from serinus.cache.results import CacheGeometry
from serinus.core.errors import ConfigError
from serinus.core.eviction import EVICTION_POLICIES


@dataclass(frozen=True, slots=True, kw_only=True)
class WritePolicy:
    """When the host gets its copy."""

    name: str
    backup_after_hits: int | None
    """Requests that must have published or matched a node before it is copied; None = only when it must leave the
    device, when free pages run low, or when its request is parked."""
    watermark: float
    """Share of the device's pages: when fewer are free, the coldest dirty leaves are copied early; 0 = never."""

    def due(self, node: Node) -> bool:
        """Whether the node is copied as soon as there is a chance."""
        return self.backup_after_hits is not None and node.uses >= self.backup_after_hits

    def worth(self, node: Node) -> bool:
        """Whether the node is copied before it leaves the device, rather than dropped."""
        return self.backup_after_hits is None or node.uses >= self.backup_after_hits


WRITE_POLICIES: Mapping[str, WritePolicy] = {
    "write_through": WritePolicy(name="write_through", backup_after_hits=1, watermark=0.0),
    "write_through_selective": WritePolicy(name="write_through_selective", backup_after_hits=2, watermark=0.0),
    "write_back": WritePolicy(name="write_back", backup_after_hits=None, watermark=0.1),
}
"""By name, as the settings call them."""


def check_settings(
    geometry: CacheGeometry, policy: str, write_policy: str, mover: PageMover | None, storage: PageStorage | None
) -> None:
    """Raises ConfigError for settings of a cache that do not fit together."""
    if policy not in EVICTION_POLICIES:
        raise ConfigError(f"cache: eviction policy is {policy!r}, expected one of {', '.join(EVICTION_POLICIES)}")
    if write_policy not in WRITE_POLICIES:
        raise ConfigError(f"cache: write policy is {write_policy!r}, expected one of {', '.join(WRITE_POLICIES)}")
    if (mover is None) == geometry.tiered:
        raise ConfigError(
            f"cache: {geometry.full.host_pages} host pages {'without' if mover is None else 'with'} a mover,"
            " expected both or neither"
        )
    if storage is not None and mover is None:
        raise ConfigError("cache: a storage without a host tier, expected host pages for it to fill")
