"""The router: one address before several engines. A request goes to a decode engine, with a prefill engine suggested.

A request that has not begun to stream is sent again to another decode engine when its own fails; a stream that breaks
midway ends with an error event. Knows nothing of tokens: it passes bytes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import quote

import msgspec
from starlette.applications import Starlette
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from serinus.core.clock import Clock, WallClock
from serinus.core.errors import RequestError, SerinusError
from serinus.front.app import error_handlers
from serinus.front.exchange import ClientGone, Exchange
from serinus.front.fleet import Fleet, Member, NobodyThere
from serinus.front.info import cache_limit, serinus_version
from serinus.front.metrics import RouterMetrics, merge_expositions
from serinus.front.openapi import openapi
from serinus.front.settings import RouterSettings
from serinus.front.state import KEY_HEADER, PREFILL_HEADER, check_key
from serinus.front.upstream import Upstream, UpstreamBroken

__all__ = ["Router", "create_router_app"]

_ALL_S_MAX = 10.0
"""Seconds an order to all engines may take."""
_PASSED_ON = ("content-type", "accept", "user-agent", "x-request-id", "traceparent")
"""Request headers the engines get to see; never a client's own `x-serinus-*`."""


class FanOutFailed(RequestError):
    """Some engines did not do what all were told."""

    status = 400


class Router:
    """State and endpoints of one router."""

    def __init__(self, settings: RouterSettings, clock: Clock) -> None:
        self.settings = settings
        self.metrics = RouterMetrics(engine=settings.name)
        self.fleet = Fleet(settings, self.metrics, clock)
        self.user_keys = tuple(key for key in (settings.api_key, settings.admin_api_key) if settings.api_key and key)
        self.admin_key = settings.admin_api_key or settings.api_key
        self.admin_keys = (self.admin_key,) if self.admin_key else ()

    # ---- generation ---------------------------------------------------------------------------------------------

    async def route(self, exchange: Exchange) -> None:
        """Pass one request to an engine, and to another where that one fails before it has begun to answer."""
        body = await exchange.body()
        gone = asyncio.Event()
        exchange.watch(gone.set)
        forward = asyncio.get_running_loop().create_task(self._forward(exchange, body))
        leaving = asyncio.get_running_loop().create_task(gone.wait())
        try:
            await asyncio.wait((forward, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not forward.done():
                raise ClientGone("front: the client hung up")
            await forward
        finally:
            exchange.unwatch()
            for task in (forward, leaving):
                task.cancel()
            await asyncio.gather(forward, leaving, return_exceptions=True)

    async def _forward(self, exchange: Exchange, body: bytes) -> None:
        tried: list[Member] = []
        last = ""
        while True:
            try:
                member = self.fleet.pick_decode(body, but=tried)
            except NobodyThere as err:
                raise NobodyThere(f"{err}; {last}" if last else str(err)) from err
            if tried:
                self.metrics.retried()
            tried.append(member)
            try:
                if await self._try(exchange, member, body):
                    return
                last = f"{member.url} has no room or is going"
            except UpstreamBroken as err:
                self.fleet.lost(member, str(err))
                if exchange.started:
                    self.metrics.broken()
                    raise
                last = str(err)

    def _headers(self, exchange: Exchange, prefill: Member | None) -> list[tuple[str, str]]:
        headers = [(name, value) for name in _PASSED_ON if (value := exchange.header(name))]
        if self.settings.api_key:
            headers.append(("authorization", f"Bearer {self.settings.api_key}"))
        if prefill is not None:
            headers.append((PREFILL_HEADER, prefill.pd_address))
            if self.admin_key:
                headers.append((KEY_HEADER, self.admin_key))
        return headers

    async def _try(self, exchange: Exchange, member: Member, body: bytes) -> bool:
        """Let one engine answer; False where it has no room and others may. Raises UpstreamBroken."""
        prefill = self.fleet.pick_prefill()
        waiting = len(body) if prefill is not None else 0
        async with Upstream(member.url, connect_s_max=self.settings.connect_s_max) as upstream:
            member.open.add(upstream)
            if prefill is not None:
                prefill.waiting_bytes += waiting
            self.metrics.routed(member.url)
            try:
                path = quote(exchange.path) + (f"?{exchange.query}" if exchange.query else "")  # it came unquoted
                method: str = exchange.scope["method"]
                await upstream.send(method, path, self._headers(exchange, prefill), body)
                if prefill is not None:
                    prefill.waiting_bytes -= waiting
                    waiting = 0
                if upstream.status == 503 and len(self.fleet.decode) > 1:
                    return False
                await self._answer(exchange, upstream)
                return True
            finally:
                member.open.discard(upstream)
                if prefill is not None:
                    prefill.waiting_bytes -= waiting

    @staticmethod
    async def _answer(exchange: Exchange, upstream: Upstream) -> None:
        content_type = upstream.headers.get("content-type", "application/json")
        if not content_type.startswith("text/event-stream"):
            await exchange.reply(upstream.status, await upstream.body(), content_type.encode("latin-1"))
            return
        await exchange.open_stream()
        rest = b""
        async for part in upstream.parts():
            data = rest + part if rest else part
            whole = data.rfind(b"\n\n") + 2  # only whole events go out: what follows may be an error event
            if whole < 2:
                rest = data
                continue
            rest = data[whole:]
            await exchange.push(data if not rest else data[:whole])
        await exchange.end(rest)

    # ---- the rest -----------------------------------------------------------------------------------------------

    async def health(self, exchange: Exchange) -> None:
        """200 while a decode engine lives."""
        self.fleet.pick_decode(b"")
        await exchange.text("")

    async def server_info(self, exchange: Exchange) -> None:
        """The router and every engine as it last saw them."""
        engines = [
            {
                "url": member.url,
                "kind": member.kind,
                "alive": member.alive,
                "why": member.why,
                "load": member.load,
                "server_info": member.info,
            }
            for member in self.fleet.members
        ]
        first = next((member.info for member in self.fleet.decode if member.alive), {})
        about = {key: first[key] for key in ("model_path", "served_model_name", "context_length") if key in first}
        await exchange.json({"version": serinus_version(), "role": "router", **about, "engines": engines})

    async def metrics_text(self, exchange: Exchange) -> None:
        """All engines' metrics and the router's own, as one Prometheus text."""
        answers = await self.fleet.ask_all("GET", "/metrics", key=self.settings.api_key, s_max=_ALL_S_MAX)
        texts = [body.decode("utf-8", errors="replace") for _, status, body in answers if status == 200]
        merged = merge_expositions([*texts, self.metrics.exposition()])
        await exchange.reply(200, merged.encode(), b"text/plain; version=0.0.4; charset=utf-8")

    async def flush_cache(self, exchange: Exchange) -> None:
        """Empty the prefix caches of all engines."""
        await exchange.body()
        answers = await self.fleet.ask_all("POST", "/flush_cache", key=self.admin_key, s_max=_ALL_S_MAX)
        if not answers:
            raise NobodyThere("front: flush_cache reached nobody, expected at least one engine to be alive")
        bad = [f"{m.url} {status}: {text.decode(errors='replace')}" for m, status, text in answers if status != 200]
        if bad:
            raise FanOutFailed(f"flush_cache: {'; '.join(bad)}, expected all to flush")
        await exchange.text("Cache flushed.\n")

    async def cache_trees(self, exchange: Exchange) -> None:
        """What every engine that lives has cached where."""
        await self._of_all(exchange, f"/cache?limit={cache_limit(exchange)}", "cache")

    async def canaries(self, exchange: Exchange) -> None:
        """What the canary of every engine that lives found."""
        await self._of_all(exchange, "/canary", "canary")

    async def _of_all(self, exchange: Exchange, path: str, name: str) -> None:
        """The same question to every engine; an answer each, or why there is none."""
        answers = await self.fleet.ask_all("GET", path, key=self.admin_key, s_max=_ALL_S_MAX)
        engines: list[dict[str, Any]] = []
        for member, status, body in answers:
            about = {"url": member.url, "kind": member.kind}
            if status == 200:
                engines.append({**about, name: msgspec.Raw(body)})
            else:
                engines.append({**about, "error": f"{status}: {body.decode(errors='replace')[:300]}"})
        await exchange.json({"engines": engines})

    async def abort_request(self, exchange: Exchange) -> None:
        """Abort a request wherever it runs."""
        body = await exchange.body()
        path = "/abort_request" + (f"?{exchange.query}" if exchange.query else "")
        answers = await self.fleet.ask_all("POST", path, key=self.admin_key, body=body, s_max=_ALL_S_MAX)
        aborted = 0
        for _, status, answer in answers:
            if 400 <= status < 500:
                await exchange.json(answer, status)
                return
            if status == 200:
                aborted += msgspec.json.decode(answer).get("aborted", 0)
        await exchange.json({"aborted": aborted})

    async def schema(self, exchange: Exchange) -> None:
        """The description of the endpoints."""
        await exchange.json(openapi(serinus_version()))


class _Endpoint:
    """ASGI app of one endpoint: key, handler, errors, count."""

    def __init__(
        self, router: Router, path: str, handler: Callable[[Exchange], Awaitable[None]], keys: tuple[str, ...]
    ) -> None:
        self._router = router
        self._path = path
        self._handler = handler
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send, body_bytes_max=self._router.settings.body_bytes_max)
        status = 500
        try:
            check_key(exchange, self._keys)
            await self._handler(exchange)
            status = exchange.status
        except ClientGone:
            status = 499
        except SerinusError as err:
            await exchange.fail(err)
            status = exchange.status
        finally:
            self._router.metrics.answered(self._path, status)


def create_router_app(settings: RouterSettings, *, clock: Clock | None = None) -> Starlette:
    """The app of one router; its lifespan polls the engines. `app.state.router` is the Router behind it."""
    router = Router(settings, clock or WallClock())
    user, admin, nobody = router.user_keys, router.admin_keys, ()
    doors: list[tuple[str, list[str], Callable[[Exchange], Awaitable[None]], tuple[str, ...]]] = [
        ("/v1/completions", ["POST"], router.route, user),
        ("/v1/chat/completions", ["POST"], router.route, user),
        ("/generate", ["POST"], router.route, user),
        ("/tokenize", ["POST"], router.route, user),
        ("/detokenize", ["POST"], router.route, user),
        ("/v1/models", ["GET"], router.route, user),
        ("/v1/models/{name:path}", ["GET"], router.route, user),
        ("/health_generate", ["GET"], router.route, user),
        ("/get_model_info", ["GET"], router.route, user),
        ("/health", ["GET"], router.health, nobody),
        ("/server_info", ["GET"], router.server_info, user),
        ("/get_server_info", ["GET"], router.server_info, user),
        ("/metrics", ["GET"], router.metrics_text, nobody),
        ("/flush_cache", ["GET", "POST"], router.flush_cache, admin),
        ("/cache", ["GET"], router.cache_trees, admin),
        ("/canary", ["GET"], router.canaries, admin),
        ("/abort_request", ["POST"], router.abort_request, admin),
        ("/openapi.json", ["GET"], router.schema, nobody),
    ]

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        router.fleet.start()
        try:
            yield
        finally:
            await router.fleet.stop()

    routes = [Route(path, _Endpoint(router, path, handler, keys), methods=ways) for path, ways, handler, keys in doors]
    app = Starlette(routes=routes, lifespan=lifespan, exception_handlers=error_handlers())
    app.state.router = router
    return app
