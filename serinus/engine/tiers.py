"""The tiers below the device, of one engine: host pools, the mover, the storage. Built together, closed in order.

Decides nothing: `cache` says what goes where; what is here carries and keeps it.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from serinus.core.clock import Clock
from serinus.core.config import ServeConfig
from serinus.core.parts import Part
from serinus.engine.memory import available_bytes
from serinus.models import ModelSpec
from serinus.pool import DevicePool, HostPool, Mover, PoolSpec, host_page_counts
from serinus.pool.storage import FileStorage

__all__ = ["Tiers", "build_tiers", "host_counts", "namespace_of", "pause"]

_LAYOUT = "page-first layer kv slot head 1"
"""How a page's bytes are laid out; another layout is another name, and another number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiers:
    """What stands behind the device pools."""

    host: Mapping[Part, HostPool]
    """Host pages of each part."""
    mover: Mover
    """Copies between device and host."""
    storage: FileStorage | None
    """Pages in files; None = none."""

    def close(self) -> None:
        """End the threads and give the memory back; the cache must be asked for nothing any more."""
        self.mover.close()
        if self.storage is not None:
            self.storage.close()
        for pool in self.host.values():
            pool.close()


def build_tiers(
    config: ServeConfig, spec: ModelSpec, pools: Mapping[Part, DevicePool], namespace: str, clock: Clock
) -> Tiers | None:
    """The host tier, and the storage where one is asked for; None without --enable-hierarchical-cache.

    Raises ConfigError: more host memory than there is, or a folder that cannot be used.
    """
    settings = config.cache
    if not settings.enable_hierarchical_cache:
        return None
    specs = {part: pool.spec for part, pool in pools.items()}
    counts = host_counts(config, specs)
    host = {part: HostPool(specs[part], counts[part]) for part in specs}
    storage = None
    if settings.hicache_storage_backend == "file":
        storage = FileStorage(
            settings.hicache_storage_dir,
            host=host,
            namespace=namespace,
            byte_max=int(settings.hicache_storage_size * 1e9) or None,
            clock=clock,
        )
    return Tiers(host=host, mover=Mover(dict(pools), host, spec.layer_parts, clock), storage=storage)


def host_counts(config: ServeConfig, specs: Mapping[Part, PoolSpec], taken: int = 0) -> dict[Part, int]:
    """Host pages of each part (page 0 included) behind such device pools; none without --enable-hierarchical-cache.

    `taken`: bytes of host memory that are spoken for. Raises ConfigError: more than there is.
    """
    settings = config.cache
    if not settings.enable_hierarchical_cache:
        return {}
    mapped = sum(s.page_bytes * s.page_count for s in specs.values() if s.device == "cpu")  # lazily: still to come
    return host_page_counts(
        specs,
        ratio=settings.hicache_ratio,
        size_gb=settings.hicache_size,
        available_bytes=available_bytes("cpu") - mapped - taken,
    )


def namespace_of(config: ServeConfig, spec: ModelSpec, pool: PoolSpec, dtype: torch.dtype) -> str:
    """A digest of all that shapes the bytes of a page but its tokens and salt: pages of two engines with the same one
    are the same. The signature holds the weights, the parts and the window."""
    facts = (
        spec.signature, config.model.revision, str(dtype), pool.page_size, pool.kv_head_count, pool.head_size,
        pool.stamped, _LAYOUT,
    )  # fmt: skip
    return hashlib.blake2b(repr(facts).encode(), digest_size=16).hexdigest()


def pause(seconds: float) -> None:
    """Let the threads that copy and read get on, where this one has nothing to do."""
    threading.Event().wait(seconds)
