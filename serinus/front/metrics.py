"""What the front and the router count about the HTTP side, for Prometheus.

Stems are those users of SGLang and vLLM know, under `serinus:`; labels engine, role and rank are on every series.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, disable_created_metrics, generate_latest

from serinus.core.metrics import MetricSpec, TimeSeries
from serinus.core.times import TimeCounts

if TYPE_CHECKING:
    from serinus.front.connection import ConnectionTable

_LABELS = ("engine", "role", "rank")
_FIRST_TOKEN_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3, 6, 12, 25, 50, 100, 200, 400)
_BETWEEN_S = (0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.4, 0.8, 2, 5)
_GRAMMAR_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
_WHOLE_S = (0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3, 6, 12, 25, 50, 100, 200, 400, 800, 1600)


def _registry() -> CollectorRegistry:
    """An empty one whose counters bring no `_created` series: the library has a switch for the whole process only."""
    disable_created_metrics()  # type: ignore[no-untyped-call]
    return CollectorRegistry()


class HttpMetrics:
    """What every HTTP app counts. `serinus:http_requests_total` is also labelled by path and status."""

    def __init__(self, *, engine: str, role: str) -> None:
        """`engine`, `role`: labels of every series."""
        self.registry = _registry()
        self.specs: list[MetricSpec] = []
        """All families of this server."""
        self._where = (engine, role, "front")
        self._requests = self._counter("http_requests", "HTTP requests answered", "path", "status")
        self._disconnects = self._counter("http_disconnects", "Requests aborted because the client hung up")
        self._open = self._gauge("http_open_requests", "HTTP requests being answered")
        self._connections = self._gauge("http_connections", "Open HTTP connections, also those without a request")
        self._refused = self._counter("http_connections_refused", "Connections beyond the bound, answered 503")
        self._timed_out = self._counter("http_connections_timed_out", "Connections closed as their client was too slow")
        self._key_requests = self._counter("api_key_requests", "Generating requests that ended, by API key", "key")
        self._key_tokens = self._counter("api_key_tokens", "Their tokens of prompts and answers", "key")
        self._key_refused = self._counter(
            "api_key_refused", "Requests answered 429, by API key and limit", "key", "limit"
        )
        self._key_running = self._gauges(
            "api_key_running_requests", "Requests being answered, of API keys with limits", "key"
        )

    def _gauge(self, stem: str, text: str) -> Gauge:
        return self._gauges(stem, text).labels(*self._where)

    def _gauges(self, stem: str, text: str, *labels: str) -> Gauge:
        self.specs.append(MetricSpec(name=stem, kind="gauge", help=text, labels=labels))
        return Gauge(f"serinus:{stem}", text, (*_LABELS, *labels), registry=self.registry)

    def _counter(self, stem: str, text: str, *labels: str) -> Counter:
        """Without `labels` of its own: the one series, which is shown from the start."""
        self.specs.append(MetricSpec(name=stem, kind="counter", help=text, labels=labels))
        family = Counter(f"serinus:{stem}", text, (*_LABELS, *labels), registry=self.registry)
        return family if labels else family.labels(*self._where)

    def opened(self) -> None:
        """A request came in."""
        self._open.inc()

    def answered(self, path: str, status: int) -> None:
        """A request was answered (499: its client hung up)."""
        self._open.dec()
        if status == 499:
            self._disconnects.inc()
        self._requests.labels(*self._where, path, str(status)).inc()

    def key_limited(self, key: str, limit: str) -> None:
        """A request was refused, as its API key has as much as it may have; `limit` says of what."""
        self._key_refused.labels(*self._where, key, limit).inc()

    def key_running(self, key: str, count: int) -> None:
        """So many requests of an API key are being answered."""
        self._key_running.labels(*self._where, key).set(count)

    def key_ended(self, key: str, tokens: int, running: int) -> None:
        """A request of an API key has ended, and cost so many tokens; `running` are left."""
        self._key_requests.labels(*self._where, key).inc()
        self._key_tokens.labels(*self._where, key).inc(tokens)
        self.key_running(key, running)

    def watch_connections(self, table: ConnectionTable) -> None:
        """Show the connections of the server that this app runs on."""
        self._connections.set_function(lambda: len(table.connections))
        table.on_refused, table.on_timed_out = self._refused.inc, self._timed_out.inc

    def exposition(self) -> str:
        """The metrics as Prometheus reads them."""
        return generate_latest(self.registry).decode()


class FrontMetrics(HttpMetrics):
    """Counters of one engine's front: also the times that clients see."""

    def __init__(self, *, engine: str, role: str) -> None:
        super().__init__(engine=engine, role=role)
        self._first = self._histogram("time_to_first_token_seconds", "From request to first token", _FIRST_TOKEN_S)
        self._between = self._histogram("inter_token_latency_seconds", "Between two tokens of an answer", _BETWEEN_S)
        self._whole = self._histogram("e2e_request_latency_seconds", "From request to the end of its answer", _WHOLE_S)
        self._per_token = self._histogram(
            "request_time_per_output_token_seconds", "Mean time per token after the first, by answer", _BETWEEN_S
        )
        self._grammars = self._counter("num_grammar", "Grammars of requests that were looked at")
        self._grammar_ends = {
            "cache_hit": self._counter("num_grammar_cache_hit", "Grammars that were compiled already"),
            "aborted": self._counter("num_grammar_aborted", "Grammars that were refused, as they are wrong"),
            "timeout": self._counter("num_grammar_timeout", "Grammars that were refused, as they take too long"),
        }
        self._compiling = self._histogram(
            "grammar_compilation_time_seconds", "Seconds to compile a grammar", _GRAMMAR_S
        )
        self._bad_frames = self._counter("wire_bad_frames", "Frames that were refused, by reason", "reason")
        self._model = self._gauges("model_info", "1, with the name that requests use for the model", "model_name")

    def _histogram(self, stem: str, text: str, bounds: tuple[float, ...]) -> TimeCounts:
        self.specs.append(MetricSpec(name=stem, kind="histogram", help=text, buckets=bounds))
        times = TimeCounts(bounds)
        self.registry.register(TimeSeries(f"serinus:{stem}", text, _LABELS, self._where, times))
        return times

    def serves(self, model_name: str) -> None:
        """The front answers for a model of this name."""
        self._model.labels(*self._where, model_name).set(1)

    def bad_frame(self, reason: str) -> None:
        """A frame of the engine could not be read."""
        self._bad_frames.labels(*self._where, reason).inc()

    def grammar(self, end: str, seconds: float = 0.0) -> None:
        """A grammar was looked at: cache_hit, aborted, timeout, or compiled within `seconds`."""
        self._grammars.inc()
        if end == "compiled":
            self._compiling.observe(seconds)
        else:
            self._grammar_ends[end].inc()

    def first_token(self, seconds: float) -> None:
        """An answer's first token came."""
        self._first.observe(seconds)

    def next_tokens(self, seconds: float, count: int) -> None:
        """`count` further tokens of one answer came together, `seconds` after the last ones."""
        self._between.observe(seconds / count, count)

    def finished(self, seconds: float, decode_seconds: float, token_count: int) -> None:
        """An answer is complete: its whole time, that after the first token, and its tokens."""
        self._whole.observe(seconds)
        if token_count > 1:
            self._per_token.observe(decode_seconds / (token_count - 1))


class RouterMetrics(HttpMetrics):
    """Counters of one router: also where requests went, and which engines answer."""

    def __init__(self, *, engine: str) -> None:
        super().__init__(engine=engine, role="router")
        self._routed = self._counter("router_requests", "Requests sent to an engine", "to")
        self._retries = self._counter("router_retries", "Requests sent again because an engine failed")
        self._broken = self._counter("router_broken_streams", "Streams an engine broke midway")
        self._given_up = self._counter("router_given_up_requests", "Requests under which two engines broke")
        self._circuit = self._gauges(
            "router_circuit_open", "1 while an engine that failed often gets no requests, or one at a time", "to"
        )
        self._up = self._gauges("router_engine_up", "1 while an engine answers the router", "to")

    def routed(self, to: str) -> None:
        """A request went to the engine at this address."""
        self._routed.labels(*self._where, to).inc()

    def retried(self) -> None:
        """An engine failed before it had answered; the request goes to another."""
        self._retries.inc()

    def broken(self) -> None:
        """An engine failed in the middle of a stream."""
        self._broken.inc()

    def given_up(self) -> None:
        """A second engine broke while it had the request, which goes to no third."""
        self._given_up.inc()

    def circuit(self, to: str, *, open_: bool) -> None:
        """Whether an engine that failed often gets no requests, or one at a time."""
        self._circuit.labels(*self._where, to).set(1 if open_ else 0)

    def engine_left(self, to: str) -> None:
        """An engine was removed: nothing is said of it any more."""
        for gauge in (self._up, self._circuit):
            with contextlib.suppress(KeyError):
                gauge.remove(*self._where, to)

    def engine_up(self, to: str, up: bool) -> None:
        """The last look at an engine."""
        self._up.labels(*self._where, to).set(1 if up else 0)
