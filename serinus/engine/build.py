"""From a ServeConfig to an Engine: its ranks, and on the leader the cache, the scheduler, the role and the metrics.

The only place where all rooms below meet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

import numpy as np
import torch

from serinus.cache import CacheGeometry, PartGeometry, PrefixCache
from serinus.canary import CanaryRank, make_canary_lead
from serinus.core.clock import Clock
from serinus.core.config import ServeConfig
from serinus.core.errors import ConfigError, InvariantError, PeerGone
from serinus.core.ids import new_incarnation
from serinus.core.log import get_logger
from serinus.core.metrics import Metrics
from serinus.core.parts import Part
from serinus.core.queue_bounds import bounds_by_priority
from serinus.core.request import Request
from serinus.core.sampling import SamplingParams
from serinus.core.settings import coverage_stride
from serinus.core.stamps import ChainHashes
from serinus.engine.engine import Engine
from serinus.engine.handoffs import HandoffParts, MadeHandoffs, make_handoffs
from serinus.engine.healing import Healer
from serinus.engine.inspect import EngineFacts, stamps_reader
from serinus.engine.kv_events import KvEventPublisher, KvEventSettings
from serinus.engine.messages import FrontEvent, TurnOutput
from serinus.engine.peers import Peers
from serinus.engine.progress import counted
from serinus.engine.spans import NO_SPANS, SpanLog
from serinus.engine.step_floor import step_floor
from serinus.engine.step_metrics import StepMetrics
from serinus.kernels import load
from serinus.models import ModelSpec, choose_dtype, load_spec, resolve
from serinus.parallel.comm import Comm, SoloComm
from serinus.pd import AnyBackend
from serinus.pool import DevicePool, PoolSpec
from serinus.ranks import LeaderLine, LeaderLinks, make_body
from serinus.ranks.build import RankParts, build_rank, choose_device, context_of, overrides_of, record_steps, rows_of
from serinus.ranks.layouts import data_backends
from serinus.ranks.rank_metrics import RankMetrics
from serinus.ranks.rank_processes import RankProcesses, mesh_of
from serinus.ranks.sizes import chunk_of, part_specs
from serinus.ranks.tier_parts import Tiers, host_counts, pause
from serinus.ranks.tiers import TierPorts, lead_tiers
from serinus.sched import SchedSettings, Scheduler
from serinus.text import GenerationConfig, load_generation_config, tokenizer_eos_ids

__all__ = ["Built", "KvSizes", "LeadKinds", "RankStarter", "build_engine", "kv_sizes", "lead"]

_CPU_STEP_S: Final = 0.3
"""Seconds of a step on a CPU, where the settings do not say."""
_FIRST_TOKENS: Final = 40
"""Of each prompt at start-up: more than attention takes for decoding, and linears as few rows."""
_LOOK_S: Final = 0.05
_QUIET_S: Final = 5.0
"""Seconds that copies and storage operations get to end before the engine goes."""
_PAUSE_S: Final = 0.001
_log = get_logger("engine")


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """An engine, and what was decided while it was built."""

    config: ServeConfig
    """The settings in force."""
    spec: ModelSpec
    engine: Engine
    line: LeaderLine
    """To the engine's ranks."""
    cache: PrefixCache
    pools: Mapping[Part, DevicePool]
    """KV of each part."""
    canary: CanaryRank | None
    """The canary of the rank in this process; None = there is none."""
    tiers: Tiers | None
    """Host tier and storage; None = none."""
    events: KvEventPublisher | None
    """Publishes what becomes cached; None = that is not wanted."""
    incarnation: int
    peers: Peers | None
    """Connections to other engines, for the driver of the engine; None = it has none."""
    pd_address: str
    """Where decode engines find this one; empty = nowhere."""
    clock: Clock
    metrics: Metrics
    context_length: int
    """Tokens of one sequence at most."""
    generation: GenerationConfig
    """Sampling defaults of the checkpoint, and the tokens that end an answer."""
    dtype: torch.dtype
    device: str
    seconds: dict[str, float]
    """Start-up phases: weights, pool, warm-up."""
    memory: Mapping[str, int]
    """Bytes of the leader's GPU by what they hold."""

    @property
    def pool(self) -> DevicePool:
        """The pool of part FULL; its pages have no bytes where all layers slide."""
        return self.pools[Part.FULL]

    @property
    def max_total_tokens(self) -> int:
        """Slots a request can use."""
        return (self.pool.spec.page_count - 1) * self.pool.spec.page_size

    def turn(self, messages: Sequence[FrontEvent] = ()) -> TurnOutput:
        """One turn of the engine at this moment, with what its peers sent; peers and subscribers of cache events get
        what it tells them. The caller sends the rest to fronts, and then flushes the line."""
        from_peers = [] if self.peers is None else self.peers.receive()
        output = self.engine.turn(self.clock.now(), messages, from_peers)
        self.deliver(output)
        return output

    def deliver(self, output: TurnOutput) -> None:
        """Pass on what an output has for peers and for subscribers of cache events."""
        if self.peers is not None:
            self.peers.deliver(output.peers)
        if self.events is not None:
            self.events.publish(output.cache_events)

    def close(self) -> None:
        """Let copies and storage writes end, then end the ranks and what carries pages. May be called again."""
        if self.tiers is not None:
            if self.line.sound and (left := self._quiet()):
                _log.warning("engine: %d copies and storage operations are given up", left)
            self.tiers.close()
        self.line.close()
        if self.events is not None:
            self.events.close()
        self.engine.handoffs.close()
        if self.peers is not None:
            self.peers.close()

    def _quiet(self) -> int:
        """Wait until nothing is under way in the tiers; returns what still is when waiting has no more use."""
        end, left = self.clock.now() + _QUIET_S, 0
        try:
            while self.line.sound and (left := self.cache.poll().in_flight) and self.clock.now() < end:
                pause(_PAUSE_S)
        except PeerGone as error:
            _log.warning("%s, while the engine closes", error)
        return left


@dataclass(frozen=True, slots=True, kw_only=True)
class KvSizes:
    """Room for KV that an engine of these settings has."""

    pools: Mapping[Part, PoolSpec]
    """On the device, by part."""
    host: Mapping[Part, int]
    """Host pages by part, page 0 included; empty = no host tier."""


def kv_sizes(config: ServeConfig, weight_bytes: int) -> KvSizes:
    """What `build_engine` would make of the memory that is free now, once weights of so many bytes are loaded.

    Allocates nothing. Raises ConfigError as `build_engine` does.
    """
    device = choose_device(config.model.device)
    folder = resolve(config.model.model_path, config.model.revision)
    model = config.model
    spec = load_spec(
        folder, overrides=overrides_of(config), load_format=model.load_format, model_impl=model.model_impl,
        quantization=model.quantization,
    )  # fmt: skip
    dtype = choose_dtype(spec, config.model.dtype, device)
    pools = part_specs(config, spec, dtype, device, context_of(config, spec), taken=weight_bytes)
    return KvSizes(pools=pools, host=host_counts(config, pools, taken=weight_bytes if device == "cpu" else 0))


class RankStarter(Protocol):
    """Starts, finds and ends the ranks that do not lead: processes (RankProcesses), or threads (ThreadRanks)."""

    links: LeaderLinks
    """The leader's connections to them."""

    def join(self) -> Comm:
        """Wait until all are connected; returns the leader's end for tensors. Raises ConfigError, PeerGone."""
        ...

    def explained(self, error: PeerGone) -> ConfigError | PeerGone:
        """An error of the ranks' connections as what is known of it."""
        ...

    def fail(self, error: BaseException) -> None:
        """The engine does not come up: end them."""
        ...

    def dismiss(self) -> None:
        """They are about to be told to stop: that they end is no loss from now on."""
        ...

    def facts(self) -> list[dict[str, Any]]:
        """All ranks, the leader first."""
        ...

    def close(self) -> None:
        """End them; they have been told to stop."""
        ...


HandoffsOf = Callable[[HandoffParts, Clock], MadeHandoffs]


@dataclass(frozen=True, slots=True, kw_only=True)
class LeadKinds:
    """What makes the parts of a leader; a simulation gives some that it watches."""

    cache: Callable[..., PrefixCache] = PrefixCache
    scheduler: Callable[[SchedSettings, PrefixCache, ChainHashes | None], Scheduler] = Scheduler
    metrics: Callable[..., Metrics] = Metrics
    incarnation: Callable[[], int] = new_incarnation


def build_engine(
    config: ServeConfig,
    clock: Clock,
    starter: RankStarter | None = None,
    *,
    handoffs_of: HandoffsOf = make_handoffs,
    backends: Sequence[AnyBackend] = (),
    before_pool: Callable[[], object] = lambda: None,
) -> Built:
    """Load the model and allocate everything, on all ranks.

    Args:
        starter: starts the ranks that do not lead, where there are any; None = it is made here.
        handoffs_of: makes the engine's role and its connections to peers.
        backends: how pages travel between engines, in the leader's process; none = as the settings say.
        before_pool: as `build_rank` takes it, of one rank.
    Raises ConfigError where the checkpoint, the machine and the settings do not fit together, PeerGone where a rank
    does not come up. Cost: dominated by reading and packing the weights.
    """
    mesh = mesh_of(config)
    if mesh.size == 1:
        parts = build_rank(config, mesh, 0, SoloComm(), clock, before_pool=before_pool)
        backends = backends or data_backends(config, 0, parts.device)
        line = LeaderLine(make_body(parts, clock, backends), mesh, clock)
        _first_steps(parts, line, clock)
        record_steps(parts, counted)
        return lead(parts, line, clock, handoffs_of, backends=backends)
    starter = RankProcesses(config, clock) if starter is None else starter
    with ExitStack() as undo:
        try:
            parts = build_rank(config, mesh, 0, starter.join(), clock)
            undo.callback(parts.close)
            record_steps(parts, counted)
            backends = backends or data_backends(config, 0, parts.device)
            line = LeaderLine(
                make_body(parts, clock, backends), mesh, clock, starter.links,
                whole=parts.canary is not None, dismiss=starter.dismiss, ends=(starter.close,),
            )  # fmt: skip
            _first_steps(parts, line, clock)
            built = lead(parts, line, clock, handoffs_of, starter=starter, backends=backends)
        except PeerGone as error:
            reason = starter.explained(error)
            starter.fail(reason)
            raise reason from error
        except BaseException as error:
            starter.fail(error)
            raise
        undo.pop_all()
    return built


def lead(
    parts: RankParts, line: LeaderLine, clock: Clock, handoffs_of: HandoffsOf, *, starter: RankStarter | None = None,
    backends: Sequence[AnyBackend] = (), kinds: LeadKinds = LeadKinds(),
) -> Built:  # fmt: skip
    """The leader's engine on top of its rank, from the settings. `starter`: where other ranks were started by one;
    `backends`: those of its page worker."""
    config, spec = parts.config, parts.spec
    generation = _generation(config, spec)
    settings = _sched_settings(parts, line.depth, generation.eos_ids)
    events = _events(config, clock)
    names = [parts.mesh.name(rank) for rank in range(parts.mesh.size)]
    ports = lead_tiers(line, names, parts.tiers)
    chain_hashes = load("cpu").chain_hashes if config.canary.kv_canary != "none" else None
    cache = _cache(kinds.cache, parts, ports, clock, chain_hashes, events=events is not None)
    scheduler = kinds.scheduler(settings, cache, chain_hashes)
    shards = spec.shards(parts.mesh, config.parallel.partition)
    canary = make_canary_lead(config, spec, shards, line, cache, scheduler, clock)
    rank = "TP0" if starter is None else names[0]
    metrics = kinds.metrics(engine=config.engine_name, role=config.role, rank=rank)
    incarnation = kinds.incarnation()
    spans = SpanLog() if config.server.otlp_traces_endpoint else NO_SPANS
    made = handoffs_of(
        HandoffParts(
            config=config, spec=spec, pools=parts.pools, scheduler=scheduler, line=line, metrics=metrics,
            backends=backends, arrived=None if canary is None else canary.arrived,
            heard=None if canary is None else canary.heard, trace=cache.trace,
            incarnation=incarnation, spans=spans,
        ),
        clock,
    )  # fmt: skip
    heals = config.canary.kv_canary == "heal"
    engine = Engine(
        scheduler=scheduler,
        cache=cache,
        line=line,
        handoffs=made.role,
        metrics=_step_metrics(config, metrics, line, clock.now()),
        canary=canary,
        healer=Healer(config.canary, scheduler, made.role, metrics) if heals else None,
        facts=_facts(parts, starter, clock),
        spans=spans,
        stream_interval=config.sched.stream_interval,
        sanity=config.cache.enable_sanity_check,
        publishes=events is not None,
    )
    return Built(
        config=config,
        spec=spec,
        engine=engine,
        line=line,
        cache=cache,
        pools=parts.pools,
        canary=parts.canary,
        tiers=parts.tiers,
        events=events,
        metrics=metrics,
        context_length=parts.context,
        generation=generation,
        dtype=parts.dtype,
        device=parts.device,
        seconds=parts.phases.seconds,
        memory=parts.memory.bytes,
        incarnation=incarnation,
        peers=made.peers,
        pd_address=made.address,
        clock=clock,
    )


def _facts(parts: RankParts, starter: RankStarter | None, clock: Clock) -> EngineFacts:
    config, tiers = parts.config, parts.tiers
    return EngineFacts(
        engine=config.engine_name,
        role=config.role,
        shelf=tiers.storage.shelf if tiers is not None and tiers.storage is not None else None,
        ranks=list if starter is None else starter.facts,
        device=parts.device,
        step_floor_s=step_floor(parts.spec.on(parts.shard), parts.pools, parts.dtype, parts.device, clock),
        stamps_of=stamps_reader(parts.pools),
    )


def _step_metrics(config: ServeConfig, metrics: Metrics, line: LeaderLine, now: float) -> StepMetrics:
    """Of all ranks, also where there is one: what it holds staged or under way is told by the line alone."""
    ranks = RankMetrics(metrics, line, engine=config.engine_name, role=config.role, now=now)
    return StepMetrics(metrics, now, every_steps=config.sched.decode_log_interval, ranks=ranks)


def _events(config: ServeConfig, clock: Clock) -> KvEventPublisher | None:
    """Publishes what is cached; None = that is not wanted.

    Raises ConfigError: the setting is wrong or its endpoint in use.
    """
    if not config.cache.kv_events_config:
        return None
    settings = KvEventSettings.from_json(config.cache.kv_events_config)
    return KvEventPublisher(settings, clock) if settings.enabled else None


def _cache(
    make: Callable[..., PrefixCache], parts: RankParts, ports: TierPorts, clock: Clock,
    chain_hashes: ChainHashes | None, *, events: bool,
) -> PrefixCache:  # fmt: skip
    config = parts.config
    return make(
        _geometry(parts.pool_specs, parts.spec.window, parts.tiers),
        enable_prefix=not config.sched.disable_radix_cache,
        policy=config.sched.radix_eviction_policy,
        write_policy=config.cache.hicache_write_policy,
        mover=ports.mover,
        storage=ports.storage,
        namespace=parts.namespace,
        kv_events=events,
        clock=clock,
        chain_hashes=chain_hashes,
    )


def _geometry(specs: Mapping[Part, PoolSpec], window: int | None, tiers: Tiers | None) -> CacheGeometry:
    host = {} if tiers is None else {part: pool.page_count for part, pool in tiers.host.items()}
    windows = {Part.SWA: window}
    parts = {
        part: PartGeometry(pages=spec.page_count, host_pages=host.get(part, 0), window=windows.get(part))
        for part, spec in specs.items()
    }
    return CacheGeometry(page_size=specs[Part.FULL].page_size, parts=parts)


def _first_steps(parts: RankParts, line: LeaderLine, clock: Clock) -> None:
    """Answer two short requests, greedy and sampled, with a scheduler and a cache of their own, without tiers, that are
    thrown away: whatever is compiled, loaded or allocated at first use is there before the first client comes, on every
    rank. The KV it leaves behind lies on pages that the real ledger calls free.
    """
    settings, pool = _sched_settings(parts, line.depth, ()), parts.pool_specs[Part.FULL]
    settings = replace(settings, prefetch_policy="none")
    room = min(settings.context_length, (pool.page_count - 1) * pool.page_size)
    scheduler = Scheduler(settings, PrefixCache(_geometry(parts.pool_specs, parts.spec.window, None)))
    with torch.inference_mode():
        _run_out(line, scheduler, clock, room)
    parts.phases.mark("warm-up")


def _run_out(line: LeaderLine, scheduler: Scheduler, clock: Clock, room: int) -> None:
    """`room`: tokens that a request may have."""
    for temperature in (0.0, 1.0):
        sampling = SamplingParams(max_new_tokens=2, temperature=temperature, top_p=0.9, ignore_eos=True)
        prompt = np.zeros(max(1, min(_FIRST_TOKENS, room - 2)), np.int32)
        scheduler.add(Request(rid=f"warm-up-{temperature}", prompt=prompt, sampling=sampling, seed=0))
    while not scheduler.idle:
        plan = scheduler.plan(clock.now())
        if plan is None:
            raise InvariantError("engine: the warm-up requests cannot run, expected a step")
        line.run(plan)
        while True:
            line.pump(_LOOK_S)
            if (finished := line.finished()) is not None:
                break
        scheduler.commit(plan, finished.result, clock.now())


def _step_s_max(config: ServeConfig, device: str) -> float:
    """Seconds of a step at most; 0 = no bound. On a CPU a chunk of full length takes seconds, in which no stream gets a
    token; whole prompts, where they are asked for, stay whole."""
    asked = config.sched.max_step_ms
    if asked is not None:
        return asked / 1e3
    return _CPU_STEP_S if device == "cpu" and config.sched.chunked_prefill_size != -1 else 0.0


def _generation(config: ServeConfig, spec: ModelSpec) -> GenerationConfig:
    """Defaults of sampling, and all tokens that end an answer: of config.json, generation_config.json and tokenizer."""
    model = config.model
    generation = load_generation_config(spec.path, model.generation_config)
    path = "" if model.skip_tokenizer_init else model.tokenizer_path or spec.path
    eos_ids = {*spec.eos_ids, *generation.eos_ids, *(tokenizer_eos_ids(path, model.revision) if path else ())}
    return replace(generation, eos_ids=tuple(sorted(each for each in eos_ids if each < spec.vocab_size)))


def overlaps(parts: RankParts) -> bool:
    """Whether steps are begun before the one before them is read. Not on a CPU, which would compute one before it gives
    out the other; nor where peers or cards write pages beside the device's own queue, as they may be given pages that a
    step under way still writes."""
    config = parts.config
    is_direct = config.role != "unified" and config.pd.transfer_backend in ("nixl", "mooncake")
    return parts.device != "cpu" and parts.mesh.size == 1 and not (config.kernels.disable_overlap_schedule or is_direct)


def _sched_settings(parts: RankParts, depth: int, eos_ids: tuple[int, ...]) -> SchedSettings:
    config, spec, pool = parts.config, parts.spec, parts.pool_specs[Part.FULL]
    running = config.sched.max_running_requests
    return SchedSettings(
        page_size=pool.page_size,
        context_length=parts.context,
        rows=rows_of(config),
        vocab_size=spec.vocab_size,
        eos_ids=eos_ids,
        max_total_tokens=(pool.page_count - 1) * pool.page_size,
        max_running_requests=running,
        max_queued_requests=config.sched.max_queued_requests,
        queued_max_of=bounds_by_priority(config.sched.max_queued_by_priority),
        priority_ageing_s=config.sched.priority_ageing_s,
        request_s_max=config.sched.request_s_max,
        chunked_prefill_size=chunk_of(config, pool.device),
        step_s_max=_step_s_max(config, pool.device),
        schedule_policy=config.sched.schedule_policy,
        min_remote_tokens=config.pd.min_remote_tokens,
        local_gain=config.pd.local_gain,
        prefetch_policy=(
            "none" if config.cache.hicache_storage_backend == "none" else config.cache.hicache_storage_prefetch_policy
        ),
        prefetch_s_max=config.cache.hicache_prefetch_s_max,
        depth=depth,
        overlaps=overlaps(parts),
        verify_parts=tuple(part for part in spec.parts if spec.layers_of(part)),
        raises=config.canary.kv_canary == "raise",
        heals=config.canary.kv_canary == "heal",
        confirms_streams=config.canary.kv_canary_stream == "confirmed",
        verify_steps=0 if config.canary.kv_canary == "none" else coverage_stride(config.canary.kv_canary_coverage),
    )
