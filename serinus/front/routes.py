"""The one table of endpoints, of an engine's front and of the router alike; and the ASGI app of one endpoint.

Each app says what handles each path; method, key and description stand here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

import msgspec
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from serinus.core.errors import SerinusError
from serinus.core.log import fields, get_logger
from serinus.front.agent_schemas import EmbeddingsBody, MessagesBody, ResponsesBody
from serinus.front.exchange import ClientGone, HttpExchange
from serinus.front.keys import Keys, check_key
from serinus.front.metrics import HttpMetrics
from serinus.front.schemas import (
    AbortBody,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerateBody,
    TokenizeBody,
    WorkerBody,
)
from serinus.wire.fault_order import FaultOrder

__all__ = ["ENDPOINTS", "EndpointSpec", "Handler", "routes_of"]

_log = get_logger("front")

Handler = Callable[[HttpExchange], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointSpec:
    """One path of the HTTP interface."""

    path: str
    """As Starlette writes it."""
    summary: str
    """One line for people."""
    methods: tuple[str, ...] = ("GET",)
    """HTTP methods that it takes."""
    keys: str = "user"
    """Which key opens it: user, admin or none."""
    content: str = "application/json"
    """Content type of its answer."""
    body: type[msgspec.Struct] | None = None
    """Fields of a POST's body."""
    streams: bool = False
    """Whether it can answer with server-sent events."""
    router_only: bool = False
    """Whether engines do not have it."""


_POST, _TEXT = ("POST",), "text/plain"
ENDPOINTS = (
    EndpointSpec(
        path="/v1/completions", summary="Continue a text (OpenAI)", methods=_POST, body=CompletionBody, streams=True
    ),
    EndpointSpec(
        path="/v1/chat/completions", summary="Answer a chat (OpenAI)", methods=_POST, body=ChatBody, streams=True
    ),
    EndpointSpec(
        path="/v1/responses",
        summary="Answer a chat, for agents (OpenAI); nothing is stored",
        methods=_POST,
        body=ResponsesBody,
        streams=True,
    ),
    EndpointSpec(
        path="/v1/messages", summary="Answer a chat (Anthropic)", methods=_POST, body=MessagesBody, streams=True
    ),
    EndpointSpec(
        path="/v1/embeddings", summary="Refused: no embedding model is served", methods=_POST, body=EmbeddingsBody
    ),
    EndpointSpec(path="/v1/models", summary="The models served (OpenAI)"),
    EndpointSpec(path="/v1/models/{name:path}", summary="One model (OpenAI)"),
    EndpointSpec(
        path="/generate", summary="Continue prompts, native form", methods=_POST, body=GenerateBody, streams=True
    ),
    EndpointSpec(path="/tokenize", summary="Text to token ids", methods=_POST, body=TokenizeBody),
    EndpointSpec(path="/detokenize", summary="Token ids to text", methods=_POST, body=DetokenizeBody),
    EndpointSpec(path="/health", summary="200 while requests can be served", keys="none", content=_TEXT),
    EndpointSpec(
        path="/ping",
        summary="The same as /health (SageMaker)",
        methods=("GET", "POST"),
        keys="none",
        content=_TEXT,
    ),
    EndpointSpec(path="/version", summary="The version of Serinus", keys="none"),
    EndpointSpec(path="/load", summary="Requests that are being answered", keys="none"),
    EndpointSpec(path="/health_generate", summary="200 after one token was generated", content=_TEXT),
    EndpointSpec(path="/metrics", summary="Prometheus metrics", keys="none", content=_TEXT),
    EndpointSpec(path="/server_info", summary="What this server is, how it is set up, how loaded it is"),
    EndpointSpec(path="/get_server_info", summary="The same as /server_info"),
    EndpointSpec(path="/get_model_info", summary="Where the model lies"),
    EndpointSpec(path="/flush_cache", summary="Empty the prefix cache", methods=_POST, keys="admin", content=_TEXT),
    EndpointSpec(path="/cache", summary="What is cached where; ?limit= nodes of the tree", keys="admin"),
    EndpointSpec(path="/canary", summary="What the KV canary checked and found, incident by incident", keys="admin"),
    EndpointSpec(
        path="/canary/perturb",
        summary="Faults planted on purpose; POST plants some, with a bound and an end",
        methods=("GET", "POST"),
        keys="admin",
        body=FaultOrder,
    ),
    EndpointSpec(
        path="/abort_request", summary="Abort one request, or all", methods=_POST, keys="admin", body=AbortBody
    ),
    EndpointSpec(
        path="/workers",
        summary="Engines of a router; POST adds one, DELETE ?url= drains one",
        methods=("GET", "POST", "DELETE"),
        keys="admin",
        body=WorkerBody,
        router_only=True,
    ),
    EndpointSpec(path="/openapi.json", summary="This description", keys="none"),
)
"""Every endpoint, in the order of the description."""


class _Endpoint:
    """ASGI app of one endpoint: checks the key, runs the handler, renders its errors, counts and logs the answer."""

    def __init__(
        self, spec: EndpointSpec, handler: Handler, keys: tuple[str, ...], metrics: HttpMetrics, body_bytes_max: int
    ) -> None:
        self._path = spec.path
        self._level = logging.INFO if spec.methods == _POST else logging.DEBUG
        """Of its lines in the log: what GET takes is polled."""
        self._handler = handler
        self._keys = keys
        self._metrics = metrics
        self._body_bytes_max = body_bytes_max

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = HttpExchange(scope, receive, send, body_bytes_max=self._body_bytes_max)
        loop = asyncio.get_running_loop()
        began = loop.time()
        self._metrics.opened()
        status = 500
        try:
            check_key(exchange, self._keys)
            await self._handler(exchange)
            status = exchange.status
        except ClientGone:
            status = 499
        except asyncio.CancelledError:
            status = 499
            raise
        except SerinusError as err:
            await exchange.fail(err)
            status = exchange.status
        finally:
            self._metrics.answered(self._path, status)
            self._log(exchange, status, loop.time() - began)

    def _log(self, exchange: HttpExchange, status: int, seconds: float) -> None:
        """One line, with the id to find the request by in other logs."""
        if _log.isEnabledFor(self._level):
            about = fields(x_request_id=exchange.request_id, rid=exchange.rid or "-", status=status, seconds=seconds)
            _log.log(self._level, "%s %s, %s", exchange.scope["method"], self._path, about)


def routes_of(handlers: Mapping[str, Handler], *, keys: Keys, metrics: HttpMetrics, body_bytes_max: int) -> list[Route]:
    """Starlette's routes of an app; `handlers`: one for each path of ENDPOINTS that it has."""
    lacking = {spec.path for spec in ENDPOINTS if not spec.router_only} - handlers.keys()
    assert not lacking, f"front: no handler of {sorted(lacking)}"
    return [
        Route(
            spec.path,
            _Endpoint(spec, handlers[spec.path], keys.that_open(spec.keys), metrics, body_bytes_max),
            methods=list(spec.methods),
        )
        for spec in ENDPOINTS
        if spec.path in handlers
    ]
