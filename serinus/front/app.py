"""The HTTP app of one engine's front: its handlers, its start and its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from serinus.core.clock import Clock, WallClock
from serinus.core.errors import ConfigError
from serinus.front import info
from serinus.front.chat import chat_completions
from serinus.front.client import EngineClient, EngineDown
from serinus.front.completions import completions
from serinus.front.dashboard import DashboardFeed
from serinus.front.embeddings import embeddings
from serinus.front.exchange import REQUEST_ID_HEADER, error_at, error_json, request_id_of
from serinus.front.messages import count_tokens, messages
from serinus.front.native import generate
from serinus.front.perturb import perturb
from serinus.front.responses import responses
from serinus.front.routes import DASHBOARD, Handler, routes_of
from serinus.front.settings import FrontSettings
from serinus.front.state import IGNORED_HEADER, Front
from serinus.wire.messages import Ready

_OF_FRONT = {
    "/v1/completions": completions,
    "/v1/chat/completions": chat_completions,
    "/v1/responses": responses,
    "/v1/messages": messages,
    "/v1/messages/count_tokens": count_tokens,
    "/v1/embeddings": embeddings,
    "/v1/models": info.models,
    "/v1/models/{name:path}": info.model,
    "/generate": generate,
    "/tokenize": info.tokenize,
    "/detokenize": info.detokenize,
    "/health": info.health,
    "/ping": info.health,
    "/version": info.version,
    "/load": info.load,
    "/health_generate": info.health_generate,
    "/metrics": info.metrics,
    "/server_info": info.server_info,
    "/get_server_info": info.server_info,
    "/get_model_info": info.model_info,
    "/flush_cache": info.flush_cache,
    "/cache": info.cache_tree,
    "/canary": info.canary,
    "/canary/perturb": perturb,
    "/abort_request": info.abort_request,
    "/openapi.json": info.description,
}


def error_handlers() -> dict[int | type[Exception], Callable[[Request, Exception], Awaitable[Response]]]:
    """Starlette's own errors (unknown path, wrong method, a bug) in OpenAI's form."""

    async def http_error(request: Request, err: Exception) -> Response:
        assert isinstance(err, HTTPException), f"front: {err!r} where an HTTPException was expected"
        if err.status_code == 404:
            message = f"path: got {request.url.path!r}, expected one of those at /openapi.json"
        else:
            message = f"{request.method} {request.url.path}: {err.detail}"
        kind = "not_found_error" if err.status_code == 404 else "invalid_request_error"
        body = error_at(request.url.path, error_json(message, kind))
        headers = {REQUEST_ID_HEADER: request_id_of(request.scope), **(err.headers or {})}
        return Response(body, err.status_code, headers, "application/json")

    async def bug(request: Request, err: Exception) -> Response:
        body = error_json(f"front: {type(err).__name__}, see the server's log", "internal_server_error")
        return Response(error_at(request.url.path, body), 500, media_type="application/json")

    return {HTTPException: http_error, Exception: bug}


def cross_origin(origins: Sequence[str]) -> list[Middleware]:
    """What lets web pages of these origins ask (CORS): headers of answers, and answers to a browser's OPTIONS."""
    if not origins:
        return []
    exposed = (REQUEST_ID_HEADER, IGNORED_HEADER)
    anything = ("*",)
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=anything,
            allow_headers=anything,
            expose_headers=exposed,
        )
    ]


def create_app(
    settings: FrontSettings,
    engine: EngineClient,
    *,
    clock: Clock | None = None,
    on_ready: Callable[[Ready], None] | None = None,
    on_failed: Callable[[str], None] | None = None,
    on_stuck: Callable[[str], None] | None = None,
) -> Starlette:
    """The app of one front.

    Serving begins at once: until the engine is loaded every request gets 503. The app's lifespan starts the engine
    client and the tokenizer, then calls `on_ready`, or `on_failed` with the reason where either does not come up.
    `on_stuck` is called, with the reason, when the engine stands still for longer than `watchdog_s_max`.
    `app.state.front` is the Front behind it.
    """
    front = Front(settings, engine, clock or WallClock())

    async def come_up() -> None:
        try:
            ready = await engine.start()
            if not (settings.model.skip_tokenizer_init or settings.lazy_tokenizer):
                await asyncio.shield(front.start_tokenizer())
        except (EngineDown, ConfigError) as err:
            if on_failed is not None:
                on_failed(str(err))
            return
        if on_ready is not None:
            on_ready(ready)
        await engine.watch(settings.server.watchdog_s_max, on_stuck)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        if not (settings.model.skip_tokenizer_init or settings.lazy_tokenizer):
            front.start_tokenizer()
        coming = asyncio.get_running_loop().create_task(come_up())
        try:
            yield
        finally:
            engine.stop()
            coming.cancel()
            front.stop()
            await asyncio.gather(coming, return_exceptions=True)
            if front.tracing is not None:
                await asyncio.to_thread(front.tracing.close)

    dashboard = DashboardFeed(front)
    handlers: dict[str, Handler] = {path: partial(handler, front) for path, handler in _OF_FRONT.items()}
    handlers |= {
        "/dashboard": dashboard.page, "/dashboard/events": dashboard.events, "/dashboard/look": dashboard.look,
    }  # fmt: skip
    routes = routes_of(
        handlers, keys=front.keys, metrics=front.metrics, body_bytes_max=settings.server.body_bytes_max,
        tracing=front.tracing, off=DASHBOARD if settings.server.no_dashboard else "",
    )  # fmt: skip
    app = Starlette(
        routes=routes,
        middleware=cross_origin(settings.server.allowed_origins),
        lifespan=lifespan,
        exception_handlers=error_handlers(),
    )
    app.state.front = front
    return app
