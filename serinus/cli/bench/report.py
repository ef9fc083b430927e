"""From answers to numbers, and from numbers to the block of text that people know from `bench_serving`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean, pstdev
from typing import Any

from serinus.cli.bench.answer import BenchAnswer
from serinus.core.errors import ConfigError

_WIDTH = 50


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear between the two nearest ranks; 0 for no values."""
    import numpy as np  # the help of a command does not load it

    return float(np.percentile(values, percent)) if len(values) else 0.0


def _spread(seconds: Sequence[float]) -> dict[str, float]:
    """How one latency is spread, in milliseconds, by the names of bench_serving."""
    ms = [value * 1000 for value in seconds]
    ranks = {"median": 50, "p90": 90, "p95": 95, "p99": 99}
    return {
        "mean": fmean(ms) if ms else 0.0,
        "std": pstdev(ms) if ms else 0.0,
        "max": max(ms, default=0.0),
        **{name: percentile(ms, percent) for name, percent in ranks.items()},
    }


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
    latencies: Mapping[str, Mapping[str, float]]
    """e2e_latency, ttft, tpot and itl: each one's mean, median and so on in milliseconds."""
    concurrency: float
    """Mean requests in flight."""
    cached: dict[str, int]
    """Cached prompt tokens by tier."""
    good: int | None = None
    """Answers within the service level, where one was given."""

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
        for name, spread in self.latencies.items():
            line |= {f"{statistic}_{name}_ms": value for statistic, value in spread.items()}
        if self.good is not None:
            line["request_goodput"] = self.good / self.seconds
        return line


def make_report(
    answers: Sequence[BenchAnswer],
    seconds: float,
    about: dict[str, Any],
    goodput: Goodput | None = None,
) -> Report:
    """The numbers of a run of `seconds`; failed answers count only as failed."""
    done = [answer for answer in answers if not answer.error]
    cached: Counter[str] = Counter()
    for answer in done:
        cached.update(answer.cached)
    return Report(
        about=about,
        seconds=seconds,
        completed=len(done),
        failed=len(answers) - len(done),
        input_tokens=sum(answer.prompt_tokens for answer in done),
        output_tokens=sum(answer.output_tokens for answer in done),
        peak_output=_peak_output(done),
        peak_concurrent=_peak_concurrent(done),
        latencies={
            "e2e_latency": _spread([answer.latency for answer in done]),
            "ttft": _spread([answer.first for answer in done]),
            "tpot": _spread([answer.per_token for answer in done if answer.output_tokens > 1]),
            "itl": _spread([gap for answer in done for gap in answer.gaps]),
        },
        concurrency=sum(answer.latency for answer in done) / seconds,
        cached=dict(cached),
        good=None if goodput is None else sum(goodput.good(answer) for answer in done),
    )


def _peak_output(answers: Sequence[BenchAnswer]) -> float:
    """Tokens in the busiest second."""
    seconds: Counter[int] = Counter()
    for answer in answers:
        times = accumulate(answer.gaps, initial=answer.sent + answer.first)
        seconds.update(int(time) for time in times)
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
    yield from _part("End-to-End Latency", "E2E Latency", report.latencies["e2e_latency"])
    yield from _part("Time to First Token", "TTFT", report.latencies["ttft"])
    yield from _part("Time per Output Token (excl. 1st token)", "TPOT", report.latencies["tpot"])
    yield from _part("Inter-Token Latency", "ITL", report.latencies["itl"])
    yield _row("Max ITL (ms):", report.latencies["itl"]["max"])
    if any(report.cached.values()):
        yield f"{'Cache Hit Details':-^{_WIDTH}}"
        yield _row("Cached tokens:", sum(report.cached.values()))
        yield _row("Cache hit rate (%):", 100 * sum(report.cached.values()) / max(1, report.input_tokens))
        for tier, count in report.cached.items():
            yield _row(f"{tier.capitalize()} cached tokens:", count)
    yield "=" * _WIDTH


def _part(title: str, name: str, spread: Mapping[str, float]) -> Iterator[str]:
    yield f"{title:-^{_WIDTH}}"
    for statistic in ("mean", "median", "p90", "p95", "p99"):
        yield _row(f"{statistic.capitalize()} {name} (ms):", spread[statistic])
