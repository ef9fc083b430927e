"""Metrics: what Prometheus reads, and that calls are cheap enough for every step."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from serinus.core.errors import InvariantError
from serinus.core.metrics import METRICS, Metrics
from serinus.core.times import TimeCounts

Sample = tuple[str, tuple[tuple[str, str], ...]]


def read(metrics: Metrics) -> dict[Sample, float]:
    """Every sample by name and labels, as a Prometheus server would understand it."""
    families = text_string_to_metric_families(metrics.render().decode())
    return {(sample.name, tuple(sorted(sample.labels.items()))): sample.value for f in families for sample in f.samples}


WHERE = (("engine", "decode-0"), ("pp_rank", "0"), ("rank", "TP1 PP0"), ("role", "decode"), ("tp_rank", "1"))


@pytest.fixture
def metrics() -> Metrics:
    return Metrics("decode-0", "decode", "TP1 PP0", tp_rank=1)


def test_every_series_names_engine_role_and_rank(metrics: Metrics) -> None:
    metrics.set("pages", 3, "free", "device", "full")
    metrics.observe("queue_time_seconds", 0.1)
    samples = read(metrics)
    assert samples
    for _, labels in samples:
        assert set(WHERE) <= set(labels)


def test_gauges_counters_and_labels_are_what_was_said(metrics: Metrics) -> None:
    metrics.set("num_running_reqs", 7)
    metrics.add("prompt_tokens", 5)
    metrics.add("prompt_tokens", 6)
    metrics.add("cached_tokens", 4, "device")
    samples = read(metrics)
    assert samples["serinus:num_running_reqs", WHERE] == 7
    assert samples["serinus:prompt_tokens_total", WHERE] == 11
    assert samples["serinus:cached_tokens_total", tuple(sorted((*WHERE, ("source", "device"))))] == 4
    assert metrics.get("cached_tokens", "device") == 4
    assert metrics.get("cached_tokens", "host") == 0
    assert metrics.by_labels("cached_tokens") == {("device",): 4}


def test_a_counter_may_be_set_to_a_higher_total_and_never_to_a_lower_one(metrics: Metrics) -> None:
    metrics.set("prompt_tokens", 5)
    metrics.set("prompt_tokens", 12)
    assert metrics.get("prompt_tokens") == 12
    with pytest.raises(ValueError, match="non-negative"):
        metrics.set("prompt_tokens", 11)


def test_histograms_count_up_to_their_bounds(metrics: Metrics) -> None:
    for value in (0.001, 0.0011, 0.0011, 1000.0):
        metrics.observe("queue_time_seconds", value)

    def bucket(bound: str) -> float:
        return samples["serinus:queue_time_seconds_bucket", tuple(sorted((*WHERE, ("le", bound))))]

    samples = read(metrics)
    assert [bucket("0.001"), bucket("0.005"), bucket("200.0"), bucket("+Inf")] == [1, 3, 3, 4]
    assert samples["serinus:queue_time_seconds_count", WHERE] == 4
    assert samples["serinus:queue_time_seconds_sum", WHERE] == pytest.approx(1000.0032)
    assert metrics.count("queue_time_seconds") == 4


def test_histograms_without_observations_are_not_shown(metrics: Metrics) -> None:
    assert "kv_transfer_latency_ms" not in metrics.render().decode()


def test_routers_for_vllm_find_their_three_gauges(metrics: Metrics) -> None:
    metrics.set("num_running_reqs", 2)
    metrics.set("num_queue_reqs", 3)
    metrics.set("token_usage", 0.5)
    samples = read(metrics)
    assert samples["vllm:num_requests_running", WHERE] == 2
    assert samples["vllm:num_requests_waiting", WHERE] == 3
    assert samples["vllm:kv_cache_usage_perc", WHERE] == 0.5


@pytest.mark.parametrize(("name", "labels"), [("nonsense", ()), ("pages", ()), ("num_running_reqs", ("x",))])
def test_a_series_that_is_not_declared_is_refused(metrics: Metrics, name: str, labels: tuple[str, ...]) -> None:
    with pytest.raises(InvariantError, match=name):
        metrics.set(name, 1, *labels)
    with pytest.raises(InvariantError, match=name):
        metrics.add(name, 1, *labels)


def test_only_histograms_are_observed(metrics: Metrics) -> None:
    with pytest.raises(InvariantError, match="num_running_reqs"):
        metrics.observe("num_running_reqs", 1)


def test_stems_are_unique_and_said_in_words() -> None:
    names = [spec.name for spec in METRICS]
    assert len(names) == len(set(names))
    for spec in METRICS:
        assert len(spec.help.split()) >= 3, spec.name
        assert not spec.name.endswith("_total"), f"{spec.name}: Prometheus adds _total to counters by itself"
        assert (spec.kind == "histogram") == bool(spec.buckets), spec.name
        assert list(spec.buckets) == sorted(set(spec.buckets)), spec.name


def test_disaggregation_gauges_stand_at_zero_from_the_start(metrics: Metrics) -> None:
    samples = read(metrics)
    for name in (
        "num_prefill_bootstrap_queue_reqs",
        "num_prefill_inflight_queue_reqs",
        "num_decode_prealloc_queue_reqs",
        "num_decode_transfer_queue_reqs",
    ):
        assert samples[f"serinus:{name}", WHERE] == 0


def test_other_ranks_show_what_they_were_told_and_nothing_else(metrics: Metrics) -> None:
    other = Metrics("decode-0", "decode", "TP0 PP1", pp_rank=1, beside=metrics)
    other.set("num_queue_reqs", 3)
    found = {name: value for (name, labels), value in read(metrics).items() if ("pp_rank", "1") in labels}
    assert found == {"serinus:num_queue_reqs": 3}, (
        "a router that knows vLLM's name sums over series, and a rank's is not another request"
    )


def test_a_histogram_that_is_counted_elsewhere_shows_what_it_has_and_no_other_bounds(metrics: Metrics) -> None:
    times = TimeCounts()
    metrics.show_times("eviction_duration_seconds", times)
    assert "eviction_duration" not in metrics.render().decode(), "nothing was observed"
    times.observe(0.003)
    times.observe(99.0, 2)
    metrics.show_times("eviction_duration_seconds", times)
    found = {name + dict(labels).get("le", ""): value for (name, labels), value in read(metrics).items()}
    family = "serinus:eviction_duration_seconds"
    assert found[f"{family}_bucket0.002"] == 0
    assert found[f"{family}_bucket0.005"] == found[f"{family}_bucket10.0"] == 1
    assert found[f"{family}_bucket+Inf"] == found[f"{family}_count"] == 3
    assert found[f"{family}_sum"] == pytest.approx(198.003)
    for name, wrong in (("eviction_duration_seconds", TimeCounts((1.0,))), ("evicted_tokens", TimeCounts())):
        with pytest.raises(InvariantError):
            metrics.show_times(name, wrong)
