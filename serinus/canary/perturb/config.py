"""From an engine's settings to its PerturbPlan, and to the share of it that each rank plants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from serinus.canary.perturb.plan import MODES, PerturbPlan, parse_perturb
from serinus.core.config import ServeConfig
from serinus.core.errors import ConfigError
from serinus.core.parts import Part
from serinus.core.rng import Rng
from serinus.models import ModelSpec
from serinus.parallel import Mesh, Shard


def fault_plan(config: ServeConfig, spec: ModelSpec) -> PerturbPlan | None:
    """The faults that the settings ask for, of the whole engine; None = none.

    Raises ConfigError: they could not happen, or could not be found, in this engine.
    """
    probabilities = parse_perturb(config.canary.kv_canary_perturb)
    if not probabilities:
        return None
    parts = {part for part in spec.parts if spec.layers_of(part)}
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
    if probabilities.get("transfer_bytes") and config.pd.is_one_sided:
        raise ConfigError(
            f"canary: perturbation transfer_bytes with --disaggregation-transfer-backend {config.pd.transfer_backend},"
            f" which reads pages by itself; expected shm, tcp or auto"
        )
    plan.check(
        parts=parts,
        real_data=config.canary.kv_canary_real_data,
        sweep_interval=config.canary.kv_canary_sweep_interval,
        has_host=config.cache.enable_hierarchical_cache,
        has_oracle=config.kernels.sampling_backend == "token_oracle",
        sends=config.role == "prefill",
    )
    return plan


def check_faults(config: ServeConfig, spec: ModelSpec, shards: Sequence[Shard]) -> None:
    """Raise ConfigError where the settings ask for faults that could not happen, or not be found, in this engine."""
    plan = fault_plan(config, spec)
    if plan is not None:
        fault_rank(config, spec, shards, plan)


def fault_rank(config: ServeConfig, spec: ModelSpec, shards: Sequence[Shard], plan: PerturbPlan) -> int:
    """The rank whose KV is damaged: as set, else drawn from the seed among those where the faults can be found.

    Raises ConfigError: there is no such rank, or it holds nothing that they damage.
    """
    partial = config.canary.kv_canary_real_data == "partial"
    head_0 = partial and any(chance and MODES[name].reads_bytes for name, chance in plan.probabilities.items())
    able = [
        shard.rank for shard in shards
        if spec.on(shard).layers_of(plan.target) and (0 in shard.kv_heads or not head_0)
    ]  # fmt: skip
    named = config.canary.kv_canary_perturb_rank
    if named is None:
        return Rng(config.canary.kv_canary_perturb_seed).split("rank").choice(able)
    if named not in able:
        what = f"layers of part {plan.target.name.lower()}{', and its head 0, which alone is digested' * head_0}"
        raise ConfigError(
            f"canary: --kv-canary-perturb-rank is {named}, expected one of {', '.join(map(str, able))} (of"
            f" {len(shards)} ranks from 0 on those that hold {what})"
        )
    return named


def rank_fault_plan(config: ServeConfig, spec: ModelSpec, shards: Sequence[Shard], rank: int) -> PerturbPlan | None:
    """The faults that one rank plants: those of KV on one rank, those of tokens where they are sampled; None = none.

    Raises ConfigError: see fault_plan and fault_rank.
    """
    plan = fault_plan(config, spec)
    if plan is None:
        return None
    shard = shards[rank]
    victim, sampler = fault_rank(config, spec, shards, plan), Mesh(tp=shard.tp, pp=shard.pp).result_rank
    own = {
        name: chance
        for name, chance in plan.probabilities.items()
        if rank == (victim if MODES[name].has_part else sampler)
    }
    if not own:
        return None
    here = spec.on(shard)
    target = plan.target if rank == victim else min(part for part in here.parts if here.layers_of(part))
    return replace(plan, probabilities=own, target=target)
