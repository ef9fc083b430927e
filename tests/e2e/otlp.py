"""A collector of OTLP traces, over HTTP and over gRPC: the protocol's own service, with the spans kept as dicts."""

from __future__ import annotations

import gzip
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

# Else a process that Ray forks from this one may abort before its program begins: gRPC's handlers of a fork
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)


class Receiver(TraceServiceServicer):
    """Takes spans, as dicts with their service, attributes and times in seconds. To be used with `with`."""

    def __init__(self) -> None:
        self.spans: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        """Those that came with each export."""
        self._news = threading.Condition()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"receiver": self}))
        self._grpc = grpc.server(ThreadPoolExecutor(4))
        add_TraceServiceServicer_to_server(self, self._grpc)
        self._grpc_port = self._grpc.add_insecure_port("127.0.0.1:0")

    def __enter__(self) -> Receiver:
        threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True).start()
        self._grpc.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._grpc.stop(None).wait(10)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_address[1]}/v1/traces"

    @property
    def grpc_url(self) -> str:
        return f"grpc://127.0.0.1:{self._grpc_port}"

    def Export(self, request: ExportTraceServiceRequest, context: grpc.ServicerContext) -> ExportTraceServiceResponse:
        """The one method of the service."""
        self.headers.append(dict(context.invocation_metadata()))
        self.take(request)
        return ExportTraceServiceResponse()

    def take(self, request: ExportTraceServiceRequest) -> None:
        """Keep the spans of one export."""
        for resource in request.resource_spans:
            about = {item.key: item.value.string_value for item in resource.resource.attributes}
            spans = [_read(span, about) for scope in resource.scope_spans for span in scope.spans]
            with self._news:
                self.spans += spans
                self._news.notify_all()

    def wait(self, check: Callable[[], bool], what: str) -> None:
        """Until spans have come by which it holds."""
        with self._news:
            assert self._news.wait_for(check, 60), f"{what} not among {[(s['trace'], s['name']) for s in self.spans]}"

    def of(self, trace: str) -> list[dict[str, Any]]:
        return [span for span in self.spans if span["trace"] == trace]


class _Handler(BaseHTTPRequestHandler):
    """Takes one export over HTTP."""

    receiver: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        self.receiver.headers.append({name.lower(): value for name, value in self.headers.items()})
        self.receiver.take(ExportTraceServiceRequest.FromString(body))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Not in the output of the tests."""


def _read(span: Any, about: dict[str, str]) -> dict[str, Any]:
    values = {item.key: getattr(item.value, item.value.WhichOneof("value")) for item in span.attributes}
    return {
        "service": about["service.name"], "instance": about["service.instance.id"], "name": span.name,
        "trace": span.trace_id.hex(), "id": span.span_id.hex(), "parent": span.parent_span_id.hex(), "values": values,
        "start": 1e-9 * span.start_time_unix_nano, "end": 1e-9 * span.end_time_unix_nano, "error": span.status.message,
    }  # fmt: skip
