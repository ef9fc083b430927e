"""OwnCanary: the canary of one rank and who plants faults there, from the settings. An engine of one rank has one too.

What it finds is judged elsewhere (judge.py): a rank knows its bytes, not who owns them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from serinus.canary import Canary, CanarySettings, PageFacts
from serinus.canary.hook import NoFaults
from serinus.canary.perturb import MODES, Perturber, PerturbPlan, parse_perturb
from serinus.core.config import ServeConfig
from serinus.core.errors import ConfigError, InvariantError
from serinus.core.log import get_logger
from serinus.core.parts import Part
from serinus.core.rng import Rng
from serinus.core.settings import coverage_stride
from serinus.kernels.canary import load_canary
from serinus.models import ForwardHook, ModelSpec
from serinus.parallel import Mesh, Shard
from serinus.pd import PageStore
from serinus.pool import DevicePool, HostPool, RequestTable
from serinus.runner import oracle_token

__all__ = ["OwnCanary", "fault_plan", "fault_rank"]

_log = get_logger("canary")


class OwnCanary:
    """One rank's. `hook` goes around the forward pass, behind the gate of loads."""

    def __init__(
        self,
        config: ServeConfig,
        spec: ModelSpec,
        pools: Mapping[Part, DevicePool],
        tables: Mapping[Part, RequestTable],
        device: str,
        host: Mapping[Part, HostPool],
        facts: PageFacts,
        *,
        host_pages: Callable[[Part], NDArray[np.int32]],
        shards: Sequence[Shard] = (),
        rank: int = 0,
    ) -> None:
        """
        Args:
            spec: the whole model; shards: what each rank has of it, () = one rank has all.
            host: this rank's host tier; host_pages: which of its pages are cached now.
        Raises ConfigError where the settings ask for what this model or this engine cannot do.
        """
        self.config = config
        self._host, self._host_pages = host, host_pages
        shard = shards[rank] if shards else None
        own = spec if shard is None else spec.on(shard)
        first_layer = 0 if shard is None else shard.layers.start
        plan = fault_plan(config, spec, has_host=bool(host))
        plan = _own_plan(plan, config, spec, own, shards, rank)
        has_oracle = config.kernels.sampling_backend == "token_oracle"
        self.perturber = None if plan is None else Perturber(plan, host_pages=self._rows if host else None)
        """Who plants faults, or nobody."""
        self.canary = Canary(
            CanarySettings(
                page_size=config.memory.page_size,
                window=spec.window,
                real_data=config.canary.kv_canary_real_data,
                stride=coverage_stride(config.canary.kv_canary_coverage),
                sweep_interval=config.canary.kv_canary_sweep_interval,
                plans_open=1 if shard is None or shard.pp == 1 else 2 * shard.pp,
            ),
            pools,
            tables,
            {part: [first_layer + layer for layer in own.layers_of(part)] for part in _parts(own)},
            load_canary(device),
            facts,
            faults=self.perturber or NoFaults(),
            oracle=partial(oracle_token, vocab_size=spec.vocab_size) if has_oracle else None,
            head_ids=None if shard is None else shard.kv_heads,
        )
        if self.perturber is not None:
            self.perturber.attach(self.canary.parts)
        self.hook: ForwardHook = self.canary.hook

    def outgoing(self, pools: Mapping[Part, PageStore]) -> Mapping[Part, PageStore]:
        """What a handoff may read pages from: the pools, damaged on their way out where that was asked for."""
        perturber = self.perturber
        if perturber is None or "transfer_bytes" not in perturber.plan.probabilities:
            return pools
        return {part: _TamperedStore(pool, part, perturber) for part, pool in pools.items()}

    def tell(self) -> None:
        """Lines of statistics, where their step has come."""
        canary, settings = self.canary, self.config.canary
        if settings.kv_canary_stats_interval and canary.steps % settings.kv_canary_stats_interval == 0:
            _log.info("%s", canary.stats_line())
        apart = settings.kv_canary_swa_divergence_interval
        if apart and canary.steps % apart == 0:
            _log.info("%s", canary.divergence_line())

    def _rows(self, part: Part) -> tuple[NDArray[np.uint8], NDArray[np.integer]]:
        if part not in self._host:
            raise InvariantError(f"engine: no host tier of part {part.name} to damage, expected one")
        return self._host[part].data_PY, self._host_pages(part)


class _TamperedStore:
    """A pool whose pages may be damaged on their way out: the perturbation transfer_bytes."""

    def __init__(self, pool: PageStore, part: Part, perturber: Perturber) -> None:
        self._pool, self._part, self._perturber = pool, part, perturber

    @property
    def page_bytes(self) -> int:
        return self._pool.page_bytes

    def read_pages(self, pages: NDArray[np.integer], out: NDArray[np.uint8]) -> object:
        self._pool.read_pages(pages, out)
        self._perturber.sent(self._part, out)
        return out

    def write_pages(self, pages: NDArray[np.integer], data: NDArray[np.uint8]) -> None:
        self._pool.write_pages(pages, data)


def fault_plan(config: ServeConfig, spec: ModelSpec, *, has_host: bool) -> PerturbPlan | None:
    """The faults that the settings ask for, of the whole engine; None = none. Raises ConfigError."""
    probabilities = parse_perturb(config.canary.kv_canary_perturb)
    if not probabilities:
        return None
    parts = _parts(spec)
    named = config.canary.kv_canary_perturb_target
    if not named and len(parts) > 1 and any(MODES[name].has_part for name in probabilities if name in MODES):
        raise ConfigError(
            "canary: --kv-canary-perturb damages KV of a model with both parts, expected --kv-canary-perturb-target"
            " full or swa"
        )
    plan = PerturbPlan(
        probabilities=probabilities,
        target=Part[named.upper()] if named else min(parts),
        warmup_steps=config.canary.kv_canary_perturb_warmup_steps,
        seed=config.canary.kv_canary_perturb_seed,
    )
    if probabilities.get("transfer_bytes") and config.pd.transfer_backend in ("nixl", "mooncake"):
        raise ConfigError(
            f"canary: perturbation transfer_bytes with --disaggregation-transfer-backend {config.pd.transfer_backend},"
            f" which reads pages by itself; expected shm, tcp or auto"
        )
    plan.check(
        parts=parts,
        real_data=config.canary.kv_canary_real_data,
        sweep_interval=config.canary.kv_canary_sweep_interval,
        has_host=has_host,
        has_oracle=config.kernels.sampling_backend == "token_oracle",
        sends=config.role == "prefill",
    )
    return plan


def fault_rank(config: ServeConfig, spec: ModelSpec, shards: Sequence[Shard], target: Part) -> int:
    """The rank whose KV is damaged: as set, else drawn from the seed among those that have layers of the part.

    Raises ConfigError: there is no such rank, or it has no such layers.
    """
    able = [shard.rank for shard in shards if spec.on(shard).layers_of(target)]
    named = config.canary.kv_canary_perturb_rank
    if named is None:
        return Rng(config.canary.kv_canary_perturb_seed).split("rank").choice(able)
    if named not in able:
        raise ConfigError(
            f"canary: --kv-canary-perturb-rank is {named}, expected one of {', '.join(map(str, able))}, which have"
            f" layers of part {target.name.lower()}"
        )
    return named


def _own_plan(
    plan: PerturbPlan | None,
    config: ServeConfig,
    spec: ModelSpec,
    own: ModelSpec,
    shards: Sequence[Shard],
    rank: int,
) -> PerturbPlan | None:
    """What of the faults this rank plants: those of KV on one rank, those of tokens where they are sampled."""
    if plan is None or len(shards) < 2:
        return plan
    mesh = Mesh(tp=shards[rank].tp, pp=shards[rank].pp)
    victim = fault_rank(config, spec, shards, plan.target)
    mine = {
        name: chance
        for name, chance in plan.probabilities.items()
        if rank == (victim if MODES[name].has_part else mesh.result_rank)
    }
    if not mine:
        return None
    return replace(plan, probabilities=mine, target=plan.target if rank == victim else min(_parts(own)))


def _parts(spec: ModelSpec) -> set[Part]:
    """Parts with layers."""
    return {part for part in spec.parts if spec.layers_of(part)}
