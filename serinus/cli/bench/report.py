"""From answers to numbers, and from numbers to the block of text that people know from `bench_serving`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean, pstdev
from typing import Any

from serinus.cli.bench.answer import BenchAnswer
from serinus.core.errors import ConfigError

__all__ = ["Goodput", "Report", "Spread", "make_report", "percentile", "result_block"]

_WIDTH = 50


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear between the two nearest ranks, as numpy's default; 0 for no values."""
    if not values:
        return 0.0
    ranked = sorted(values)
    place = (len(ranked) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ranked) - 1)
    return ranked[low] + (ranked[high] - ranked[low]) * (place - low)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """How one latency is spread, in milliseconds."""

    mean: float
    median: float
    std: float
    p90: float
    p95: float
    p99: float
    most: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Spread:
        ms = [value * 1000 for value in seconds]
        return cls(
            mean=fmean(ms) if ms else 0.0,
            median=percentile(ms, 50),
            std=pstdev(ms) if ms else 0.0,
            p90=percentile(ms, 90),
            p95=percentile(ms, 95),
            p99=percentile(ms, 99),
            most=max(ms, default=0.0),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """A service level: an answer is good if none of its latencies is above."""

    limits_ms: dict[str, float]
    """ttft, tpot, e2e -> milliseconds."""

    @classmethod
    def parse(cls, words: Sequence[str]) -> Goodput:
        """From `ttft:500 tpot:50`. Raises ConfigError."""
        limits: dict[str, float] = {}
        for word in words:
            name, _, limit = word.partition(":")
            name = "e2e" if name == "e2el" else name
            try:
                value = float(limit)
            except ValueError:
                value = -1.0
            if name not in ("ttft", "tpot", "e2e") or not value > 0:
                raise ConfigError(f"bench: --goodput has {word!r}, expected ttft:MS, tpot:MS or e2e:MS")
            limits[name] = value
        return cls(limits_ms=limits)

    def good(self, answer: BenchAnswer) -> bool:
        seen = {"ttft": answer.first, "tpot": answer.per_token, "e2e": answer.latency}
        return all(seen[name] * 1000 <= limit for name, limit in self.limits_ms.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The numbers of one run."""

    about: dict[str, Any]
    """backend, dataset, rate, lengths: what was asked."""
    seconds: float
    completed: int
    failed: int
    input_tokens: int
    output_tokens: int
    peak_output: float
    """Tokens that came in the busiest second."""
    peak_concurrent: int
    """Requests in flight at the busiest moment."""
    e2e: Spread
    ttft: Spread
    tpot: Spread
    itl: Spread
    concurrency: float
    """Mean requests in flight."""
    cached: dict[str, int]
    """Cached prompt tokens by tier."""
    good: int | None = None
    """Answers within the service level, where one was given."""
    integrity: dict[str, float] = field(default_factory=dict)
    """KV integrity, where the server counts it: rows of the block's last part."""

    def to_json(self) -> dict[str, Any]:
        """One line of the output file; names as bench_serving's."""
        line: dict[str, Any] = {
            **self.about,
            "duration": self.seconds,
            "completed": self.completed,
            "failed": self.failed,
            "total_input_tokens": self.input_tokens,
            "total_output_tokens": self.output_tokens,
            "request_throughput": self.completed / self.seconds,
            "input_throughput": self.input_tokens / self.seconds,
            "output_throughput": self.output_tokens / self.seconds,
            "total_throughput": (self.input_tokens + self.output_tokens) / self.seconds,
            "max_output_tokens_per_s": self.peak_output,
            "max_concurrent_requests": self.peak_concurrent,
            "concurrency": self.concurrency,
            "cached_tokens": self.cached,
        }
        for name, spread in (("e2e_latency", self.e2e), ("ttft", self.ttft), ("tpot", self.tpot), ("itl", self.itl)):
            line |= {
                f"mean_{name}_ms": spread.mean,
                f"median_{name}_ms": spread.median,
                f"std_{name}_ms": spread.std,
                f"p90_{name}_ms": spread.p90,
                f"p95_{name}_ms": spread.p95,
                f"p99_{name}_ms": spread.p99,
                f"max_{name}_ms": spread.most,
            }
        if self.good is not None:
            line["request_goodput"] = self.good / self.seconds
        if self.integrity:
            line["kv_integrity"] = self.integrity
        return line


def make_report(
    answers: Sequence[BenchAnswer],
    seconds: float,
    about: dict[str, Any],
    goodput: Goodput | None = None,
) -> Report:
    """The numbers of a run of `seconds`; failed answers count only as failed."""
    done = [answer for answer in answers if not answer.error]
    cached: dict[str, int] = {}
    for answer in done:
        for tier, count in answer.cached.items():
            cached[tier] = cached.get(tier, 0) + count
    return Report(
        about=about,
        seconds=seconds,
        completed=len(done),
        failed=len(answers) - len(done),
        input_tokens=sum(answer.prompt_tokens for answer in done),
        output_tokens=sum(answer.output_tokens for answer in done),
        peak_output=_peak_output(done),
        peak_concurrent=_peak_concurrent(done),
        e2e=Spread.of([answer.latency for answer in done]),
        ttft=Spread.of([answer.first for answer in done]),
        tpot=Spread.of([answer.per_token for answer in done if answer.output_tokens > 1]),
        itl=Spread.of([gap for answer in done for gap in answer.gaps]),
        concurrency=sum(answer.latency for answer in done) / seconds,
        cached=cached,
        good=None if goodput is None else sum(goodput.good(answer) for answer in done),
    )


def _peak_output(answers: Sequence[BenchAnswer]) -> float:
    """Tokens in the busiest second."""
    seconds: dict[int, int] = {}
    for answer in answers:
        time = answer.sent + answer.first
        seconds[int(time)] = seconds.get(int(time), 0) + 1
        for gap in answer.gaps:
            time += gap
            seconds[int(time)] = seconds.get(int(time), 0) + 1
    return float(max(seconds.values(), default=0))


def _peak_concurrent(answers: Sequence[BenchAnswer]) -> int:
    moments = sorted((time, step) for a in answers for time, step in ((a.sent, 1), (a.sent + a.latency, -1)))
    most = now = 0
    for _, step in moments:
        now += step
        most = max(most, now)
    return most


def result_block(report: Report) -> str:
    """The text: 50 columns, the lines and words of bench_serving."""
    return "\n".join(_lines(report))


def _row(name: str, value: object) -> str:
    shown = f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{name:<40} {shown:<10}".rstrip()


def _lines(report: Report) -> Iterator[str]:
    yield f"{' Serving Benchmark Result ':=^{_WIDTH}}"
    yield _row("Backend:", report.about.get("backend", ""))
    yield _row("Traffic request rate:", report.about.get("request_rate", "inf"))
    yield _row("Max request concurrency:", report.about.get("max_concurrency") or "not set")
    yield _row("Successful requests:", report.completed)
    if report.failed:
        yield _row("Failed requests:", report.failed)
    yield _row("Benchmark duration (s):", report.seconds)
    yield _row("Total input tokens:", report.input_tokens)
    yield _row("Total generated tokens:", report.output_tokens)
    yield _row("Request throughput (req/s):", report.completed / report.seconds)
    if report.good is not None:
        yield _row("Request goodput (req/s):", report.good / report.seconds)
    yield _row("Input token throughput (tok/s):", report.input_tokens / report.seconds)
    yield _row("Output token throughput (tok/s):", report.output_tokens / report.seconds)
    yield _row("Peak output token throughput (tok/s):", report.peak_output)
    yield _row("Peak concurrent requests:", report.peak_concurrent)
    yield _row("Total token throughput (tok/s):", (report.input_tokens + report.output_tokens) / report.seconds)
    yield _row("Concurrency:", report.concurrency)
    yield from _part("End-to-End Latency", "E2E Latency", report.e2e)
    yield from _part("Time to First Token", "TTFT", report.ttft)
    yield from _part("Time per Output Token (excl. 1st token)", "TPOT", report.tpot)
    yield from _part("Inter-Token Latency", "ITL", report.itl)
    yield _row("Max ITL (ms):", report.itl.most)
    if any(report.cached.values()):
        yield f"{'Cache Hit Details':-^{_WIDTH}}"
        yield _row("Cached tokens:", sum(report.cached.values()))
        yield _row("Cache hit rate (%):", 100 * sum(report.cached.values()) / max(1, report.input_tokens))
        for tier, count in report.cached.items():
            yield _row(f"{tier.capitalize()} cached tokens:", count)
    if report.integrity:
        yield f"{'KV integrity':-^{_WIDTH}}"
        for name, value in report.integrity.items():
            yield _row(f"{name}:", value)
    yield "=" * _WIDTH


def _part(title: str, name: str, spread: Spread) -> Iterator[str]:
    yield f"{title:-^{_WIDTH}}"
    yield _row(f"Mean {name} (ms):", spread.mean)
    yield _row(f"Median {name} (ms):", spread.median)
    yield _row(f"P90 {name} (ms):", spread.p90)
    yield _row(f"P95 {name} (ms):", spread.p95)
    yield _row(f"P99 {name} (ms):", spread.p99)
