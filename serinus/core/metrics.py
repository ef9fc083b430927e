"""What one engine counts, for Prometheus: `serinus:*` series with the stems and meanings of their SGLang counterparts.

Every series carries the labels engine, role, rank, tp_rank and pp_rank. What clients see (time to first token, between
tokens, whole requests) is measured by the front. Knows no HTTP. Cost of a call: about a microsecond
(benchmarks/metrics.py), so that the loop may call them in every step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from typing import Any, Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from serinus.core.errors import InvariantError
from serinus.core.times import MOVE_S, TimeCounts

_LABELS = ("engine", "role", "rank", "tp_rank", "pp_rank")
_QUEUE_S = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200)
_STEP_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2, 5, 10)
_MOVE_MS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000)
_MOVE_MB = (0.1, 0.5, 1, 5, 10, 50, 100, 250, 500, 1000, 2500, 5000)
_MOVE_GB_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSpec:
    """One family of series."""

    name: str
    """Stem; `serinus:` goes before it, and `_total` after it where it is a counter."""
    kind: str
    """gauge, counter or histogram."""
    help: str
    """What it means, with its unit."""
    labels: tuple[str, ...] = ()
    """Besides those of every series."""
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram; the last bucket, infinity, is not among them."""
    alias: str = ""
    """The name under which routers for vLLM (llm-d) look for it."""

    @property
    def series(self) -> str:
        """Its name in a scrape."""
        return f"serinus:{self.name}" + ("_total" if self.kind == "counter" else "")


def _gauge(name: str, help: str, *labels: str, alias: str = "") -> MetricSpec:
    return MetricSpec(name=name, kind="gauge", help=help, labels=labels, alias=alias)


def _counter(name: str, help: str, *labels: str) -> MetricSpec:
    return MetricSpec(name=name, kind="counter", help=help, labels=labels)


def _histogram(name: str, help: str, buckets: tuple[float, ...]) -> MetricSpec:
    return MetricSpec(name=name, kind="histogram", help=help, buckets=buckets)


METRICS: tuple[MetricSpec, ...] = (
    _gauge("num_running_reqs", "Requests in the batch", alias="vllm:num_requests_running"),
    _gauge("num_queue_reqs", "Requests that wait for the batch", alias="vllm:num_requests_waiting"),
    _gauge("num_retracted_reqs", "Waiting requests that had run and gave their pages back"),
    _gauge("token_usage", "Used part of the KV pool, 0 to 1", alias="vllm:kv_cache_usage_perc"),
    _gauge("num_used_tokens", "Tokens of KV that requests hold"),
    _gauge("kv_available_tokens", "Tokens of KV on free pages"),
    _gauge("kv_evictable_tokens", "Tokens of KV that are cached and held by nobody"),
    _gauge("kv_used_tokens", "Tokens of KV that are neither free nor evictable"),
    _gauge("max_total_num_tokens", "Tokens of KV the pool has room for"),
    _gauge("pages", "Pages by state, of each pool", "state", "tier", "part"),
    _gauge("hicache_host_used_tokens", "Tokens of KV in the host tier"),
    _gauge("hicache_host_total_tokens", "Tokens of KV the host tier has room for; 0 = there is none"),
    _gauge("swa_token_usage", "Used part of the pool of sliding layers, 0 to 1"),
    _gauge("gen_throughput", "Generated tokens per second over the last interval"),
    _gauge("cache_hit_rate", "Cached part of the prompt tokens over the last interval, 0 to 1"),
    _gauge("num_prefill_bootstrap_queue_reqs", "Prefill: prepared requests without a grant"),
    _gauge("num_prefill_inflight_queue_reqs", "Prefill: computed requests whose pages are still being fetched"),
    _gauge("num_decode_prealloc_queue_reqs", "Decode: remote requests without pages"),
    _gauge("num_decode_transfer_queue_reqs", "Decode: remote requests whose pages are granted"),
    _gauge("startup_time_seconds", "Where the start-up time went", "phase"),
    _counter("scheduler_turns", "Turns of the loop"),
    _gauge("pp_bubble_fraction", "Part of the time with steps under way in which this rank computed nothing, 0 to 1"),
    _gauge("control_step_seconds", "Ranks: seconds of the leader per step for telling and hearing, lately"),
    _counter("rank_steps", "Ranks: steps whose results were taken"),
    _counter("rank_compute_seconds", "Ranks: seconds in steps, without waiting for other ranks"),
    _counter("rank_wait_seconds", "Ranks: seconds in steps of waiting for other ranks"),
    _gauge("rank_tier_copies", "Ranks: copies between device and host under way there"),
    _gauge("rank_storage_operations", "Ranks: storage operations under way there"),
    _gauge("rank_staged_pieces", "Ranks: pieces of handoffs staged there and not yet taken by the peer"),
    _counter("control_bytes", "Ranks: bytes of headers that the leader sent"),
    _counter("control_headers", "Ranks: headers that the leader sent"),
    _counter("num_requests", "Requests that were taken"),
    _counter("num_finished_requests", "Requests that ended, by reason", "reason"),
    _counter("num_timed_out_requests", "Requests that reached their deadline"),
    _counter("num_aborted_requests", "Requests that the client, an operator or a peer ended"),
    _counter("num_retracted_requests", "Times a request gave its pages back under pressure"),
    _counter("num_recomputed_requests", "Remote requests that were computed here after all, by reason", "reason"),
    _counter("prompt_tokens", "Prompt tokens of requests that were answered"),
    _counter("generation_tokens", "Tokens generated by this engine"),
    _counter("computed_tokens", "Tokens that went through the model, recomputed ones included"),
    _counter("cached_tokens", "Prompt tokens whose KV was found, by tier", "source"),
    _counter("evicted_tokens", "Cached tokens that left the device to make room"),
    _histogram("eviction_duration_seconds", "Seconds of one eviction, waits for copies to the host included", MOVE_S),
    _counter("load_back_tokens", "Tokens that came back from the host"),
    _histogram("load_back_duration_seconds", "Seconds of one such copy; forward passes run meanwhile", MOVE_S),
    _counter("hicache_failed_copies", "Copies between device and host that failed; nothing was lost but time"),
    _counter("hicache_backup_tokens", "Tokens copied to the host"),
    _histogram("hicache_backup_duration_seconds", "Seconds of one such copy", MOVE_S),
    _counter("hicache_dropped_tokens", "Tokens that left the device without a copy, as the host had no room"),
    _counter("prefetched_tokens", "Tokens that came from storage to the host"),
    _counter("backuped_tokens", "Tokens written to storage"),
    _counter("storage_condemned_pages", "Stored pages removed as condemned, or as computed from condemned ones"),
    _counter("cache_sanity_checks", "Complete checks of the cache's invariants that passed"),
    _counter("cache_sanity_steps", "Nodes whose invariants were checked between steps"),
    _counter("num_bootstrap_failed_reqs", "Handoffs that ended before a grant, by cause", "cause"),
    _counter("num_transfer_failed_reqs", "Handoffs that ended after the grant, by cause", "cause"),
    _counter("kv_transfer_pages", "Pages handed over, by direction", "direction"),
    _counter("kv_transfer_bytes", "Bytes of KV handed over, by direction", "direction"),
    _counter("num_local_prompts", "Decode: prompts that were never sent away, by reason", "reason"),
    _gauge("kv_transfer_peers", "Decode: prefill engines that it knows, by state of the connection", "state"),
    _gauge("kv_transfer_quarantined_pages", "Pages of closed grants that a peer may still write"),
    _gauge("kv_transfer_parked_tokens", "Prefill: tokens of finished prompts without a grant"),
    _counter("kv_transfer_forgotten", "Prefill: finished prompts that gave their pages up before a grant came"),
    _counter("kv_transfer_late_frames", "Data frames for closed grants, dropped"),
    _counter("kv_canary_violations", "Broken promises about KV, by reason and check", "reason", "tag"),
    _counter("kv_canary_incidents", "Places found wrong: one for each slot, reason and owner of the page"),
    _counter("kv_canary_slots", "Slots the canary had to verify, and did", "state"),
    _counter("kv_canary_checks", "Slots that were verified, by leg: where the canary stands", "leg"),
    _counter("kv_canary_overhead_seconds", "Seconds of ranks in calls of the canary, around steps and beside them"),
    _gauge("kv_canary_coverage_ratio", "Verified part of the slots the canary had to verify, 0 to 1"),
    _counter("kv_canary_heals", "Requests that read wrong KV in mode heal, by what became of them", "result"),
    _counter("kv_canary_short_receipts", "Answers for which fewer slots of KV were verified than were due"),
    _counter("kv_canary_healed_tokens", "Tokens computed again because KV was found wrong"),
    _gauge("kv_canary_last_verified_seconds", "Seconds since a cached page was last verified: oldest, median", "page"),
    _counter("kv_canary_sweep_passes", "Complete walks over the cached pages"),
    _counter("kv_faults_injected", "Faults planted by --kv-canary-perturb", "kind"),
    _counter("wire_bad_frames", "Frames that were refused, by reason", "reason"),
    _counter("wire_connections_cut", "Connections that others made and that were cut off here, by reason", "reason"),
    _counter("wire_retransmits", "Control frames that were sent again"),
    _histogram("queue_time_seconds", "From arrival to the first step that worked for a request", _QUEUE_S),
    _histogram("step_seconds", "One step of the loop: plan, run, commit", _STEP_S),
    _histogram("grammar_mask_seconds", "Seconds to make the masks of a step, beside its forward pass", MOVE_S),
    _histogram("grammar_wait_seconds", "Seconds that such a step waited for them", MOVE_S),
    _histogram("kv_transfer_speed_gb_s", "GB/s of one handoff, first byte to last", _MOVE_GB_S),
    _histogram("kv_transfer_latency_ms", "Milliseconds of one handoff, first byte to last", _MOVE_MS),
    _histogram("kv_transfer_bootstrap_ms", "Milliseconds from PREPARE to the first byte", _MOVE_MS),
    _histogram("kv_transfer_connect_seconds", "Seconds a handoff waited for its peer to be greeted", MOVE_S),
    _histogram("kv_transfer_grant_wait_seconds", "Prefill: seconds from PREPARE to GRANT", MOVE_S),
    _histogram("kv_transfer_queue_seconds", "Decode: seconds a prompt waited in the queue of prefill", MOVE_S),
    _histogram("kv_transfer_compute_seconds", "Decode: seconds prefill computed a prompt", MOVE_S),
    _histogram("kv_transfer_confirm_seconds", "Decode, pull: seconds a CONFIRM waits, where no hold is read", MOVE_S),
    _histogram("kv_transfer_quarantine_seconds", "Seconds pages of a closed grant were held back", MOVE_S),
    _histogram("kv_transfer_first_token_seconds", "Seconds from arrival to a first token that came over", MOVE_S),
    _histogram("kv_transfer_alloc_ms", "Milliseconds a remote request waited for pages", _MOVE_MS),
    _histogram("kv_transfer_total_mb", "Megabytes of one handoff", _MOVE_MB),
)
"""All families that an engine has."""

_MAKERS: Final = {"gauge": Gauge, "counter": Counter}


class TimeSeries(Collector):
    """Shows TimeCounts as a histogram of one series."""

    def __init__(
        self,
        name: str,
        text: str,
        labels: Sequence[str],
        where: Sequence[str],
        times: TimeCounts,
        *,
        empty: bool = True,
    ) -> None:
        """`where`: the values of `labels`; `empty`: it is shown before the first observation too."""
        self._name, self._text, self._labels, self._where = name, text, labels, where
        self.times = times
        self._empty = empty

    def collect(self) -> Iterator[HistogramMetricFamily]:
        times = self.times
        if not self._empty and not any(times.counts):
            return
        names = map(floatToGoString, (*times.bounds, inf))
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        family.add_metric(self._where, list(zip(names, accumulate(times.counts), strict=True)), times.seconds)
        yield family


class Metrics:
    """The series of one rank of one engine: prometheus-client's objects, found by the name of their spec."""

    def __init__(
        self,
        engine: str,
        role: str,
        rank: str = "TP0",
        *,
        tp_rank: int = 0,
        pp_rank: int = 0,
        beside: Metrics | None = None,
    ) -> None:
        """`engine`: its name; `role`: unified, prefill or decode; `rank`: TP0, or TP1 PP0 where there are several.

        `beside`: metrics of the leader, with which those of this rank are rendered; only what is set appears.
        """
        self._where = (engine, role, rank, str(tp_rank), str(pp_rank))
        self._is_leader = beside is None
        self._series: dict[tuple[str, tuple[str, ...]], Any] = {}
        self._totals: dict[tuple[str, tuple[str, ...]], float] = {}
        """Counters that are set to a total: the last one."""
        self._shown: dict[str, TimeSeries] = {}
        """Histograms that are counted elsewhere."""
        self._registry: CollectorRegistry = CollectorRegistry() if beside is None else beside._registry
        self._families: dict[str, MetricWrapperBase] = {} if beside is None else beside._families
        if beside is not None:
            return
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a switch for the whole process: no `_created` series
        for spec in METRICS:
            if spec.kind != "histogram":
                names = (*_LABELS, *spec.labels)
                make = _MAKERS[spec.kind]
                self._families[spec.name] = make(f"serinus:{spec.name}", spec.help, names, registry=self._registry)
                if spec.alias:
                    self._families[spec.alias] = Gauge(spec.alias, spec.help, names, registry=self._registry)
                if not spec.labels:
                    self.add(spec.name, 0)

    def set(self, name: str, value: float, *labels: str) -> None:
        """A gauge is `value` now; `labels` in the order of its spec. A counter too may be set to a higher total.

        Raises InvariantError: no such metric, or other labels. Raises ValueError: a counter would fall.
        """
        series = self._find(name, labels)
        if isinstance(series, Counter):
            series.inc(value - self._totals.get((name, labels), 0.0))
            self._totals[name, labels] = value
        else:
            series.set(value)
        if self._is_leader and _SPECS[name].alias:
            self._find(_SPECS[name].alias, labels).set(value)

    def add(self, name: str, amount: float = 1.0, *labels: str) -> None:
        """A counter grew by `amount` >= 0, or a gauge changed by it. Raises InvariantError like `set`."""
        self._find(name, labels).inc(amount)
        if self._is_leader and _SPECS[name].alias:
            self._find(_SPECS[name].alias, labels).inc(amount)

    def observe(self, name: str, value: float) -> None:
        """An observation of a histogram, in the unit that its name ends with.

        Raises InvariantError: no such histogram.
        """
        if name not in _SPECS or _SPECS[name].kind != "histogram":
            raise InvariantError(f"core: metric {name!r}, expected a histogram of METRICS")
        self._find(name, ()).observe(value)

    def show_times(self, name: str, times: TimeCounts) -> None:
        """Show a histogram that is counted elsewhere; to be called again changes nothing.

        Raises InvariantError: no such histogram, or with other bounds.
        """
        spec = _SPECS.get(name)
        if spec is None or spec.kind != "histogram" or spec.buckets != times.bounds:
            raise InvariantError(
                f"core: metric {name!r} with the bounds {times.bounds}, expected a histogram of METRICS"
            )
        if name not in self._shown:
            self._shown[name] = TimeSeries(f"serinus:{name}", spec.help, _LABELS, self._where, times, empty=False)
            self._registry.register(self._shown[name])
        self._shown[name].times = times

    def get(self, name: str, *labels: str) -> float:
        """The present value of a gauge or counter; 0 where nothing was set yet. Slow: for tests."""
        return self._sample(name, "_total" if _SPECS[name].kind == "counter" else "", labels)

    def by_labels(self, name: str) -> dict[tuple[str, ...], float]:
        """The present values of all series of a gauge or counter. Slow: for tests and the simulation."""
        return {labels: self.get(name, *labels) for known, labels in self._series if known == name}

    def count(self, name: str) -> int:
        """How many observations a histogram has. Slow: for tests."""
        return int(self._sample(name, "_count", ()))

    def render(self) -> bytes:
        """The Prometheus text (about a millisecond); histograms without observations are left out."""
        return generate_latest(self._registry)

    def _sample(self, name: str, ending: str, labels: tuple[str, ...]) -> float:
        names = dict(zip((*_LABELS, *_SPECS[name].labels), (*self._where, *labels), strict=True))
        return self._registry.get_sample_value(f"serinus:{name}{ending}", names) or 0.0

    def _find(self, name: str, labels: tuple[str, ...]) -> Any:
        """One series; made when it is first asked for. Raises InvariantError: not one of METRICS."""
        series = self._series.get((name, labels))
        if series is not None:
            return series
        family = self._families.get(name)
        spec = _SPECS.get(name)
        if family is None and spec is not None:
            family = self._families[name] = Histogram(
                f"serinus:{name}", spec.help, _LABELS, buckets=spec.buckets, registry=self._registry
            )
        if family is None or (spec is not None and len(labels) != len(spec.labels)):
            raise InvariantError(f"core: metric {name!r} with {len(labels)} labels, expected one of METRICS as it is")
        series = self._series[name, labels] = family.labels(*self._where, *labels)
        return series


_SPECS: Final = {spec.name: spec for spec in METRICS}
