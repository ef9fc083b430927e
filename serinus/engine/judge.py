"""Judge: what follows from a violation of KV: logged, its pages condemned, its requests ended. One for all ranks.

Who owns a page, who uses it, what happened to it: the leader's cache and scheduler know; the canaries do not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serinus.cache import PrefixCache, ResidentSlots, Tier
from serinus.canary import Violation, ViolationLog, reason_names
from serinus.canary.perturb import Injection
from serinus.core.config import ServeConfig
from serinus.core.errors import KvViolation
from serinus.core.log import get_logger
from serinus.core.metrics import Metrics
from serinus.core.parts import Part
from serinus.core.settings import coverage_stride
from serinus.engine.guard import Verdict
from serinus.kernels.canary import Reason
from serinus.sched import Scheduler

__all__ = ["CanaryCounts", "Judge", "PageKnowledge", "count", "view", "words"]

_log = get_logger("canary")


class PageKnowledge:
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

    def host_pages(self, part: Part) -> NDArray[np.int32]:
        """Pages of the host tier that are cached now."""
        return self._cache().host_pages(part)

    def condemn(self, part: Part, page: int) -> None:
        """Nobody shall find this page again."""
        self._cache().condemn(part, np.array([page], np.int32))

    def _cache(self) -> PrefixCache:
        assert self.cache is not None, "engine: the canary looks into a cache before there is one"
        return self.cache


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryCounts:
    """What a canary, or those of all ranks together, did so far."""

    steps: int = 0
    sweep_passes: int = 0
    slots_due: int = 0
    """Slots that had to be verified."""
    slots_checked: int = 0
    """Those that were."""
    violations: int = 0
    """Ever, those included whose details were lost to a ring's overflow."""


class Judge:
    """Sentences violations."""

    def __init__(self, facts: PageKnowledge, *, mode: str) -> None:
        """`mode`: log or raise, as --kv-canary."""
        self._facts = facts
        self.raises = mode == "raise"

    def sentence(self, violations: Sequence[Violation]) -> Sequence[Verdict]:
        """Log all; in mode raise: condemn the pages whose bytes are wrong, and name the requests that are touched.

        Wrong bytes touch whoever uses the page, a wrong row only its own request. Raises KvViolation where nobody can
        be named.
        """
        verdicts: dict[str, Verdict] = {}
        for violation in violations:
            _log.error("%s", violation.line())
            if not self.raises:
                continue
            users: tuple[str, ...] = ()
            if Reason.VERIFY_REAL_KV_HASH in violation.reasons:
                users = violation.users
                self._facts.condemn(violation.part, violation.page)
            touched = dict.fromkeys(rid for rid in (violation.rid, *users) if rid)
            if not touched and not violation.owner:
                raise KvViolation(f"canary: {words(violation)}, and nobody owns the page")
            for rid in touched:
                verdicts.setdefault(rid, Verdict(rid=rid, reason=words(violation)))
        return tuple(verdicts.values())


def words(violation: Violation) -> str:
    """What is told to the client."""
    where = f" of rank {violation.rank}" if violation.rank else ""
    return (
        f"KV integrity: {'|'.join(reason_names(violation.reasons))} at slot {violation.slot}, position"
        f" {violation.position}{where} ({violation.tag}, step {violation.step})"
    )


def view(
    config: ServeConfig, counts: CanaryCounts, violations: ViolationLog, injections: Sequence[Injection]
) -> dict[str, Any]:
    """For `GET /canary`."""
    return {
        "mode": config.canary.kv_canary,
        "real_data": config.canary.kv_canary_real_data,
        "stride": coverage_stride(config.canary.kv_canary_coverage),
        "steps": counts.steps,
        "sweep_passes": counts.sweep_passes,
        "slots_due": counts.slots_due,
        "slots_checked": counts.slots_checked,
        "violations": counts.violations,
        "counts": [
            {"reason": reason, "tag": tag, "count": count} for (reason, tag), count in sorted(violations.counts.items())
        ],
        "latest": [violation.as_json() for violation in violations],
        "injected": [injection.as_json() for injection in injections],
    }


def count(metrics: Metrics, counts: CanaryCounts, violations: ViolationLog, injections: Sequence[Injection]) -> None:
    """Bring the canary's counters up to now."""
    for (reason, tag), number in violations.counts.items():
        metrics.set("kv_canary_violations", number, reason, tag)
    metrics.set("kv_canary_slots", counts.slots_due, "due")
    metrics.set("kv_canary_slots", counts.slots_checked, "checked")
    metrics.set("kv_canary_sweep_passes", counts.sweep_passes)
    for name, number in Counter(injection.mode for injection in injections).items():
        metrics.set("kv_faults_injected", number, name)
