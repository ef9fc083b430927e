"""The one table of endpoints, of an engine's front and of the router alike; and the ASGI app of one endpoint.

Each app says what handles each path; method, key and description stand here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

import msgspec
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from serinus.core.errors import SerinusError
from serinus.core.log import fields, get_logger
from serinus.front.agent_answers import (
    EmbeddingList,
    Message,
    MessageEvent,
    ResponseEvent,
    ResponseObject,
    TokenCount,
)
from serinus.front.agent_schemas import EmbeddingsBody, MessagesBody, ResponsesBody
from serinus.front.answer_schemas import (
    Chat,
    ChatChunk,
    Completion,
    CompletionChunk,
    Detokenized,
    Generated,
    NotGenerated,
    Tokenized,
)
from serinus.front.exchange import ClientGone, HttpExchange
from serinus.front.keys import Keys
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
from serinus.front.state_answers import (
    Aborted,
    ByEngine,
    CacheView,
    CanaryView,
    Description,
    EngineInfo,
    FaultsView,
    LookView,
    ModelCard,
    ModelInfo,
    ModelList,
    RouterInfo,
    ServerLoad,
    Version,
    WorkerList,
    WorkerView,
)
from serinus.front.tracing import TRACE_HEADERS, Tracing
from serinus.wire.fault_order import FaultOrder

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
    body: type[msgspec.Struct] | None = None
    """Fields of a POST's body."""
    body_optional: bool = False
    """Whether a POST needs none."""
    query: Mapping[str, type] = field(default_factory=dict)
    """Parameters of the query, by name."""
    query_of: str = "GET"
    """The method that takes them."""
    answers: tuple[type[msgspec.Struct], ...] = ()
    """What its JSON is, one of them; () = its answer is text, or a text alone."""
    listed: bool = False
    """Whether a list of these is an answer too."""
    router_answers: tuple[type[msgspec.Struct], ...] = ()
    """What a router's JSON is, where it is another one."""
    views: Mapping[str, type[msgspec.Struct]] = field(default_factory=dict)
    """What the JSON of some of its methods is, where that differs."""
    events: type[msgspec.Struct] | None = None
    """What an event of its stream is, where it can answer with server-sent events."""
    says_done: bool = True
    """Whether `[DONE]` is the last of them."""
    text: tuple[str, ...] = ("text/plain",)
    """Content types of an answer that is text."""
    changed: int = 200
    """Status of an answer to what changes something."""
    router_only: bool = False
    """Whether engines do not have it."""


DASHBOARD = "/dashboard"
"""What the paths of the page begin with."""
_POST = ("POST",)
ENDPOINTS = (
    EndpointSpec(
        path="/v1/completions", summary="Continue a text (OpenAI)", methods=_POST, body=CompletionBody,
        answers=(Completion,), events=CompletionChunk,
    ),
    EndpointSpec(
        path="/v1/chat/completions", summary="Answer a chat (OpenAI)", methods=_POST, body=ChatBody, answers=(Chat,),
        events=ChatChunk,
    ),
    EndpointSpec(
        path="/v1/responses", summary="Answer a chat, for agents (OpenAI); nothing is stored", methods=_POST,
        body=ResponsesBody, answers=(ResponseObject,), events=ResponseEvent,
        says_done=False,
    ),
    EndpointSpec(
        path="/v1/messages", summary="Answer a chat (Anthropic)", methods=_POST, body=MessagesBody, answers=(Message,),
        events=MessageEvent,
        says_done=False,
    ),
    EndpointSpec(
        path="/v1/messages/count_tokens", summary="Tokens of such a chat (Anthropic)", methods=_POST, body=MessagesBody,
        answers=(TokenCount,),
    ),
    EndpointSpec(
        path="/v1/embeddings", summary="Embeddings of texts (OpenAI), by an embedding model; 400 by any other",
        methods=_POST, body=EmbeddingsBody, answers=(EmbeddingList,),
    ),
    EndpointSpec(path="/v1/models", summary="The models served (OpenAI)", answers=(ModelList,)),
    EndpointSpec(path="/v1/models/{name:path}", summary="One model (OpenAI)", answers=(ModelCard,)),
    EndpointSpec(
        path="/generate", summary="Continue prompts, native form", methods=_POST, body=GenerateBody,
        answers=(Generated, NotGenerated), listed=True, events=Generated,
    ),
    EndpointSpec(path="/tokenize", summary="Text to token ids", methods=_POST, body=TokenizeBody, answers=(Tokenized,)),
    EndpointSpec(
        path="/detokenize", summary="Token ids to text", methods=_POST, body=DetokenizeBody, answers=(Detokenized,)
    ),
    EndpointSpec(path="/health", summary="200 while requests can be served", keys="none"),
    EndpointSpec(path="/ping", summary="The same as /health (SageMaker)", methods=("GET", "POST"), keys="none"),
    EndpointSpec(path="/version", summary="The version of Serinus", keys="none", answers=(Version,)),
    EndpointSpec(path="/load", summary="Requests that are being answered", keys="none", answers=(ServerLoad,)),
    EndpointSpec(path="/health_generate", summary="200 after one token was generated"),
    EndpointSpec(
        path="/metrics", summary="Prometheus metrics", keys="none", text=("text/plain", "application/openmetrics-text")
    ),
    EndpointSpec(
        path="/server_info", summary="What this server is, how it is set up, how loaded it is", answers=(EngineInfo,),
        router_answers=(RouterInfo,),
    ),
    EndpointSpec(
        path="/get_server_info", summary="The same as /server_info", answers=(EngineInfo,), router_answers=(RouterInfo,)
    ),
    EndpointSpec(path="/get_model_info", summary="Where the model lies", answers=(ModelInfo,)),
    EndpointSpec(path="/flush_cache", summary="Empty the prefix cache", methods=_POST, keys="admin"),
    EndpointSpec(
        path="/cache", summary="What is cached where; `limit`: nodes of the tree", keys="admin", query={"limit": int},
        answers=(CacheView,), router_answers=(ByEngine,),
    ),
    EndpointSpec(
        path="/canary", summary="What the KV canary checked and found, incident by incident", keys="admin",
        answers=(CanaryView,), router_answers=(ByEngine,),
    ),
    EndpointSpec(
        path="/canary/perturb", summary="Faults planted on purpose; POST plants some, with a bound and an end",
        methods=("GET", "POST"), keys="admin", body=FaultOrder, answers=(FaultsView,), router_answers=(ByEngine,),
    ),
    EndpointSpec(
        path="/dashboard", summary="The live page; it asks for the key itself", keys="none", text=("text/html",)
    ),
    EndpointSpec(
        path="/dashboard/events", summary="Its stream: the whole state, then what changes", keys="admin",
        text=("text/event-stream",),
    ),
    EndpointSpec(
        path="/dashboard/look", summary="One page of KV, or one node of the tree; of a router's `engine`", keys="admin",
        query={"what": str, "tier": str, "part": str, "page": int, "node": int, "engine": str}, answers=(LookView,),
    ),
    EndpointSpec(
        path="/abort_request", summary="Abort one request, or all", methods=_POST, keys="admin", body=AbortBody,
        body_optional=True, query={"rid": str, "abort_all": bool}, query_of="POST", answers=(Aborted,),
    ),
    EndpointSpec(
        path="/workers", summary="Engines of a router; POST adds one, DELETE drains the one at `url`",
        methods=("GET", "POST", "DELETE"), keys="admin", body=WorkerBody, query={"url": str}, query_of="DELETE",
        answers=(WorkerView,), views={"GET": WorkerList}, changed=202, router_only=True,
    ),
    EndpointSpec(path="/openapi.json", summary="This description", keys="none", answers=(Description,)),
)  # fmt: skip
"""Every endpoint, in the order of the description."""


class _Endpoint:
    """ASGI app of one endpoint: checks the key, runs the handler, renders its errors, counts and logs the answer."""

    def __init__(
        self,
        spec: EndpointSpec,
        handler: Handler,
        keys: Keys,
        metrics: HttpMetrics,
        body_bytes_max: int,
        tracing: Tracing | None,
    ) -> None:
        self._path = spec.path
        self._opened_by = spec.keys
        self._generates = spec.events is not None
        self._level = logging.INFO if spec.methods == _POST else logging.DEBUG
        """Of its lines in the log: what GET takes is polled."""
        self._handler = handler
        self._keys = keys
        self._metrics = metrics
        self._body_bytes_max = body_bytes_max
        self._tracing = tracing if self._generates else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = HttpExchange(scope, receive, send, body_bytes_max=self._body_bytes_max)
        loop = asyncio.get_running_loop()
        began = loop.time()
        self._metrics.opened()
        if self._tracing is not None:
            headers = {name: value for name in TRACE_HEADERS if (value := exchange.header(name))}
            exchange.span = self._tracing.begin(f"POST {self._path}", headers)
        status = 500
        try:
            key = self._keys.check(exchange, self._opened_by)
            with self._keys.counted(key if self._generates else None, exchange, self._metrics, began):
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
            if exchange.span is not None and self._tracing is not None:
                exchange.span.set({"url.path": self._path, "serinus.x_request_id": exchange.request_id})
                self._tracing.end(exchange.span, status)
            self._log(exchange, status, loop.time() - began)

    def _log(self, exchange: HttpExchange, status: int, seconds: float) -> None:
        """One line, with the id to find the request by in other logs."""
        if _log.isEnabledFor(self._level):
            key = {"key": exchange.share.name} if exchange.share.name else {}
            about = {
                "x_request_id": exchange.request_id, "rid": exchange.rid or "-", "status": status, "seconds": seconds,
                **key,
            }  # fmt: skip
            span, method = exchange.span, exchange.scope["method"]
            trace = {"trace_id": span.traceparent.split("-")[1]} if span is not None and span.traceparent else {}
            _log.log(
                self._level, "%s %s, %s", method, self._path, fields(**about),
                extra={"method": method, "path": self._path, **about, **trace},
            )  # fmt: skip


def routes_of(
    handlers: Mapping[str, Handler], *, keys: Keys, metrics: HttpMetrics, body_bytes_max: int,
    tracing: Tracing | None = None, off: str = "",
) -> list[Route]:  # fmt: skip
    """Starlette's routes of an app; `handlers`: one for each path of ENDPOINTS that it has. Paths that begin with `off`
    are left out."""
    lacking = {spec.path for spec in ENDPOINTS if not spec.router_only} - handlers.keys()
    assert not lacking, f"front: no handler of {sorted(lacking)}"
    return [
        Route(
            spec.path,
            _Endpoint(spec, handlers[spec.path], keys, metrics, body_bytes_max, tracing),
            methods=list(spec.methods),
        )
        for spec in ENDPOINTS
        if spec.path in handlers and not (off and spec.path.startswith(off))
    ]
