"""KvGuard: the canary in one engine. Built from the settings, it stands around each step and says who has to end.

The canary decides what is checked and names who had to do with a violation; here its word meets scheduler, cache and
metrics.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serinus.cache import PrefixCache, ResidentSlots, Tier
from serinus.canary import Canary, CanarySettings, Violation, reason_names
from serinus.canary.hook import NoFaults
from serinus.canary.perturb import MODES, Perturber, PerturbPlan, parse_perturb
from serinus.core.config import ServeConfig
from serinus.core.errors import ConfigError, InvariantError, KvViolation
from serinus.core.log import get_logger
from serinus.core.metrics import Metrics
from serinus.core.parts import Part
from serinus.core.plan import StepPlan, StepResult
from serinus.core.settings import coverage_stride
from serinus.engine.guard import Verdict
from serinus.kernels.canary import Reason, load_canary
from serinus.models import ForwardHook, ModelSpec
from serinus.pd import PageStore
from serinus.pool import DevicePool, HostPool, RequestTable
from serinus.runner import oracle_token
from serinus.sched import OwnPages, Scheduler

__all__ = ["KvGuard", "make_guard"]

_log = get_logger("canary")


class _Facts:
    """PageFacts of an engine; it learns of cache and scheduler once they are there."""

    def __init__(self) -> None:
        self.cache: PrefixCache | None = None
        self.scheduler: Scheduler | None = None

    def owner(self, part: Part, page: int) -> str:
        ledger = self._cache().ledgers[Tier.DEVICE, part]
        return ledger.describe(int(ledger.owner_P[page]))

    def users(self, part: Part, page: int) -> tuple[str, ...]:
        assert self.scheduler is not None, "engine: the canary found something before there was a scheduler"
        return self.scheduler.users_of(part, page)

    def history(self, part: Part, page: int) -> str:
        return self._cache().ledgers[Tier.DEVICE, part].history(page)

    def walk(self, cursor: int, budget: int, part: Part) -> ResidentSlots:
        return self._cache().walk(cursor, budget, part=part, unlocked_only=True)

    def condemn(self, part: Part, page: int) -> None:
        """Nobody shall find this page again."""
        self._cache().condemn(part, np.array([page], np.int32))

    def _cache(self) -> PrefixCache:
        assert self.cache is not None, "engine: the canary looks into a cache before there is one"
        return self.cache


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


class KvGuard:
    """A canary at work. `hook` goes around the forward pass, behind the gate of loads."""

    def __init__(
        self,
        config: ServeConfig,
        spec: ModelSpec,
        pools: Mapping[Part, DevicePool],
        tables: Mapping[Part, RequestTable],
        device: str,
        host: Mapping[Part, HostPool],
    ) -> None:
        """Raises ConfigError where the settings ask for what this model or this engine cannot do."""
        self._raises = config.canary.kv_canary == "raise"
        self._mode = config.canary.kv_canary
        self._stats_interval = config.canary.kv_canary_stats_interval
        self._divergence_interval = config.canary.kv_canary_swa_divergence_interval
        self._facts = _Facts()
        self._host = host
        parts = {part for part in spec.parts if spec.layers_of(part)}
        has_oracle = config.kernels.sampling_backend == "token_oracle"
        self.perturber = _perturber(config, parts, self._host_pages if host else None, has_oracle=has_oracle)
        """Who plants faults, or nobody."""
        self.canary = Canary(
            CanarySettings(
                page_size=config.memory.page_size,
                window=spec.window,
                real_data=config.canary.kv_canary_real_data,
                stride=coverage_stride(config.canary.kv_canary_coverage),
                sweep_interval=config.canary.kv_canary_sweep_interval,
            ),
            pools,
            tables,
            {part: spec.layers_of(part) for part in parts},
            load_canary(device),
            self._facts,
            faults=self.perturber or NoFaults(),
            oracle=partial(oracle_token, vocab_size=spec.vocab_size) if has_oracle else None,
        )
        if self.perturber is not None:
            self.perturber.attach(self.canary.parts)
        self.hook: ForwardHook = self.canary.hook

    def bind(self, cache: PrefixCache, scheduler: Scheduler) -> None:
        """Whom to ask about pages; once, before the first step that counts."""
        self._facts.cache, self._facts.scheduler = cache, scheduler

    def begin(self, plan: StepPlan) -> None:
        self.canary.begin(plan)

    def returned(self, result: StepResult) -> StepResult:
        return self.canary.returned(result)

    def judge(self) -> Sequence[Verdict]:
        violations = self.canary.end()
        steps = self.canary.steps
        if self._stats_interval and steps % self._stats_interval == 0:
            _log.info("%s", self.canary.stats_line())
        if self._divergence_interval and steps % self._divergence_interval == 0:
            _log.info("%s", self.canary.divergence_line())
        return self._sentence(violations)

    def arrived(self, rid: str, own: OwnPages | None) -> str:
        if own is None:
            return ""
        violations = self.canary.arrived(rid, own.spans, len(own.tokens), own.tokens)
        self._sentence(violations)
        return _words(violations[0]) if violations and self._raises else ""

    def outgoing(self, pools: Mapping[Part, PageStore]) -> Mapping[Part, PageStore]:
        perturber = self.perturber
        if perturber is None or "transfer_bytes" not in perturber.plan.probabilities:
            return pools
        return {part: _TamperedStore(pool, part, perturber) for part, pool in pools.items()}

    def view(self) -> dict[str, Any]:
        canary = self.canary
        return {
            "mode": self._mode,
            "real_data": canary.settings.real_data,
            "stride": canary.settings.stride,
            "steps": canary.steps,
            "sweep_passes": canary.sweep_passes,
            "slots_due": sum(canary.due_slots.values()),
            "slots_checked": canary.checked_slots(),
            "violations": canary.violations.total,
            "counts": [
                {"reason": reason, "tag": tag, "count": count}
                for (reason, tag), count in sorted(canary.violations.counts.items())
            ],
            "latest": [violation.as_json() for violation in canary.violations],
            "injected": [injection.as_json() for injection in self.perturber.injections] if self.perturber else [],
        }

    def refresh(self, metrics: Metrics) -> None:
        canary = self.canary
        for (reason, tag), count in canary.violations.counts.items():
            metrics.set("kv_canary_violations", count, reason, tag)
        metrics.set("kv_canary_slots", sum(canary.due_slots.values()), "due")
        metrics.set("kv_canary_slots", canary.checked_slots(), "checked")
        metrics.set("kv_canary_sweep_passes", canary.sweep_passes)
        if self.perturber is not None:
            for name in MODES:
                planted = sum(injection.mode == name for injection in self.perturber.injections)
                if planted:
                    metrics.set("kv_faults_injected", planted, name)

    def _sentence(self, violations: Sequence[Violation]) -> Sequence[Verdict]:
        """Log all; in mode raise: condemn the pages whose bytes are wrong, and name the requests that are touched.

        Wrong bytes touch whoever uses the page, a wrong row only its own request. Raises KvViolation where nobody can
        be named.
        """
        verdicts: dict[str, Verdict] = {}
        for violation in violations:
            _log.error("%s", violation.line())
            if not self._raises:
                continue
            users: tuple[str, ...] = ()
            if Reason.VERIFY_REAL_KV_HASH in violation.reasons:
                users = violation.users
                self._facts.condemn(violation.part, violation.page)
            touched = dict.fromkeys(rid for rid in (violation.rid, *users) if rid)
            if not touched and not violation.owner:
                raise KvViolation(f"canary: {_words(violation)}, and nobody owns the page")
            for rid in touched:
                verdicts.setdefault(rid, Verdict(rid=rid, reason=_words(violation)))
        return tuple(verdicts.values())

    def _host_pages(self, part: Part) -> tuple[NDArray[np.uint8], NDArray[np.integer]]:
        cache = self._facts.cache
        if cache is None or part not in self._host:
            raise InvariantError(f"engine: no host tier of part {part.name} to damage, expected one")
        return self._host[part].data_PY, cache.host_pages(part)


def _words(violation: Violation) -> str:
    return (
        f"KV integrity: {'|'.join(reason_names(violation.reasons))} at slot {violation.slot}, position"
        f" {violation.position} ({violation.tag}, step {violation.step})"
    )


def _perturber(config: ServeConfig, parts: set[Part], host_pages: Any, *, has_oracle: bool) -> Perturber | None:
    probabilities = parse_perturb(config.canary.kv_canary_perturb)
    if not probabilities:
        return None
    named = config.canary.kv_canary_perturb_target
    if not named and len(parts) > 1 and any(MODES[name].has_part for name in probabilities if name in MODES):
        raise ConfigError(
            "canary: --kv-canary-perturb damages KV of a model with both parts, expected --kv-canary-perturb-target"
            " full or swa"
        )
    target = Part[named.upper()] if named else min(parts)
    plan = PerturbPlan(
        probabilities=probabilities,
        target=target,
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
        has_host=host_pages is not None,
        has_oracle=has_oracle,
        sends=config.role == "prefill",
    )
    return Perturber(plan, host_pages=host_pages)


def make_guard(
    config: ServeConfig,
    spec: ModelSpec,
    pools: Mapping[Part, DevicePool],
    tables: Mapping[Part, RequestTable],
    device: str,
    host: Mapping[Part, HostPool],
) -> KvGuard | None:
    """The guard that the settings ask for; None without a canary. Raises ConfigError."""
    if config.canary.kv_canary == "none":
        return None
    return KvGuard(config, spec, pools, tables, device, host)
