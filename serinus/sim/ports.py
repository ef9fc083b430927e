"""What a simulated engine's handoff port is built with: settings, backends, stores that check every access.

The page workers of the ranks move pages, by commands of the line; one-sided backends go on from pool to pool beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from serinus.core.config import ServeConfig
from serinus.core.line import CommandLine
from serinus.core.parts import Part
from serinus.core.rng import MASK64, Rng, splitmix64
from serinus.core.settings import (
    CacheSettings,
    CanarySettings,
    MemorySettings,
    ModelSettings,
    ParallelSettings,
    PdSettings,
    ScheduleSettings,
    ServerSettings,
)
from serinus.pd import (
    AnyBackend,
    DecodeResult,
    HandoffPort,
    HandoffSettings,
    LocalBackend,
    PeerChanged,
    PrefillResult,
    Quarantine,
    Region,
    TcpBackend,
)
from serinus.pd.backends import PageRows, Receiver, Sender, ShmBackend
from serinus.sim.disk import Folders
from serinus.sim.one_sided import ONE_SIDED, Fabric, one_sided
from serinus.sim.options import EngineShape, Shape
from serinus.sim.pools import SimPool
from serinus.sim.segments import SharedMemory
from serinus.sim.timeline import Timeline
from serinus.sim.watched import PageWatch
from serinus.wire import Gone, PeerMessage

if TYPE_CHECKING:
    from serinus.sim.engine import SimEngine

ROWS = 5
"""Of req_to_token, the padding row included."""
_STAGING_BYTES = 1 << 12
_SWEEP_EVERY = 3
"""Steps between two sweeps of a canary."""
_HEALS = 10_000
"""Heals of one request at most: it is damaged until it has its answer."""
SWEEP_S = 4.0
"""Virtual seconds of one pass over a cache at most."""


@lru_cache(maxsize=1024)
def config_of(shape: EngineShape, world: Shape) -> ServeConfig:
    """The settings of an engine. Cost: half a millisecond, so they are kept."""
    canary, cache = CanarySettings(kv_canary="none"), CacheSettings()
    if world.canary:
        heals: dict[str, Any] = (
            {"kv_canary_heals_max": _HEALS, "kv_canary_heal_tokens_per_second": 0} if world.mode == "heal" else {}
        )
        canary = CanarySettings(
            **heals, kv_canary=world.mode, kv_canary_real_data=world.canary, kv_canary_coverage=world.coverage,
            kv_canary_sweep_interval=_SWEEP_EVERY, kv_canary_sweep_seconds=SWEEP_S, kv_canary_stats_interval=0,
        )  # fmt: skip
    if shape.host_pages:
        stored: dict[str, Any] = {
            "hicache_storage_backend": "file", "hicache_storage_dir": "/pages",
            "hicache_storage_prefetch_policy": shape.prefetch,
            **({"hicache_prefetch_s_max": 0.05} if shape.prefetch == "timeout" else {}),
        }  # fmt: skip
        cache = CacheSettings(
            enable_hierarchical_cache=True,
            hicache_write_policy=shape.write_policy,
            **(stored if shape.prefetch != "none" else {}),
        )
    order: dict[str, Any] = {"schedule_policy": "priority", "priority_ageing_s": world.ageing_s} if world.ranked else {}
    return ServeConfig(
        model=ModelSettings(model_path="simulated", context_length=world.context_length),
        server=ServerSettings(name=shape.name),
        memory=MemorySettings(page_size=shape.page_size),
        sched=ScheduleSettings(
            max_running_requests=world.rows or ROWS - 1,
            chunked_prefill_size=shape.chunk,
            decode_log_interval=0,
            **order,
        ),
        cache=cache,
        pd=PdSettings(
            mode=shape.role,
            min_remote_tokens=2,
            on_failure=world.on_failure if shape.role == "decode" else "recompute",
            optimistic_prefill=world.optimistic,
            park_tokens=24,
            handoff_s_max=30.0,
            keepalive_s=1.0,
            peer_s_max=5.0,
            cluster_secret=world.secret,
        ),
        parallel=ParallelSettings(tp_size=shape.tp, pp_size=shape.pp),
        canary=canary,
    )


class Shared:
    """What the engines of a cluster share: names that never repeat, staging memory, one-sided transports, files."""

    def __init__(self, seed: int, backend: str, fabric: Fabric, timeline: Timeline, rng: Rng) -> None:
        self._seed = seed
        self.backend = backend
        self.fabric = fabric
        self.local = LocalBackend(_STAGING_BYTES)
        self.machine = SharedMemory()
        self._minted = 0
        self.folders = Folders(timeline.now, rng)

    def incarnation(self, name: str, life: int) -> int:
        """Of one run of one engine."""
        value = self._seed & MASK64
        for byte in f"{name}/{life}".encode():
            value = splitmix64(value ^ byte)
        return value >> 1 | 1

    def mint(self) -> str:
        """A name that was never given before."""
        self._minted += 1
        return f"x{self._minted}"

    def ends(self, engine: SimEngine) -> list[list[AnyBackend]]:
        """How pages travel to and from one run of an engine, by rank."""
        count = engine.shape.tp * engine.shape.pp
        if self.backend in ONE_SIDED:
            segments = self.machine.process(engine.name)
            return [[one_sided(self.fabric, engine, rank, self.backend, segments)] for rank in range(count)]
        backend: AnyBackend = TcpBackend(_STAGING_BYTES)
        if self.backend == "local":
            backend = Staging(self.local)
        elif self.backend == "shm":
            backend = ShmBackend(_STAGING_BYTES, self.machine.process(engine.name))
        return [[backend] for _ in range(count)]

    @property
    def idle(self) -> bool:
        """Nothing is staged or under way."""
        return not self.local.staged_count and not self.fabric.moving

    def unrest(self) -> str:
        """What is, in words."""
        return f"{self.local.staged_count} pieces are staged, {self.fabric.moving} pages are being moved"


class Staging:
    """The local backend as the processes of one engine have it (pd's Backend): what they staged is gone with them."""

    name = LocalBackend.name
    capabilities = LocalBackend.capabilities

    def __init__(self, shared: LocalBackend) -> None:
        self._shared = shared
        self._senders: list[Sender] = []

    def sender(self) -> Sender:
        """For a new connection."""
        self._senders.append(self._shared.sender())
        return self._senders[-1]

    def receiver(self) -> Receiver:
        """For a new connection."""
        return self._shared.receiver()

    def kill(self) -> None:
        """The system takes back what the processes had staged."""
        for sender in self._senders:
            sender.close()


class CheckedStore:
    """The pages of one part of one rank, as one-sided transports reach them; every access is checked."""

    def __init__(self, pool: SimPool, part: Part, watch: PageWatch, *, is_source: bool) -> None:
        self.pool, self._part, self._watch, self._is_source = pool, part, watch, is_source
        self.page_bytes = pool.page_bytes
        """Bytes of one page."""
        self.regions = tuple(
            Region(
                part=part, address=own.address, lane_count=own.lane_count, lane_stride=own.lane_stride,
                strip_bytes=own.strip_bytes, page_count=own.page_count,
            )
            for own in pool.regions
        )  # fmt: skip
        self._memory = [(pool.k[0]), *([] if pool.stamps_LS4 is None else [pool.stamps_LS4])]

    def find(self, address: int, byte_count: int) -> tuple[NDArray[np.uint8], NDArray[np.intp]] | None:
        """A view of the bytes there, and the pages that they belong to; None = they lie elsewhere."""
        for region, tensor in zip(self.regions, self._memory, strict=True):
            at = address - region.address
            if 0 <= at < region.byte_count:
                start = at % region.lane_stride
                pages = np.arange(start // region.strip_bytes, -(-(start + byte_count) // region.strip_bytes))
                memory = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy()
                return memory[at : at + byte_count], pages
        return None

    def rows(self, rows: PageRows, pages: NDArray[np.integer]) -> NDArray[np.uint8] | None:
        """A copy of rows of pages of this store, [G, bytes of all of them]; None = they lie elsewhere."""
        steps = rows.page_step, rows.strip_step, rows.row_step, 1
        for region, tensor in zip(self.regions, self._memory, strict=True):
            at = rows.address - region.address
            if 0 <= at < region.byte_count:
                memory = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
                found: NDArray[np.uint8] = memory.as_strided((rows.page_count, *rows.shape), steps, at).numpy()[pages]
                return found.reshape(len(pages), -1)
        return None

    def read_pages(self, pages: NDArray[np.integer], out: NDArray[np.uint8]) -> None:
        """Copy pages into out[G, page_bytes]: what is sent is digested first."""
        self.check_read(pages)
        self.pool.read_pages(pages, out)

    def read_stamps(self, pages: NDArray[np.integer]) -> NDArray[np.uint8]:
        """The same of the pool, checked."""
        self.check_read(pages)
        return self.pool.read_stamps(pages)

    def write_stamps(self, pages: NDArray[np.integer], rows: NDArray[np.uint8]) -> None:
        """The same of the pool, checked."""
        self.check_write(pages)
        self.pool.write_stamps(pages, rows)

    def token_digests(
        self, pages: NDArray[np.integer], first_layer: int, coefficients_L22W: torch.Tensor
    ) -> NDArray[np.uint64]:
        """The same of the pool, checked."""
        return self.pool.token_digests(pages, first_layer, coefficients_L22W)

    def check_read(self, pages: NDArray[np.integer]) -> None:
        """Raises AssertionError: a peer reads pages of this engine, and nothing holds them for that."""
        if self._is_source:
            self._watch.check_read(self._part, pages)

    def check_write(self, pages: NDArray[np.integer]) -> None:
        """Raises AssertionError: these pages may not be written now."""
        self._watch.check_write(self._part, pages)


class WatchedPort(HandoffPort[Any]):
    """The port of an engine of the simulation, which counts what it asks for. Its timeouts are short enough for a run
    of some virtual seconds."""

    def __init__(
        self, engine: SimEngine, machine: Callable[..., Any], settings: HandoffSettings, *, line: CommandLine,
        backends: Sequence[AnyBackend],
    ) -> None:  # fmt: skip
        ranks = engine.ranks
        page_bytes = max(pool.page_bytes for rank in ranks for pool in rank.pools.values())
        settings = replace(
            settings, host="here", piece_bytes_max=2 * page_bytes, lease_s=12.0, abort_s_max=9.0, retry_s_min=0.2,
            retry_s_max=1.0, staging_pieces=1 if len(ranks) == 1 else 3,
        )  # fmt: skip
        super().__init__(machine, settings, line=line, backends=backends, mint=engine.shared.mint)
        self._network = engine.network

    def turn(
        self, now: float, messages: Sequence[PeerMessage | Gone] = (), *, load: int = 0, turn: int = 0,
        queue_s: float = 0.0, token_s: float = 0.0,
    ) -> list[DecodeResult | PrefillResult]:  # fmt: skip
        results = super().turn(now, messages, load=load, turn=turn, queue_s=queue_s, token_s=token_s)
        for result in results:
            if isinstance(result, Quarantine):
                self._network.quarantined += 1
            elif isinstance(result, PeerChanged) and result.state == "down":
                self._network.peers_lost[result.reason[:40]] += 1
        return results
