"""The HTTP app of one front: routes, keys, errors, and the count of everything that was answered."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from serinus.core.clock import Clock, WallClock
from serinus.core.errors import ConfigError, SerinusError
from serinus.front import info
from serinus.front.chat import chat_completions
from serinus.front.client import EngineClient, EngineDown
from serinus.front.completions import completions
from serinus.front.exchange import ClientGone, Exchange, error_json
from serinus.front.native import generate
from serinus.front.openapi import openapi
from serinus.front.settings import FrontSettings
from serinus.front.state import Front, check_key
from serinus.wire.messages import Ready

__all__ = ["create_app", "error_handlers"]

Handler = Callable[[Front, Exchange], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Door:
    """One endpoint: where, how, and who may enter."""

    path: str
    """Starlette path."""
    methods: tuple[str, ...]
    """HTTP methods."""
    handler: Handler
    """Who answers."""
    keys: str = "user"
    """user, admin or none."""


async def _schema(front: Front, exchange: Exchange) -> None:
    await exchange.json(openapi(info.serinus_version()))


_GET, _POST, _BOTH = ("GET",), ("POST",), ("GET", "POST")
_DOORS = (
    _Door(path="/v1/completions", methods=_POST, handler=completions),
    _Door(path="/v1/chat/completions", methods=_POST, handler=chat_completions),
    _Door(path="/v1/models", methods=_GET, handler=info.models),
    _Door(path="/v1/models/{name:path}", methods=_GET, handler=info.model),
    _Door(path="/generate", methods=_POST, handler=generate),
    _Door(path="/tokenize", methods=_POST, handler=info.tokenize),
    _Door(path="/detokenize", methods=_POST, handler=info.detokenize),
    _Door(path="/health", methods=_GET, handler=info.health, keys="none"),
    _Door(path="/health_generate", methods=_GET, handler=info.health_generate),
    _Door(path="/metrics", methods=_GET, handler=info.metrics, keys="none"),
    _Door(path="/server_info", methods=_GET, handler=info.server_info),
    _Door(path="/get_server_info", methods=_GET, handler=info.server_info),
    _Door(path="/get_model_info", methods=_GET, handler=info.model_info),
    _Door(path="/flush_cache", methods=_BOTH, handler=info.flush_cache, keys="admin"),
    _Door(path="/cache", methods=_GET, handler=info.cache_tree, keys="admin"),
    _Door(path="/canary", methods=_GET, handler=info.canary, keys="admin"),
    _Door(path="/abort_request", methods=_POST, handler=info.abort_request, keys="admin"),
    _Door(path="/openapi.json", methods=_GET, handler=_schema, keys="none"),
)


class _Endpoint:
    """ASGI app of one door: checks the key, runs the handler, shows its errors, counts the answer."""

    def __init__(self, front: Front, door: _Door) -> None:
        self._front = front
        self._door = door
        self._keys = {"user": front.user_keys, "admin": front.admin_keys, "none": ()}[door.keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        front = self._front
        exchange = Exchange(scope, receive, send, body_bytes_max=front.settings.body_bytes_max)
        front.metrics.opened()
        status = 500
        try:
            check_key(exchange, self._keys)
            await self._door.handler(front, exchange)
            status = exchange.status
        except (ClientGone, asyncio.CancelledError) as err:
            status = 499
            if isinstance(err, asyncio.CancelledError):
                raise
        except SerinusError as err:
            await exchange.fail(err)
            status = exchange.status
        finally:
            front.metrics.answered(self._door.path, status)


def error_handlers() -> dict[int | type[Exception], Callable[[Request, Exception], Awaitable[Response]]]:
    """Starlette's own errors (unknown path, wrong method, a bug) in OpenAI's form."""

    async def http_error(request: Request, err: Exception) -> Response:
        assert isinstance(err, HTTPException), f"front: {err!r} where an HTTPException was expected"
        if err.status_code == 404:
            message = f"path: got {request.url.path!r}, expected one of those at /openapi.json"
        else:
            message = f"{request.method} {request.url.path}: {err.detail}"
        kind = "not_found_error" if err.status_code == 404 else "invalid_request_error"
        body = error_json(message, kind, code=err.status_code)
        return Response(body, err.status_code, dict(err.headers or {}), "application/json")

    async def bug(request: Request, err: Exception) -> Response:
        body = error_json(f"front: {type(err).__name__}, see the server's log", "internal_server_error", code=500)
        return Response(body, 500, media_type="application/json")

    return {HTTPException: http_error, Exception: bug}


def create_app(
    settings: FrontSettings,
    engine: EngineClient,
    *,
    clock: Clock | None = None,
    on_ready: Callable[[Ready], None] | None = None,
    on_failed: Callable[[str], None] | None = None,
) -> Starlette:
    """The app of one front.

    Serving begins at once: until the engine is loaded every request gets 503. The app's lifespan starts the engine
    client and the tokenizer, then calls `on_ready`, or `on_failed` with the reason where either does not come up.
    `app.state.front` is the Front behind it.
    """
    front = Front(settings, engine, clock or WallClock())

    async def come_up() -> None:
        try:
            ready = await engine.start()
            if not (settings.skip_tokenizer_init or settings.lazy_tokenizer):
                await asyncio.shield(front.start_tokenizer())
        except (EngineDown, ConfigError) as err:
            if on_failed is not None:
                on_failed(str(err))
            return
        if on_ready is not None:
            on_ready(ready)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        if not (settings.skip_tokenizer_init or settings.lazy_tokenizer):
            front.start_tokenizer()
        coming = asyncio.get_running_loop().create_task(come_up())
        try:
            yield
        finally:
            engine.stop()
            coming.cancel()
            front.stop()
            await asyncio.gather(coming, return_exceptions=True)

    routes = [Route(door.path, _Endpoint(front, door), methods=list(door.methods)) for door in _DOORS]
    app = Starlette(routes=routes, lifespan=lifespan, exception_handlers=error_handlers())
    app.state.front = front
    return app
