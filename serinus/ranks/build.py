"""From a ServeConfig to one rank that can run plans: model, pools, tables, tiers, canary, runner.

An engine of one rank has all of the model; of several, each has its shard of it, and as many pages as the rank that has
room for least. Times each phase, so that start-up can say where the time went.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from serinus.canary import CanaryRank, make_canary_rank
from serinus.core.clock import Clock
from serinus.core.config import ServeConfig
from serinus.core.cores import engine_threads
from serinus.core.errors import BadRequest, ConfigError
from serinus.core.log import get_logger
from serinus.core.parts import PageStore, Part
from serinus.kernels import Kernels, load, warm
from serinus.models import (
    ForwardHook,
    Model,
    ModelSpec,
    TensorDigests,
    choose_dtype,
    compose_hooks,
    load_model,
    load_spec,
    resolve,
)
from serinus.parallel import Mesh, Shard
from serinus.parallel.comm import Comm
from serinus.pool import DevicePool, LayerGate, PoolSpec, RequestTable
from serinus.ranks.devices import take_device
from serinus.ranks.memory import trim
from serinus.ranks.sizes import part_specs
from serinus.ranks.tier_parts import Tiers, build_tiers, host_counts, namespace_of
from serinus.runner import GrammarMasks, Runner, oracle_token
from serinus.text import GrammarVocabulary, load_tokenizer

__all__ = ["Phases", "RankParts", "assemble", "build_rank", "choose_device", "context_of", "overrides_of", "rows_of"]

_log = get_logger("engine")


class Phases:
    """Seconds spent since the last mark, by name."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._last = clock.now()
        self.seconds: dict[str, float] = {}

    def mark(self, name: str) -> None:
        """What was done since the last mark is called `name`."""
        now = self._clock.now()
        self.seconds[name] = now - self._last
        self._last = now


@dataclass(frozen=True, slots=True, kw_only=True)
class RankParts:
    """All that one rank has."""

    config: ServeConfig
    mesh: Mesh
    comm: Comm
    """To the other ranks."""
    spec: ModelSpec
    """The whole model, all ranks together."""
    shard: Shard
    """What this rank has of it."""
    context: int
    """Tokens of one sequence at most."""
    dtype: torch.dtype
    device: str
    kernels: Kernels
    pools: Mapping[Part, DevicePool]
    """KV of this rank's layers and heads, by part; equal page counts on all ranks."""
    tables: Mapping[Part, RequestTable]
    namespace: str
    """Of this rank's pages in the storage."""
    tiers: Tiers | None
    """This rank's host pools, mover and files; None = none."""
    canary: CanaryRank | None
    """This rank's half of the canary."""
    runner: Runner
    phases: Phases

    @property
    def pool_specs(self) -> dict[Part, PoolSpec]:
        """The shapes of its device pools."""
        return {part: pool.spec for part, pool in self.pools.items()}

    @property
    def outgoing(self) -> Mapping[Part, PageStore]:
        """The pools of this rank as a handoff reads them."""
        return self.pools if self.canary is None else self.canary.outgoing(self.pools)

    def close(self) -> None:
        """End its threads and connections."""
        self.runner.close()
        if self.tiers is not None:
            self.tiers.close()
        self.comm.close()


def build_rank(config: ServeConfig, mesh: Mesh, rank: int, comm: Comm, clock: Clock) -> RankParts:
    """Load this rank's share of the model and allocate everything; all ranks do it side by side.

    Raises ConfigError where the checkpoint, the machine and the settings do not fit together, PeerGone where another
    rank does not come as far. Cost: dominated by reading and packing the weights.
    """
    phases = Phases(clock)
    if mesh.size > 1:
        take_device(config, rank)
    device = choose_device(config.model.device)
    threads = config.kernels.threads
    if mesh.size > 1:
        threads = engine_threads(threads, len(config.parallel.local_ranks))
    if threads:
        torch.set_num_threads(threads)
    kernels = _load_kernels(config, device, phases)
    folder = resolve(config.model.model_path, config.model.revision)
    seed = config.model.random_seed or 0
    spec = load_spec(folder, overrides=overrides_of(config), load_format=config.model.load_format, seed=seed)
    shard = spec.shards(mesh, config.parallel.partition)[rank]
    own = spec.on(shard)
    dtype = choose_dtype(spec, config.model.dtype, device)
    context = context_of(config, spec)
    peers = [each for each in config.parallel.local_ranks if mesh.pp_rank(each) == mesh.pp_rank(rank)]
    digests = TensorDigests(index=peers.index(rank), count=len(peers))
    with torch.inference_mode():
        model = load_model(
            spec,
            folder,
            dtype,
            kernels,
            load_format=config.model.load_format,
            seed=seed,
            positions=context,
            device=device,
            shard=shard,
            comm=comm,
            digests=digests,
        )
        if not spec.signature:
            spec = spec.signed(digests.of_model(comm))
        trim()
        phases.mark("weights")
        specs = _agreed(part_specs(config, own, dtype, device, context), comm)
        host = _agreed_host(config, specs, comm)
        pools = {part: DevicePool(part_spec, kernels) for part, part_spec in specs.items()}
        some = shard if mesh.size > 1 else None
        namespace = namespace_of(config, spec, specs[Part.FULL], dtype, some)
        tiers = build_tiers(config, own.layer_parts, pools, namespace, clock, shard=some, counts=host)
        phases.mark("pool")
        return assemble(
            config, comm, spec, model, pools, tiers, kernels, context=context, namespace=namespace, phases=phases
        )  # fmt: skip


def assemble(
    config: ServeConfig, comm: Comm, spec: ModelSpec, model: Model, pools: Mapping[Part, DevicePool],
    tiers: Tiers | None, kernels: Kernels, *, context: int, namespace: str, phases: Phases,
) -> RankParts:  # fmt: skip
    """One rank over its share of the model, its pools and its tiers: row tables, canary, runner.

    `spec`: of the whole model; `context`: tokens of one sequence at most.
    """
    mesh, rank, full = comm.mesh, comm.rank, pools[Part.FULL].spec
    shards = spec.shards(mesh, config.parallel.partition)
    tables = {part: RequestTable(rows_of(config), context, full.device) for part in pools}
    oracle = config.kernels.sampling_backend == "token_oracle"
    token = partial(oracle_token, vocab_size=spec.vocab_size) if oracle else None
    host = {} if tiers is None else tiers.host
    canary = make_canary_rank(config, spec, shards, rank, pools, tables, host, device=full.device, oracle=token)
    if canary is not None and tiers is not None and tiers.storage is not None:
        tiers.storage.check = canary.host_check
    hooks: list[ForwardHook] = [] if tiers is None else [LayerGate(tiers.mover)]
    hooks += [] if canary is None else [canary.hook]
    grammars = None
    if rank == mesh.result_rank and not oracle and not config.model.skip_tokenizer_init:
        grammars = GrammarMasks(partial(_grammar_vocabulary, config, spec), width=spec.vocab_size, kept=rows_of(config))
    runner = Runner(
        model, pools, tables, kernels, hook=compose_hooks(hooks), is_watched=canary is not None, token_oracle=oracle,
        comm=comm, grammars=grammars,
    )  # fmt: skip
    return RankParts(
        config=config, mesh=mesh, comm=comm, spec=spec, shard=shards[rank], context=context, dtype=full.dtype,
        device=full.device, kernels=kernels, pools=pools, tables=tables, namespace=namespace, tiers=tiers,
        canary=canary, runner=runner, phases=phases,
    )  # fmt: skip


def _grammar_vocabulary(config: ServeConfig, spec: ModelSpec) -> GrammarVocabulary:
    """Raises BadRequest, for the first request that has a grammar: the tokenizer cannot be read, or not for that."""
    path = config.model.tokenizer_path or spec.path
    try:
        tokenizer = load_tokenizer(path, revision=config.model.revision)
    except ConfigError as error:
        raise BadRequest("grammar", path, f"a tokenizer that can be read ({error})") from error
    return GrammarVocabulary(tokenizer, width=spec.vocab_size, eos_ids=spec.eos_ids)


def _load_kernels(config: ServeConfig, device: str, phases: Phases) -> Kernels:
    kernels = load(device, config.kernels.attention_backend)
    once = "; compiled at the first start on this machine, for about 20 s" if kernels.warmer is not None else ""
    _log.info("kernels on %s: %s%s", kernels.device, kernels.summary(), once)
    if config.canary.kv_canary != "none" or config.cache.enable_hierarchical_cache or config.role != "unified":
        warm(kernels, shapes=())  # the model's own are compiled by the engine's first steps
    phases.mark("kernels")
    return kernels


def _agreed(specs: dict[Part, PoolSpec], comm: Comm) -> dict[Part, PoolSpec]:
    """With as many pages as the rank with room for least."""
    counts = comm.smallest([spec.page_count for spec in specs.values()])
    return {part: replace(specs[part], page_count=count) for part, count in zip(specs, counts, strict=True)}


def _agreed_host(config: ServeConfig, specs: dict[Part, PoolSpec], comm: Comm) -> dict[Part, int]:
    """Host pages by part, likewise; empty = no host tier."""
    counts = host_counts(config, specs)
    return dict(zip(counts, comm.smallest(list(counts.values())), strict=True))


def rows_of(config: ServeConfig) -> int:
    """Rows of req_to_token, the padding row included."""
    return config.sched.max_running_requests + 1


def overrides_of(config: ServeConfig) -> dict[str, Any]:
    """Values that replace those of config.json. Raises ConfigError: no JSON object."""
    text = config.model.json_model_override_args
    try:
        overrides = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"engine: json_model_override_args is {text!r} ({error}), expected a JSON object") from None
    if not isinstance(overrides, dict):
        raise ConfigError(f"engine: json_model_override_args is {text!r}, expected a JSON object")
    return overrides


def choose_device(name: str) -> str:
    """`auto` is cuda where there is one, else cpu. Raises ConfigError for a device that is not there."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"engine: device is {name!r}, but torch sees no CUDA device; expected cpu")
    return name


def context_of(config: ServeConfig, spec: ModelSpec) -> int:
    """The context in force: the model's, or the smaller one of the settings. Raises ConfigError: theirs is larger."""
    asked = config.model.context_length
    if asked is None:
        return spec.context_length
    if asked > spec.context_length:
        raise ConfigError(
            f"engine: context_length is {asked}, expected at most {spec.context_length}, which the model holds"
        )
    return asked
