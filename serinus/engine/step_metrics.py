"""What people see of the steps: log lines in the form they know from SGLang, and metrics.

Per step only histograms and a few sums are touched; gauges and totals are read from the scheduler at a scrape
(`refresh`). Decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from serinus.cache import CacheStats, PageCounts, PrefixCache, Tier
from serinus.core.log import get_logger
from serinus.core.metrics import Metrics
from serinus.core.parts import Part
from serinus.core.plan import StepResult
from serinus.core.request import KvIntegrity, TokenDelta
from serinus.ranks.rank_metrics import RankMetrics
from serinus.sched import Outcome, SchedStats, Scheduler

_WINDOW_S = 1.0
"""Seconds of steps over which rates are taken; after a longer pause a new window begins with the next step."""
_log = get_logger("engine")


@dataclass(slots=True)
class _Window:
    """Tokens since a moment."""

    since: float
    generated: int = 0
    prompt: int = 0
    cached: int = 0

    def add(self, outcome: Outcome) -> None:
        self.generated += outcome.decode_tokens
        self.prompt += outcome.prompt_tokens
        self.cached += outcome.cached_tokens

    def throughput(self, now: float) -> float:
        """Generated tokens per second."""
        return self.generated / max(now - self.since, 1e-9)


class StepListener(Protocol):
    """What is told of steps while a dashboard is open."""

    def stepped(self, outcome: Outcome, seconds: float, now: float) -> None:
        """One step ended at `now`, after `seconds`."""

    def answered(self, delta: TokenDelta) -> None:
        """A delta left for its client that says what the request cost."""


class StepMetrics:
    """Told of every step; speaks every `every_steps` decode steps (0 = never) and at every step with a prompt."""

    def __init__(self, metrics: Metrics, now: float, *, every_steps: int, ranks: RankMetrics | None = None) -> None:
        """`ranks`: shows what the ranks of this engine do and hold; None = that is not asked for."""
        self.metrics = metrics
        self.busy_seconds = 0.0
        """Time spent in steps since the start."""
        self._ranks = ranks
        self._every_steps = every_steps
        self._decode_steps = 0
        self._last_step = now
        self._shown = _Window(self._last_step)
        """The window of the gauges."""
        self._logged = _Window(self._last_step)
        """For the log line, which has a pace of its own."""
        self.listener: StepListener | None = None
        """Where it is set, it is told of every step and of every answer."""

    def stepped(self, outcome: Outcome, seconds: float, scheduler: Scheduler, now: float) -> None:
        """One step ended at `now`, after `seconds`."""
        self.metrics.observe("step_seconds", seconds)
        self.busy_seconds += seconds
        if self.listener is not None:
            self.listener.stepped(outcome, seconds, now)
        for delta in outcome.deltas:
            self.answered(delta)
        self._count(outcome, seconds, now)
        if outcome.prompt_tokens and self._every_steps:
            self._log_prefill(outcome, seconds, scheduler)
        if outcome.decode_tokens:
            self._decode_steps += 1
            if self._every_steps and self._decode_steps % self._every_steps == 0:
                self._log_decode(scheduler, now)

    def masked(self, result: StepResult) -> None:
        """Masks of grammars were made for a step, or were not."""
        if result.mask_seconds is not None:
            self.metrics.observe("grammar_mask_seconds", result.mask_seconds)
            self.metrics.observe("grammar_wait_seconds", result.mask_wait_seconds)

    def answered(self, delta: TokenDelta) -> None:
        """A delta left for its client, from a step or from a handoff."""
        if delta.usage is None:
            return
        if self.listener is not None:
            self.listener.answered(delta)
        if delta.token_ids and delta.usage.completion_tokens == 1:  # an abort after one token brings none
            self.metrics.observe("queue_time_seconds", delta.usage.queue_seconds)
        if delta.finish is not None:
            self.metrics.add("num_finished_requests", 1, delta.finish.value)
            self._look_at(delta.rid, delta.usage.kv_integrity)

    def _look_at(self, rid: str, receipt: KvIntegrity | None) -> None:
        if receipt is None or receipt.slots_checked >= receipt.slots_due:
            return
        self.metrics.add("kv_canary_short_receipts", 1)
        _log.error(
            "kv_canary short: req=%s slots_due=%d slots_checked=%d: nothing is vouched for", rid, receipt.slots_due,
            receipt.slots_checked, extra={"rids": [rid]},
        )  # fmt: skip

    def refresh(self, scheduler: Scheduler, cache: PrefixCache, turns: int, now: float) -> None:
        """Bring gauges and totals up to now; for a scrape."""
        stats, metrics = scheduler.stats(), self.metrics
        for name in (
            "num_running_reqs",
            "num_queue_reqs",
            "num_retracted_reqs",
            "num_prefill_inflight_queue_reqs",
            "num_decode_prealloc_queue_reqs",
            "num_decode_transfer_queue_reqs",
            "token_usage",
        ):
            metrics.set(name, getattr(stats, name))
        metrics.set("num_used_tokens", stats.used_tokens)
        metrics.set("kv_used_tokens", stats.used_tokens)
        metrics.set("kv_available_tokens", stats.free_tokens)
        metrics.set("kv_evictable_tokens", stats.evictable_tokens)
        metrics.set("max_total_num_tokens", stats.total_tokens)
        metrics.set("scheduler_turns", turns)
        totals = stats.totals
        metrics.set("num_requests", totals.requests)
        metrics.set("num_aborted_requests", totals.aborted)
        metrics.set("num_retracted_requests", totals.retracted)
        metrics.set("prompt_tokens", totals.prompt_tokens)
        metrics.set("generation_tokens", totals.generation_tokens)
        metrics.set("computed_tokens", totals.computed_tokens)
        for tier, count in totals.cached_tokens.items():
            metrics.set("cached_tokens", count, tier)
        self._refresh_cache(cache.stats())
        if self._ranks is not None:
            self._ranks.refresh(now)
        if now - self._last_step > 2 * _WINDOW_S:
            metrics.set("gen_throughput", 0.0)

    def _refresh_cache(self, kept: CacheStats) -> None:
        metrics, size = self.metrics, kept.page_size
        for name, value in (
            ("evicted_tokens", kept.evicted_pages * size),
            ("load_back_tokens", kept.loaded_tokens),
            ("hicache_failed_copies", kept.failed_copies),
            ("hicache_backup_tokens", kept.backup_tokens),
            ("hicache_dropped_tokens", kept.dropped_tokens),
            ("prefetched_tokens", kept.prefetched_tokens),
            ("backuped_tokens", kept.stored_tokens),
            ("storage_condemned_pages", kept.removed_pages),
            ("cache_sanity_checks", kept.sanity_checks),
            ("cache_sanity_steps", kept.sanity_steps),
        ):
            metrics.set(name, value)
        metrics.show_times("eviction_duration_seconds", kept.eviction_times)
        metrics.show_times("load_back_duration_seconds", kept.load_times)
        metrics.show_times("hicache_backup_duration_seconds", kept.backup_times)
        self._set_pages("device", "full", kept.pages)
        for (tier, part), pool in kept.pools.items():
            self._set_pages(tier.name.lower(), part.name.lower(), pool.pages)
            if tier is Tier.HOST and part is Part.FULL:
                metrics.set("hicache_host_used_tokens", (pool.page_count - pool.pages.free) * size)
                metrics.set("hicache_host_total_tokens", pool.page_count * size)
            if tier is Tier.DEVICE and part is Part.SWA:
                used = pool.page_count - pool.pages.free - pool.evictable
                metrics.set("swa_token_usage", used / pool.page_count)

    def _set_pages(self, tier: str, part: str, pages: PageCounts) -> None:
        for state in ("free", "parked", "request", "tree", "copy", "quarantined", "retired"):
            self.metrics.set("pages", getattr(pages, state), state, tier, part)

    def _count(self, outcome: Outcome, seconds: float, now: float) -> None:
        """Add a step to both windows; the gauges change when theirs is full, however often they are scraped."""
        if now - seconds - self._last_step > _WINDOW_S:
            self._shown, self._logged = _Window(now - seconds), _Window(now - seconds)
        self._last_step = now
        self._logged.add(outcome)
        window = self._shown
        window.add(outcome)
        if now - window.since >= _WINDOW_S:
            self.metrics.set("gen_throughput", window.throughput(now))
            if window.prompt + window.cached:
                self.metrics.set("cache_hit_rate", window.cached / (window.prompt + window.cached))
            self._shown = _Window(now)

    def _log_prefill(self, outcome: Outcome, seconds: float, scheduler: Scheduler) -> None:
        stats = scheduler.stats()
        _log.info(
            "Prefill batch, #new-seq: %d, #new-token: %d, #cached-token: %d%s, token usage: %.2f, #running-req: %d,"
            " #queue-req: %d, input throughput (token/s): %.2f",
            outcome.new_requests,
            outcome.prompt_tokens,
            outcome.cached_tokens,
            "".join(f", #{tier}-token: {count}" for tier, count in outcome.cached_by_tier.items() if tier != "device"),
            stats.token_usage,
            stats.num_running_reqs,
            stats.num_queue_reqs,
            outcome.prompt_tokens / max(seconds, 1e-9),
            extra={"new_tokens": outcome.prompt_tokens, "cached_tokens": outcome.cached_tokens, **_queues(stats)},
        )

    def _log_decode(self, scheduler: Scheduler, now: float) -> None:
        stats = scheduler.stats()
        throughput = self._logged.throughput(now)
        self._logged = _Window(now)
        _log.info(
            "Decode batch, #running-req: %d, #token: %d, token usage: %.2f, gen throughput (token/s): %.2f,"
            " #queue-req: %d",
            stats.num_running_reqs,
            stats.used_tokens,
            stats.token_usage,
            throughput,
            stats.num_queue_reqs,
            extra={"gen_throughput": throughput, **_queues(stats)},
        )


def _queues(stats: SchedStats) -> dict[str, float]:
    """What a line about a step has as fields, besides its own."""
    names = ("num_running_reqs", "num_queue_reqs", "token_usage")
    return {name: getattr(stats, name) for name in names}
