"""From a ServeConfig to an Engine: its ranks, and on the leader the cache, the scheduler, the role and the metrics.

The only place where all rooms below meet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Protocol

from serinus.cache import PrefixCache
from serinus.canary import make_canary_lead
from serinus.core.clock import Clock
from serinus.core.config import ServeConfig
from serinus.core.errors import ConfigError, PeerGone
from serinus.core.ids import new_incarnation
from serinus.core.metrics import Metrics
from serinus.core.parts import Part
from serinus.core.stamps import ChainHashes
from serinus.engine.built import Built
from serinus.engine.engine import Engine
from serinus.engine.first_steps import first_steps
from serinus.engine.handoffs import HandoffParts, MadeHandoffs, make_handoffs
from serinus.engine.healing import Healer
from serinus.engine.inspect import EngineFacts, stamps_reader
from serinus.engine.kv_events import KvEventPublisher, KvEventSettings
from serinus.engine.planning import make_cache, sched_settings
from serinus.engine.progress import counted
from serinus.engine.spans import NO_SPANS, SpanLog
from serinus.engine.step_floor import step_floor
from serinus.engine.step_metrics import StepMetrics
from serinus.kernels import load
from serinus.models import ModelSpec, choose_dtype, choose_kv_dtype, spec_of
from serinus.parallel.comm import Comm, SoloComm
from serinus.pd import AnyBackend
from serinus.pool import PoolSpec
from serinus.ranks import LeaderLine, LeaderLinks, make_body
from serinus.ranks.build import (
    RankParts,
    build_rank,
    choose_device,
    context_of,
    record_steps,
    rehearse_steps,
)
from serinus.ranks.layouts import data_backends
from serinus.ranks.rank_metrics import RankMetrics
from serinus.ranks.rank_processes import RankProcesses, mesh_of
from serinus.ranks.sizes import part_specs
from serinus.ranks.tier_parts import host_counts
from serinus.ranks.tiers import lead_tiers
from serinus.sched import SchedSettings, Scheduler
from serinus.text import GenerationConfig, load_generation_config, tokenizer_eos_ids


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
    device, spec = choose_device(config.model.device), spec_of(config.model)
    dtype = choose_dtype(spec, config.model.dtype, device)
    kv_dtype = choose_kv_dtype(config.memory.kv_cache_dtype, dtype)
    pools = part_specs(config, spec, kv_dtype, device, context_of(config, spec), taken=weight_bytes)
    return KvSizes(pools=pools, host=host_counts(config, pools, taken=weight_bytes if device == "cpu" else 0))


class RankStarter(Protocol):
    """Starts, finds and ends the ranks that do not lead: processes (RankProcesses), or threads (ThreadRanks)."""

    links: LeaderLinks
    """The leader's connections to them."""

    def join(self) -> Comm:
        """Wait until all are connected; returns the leader's end for tensors. Raises ConfigError, PeerGone."""

    def explained(self, error: PeerGone) -> ConfigError | PeerGone:
        """An error of the ranks' connections as what is known of it."""

    def fail(self, error: BaseException) -> None:
        """The engine does not come up: end them."""

    def dismiss(self) -> None:
        """They are about to be told to stop: that they end is no loss from now on."""

    def facts(self) -> list[dict[str, Any]]:
        """All ranks, the leader first."""

    def close(self) -> None:
        """End them; they have been told to stop."""


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
    recorded: bool = True,
) -> Built:
    """Load the model and allocate everything, on all ranks.

    Args:
        starter: starts the ranks that do not lead, where there are any; None = it is made here.
        handoffs_of: makes the engine's role and its connections to peers.
        backends: how pages travel between engines, in the leader's process; none = as the settings say.
        before_pool: as `build_rank` takes it, of one rank.
        recorded: whether decode steps of one rank are recorded, where they can be; else they are not even rehearsed.
    Raises ConfigError where the checkpoint, the machine and the settings do not fit together, PeerGone where a rank
    does not come up. Cost: dominated by reading and packing the weights.
    """
    mesh = mesh_of(config)
    parts: RankParts | None = None
    if mesh.size == 1:
        with ExitStack() as undo:
            parts = build_rank(config, mesh, 0, SoloComm(), clock, before_pool=before_pool)
            undo.callback(parts.close)
            backends = backends or data_backends(config, 0, parts.device)
            line = LeaderLine(make_body(parts, clock, backends), mesh, clock, ends=(parts.runner.close,))
            undo.callback(line.close)
            first_steps(parts, line, clock)
            record_steps(parts, counted) if recorded else rehearse_steps(parts)
            built = lead(parts, line, clock, handoffs_of, backends=backends)
            undo.pop_all()
        return built
    starter = RankProcesses(config, clock) if starter is None else starter
    try:
        parts = build_rank(config, mesh, 0, starter.join(), clock)
        record_steps(parts, counted)
        backends = backends or data_backends(config, 0, parts.device)
        line = LeaderLine(
            make_body(parts, clock, backends), mesh, clock, starter.links,
            whole=parts.canary is not None, dismiss=starter.dismiss, ends=(parts.runner.close, starter.close),
        )  # fmt: skip
        first_steps(parts, line, clock)
        return lead(parts, line, clock, handoffs_of, starter=starter, backends=backends)
    except BaseException as error:
        reason = starter.explained(error) if isinstance(error, PeerGone) else error
        with ExitStack() as undo:
            if parts is not None:
                undo.callback(parts.close)
            undo.callback(starter.fail, reason)
            if parts is not None:
                parts.runner.close()  # first: NCCL waits for what is recorded
        if reason is error:
            raise
        raise reason from error


def lead(
    parts: RankParts, line: LeaderLine, clock: Clock, handoffs_of: HandoffsOf, *, starter: RankStarter | None = None,
    backends: Sequence[AnyBackend] = (), kinds: LeadKinds = LeadKinds(),
) -> Built:  # fmt: skip
    """The leader's engine on top of its rank, from the settings. `starter`: where other ranks were started by one;
    `backends`: those of its page worker."""
    events = _events(parts.config, clock)
    with ExitStack() as undo:
        if events is not None:
            undo.callback(events.close)
        built = _lead(parts, line, clock, handoffs_of, starter, backends, kinds, events)
        undo.pop_all()
    return built


def _lead(
    parts: RankParts, line: LeaderLine, clock: Clock, handoffs_of: HandoffsOf, starter: RankStarter | None,
    backends: Sequence[AnyBackend], kinds: LeadKinds, events: KvEventPublisher | None,
) -> Built:  # fmt: skip
    config, spec = parts.config, parts.spec
    generation = _generation(config, spec)
    settings = sched_settings(parts, line.depth, generation.eos_ids)
    names = [parts.mesh.name(rank) for rank in range(parts.mesh.size)]
    ports = lead_tiers(line, names, parts.tiers)
    chain_hashes = load("cpu").chain_hashes if config.canary.kv_canary != "none" else None
    cache = make_cache(kinds.cache, parts, ports, clock, chain_hashes, events=events is not None)
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


def _generation(config: ServeConfig, spec: ModelSpec) -> GenerationConfig:
    """Defaults of sampling, and all tokens that end an answer: of config.json, generation_config.json and tokenizer."""
    model = config.model
    generation = load_generation_config(spec.path, model.generation_config)
    path = "" if model.skip_tokenizer_init else model.tokenizer_path or spec.path
    eos_ids = {*spec.eos_ids, *generation.eos_ids, *(tokenizer_eos_ids(path, model.revision) if path else ())}
    return replace(generation, eos_ids=tuple(sorted(each for each in eos_ids if each < spec.vocab_size)))
