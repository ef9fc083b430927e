"""From a ServeConfig to one rank that can run plans: model, pools, tables, tiers, canary, runner.

An engine of one rank has all of the model; of several, each has its shard of it, and as many pages as the rank that has
room for least. Times each phase, so that start-up can say where the time went.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import partial

import torch

from serinus.canary import CanaryRank, make_canary_rank
from serinus.core.clock import Clock
from serinus.core.config import ServeConfig
from serinus.core.cores import engine_threads
from serinus.core.errors import BadRequest, ConfigError
from serinus.core.log import get_logger
from serinus.core.parts import PageStore, Part
from serinus.kernels import FP8_FORMATS, Kernels, load, warm
from serinus.models import (
    TOY_ARCHITECTURE,
    ForwardHook,
    Model,
    ModelSpec,
    TensorDigests,
    choose_dtype,
    choose_kv_dtype,
    compose_hooks,
    load_model,
    spec_of,
)
from serinus.parallel import Mesh, Shard
from serinus.parallel.comm import Comm, TorchComm
from serinus.pool import DevicePool, LayerGate, PoolSpec, RequestTable
from serinus.ranks.devices import take_device
from serinus.ranks.largest_step import largest_step_bytes
from serinus.ranks.load_progress import LoadProgress
from serinus.ranks.memory import available_bytes, trim
from serinus.ranks.memory_account import MemoryAccount
from serinus.ranks.peer_exchange import share_memory
from serinus.ranks.sizes import chunk_of, part_specs
from serinus.ranks.tier_parts import Tiers, build_tiers, host_counts, namespace_of
from serinus.runner import GrammarMasks, Runner, batch_sizes, oracle_token
from serinus.text import GrammarVocabulary, load_tokenizer

_log = get_logger("engine")
_E4M3_SINCE = (8, 9)
"""The compute capability from which Triton reads that type."""


class Phases:
    """Seconds spent since the last mark, by name."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._last = clock.now()
        self.seconds: dict[str, float] = {}

    def mark(self, name: str) -> None:
        """What was done since the last mark is called `name`."""
        now = self.clock.now()
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
    memory: MemoryAccount

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


def build_rank(
    config: ServeConfig, mesh: Mesh, rank: int, comm: Comm, clock: Clock, *, profiled: bool = True,
    before_pool: Callable[[], object] = lambda: None,
) -> RankParts:  # fmt: skip
    """Load this rank's share of the model and allocate everything; all ranks do it side by side.

    Args:
        profiled: run the largest step of a GPU, to leave room for it.
        before_pool: called before it is asked how much memory is free.
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
    share_memory(config, comm, device, kernels)
    spec = spec_of(config.model, device=device)
    shard = spec.shards(mesh, config.parallel.partition)[rank]
    own = spec.on(shard)
    dtype, kv_dtype = _dtypes(config, spec, device, kernels)
    context = context_of(config, spec)
    peers = [each for each in config.parallel.local_ranks if mesh.pp_rank(each) == mesh.pp_rank(rank)]
    alone = mesh.ep > 1  # tensors of whole experts are taken by one rank alone
    digests = TensorDigests(index=0 if alone else peers.index(rank), count=1 if alone else len(peers))
    progress = LoadProgress(clock)
    with torch.inference_mode():
        model = load_model(
            spec, spec.path, dtype, kernels, load_format=config.model.load_format, seed=config.model.random_seed or 0,
            positions=context, device=device, shard=shard, comm=comm, digests=digests, tell=progress,
        )  # fmt: skip
        progress.end()
        if kv_dtype in FP8_FORMATS:
            whence = "of the checkpoint" if model.has_kv_scales else "1.0, as the checkpoint has none"
            _log.info("keys and values are kept in %s; their scales: %s", str(kv_dtype).removeprefix("torch."), whence)
        if not spec.signature:
            spec = spec.signed(digests.of_model(comm))
        trim()
        phases.mark("weights")
        memory = MemoryAccount(device)
        memory.mark("weights")
        step_bytes = _step_bytes(config, model, kernels, own, kv_dtype, device, context) if profiled else 0
        before_pool()
        specs = _agreed(
            part_specs(config, own, kv_dtype, device, context, step_bytes=step_bytes, own=memory.own_bytes), comm
        )
        host = _agreed_host(config, specs, comm)
        pools = {part: DevicePool(part_spec, kernels) for part, part_spec in specs.items()}
        some = shard if mesh.size > 1 else None
        namespace = namespace_of(config, spec, specs[Part.FULL], kv_dtype, some)
        tiers = build_tiers(config, own.layer_parts, pools, namespace, clock, shard=some, counts=host)
        phases.mark("pool")
        memory.mark("KV")
        with ExitStack() as undo:
            if tiers is not None:
                undo.callback(tiers.close)
            parts = assemble(
                config, comm, spec, model, pools, tiers, kernels, context=context, namespace=namespace, phases=phases,
                memory=memory,
            )  # fmt: skip
            undo.pop_all()
        memory.put("largest step", step_bytes)
        return parts


def assemble(
    config: ServeConfig, comm: Comm, spec: ModelSpec, model: Model, pools: Mapping[Part, DevicePool],
    tiers: Tiers | None, kernels: Kernels, *, context: int, namespace: str, phases: Phases,
    memory: MemoryAccount | None = None,
) -> RankParts:  # fmt: skip
    """One rank over its share of the model, its pools and its tiers: row tables, canary, runner.

    `spec`: of the whole model; `context`: tokens of one sequence at most.
    """
    mesh, rank, full = comm.mesh, comm.rank, pools[Part.FULL].spec
    memory = memory or MemoryAccount("cpu")
    shards = spec.shards(mesh, config.parallel.partition)
    tables = {part: RequestTable(rows_of(config), context, full.device) for part in pools}
    memory.mark("tables")
    oracle = config.kernels.sampling_backend == "token_oracle"
    token = partial(oracle_token, vocab_size=spec.vocab_size) if oracle else None
    host = {} if tiers is None else tiers.host
    canary = make_canary_rank(
        config, spec, shards, rank, pools, tables, host, device=full.device, clock=phases.clock, oracle=token,
        dtype=model.dtype,
    )  # fmt: skip
    memory.mark("canary")
    if canary is not None and tiers is not None and tiers.storage is not None:
        tiers.storage.check = canary.host_check
    hooks: list[ForwardHook] = [] if tiers is None else [LayerGate(tiers.mover)]
    hooks += [] if canary is None else [canary.hook]
    grammars = None
    has_grammars = not config.model.skip_tokenizer_init and config.model.grammar_backend != "none"
    if rank == mesh.result_rank and not oracle and has_grammars:
        grammars = GrammarMasks(
            partial(_grammar_vocabulary, config, spec), phases.clock, width=spec.vocab_size,
            kept=rows_of(config),
        )  # fmt: skip
    runner = Runner(
        model, pools, tables, kernels, hook=compose_hooks(hooks), is_watched=canary is not None, token_oracle=oracle,
        comm=comm, grammars=grammars,
    )  # fmt: skip
    return RankParts(
        config=config, mesh=mesh, comm=comm, spec=spec, shard=shards[rank], context=context, dtype=model.dtype,
        device=full.device, kernels=kernels, pools=pools, tables=tables, namespace=namespace, tiers=tiers,
        canary=canary, runner=runner, phases=phases, memory=memory,
    )  # fmt: skip


def _step_bytes(
    config: ServeConfig, model: Model, kernels: Kernels, own: ModelSpec, dtype: torch.dtype, device: str, context: int
) -> int:  # fmt: skip
    """What the largest step takes of a GPU beside weights and KV. Of one rank of several a fifth of what is free: a
    step would need the others."""
    if device == "cpu" or own.architecture == TOY_ARCHITECTURE:
        return 0
    torch.cuda.empty_cache()
    if config.parallel.size > 1:
        return available_bytes(device) // 5
    chunk = chunk_of(config, device)
    shape = PoolSpec(
        layer_count=0, kv_head_count=own.kv_head_count, head_size=own.head_size, page_size=config.memory.page_size,
        page_count=2, dtype=dtype, device=device,
    )  # fmt: skip
    return largest_step_bytes(config, model, kernels, shape, context, context if chunk < 0 else chunk)


def record_steps(parts: RankParts, shown: Callable[[str, int], AbstractContextManager[Callable[[], object]]]) -> None:
    """Record decode steps as CUDA graphs; where that cannot be, say why in the log, and then what memory went where.
    Nothing on a CPU.

    All ranks call it side by side, and find the same reason. `shown`: begins a progress bar of so many steps; calling
    what it gives advances it.
    Cost: some 0.1 s a size, and what kernels are compiled for sizes that they have not seen.
    """
    if parts.device == "cpu":
        return
    if (reason := _why_eager(parts)) is not None:
        _log.info("decode steps are queued kernel by kernel: %s", reason)
    else:
        _record(parts, shown)
    rehearse_steps(parts, () if reason is None else graph_sizes(parts.config))
    parts.memory.tell()


def rehearse_steps(parts: RankParts, sizes: Sequence[int] = ()) -> None:
    """Compute decode steps of these sizes, and logits, for nothing but what is compiled at first use. Nothing where
    that does not depend on sizes. All ranks call it side by side."""
    if specializes(parts) and parts.spec.architecture != TOY_ARCHITECTURE and not parts.spec.through_transformers:
        parts.runner.rehearse(sizes)


def specializes(parts: RankParts) -> bool:
    """Whether kernels are compiled for sizes of steps, when a step of that size comes first."""
    return parts.kernels.columns["choose_tokens"] == "triton"


def graph_sizes(config: ServeConfig) -> tuple[int, ...]:
    """Batches of decode steps that are recorded on a GPU."""
    return batch_sizes(min(config.sched.max_running_requests, config.kernels.cuda_graph_max_bs or 256))


def _record(parts: RankParts, shown: Callable[[str, int], AbstractContextManager[Callable[[], object]]]) -> None:
    sizes = graph_sizes(parts.config)
    before = available_bytes(parts.device)
    with shown("recording CUDA graphs", len(sizes)) as advance:
        parts.runner.record(sizes, lambda size: advance())
    parts.phases.mark("graphs")
    parts.memory.put("graphs", max(before - available_bytes(parts.device), 0))
    _log.info("%d CUDA graphs, decode batches up to %d", len(sizes), sizes[-1])


def _why_eager(parts: RankParts) -> str | None:
    """Why no step is recorded; None = nothing is in the way."""
    ops = {"latent_attention" if parts.spec.is_latent else "paged_attention"} | (
        set() if parts.canary is None else {"canary_watch", "watched_attention"}
    )
    ops |= set() if parts.spec.experts is None else {"fused_moe"}
    waiting = sorted(op for op in ops if parts.kernels.columns[op] == "ref")
    has_faults = bool(parts.config.canary.kv_canary_perturb or parts.config.canary.kv_canary_perturb_api)
    if parts.config.kernels.disable_cuda_graph:
        return "--disable-cuda-graph"
    over_nccl = parts.mesh.tp > 1 and not (isinstance(parts.comm, TorchComm) and parts.comm.peers is not None)
    if over_nccl and parts.config.kernels.cuda_graph_max_bs is None:
        return "steps that add up over NCCL are recorded where --cuda-graph-max-bs asks for it"
    if parts.mesh.tp > 1 and (parts.tiers is not None or has_faults):
        return "slices exchange tensors in recorded steps, and each would wait for loads, or plant faults, by itself"
    if parts.spec.architecture == TOY_ARCHITECTURE:
        return "the toy model waits for the device"
    if parts.spec.through_transformers:
        return "code of transformers is not recorded"
    if waiting:
        return f"the reference's {', '.join(waiting)} waits for the device"
    return None


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
    once = "; what this machine has not compiled before takes about 20 s" if kernels.warmer is not None else ""
    _log.info("kernels on %s: %s%s", kernels.device, kernels.summary(), once)
    if config.canary.kv_canary != "none" or config.cache.enable_hierarchical_cache or config.role != "unified":
        warm(kernels, shapes=())  # the model's own are compiled by the engine's first steps
    phases.mark("kernels")
    return kernels


def _dtypes(config: ServeConfig, spec: ModelSpec, device: str, kernels: Kernels) -> tuple[torch.dtype, torch.dtype]:
    """Of activations and of KV. Raises ConfigError: a setting that cannot be had, for this model or on this device."""
    dtype = choose_dtype(spec, config.model.dtype, device)
    kv_dtype = choose_kv_dtype(config.memory.kv_cache_dtype, dtype)
    if spec.architecture == TOY_ARCHITECTURE:
        return kv_dtype, kv_dtype  # its rows are bytes of hashes
    is_narrow = kv_dtype == torch.float8_e4m3fn and kernels.columns["paged_attention"] == "triton"
    if is_narrow and device != "cpu" and torch.cuda.get_device_capability(device) < _E4M3_SINCE:
        raise ConfigError(
            f"engine: kv_cache_dtype is {config.memory.kv_cache_dtype!r} on a GPU before compute capability 8.9,"
            " expected auto or fp8_e5m2"
        )
    return dtype, kv_dtype


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
