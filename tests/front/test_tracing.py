"""Spans of a front and of a router: under the client's trace, exported with the engine's, or none at all."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from serinus.core.clock import ManualClock, WallClock
from serinus.core.config import RouterConfig, ServeConfig, from_names
from serinus.core.errors import ConfigError
from serinus.core.trace import SpanRecord
from serinus.front import RouterSettings, check_endpoint
from serinus.front.router import Router
from serinus.front.tracing import Tracing, make_tracing
from serinus.testing.running_front import front_settings
from tests.e2e.otlp import Receiver

TRACE, CLIENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE}-{CLIENT}-01"}


@pytest.fixture
def memory() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def tracing(memory: InMemorySpanExporter) -> Iterator[Tracing]:
    made = Tracing(memory, role="decode", name="decode-0", clock=ManualClock(50.0), batched=False)
    yield made
    made.close()


def ids(span: ReadableSpan) -> tuple[str, str]:
    """Its trace, and the span under which it stands."""
    return f"{span.context.trace_id:032x}", f"{span.parent.span_id:016x}" if span.parent else ""


def test_a_request_continues_the_trace_of_its_client(tracing: Tracing, memory: InMemorySpanExporter) -> None:
    span = tracing.begin("POST /generate", HEADERS)
    _, trace, own, flags = span.traceparent.split("-")
    assert (trace, flags) == (TRACE, "01")
    span.set({"gen_ai.request.model": "canary"})
    tracing.end(span, 200)
    (seen,) = memory.get_finished_spans()
    assert ids(seen) == (TRACE, CLIENT)
    assert f"{seen.context.span_id:016x}" == own
    assert seen.attributes == {"gen_ai.request.model": "canary", "http.response.status_code": 200}
    assert seen.resource.attributes["service.name"] == "serinus-decode"
    assert seen.resource.attributes["service.instance.id"] == "decode-0"


@pytest.mark.parametrize(
    "headers", [{}, {"traceparent": "garbage"}, {"traceparent": f"00-{'0' * 32}-{CLIENT}-01"}, {"tracestate": "a=b"}]
)
def test_without_a_valid_trace_a_new_one_begins(
    tracing: Tracing, memory: InMemorySpanExporter, headers: dict[str, str]
) -> None:
    tracing.end(tracing.begin("POST /generate", headers), 200)
    (seen,) = memory.get_finished_spans()
    assert ids(seen)[0] not in ("0" * 32, TRACE)
    assert not ids(seen)[1]


def test_a_trace_that_is_not_sampled_costs_the_engine_nothing(tracing: Tracing, memory: InMemorySpanExporter) -> None:
    span = tracing.begin("POST /generate", {"traceparent": f"00-{TRACE}-{CLIENT}-00"})
    assert not span.traceparent
    tracing.end(span, 200)
    assert not memory.get_finished_spans()


@pytest.mark.parametrize(("status", "word"), [(499, "hung up"), (500, "HTTP 500"), (400, "")])
def test_what_fails_is_an_error(tracing: Tracing, memory: InMemorySpanExporter, status: int, word: str) -> None:
    tracing.end(tracing.begin("POST /generate", HEADERS), status)
    (seen,) = memory.get_finished_spans()
    assert word in (seen.status.description or "")
    assert seen.status.is_ok != bool(word)


def test_records_of_the_engine_are_spans_in_the_time_of_this_machine(
    tracing: Tracing, memory: InMemorySpanExporter
) -> None:
    record = SpanRecord(
        name="handoff", traceparent=HEADERS["traceparent"], start=40.0, end=45.0, attributes={"serinus.pages": 3},
        parts=(("handoff.grant", 40.0, 41.0),), error="late",
    )  # fmt: skip
    tracing.export([record])
    grant, handoff = memory.get_finished_spans()
    assert ids(handoff) == (TRACE, CLIENT)
    assert ids(grant) == (TRACE, f"{handoff.context.span_id:016x}")
    assert (handoff.start_time, handoff.end_time) == (1_700_000_040 * 10**9, 1_700_000_045 * 10**9)
    assert (grant.start_time, grant.end_time) == (1_700_000_040 * 10**9, 1_700_000_041 * 10**9)
    assert dict(handoff.attributes or {}) == {"serinus.pages": 3}
    assert handoff.status.description == "late"


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_a_collector_gets_a_request_and_what_its_engine_recorded(
    protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-key=k")
    with Receiver() as receiver:
        made = make_tracing(
            receiver.grpc_url if protocol == "grpc" else receiver.url, role="decode", name="d", clock=WallClock()
        )
        assert made is not None
        span = made.begin("POST /generate", HEADERS)
        record = SpanRecord(
            name="handoff", traceparent=span.traceparent, start=1.0, end=3.0, parts=(("handoff.grant", 1.0, 2.0),),
            attributes=(("serinus.pages", 7),), error="it failed",
        )  # fmt: skip
        made.export([record])
        made.end(span, 200)
        made.close()
        receiver.wait(lambda: len(receiver.of(TRACE)) == 3, "three spans")
    by_name = {each["name"]: each for each in receiver.of(TRACE)}
    front, handoff, grant = (by_name[name] for name in ("POST /generate", "handoff", "handoff.grant"))
    assert (front["parent"], handoff["parent"], grant["parent"]) == (CLIENT, front["id"], handoff["id"])
    assert (handoff["values"], handoff["error"]) == ({"serinus.pages": 7}, "it failed")
    assert handoff["end"] - handoff["start"] == pytest.approx(2.0, abs=1e-6)
    assert {each["service"] for each in by_name.values()} == {"serinus-decode"}
    assert all(each["x-key"] == "k" for each in receiver.headers)


def test_without_an_endpoint_there_is_no_tracing() -> None:
    assert make_tracing("", role="decode", name="d", clock=WallClock()) is None
    assert Router(RouterSettings(decode_urls=("http://127.0.0.1:1",)), WallClock()).tracing is None


@pytest.mark.parametrize(
    "endpoint",
    ["http://127.0.0.1:1", "grpc://127.0.0.1:1", pytest.param("http://127.0.0.1:1/v1/traces", marks=pytest.mark.proof)],
)
def test_an_endpoint_that_does_not_answer_delays_the_end_by_little(endpoint: str) -> None:
    clock = WallClock()
    made = make_tracing(endpoint, role="decode", name="d", clock=clock)
    assert made is not None
    made.end(made.begin("POST /generate", {}), 200)
    began = clock.now()
    made.close()
    assert clock.now() - began < 15


@pytest.mark.parametrize(
    ("endpoint", "module"),
    [
        ("http://127.0.0.1:4318", "opentelemetry.exporter.otlp.proto.http.trace_exporter"),
        ("grpc://127.0.0.1:4317", "opentelemetry.exporter.otlp.proto.grpc.trace_exporter"),
        ("http://127.0.0.1:4317", "opentelemetry.exporter.otlp.proto.grpc.trace_exporter"),
    ],
)
@pytest.mark.parametrize(
    "settings", [front_settings, lambda **more: RouterSettings(decode_urls=("http://h:1",), **more)]
)
def test_an_endpoint_without_the_extra_is_refused_at_start(
    monkeypatch: pytest.MonkeyPatch, settings: Callable[..., object], endpoint: str, module: str
) -> None:
    check_endpoint(endpoint)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=r"--otlp-traces-endpoint is .* expected pip install -e '\.\[otel\]'"):
        settings(otlp_traces_endpoint=endpoint)


@pytest.mark.parametrize("wrong", ["localhost:4317", "udp://h:1", "http://", "4318"])
@pytest.mark.parametrize("tree", [ServeConfig, RouterConfig])
def test_an_endpoint_that_is_none_is_refused(tree: type[ServeConfig], wrong: str) -> None:
    with pytest.raises(ConfigError, match="--otlp-traces-endpoint"):
        from_names(tree, {"otlp_traces_endpoint": wrong})
