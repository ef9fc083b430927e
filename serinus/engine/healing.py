"""Healer: what becomes of a request that read wrong KV in mode heal, and how much may be computed again.

    why_not = healer.heal(rid, reason, now)      # "" = it is computed again, or there is nothing to do

Decides by the bounds alone; the scheduler does it, the role tells peers.
"""

from __future__ import annotations

from serinus.core.log import get_logger
from serinus.core.metrics import Metrics
from serinus.core.settings import CanarySettings
from serinus.engine.roles import Handoffs
from serinus.sched import Healing, Scheduler

_SPAN_S = 10.0
"""Seconds over which the budget of recomputed tokens is averaged."""
_log = get_logger("engine")


class TokenBudget:
    """Tokens that may be computed again: `per_second` of them on average over 10 s; 0 = no bound.

    What one heal costs is known when it is over, so the balance may fall below 0 once; then no request is healed before
    it has grown above 0 again.
    """

    def __init__(self, per_second: int) -> None:
        self._per_second = per_second
        self._balance = self._most = per_second * _SPAN_S
        self._at = 0.0
        self._spent = 0

    def allows(self, spent: int, now: float) -> bool:
        """Whether one more request may be healed. `spent`: tokens computed again since the start."""
        grown = self._balance - (spent - self._spent) + (now - self._at) * self._per_second
        self._balance, self._spent, self._at = min(self._most, grown), spent, now
        return self._per_second == 0 or self._balance > 0


class Healer:
    """The mode heal of one engine."""

    def __init__(self, settings: CanarySettings, scheduler: Scheduler, handoffs: Handoffs, metrics: Metrics) -> None:
        self._settings = settings
        self._scheduler, self._handoffs, self._metrics = scheduler, handoffs, metrics
        self._budget = TokenBudget(settings.kv_canary_heal_tokens_per_second)
        for result in ("recomputed", "asked_again", "handed_back", "heals_max", "budget", "stream_wrong"):
            metrics.add("kv_canary_heals", 0, result)

    def heal(self, rid: str, reason: str, now: float) -> str:
        """A request read wrong KV (`reason`: what was found). Returns why it must end instead; empty = it is computed
        again, or there is nothing to do."""
        scheduler, result, why_not = self._scheduler, "recomputed", ""
        match scheduler.heals.kind_of(rid):
            case Healing.NOTHING:
                return ""
            case Healing.PEER:
                result, why_not = "handed_back", reason
            case Healing.TRANSFER:
                self._handoffs.aborted(rid, now, code="kv_canary", reason=reason)  # while its pages are still its own
                scheduler.recompute(rid, "kv_canary")
            case Healing.RUNNING:
                result, why_not = self._within_bounds(rid, reason, now)
                if not why_not:
                    asks = self._handoffs.can_ask_again(rid)
                    result = "asked_again" if asks else result
                    heals, most = scheduler.heals.count(rid), self._settings.kv_canary_heals_max
                    scheduler.heals.heal(rid, reason, now, asks=asks, is_last=0 < heals == most - 1)
        self._metrics.add("kv_canary_heals", 1, result)
        _log.warning("kv_canary heal: req=%s result=%s reason=%s", rid, result, reason.replace(" ", "_"))
        return why_not

    def _within_bounds(self, rid: str, reason: str, now: float) -> tuple[str, str]:
        """The result of a heal, and where it is beyond the bounds why."""
        settings, heals = self._settings, self._scheduler.heals.count(rid)
        if heals >= settings.kv_canary_heals_max:
            return "heals_max", f"{reason}; healed {heals} times, --kv-canary-heals-max is {heals}"
        if not self._budget.allows(self._scheduler.totals.healed_tokens, now):
            per_second = settings.kv_canary_heal_tokens_per_second
            return "budget", f"{reason}; --kv-canary-heal-tokens-per-second, {per_second}, is used up"
        return "recomputed", ""

    def refresh(self, metrics: Metrics) -> None:
        """Bring the counters up to now, for a scrape."""
        totals = self._scheduler.totals
        metrics.set("kv_canary_healed_tokens", totals.healed_tokens)
        metrics.set("kv_canary_heals", totals.wrong_streams, "stream_wrong")
