"""The tiers below the device, of one rank: host pools, the mover, the storage. Built together, closed in order.

Decides nothing: `cache` says what goes where; what is here carries and keeps it. With several ranks each has tiers of
its own, as many host pages as the rank that has least, and files in a folder that names its share of the model.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from serinus.core.clock import Clock
from serinus.core.config import ServeConfig
from serinus.core.parts import Part
from serinus.models import ModelSpec
from serinus.parallel import Shard
from serinus.pool import DeviceMover, DevicePool, HostPool, Mover, PoolSpec, Workers, host_page_counts, map_ahead
from serinus.pool.storage import FileStorage
from serinus.ranks.memory import available_bytes

_LAYOUT = "page-first layer kv slot head 1"
"""How a page's bytes are laid out; another layout is another name, and another number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiers:
    """What stands behind the device pools."""

    host: Mapping[Part, HostPool]
    """Host pages of each part."""
    mover: Mover | DeviceMover
    """Copies between device and host."""
    storage: FileStorage | None
    """Pages in files; None = none."""
    mapping: Workers | None = None
    """What maps the host pages that were not written yet; None = they are mapped when they are."""

    def close(self) -> None:
        """End the threads and give the memory back; the cache must be asked for nothing any more."""
        if self.mapping is not None:
            self.mapping.stop()
        self.mover.close()
        if self.storage is not None:
            self.storage.close()
        for pool in self.host.values():
            pool.close()


def build_tiers(
    config: ServeConfig,
    layer_parts: Sequence[Part],
    pools: Mapping[Part, DevicePool],
    namespace: str,
    clock: Clock,
    *,
    shard: Shard | None = None,
    counts: Mapping[Part, int] | None = None,
) -> Tiers | None:
    """The host tier, and the storage where one is asked for; None without --enable-hierarchical-cache.

    Args:
        layer_parts: of this rank's layers.
        namespace: of this rank's pages.
        shard: what this rank has of the model; None = all of it. Its files lie in a folder of their own.
        counts: host pages by part, where others agreed on them; None = as many as fit here.
    Raises ConfigError: more host memory than there is, or a folder that cannot be used.
    """
    settings = config.cache
    if not settings.enable_hierarchical_cache:
        return None
    specs = {part: pool.spec for part, pool in pools.items()}
    counts = host_counts(config, specs) if counts is None else counts
    host = {part: HostPool(specs[part], counts[part]) for part in specs}
    storage = None
    if settings.hicache_storage_backend == "file":
        folder = Path(os.path.expanduser(settings.hicache_storage_dir))
        ranks = 1 if shard is None else shard.tp * shard.pp
        storage = FileStorage(
            folder / share_name(shard),
            host=host,
            namespace=namespace,
            byte_max=int(settings.hicache_storage_size * 1e9 / ranks) or None,
            clock=clock,
        )
    on_cpu = all(spec.device == "cpu" for spec in specs.values())
    mover = Mover(pools, host, layer_parts, clock) if on_cpu else DeviceMover(pools, host, layer_parts)
    return Tiers(host=host, mover=mover, storage=storage, mapping=map_ahead(host.values()))


def host_counts(config: ServeConfig, specs: Mapping[Part, PoolSpec], taken: int = 0) -> dict[Part, int]:
    """Host pages of each part (page 0 included) behind such device pools; none without --enable-hierarchical-cache.

    `taken`: bytes of host memory that are spoken for, by this rank. Ranks of one machine share what it has.
    Raises ConfigError: more than there is.
    """
    settings = config.cache
    if not settings.enable_hierarchical_cache:
        return {}
    mapped = sum(s.page_bytes * s.page_count for s in specs.values() if s.device == "cpu")  # lazily: still to come
    return host_page_counts(
        specs,
        ratio=settings.hicache_ratio,
        size_gb=settings.hicache_size,
        available_bytes=available_bytes("cpu") // len(config.parallel.local_ranks) - mapped - taken,
    )


def namespace_of(
    config: ServeConfig, spec: ModelSpec, pool: PoolSpec, dtype: torch.dtype, shard: Shard | None = None
) -> str:
    """A digest of all that shapes the bytes of a page but its tokens and salt: pages of two engines with the same one
    are the same. The signature holds the weights, the parts and the window; stamps hold what their digests read."""
    assert spec.signature, "ranks: a namespace of a model whose weights are not loaded"
    stamps = pool.stamped and config.canary.kv_canary_real_data
    facts: tuple[object, ...] = (
        spec.signature, config.model.revision, str(dtype), pool.page_size, pool.kv_head_count, pool.head_size,
        stamps, _LAYOUT,
    )  # fmt: skip
    facts += (share,) if (share := share_name(shard)) else ()
    return hashlib.blake2b(repr(facts).encode(), digest_size=16).hexdigest()


def share_name(shard: Shard | None) -> str:
    """What a rank's files are known by: its place, and how the model is cut; empty for all of a model."""
    if shard is None or shard.tp * shard.pp == 1:
        return ""
    layers, heads, place = shard.layers, shard.kv_heads, shard.name.replace(" ", "-")
    return f"tp{shard.tp}-pp{shard.pp}-{place}-layers{layers.start}-{layers.stop}-heads{heads.start}-{heads.stop}"


def pause(seconds: float) -> None:
    """Let the threads that copy and read get on, where this one has nothing to do."""
    threading.Event().wait(seconds)
