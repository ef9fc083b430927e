"""Traces by OpenTelemetry: a span for each request here, and those that the engine recorded.

`traceparent` (W3C) comes from the client, goes on to engines, and over the wire to their peers; spans are sent in the
background. Without an endpoint there is no Tracing, and its library is not imported. Samplers, batches and the name of
the service may be set by the library's own environment (OTEL_TRACES_SAMPLER, OTEL_SERVICE_NAME...).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from serinus.core.clock import Clock
from serinus.core.errors import ConfigError
from serinus.core.trace import SpanRecord
from serinus.core.version import package_version

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

    from serinus.front.calls import Call

TRACE_HEADERS: Final = ("traceparent", "tracestate")
"""Headers of a request that say of which trace it is."""
_OPERATIONS: Final = {
    "/v1/chat/completions": "chat", "/v1/messages": "chat", "/v1/responses": "chat", "/v1/embeddings": "embeddings",
}  # fmt: skip
_EXPORT_S: Final = 5.0
"""Seconds that one export may take."""


def check_endpoint(endpoint: str) -> None:
    """Raise ConfigError where spans cannot be sent to this endpoint, as what that needs is not installed."""
    _exporter_type(endpoint)


def _exporter_type(endpoint: str) -> Any:
    try:
        if _is_grpc(endpoint):
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

            return GrpcExporter
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter
    except ImportError as err:
        raise ConfigError(
            f"config: --otlp-traces-endpoint is {endpoint!r} and {err.name} is not installed, expected"
            " pip install -e '.[otel]'"
        ) from err
    return HttpExporter


def _is_grpc(endpoint: str) -> bool:
    """4317 is the port of OTLP over gRPC, and what users of vLLM write as http://HOST:4317."""
    parts = urlsplit(endpoint)
    return parts.scheme in ("grpc", "grpcs") or parts.port == 4317


def make_tracing(endpoint: str, *, role: str, name: str, clock: Clock) -> Tracing | None:
    """Sends traces of the server `name` to an endpoint; None where that is empty. Raises ConfigError."""
    if not endpoint:
        return None
    make = _exporter_type(endpoint)
    parts = urlsplit(endpoint)
    if _is_grpc(endpoint):
        secure = parts.scheme in ("grpcs", "https")
        exporter = make(endpoint=parts.netloc, insecure=not secure, timeout=_EXPORT_S)
    else:
        whole = endpoint if parts.path.strip("/") else f"{endpoint.rstrip('/')}/v1/traces"
        exporter = make(endpoint=whole, timeout=_EXPORT_S)
    return Tracing(exporter, role=role, name=name, clock=clock)


class RequestSpan:
    """The span of one HTTP request, under way."""

    __slots__ = ("_span", "traceparent")

    def __init__(self, span: Any, traceparent: str) -> None:
        self._span = span
        self.traceparent = traceparent
        """For what is done under it; empty where the trace is not sampled."""

    def set(self, attributes: Mapping[str, Any]) -> None:
        """What is told of it."""
        self._span.set_attributes(attributes)


class Tracing:
    """Spans of one server."""

    def __init__(self, exporter: SpanExporter, *, role: str, name: str, clock: Clock, batched: bool = True) -> None:
        """`role`, `name`: the service serinus-ROLE has an instance NAME; `batched`: in the background."""
        from opentelemetry import trace
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        resource = Resource.create({"service.instance.id": name, "service.version": package_version()})
        if str(resource.attributes["service.name"]).startswith("unknown_service"):  # OTEL_SERVICE_NAME is not set
            resource = resource.merge(Resource({"service.name": f"serinus-{role}"}))
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter) if batched else SimpleSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("serinus", package_version())
        self._trace = trace
        self._w3c = TraceContextTextMapPropagator()
        self._clock = clock

    def begin(self, name: str, headers: Mapping[str, str]) -> RequestSpan:
        """A request came; `headers`: its TRACE_HEADERS."""
        under = self._w3c.extract(headers)
        span = self._tracer.start_span(name, under, kind=self._trace.SpanKind.SERVER)
        carrier: dict[str, str] = {}
        if span.is_recording():
            self._w3c.inject(carrier, self._trace.set_span_in_context(span))
        return RequestSpan(span, carrier.get("traceparent", ""))

    def end(self, span: RequestSpan, status: int) -> None:
        """It was answered with this HTTP status (499: its client hung up)."""
        ended = span._span
        ended.set_attribute("http.response.status_code", status)
        if status >= 499:
            ended.set_status(self._trace.StatusCode.ERROR, "the client hung up" if status == 499 else f"HTTP {status}")
        ended.end()

    def export(self, records: Sequence[SpanRecord]) -> None:
        """Spans that the engine recorded, in the time of this machine."""
        offset = self._clock.unix() - self._clock.now()

        def ns(seconds: float) -> int:
            return int(1e9 * (seconds + offset))

        for record in records:
            under = self._w3c.extract({"traceparent": record.traceparent})
            span = self._tracer.start_span(
                record.name, under, attributes=dict(record.attributes), start_time=ns(record.start)
            )
            inside = self._trace.set_span_in_context(span)
            for name, start, end in record.parts:
                self._tracer.start_span(name, inside, start_time=ns(start)).end(ns(end))
            if record.error:
                span.set_status(self._trace.StatusCode.ERROR, record.error)
            span.end(ns(record.end))

    def close(self) -> None:
        """Export what is left, and end. Cost: up to some seconds where the endpoint does not answer."""
        self._provider.shutdown()


def call_attributes(call: Call, *, path: str, model: str, start: float, now: float) -> dict[str, Any]:
    """What is told of a request that an engine answered: OpenTelemetry's names for generative models, and vLLM's."""
    sampling, first = call.asks[0].sampling, call.sequences[0]
    about: dict[str, Any] = {
        "gen_ai.operation.name": _OPERATIONS.get(path, "text_completion"),
        "gen_ai.provider.name": "serinus",
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.response.id": call.request_id,
        "gen_ai.request.id": call.request_id,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.max_tokens": sampling.max_new_tokens,
        "gen_ai.request.choice.count": sampling.n,
        "gen_ai.request.n": sampling.n,
        "gen_ai.usage.num_sequences": len(call.sequences),
        "gen_ai.usage.input_tokens": call.prompt_tokens,
        "gen_ai.usage.output_tokens": call.completion_tokens,
        "gen_ai.usage.prompt_tokens": call.prompt_tokens,
        "gen_ai.usage.completion_tokens": call.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": call.cached_tokens,
        "gen_ai.response.finish_reasons": [each.finish.value for each in call.sequences if each.finish is not None],
        "gen_ai.latency.e2e": now - start,
    }
    if first.first_at:
        about["gen_ai.latency.time_to_first_token"] = first.first_at - start
        about["gen_ai.latency.time_in_model_decode"] = first.last_at - first.first_at
    if (usage := first.usage) is not None:
        about["gen_ai.latency.time_in_queue"] = usage.queue_seconds
        about["serinus.prefill_engine"] = usage.prefill_engine
        about["serinus.handoff_tokens"] = usage.handoff_tokens
        about["serinus.local_reason"] = usage.local_reason
        about["serinus.retractions"] = usage.retractions
    return {name: value for name, value in about.items() if value is not None and value != ""}
