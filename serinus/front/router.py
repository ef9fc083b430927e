"""The router: one address before several engines. A request goes to a decode engine, with a prefill engine suggested.

A request that has not begun to stream is sent to another decode engine when its own breaks, once: a request under which
two engines broke may be what breaks them, and is answered 500. An engine that cannot be reached, or has no room, never
had the request: it may go on to all others, and after a pause to all again. A stream that breaks midway ends with an
error event. Knows nothing of tokens: it passes bytes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any
from urllib.parse import quote

import msgspec
from starlette.applications import Starlette

from serinus.core.clock import Clock, WallClock
from serinus.core.errors import RequestError, SerinusError
from serinus.core.ids import new_incarnation
from serinus.core.log import get_logger
from serinus.core.rng import Rng
from serinus.core.version import package_version
from serinus.front.app import cross_origin, error_handlers
from serinus.front.backoff import Backoff
from serinus.front.client import BROKE_HEADER
from serinus.front.dashboard import answer_page
from serinus.front.dashboard_fleet import FleetDashboard
from serinus.front.exchange import REQUEST_ID_HEADER, UNAVAILABLE, ClientGone, HttpExchange
from serinus.front.exposition import answer_scrape
from serinus.front.fleet import Fleet, FleetEngine, NoEngineAlive, engine_secrets, reason_of
from serinus.front.info import cache_limit
from serinus.front.keys import Keys, share_headers
from serinus.front.metrics import RouterMetrics
from serinus.front.openapi import openapi
from serinus.front.perturb import perturb_all
from serinus.front.proofs import PREFILL_HEADER, PROOF_HEADER, TOKENS_HEADER, proof_of
from serinus.front.routes import DASHBOARD, ENDPOINTS, Handler, routes_of
from serinus.front.settings import RouterSettings
from serinus.front.state import IGNORED_HEADER
from serinus.front.tracing import TRACE_HEADERS, make_tracing
from serinus.front.upstream import NotConnected, Upstream, UpstreamBroken
from serinus.front.workers import list_models, one_model, renamed, workers

_ALL_S_MAX = 10.0
"""Seconds a request to all engines may take."""
_BREAKS_MAX = 2
"""Engines that may break under one request."""
_PASSED_ON = ("content-type", "accept", "user-agent")
"""Request headers the engines get to see; never a client's own `x-serinus-*`."""
_LOST = f'"code":"{UNAVAILABLE}"}}}}\n\n'.encode()
"""Ends the error event of an engine that broke when its stream had begun; in a text every quote is escaped."""
_TOKENS = f": {TOKENS_HEADER} ".encode()
"""Begins the comment that says the tokens of a stream; in a text every line break is escaped."""
_log = get_logger("front")


class FanOutFailed(RequestError):
    """Some engines did not do what all were told."""

    status = 400


class BrokeTwice(SerinusError):
    """Two engines broke while they had this request: it is sent to no third (500)."""


def _take_tokens(exchange: HttpExchange, events: bytes) -> bytes:
    """The events without the comment at the end of a stream that says its tokens, which is for the router."""
    at = events.rfind(_TOKENS)
    if at < 0 or events[at - 2 : at] not in (b"", b"\n\n") or not (told := events[at + len(_TOKENS) : -2]).isdigit():
        return events
    exchange.tokens = partial(int, told)
    return events[:at]


class Router:
    """State and endpoints of one router."""

    def __init__(self, settings: RouterSettings, clock: Clock, rng: Rng | None = None) -> None:
        """`rng`: of the pauses between tries; None = one that no seed repeats."""
        self.settings = settings
        self._backoff = Backoff(
            rng or Rng(new_incarnation()), first_s=settings.retry_first_s, most_s=settings.retry_most_s
        )
        self.metrics = RouterMetrics(engine=settings.name)
        self.fleet = Fleet(settings, self.metrics, clock)
        self.keys = Keys(user=settings.api_key, admin=settings.admin_api_key, file=settings.api_keys_file)
        self._secrets = engine_secrets(settings)
        self.tracing = make_tracing(settings.otlp_traces_endpoint, role="router", name=settings.name, clock=clock)
        self.dashboard = FleetDashboard(self.fleet, key=self.keys.operator, ca_certs=settings.ssl_ca_certs)
        self.open_count = 0
        """Requests that are with an engine."""

    # ---- generation ---------------------------------------------------------------------------------------------

    async def route(self, exchange: HttpExchange) -> None:
        """Pass one request to an engine, and to another where that one fails before it has begun to answer.

        Raises ClientGone, NoEngineAlive, BrokeTwice, UpstreamBroken (an engine failed midway).
        """
        body = await exchange.body()
        self.open_count += 1
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
            self.open_count -= 1
            exchange.unwatch()
            for task in (forward, leaving):
                task.cancel()
            await asyncio.gather(forward, leaving, return_exceptions=True)

    async def _forward(self, exchange: HttpExchange, body: bytes) -> None:
        model = self.fleet.model_of(body)
        tried: list[FleetEngine] = []
        broke: list[str] = []
        last, pauses = "", 0
        for attempt in range(self.settings.retry_max_retries + 1):
            try:
                member = self.fleet.pick_decode(body, model=model, but=tried)
            except NoEngineAlive as err:
                may_come = any(member.url not in broke for member in self.fleet.owners(model))
                if not last or not may_come or attempt == self.settings.retry_max_retries:
                    raise NoEngineAlive(f"{err}; {last}" if last else str(err)) from err
                await asyncio.sleep(self._backoff.pause_s(pauses))  # all had it: by then one may have room, or be back
                pauses += 1
                tried = [member for member in tried if member.url in broke]
                continue
            if attempt:
                self.metrics.retried()
            tried.append(member)
            try:
                if await self._try(exchange, member, body, model):
                    return
                last = f"{member.url} has no room or is going"
            except NotConnected as err:
                self.fleet.lost(member, str(err))
                last = str(err)
            except UpstreamBroken as err:
                self.fleet.lost(member, str(err))
                if exchange.answered:
                    self.metrics.broken()
                    raise
                last = str(err)
                broke.append(member.url)
                if len(broke) == _BREAKS_MAX:
                    raise self._given_up(exchange.request_id, broke, last) from err
        tries = self.settings.retry_max_retries + 1
        raise NoEngineAlive(f"front: {tries} tries of this request failed, expected an engine to take it; {last}")

    def _given_up(self, request_id: str, broke: Sequence[str], last: str) -> BrokeTwice:
        self.metrics.given_up()
        said = (
            f"front: request {request_id} was under way at {' and '.join(broke)} when they broke, so it is"
            f" sent to no other engine; the last one: {last}"
        )
        _log.error("%s", said, extra={"rid": request_id})
        return BrokeTwice(said)

    def _headers(self, exchange: HttpExchange, prefill: FleetEngine | None) -> list[tuple[str, str]]:
        headers = [(name, value) for name in _PASSED_ON if (value := exchange.header(name))]
        headers.append((REQUEST_ID_HEADER, exchange.request_id))
        traced = {name: exchange.header(name) for name in TRACE_HEADERS}
        if exchange.span is not None and exchange.span.traceparent:
            traced["traceparent"] = exchange.span.traceparent
        headers += [(name, value) for name, value in traced.items() if value]
        if self.settings.api_key:
            headers.append(("authorization", f"Bearer {self.settings.api_key}"))
        headers += share_headers(exchange.share, self._secrets)
        if prefill is not None:
            headers.append((PREFILL_HEADER, prefill.pd_address))
            headers.append((PROOF_HEADER, proof_of(prefill.pd_address, self._secrets)))
        return headers

    async def _try(self, exchange: HttpExchange, member: FleetEngine, body: bytes, model: str) -> bool:
        """Let one engine answer; False where it has no room and others may. Raises UpstreamBroken.

        What it did counts in its circuit.
        """
        sent_at = self.fleet.sent(member)
        status = 0
        try:
            status = await self._send(exchange, member, body, model)
        except UpstreamBroken as err:
            self.fleet.failed(member, str(err), sent_at)
            raise
        except BaseException:
            self.fleet.left(member, sent_at)
            raise
        if status in (503, 504):
            self.fleet.left(member, sent_at)
        elif status >= 500:
            self.fleet.failed(member, f"it answered {status}", sent_at)
        else:
            self.fleet.answered(member, sent_at)
        return bool(status)

    async def _send(self, exchange: HttpExchange, member: FleetEngine, body: bytes, model: str) -> int:
        """Let one engine answer; the status, or 0 where it has no room and others may. Raises UpstreamBroken."""
        prefill = self.fleet.pick_prefill(body, model=model)
        others = len(self.fleet.owners(model)) > 1
        if member.alias not in ("", member.own_model):
            body = renamed(body, member.own_model)
        waiting = len(body) if prefill is not None else 0

        def prefilled() -> None:
            nonlocal waiting
            if prefill is not None:
                prefill.waiting_bytes -= waiting
            waiting = 0

        async with Upstream(
            member.url, connect_s_max=self.settings.connect_s_max, ca_certs=self.settings.ssl_ca_certs
        ) as upstream:
            member.open.add(upstream)
            if prefill is not None:
                prefill.waiting_bytes += waiting
            self.metrics.routed(member.url)
            try:
                path = quote(exchange.path) + (f"?{exchange.query}" if exchange.query else "")  # it came unquoted
                method: str = exchange.scope["method"]
                await upstream.send(method, path, self._headers(exchange, prefill), body)
                if upstream.status == 503 and BROKE_HEADER in upstream.headers and others:
                    raise UpstreamBroken(f"front: {member.url} broke ({reason_of(await upstream.body())})")
                if upstream.status == 503 and others:
                    return 0
                await self._answer(exchange, upstream, prefilled, others=others)
                return upstream.status
            finally:
                member.open.discard(upstream)
                prefilled()

    async def _answer(
        self, exchange: HttpExchange, upstream: Upstream, prefilled: Callable[[], None], *, others: bool
    ) -> None:
        if ignored := upstream.headers.get(IGNORED_HEADER):
            exchange.headers.append((IGNORED_HEADER.encode(), ignored.encode("latin-1")))
        if retry := upstream.headers.get("retry-after"):
            exchange.headers.append((b"retry-after", retry.encode("latin-1")))
        if (told := upstream.headers.get(TOKENS_HEADER, "")).isdecimal():
            exchange.tokens = partial(int, told)
        content_type = upstream.headers.get("content-type", "application/json")
        if not content_type.startswith("text/event-stream"):
            body = await upstream.body()
            if not exchange.started:
                await exchange.reply(upstream.status, body, content_type.encode("latin-1"))
            else:  # the engine before this one had sent comments when it broke
                await exchange.end_failed(upstream.status, body)
            return
        if not exchange.started:
            await exchange.open_stream()
        rest = b""
        async for part in upstream.parts():
            data = rest + part if rest else part
            whole = data.rfind(b"\n\n") + 2  # only whole events go out: what follows may be an error event
            if whole < 2:
                rest = data
                continue
            rest = data[whole:]
            events = _take_tokens(exchange, data if not rest else data[:whole])
            if not exchange.answered:
                if b"data:" not in events:
                    await exchange.keep_alive(events)
                    continue
                if _LOST in events and others:
                    raise UpstreamBroken(f"front: {upstream.url} broke before the first token")
                prefilled()
            elif _LOST in events:  # its engine died, and its front lives and says so
                before, _, said = events[: events.index(_LOST)].rpartition(b"data: ")
                if (end := before.rfind(b"\n\n") + 2) > 1:
                    await exchange.push(before[:end])
                why = reason_of(said + _LOST)
                raise UpstreamBroken(f"front: {upstream.url} broke in the middle of the stream ({why})")
            await exchange.push(events)
        await exchange.end(rest)

    # ---- models and engines ----------------------------------------------------------------------------------------

    async def models(self, exchange: HttpExchange) -> None:
        """All models; of one alone its engine tells. Raises NoEngineAlive."""
        if self.fleet.has_one_model:
            await self.route(exchange)
        else:
            await list_models(self.fleet, self.settings, exchange)

    async def model(self, exchange: HttpExchange) -> None:
        """One of them. Raises NoEngineAlive, UnknownModel."""
        if self.fleet.has_one_model:
            await self.route(exchange)
        else:
            await one_model(self.fleet, self.settings, exchange)

    async def workers(self, exchange: HttpExchange) -> None:
        """The engines; they come and go by this."""
        await workers(self.fleet, self.keys, exchange)

    # ---- the rest -----------------------------------------------------------------------------------------------

    async def health(self, exchange: HttpExchange) -> None:
        """200 while a decode engine is alive. Raises NoEngineAlive."""
        self.fleet.ready()
        await exchange.text("")

    async def version(self, exchange: HttpExchange) -> None:
        """The router's own version."""
        await exchange.json({"version": package_version()})

    async def load(self, exchange: HttpExchange) -> None:
        """How many requests are with an engine."""
        await exchange.json({"server_load": self.open_count})

    async def server_info(self, exchange: HttpExchange) -> None:
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
        await exchange.json({"version": package_version(), "role": "router", **about, "engines": engines})

    async def metrics_text(self, exchange: HttpExchange) -> None:
        """All engines' metrics and the router's own, as one Prometheus text."""
        answers = await self.fleet.ask_all("GET", "/metrics", key=self.settings.api_key, s_max=_ALL_S_MAX)
        texts = [body.decode("utf-8", errors="replace") for _, status, body in answers if status == 200]
        await answer_scrape(exchange, [*texts, self.metrics.exposition()])

    async def flush_cache(self, exchange: HttpExchange) -> None:
        """Empty the prefix caches of all engines. Raises NoEngineAlive, FanOutFailed."""
        await exchange.body()
        answers = await self.fleet.ask_all("POST", "/flush_cache", key=self.keys.operator, s_max=_ALL_S_MAX)
        for member, _, _ in answers:
            member.life += 1
        if not answers:
            raise NoEngineAlive("front: flush_cache reached no engine, expected at least one engine to be alive")
        bad = [f"{m.url} {status}: {text.decode(errors='replace')}" for m, status, text in answers if status != 200]
        if bad:
            raise FanOutFailed(f"flush_cache: {'; '.join(bad)}, expected all to flush")
        await exchange.text("Cache flushed.\n")

    async def cache_trees(self, exchange: HttpExchange) -> None:
        """What every engine that is alive has cached where."""
        await self._of_all(exchange, f"/cache?limit={cache_limit(exchange)}", "cache")

    async def canaries(self, exchange: HttpExchange) -> None:
        """What the canary of every engine that is alive found."""
        await self._of_all(exchange, "/canary", "canary")

    async def perturb(self, exchange: HttpExchange) -> None:
        """Faults planted on purpose in every engine, or in those of one role."""
        await perturb_all(self.fleet, self.keys.operator, exchange)

    async def _of_all(self, exchange: HttpExchange, path: str, name: str) -> None:
        """The same question to every engine; an answer each, or why there is none."""
        answers = await self.fleet.ask_all("GET", path, key=self.keys.operator, s_max=_ALL_S_MAX)
        engines: list[dict[str, Any]] = []
        for member, status, body in answers:
            about = {"url": member.url, "kind": member.kind}
            if status == 200:
                engines.append({**about, name: msgspec.Raw(body)})
            else:
                engines.append({**about, "error": f"{status}: {body.decode(errors='replace')[:300]}"})
        await exchange.json({"engines": engines})

    async def abort_request(self, exchange: HttpExchange) -> None:
        """Abort a request wherever it runs."""
        body = await exchange.body()
        path = "/abort_request" + (f"?{exchange.query}" if exchange.query else "")
        answers = await self.fleet.ask_all("POST", path, key=self.keys.operator, body=body, s_max=_ALL_S_MAX)
        aborted = 0
        for _, status, answer in answers:
            if 400 <= status < 500:
                await exchange.json(answer, status)
                return
            if status == 200:
                aborted += msgspec.json.decode(answer).get("aborted", 0)
        await exchange.json({"aborted": aborted})

    async def description(self, exchange: HttpExchange) -> None:
        """The description of the endpoints."""
        await exchange.json(openapi(package_version(), of_router=True))


def create_router_app(settings: RouterSettings, *, clock: Clock | None = None) -> Starlette:
    """The app of one router; its lifespan polls the engines. `app.state.router` is the Router behind it."""
    router = Router(settings, clock or WallClock())
    handlers: dict[str, Handler] = dict.fromkeys((spec.path for spec in ENDPOINTS), router.route)
    handlers |= {
        "/health": router.health,
        "/ping": router.health,
        "/version": router.version,
        "/load": router.load,
        "/server_info": router.server_info,
        "/get_server_info": router.server_info,
        "/metrics": router.metrics_text,
        "/flush_cache": router.flush_cache,
        "/cache": router.cache_trees,
        "/canary": router.canaries,
        "/canary/perturb": router.perturb,
        "/dashboard": answer_page,
        "/dashboard/events": router.dashboard.events,
        "/dashboard/look": router.dashboard.look,
        "/abort_request": router.abort_request,
        "/openapi.json": router.description,
        "/v1/models": router.models,
        "/v1/models/{name:path}": router.model,
        "/workers": router.workers,
    }

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        router.fleet.start()
        try:
            yield
        finally:
            await router.fleet.stop()
            if router.tracing is not None:
                await asyncio.to_thread(router.tracing.close)

    routes = routes_of(
        handlers, keys=router.keys, metrics=router.metrics, body_bytes_max=settings.body_bytes_max,
        tracing=router.tracing,
        off="" if settings.dashboard else DASHBOARD,
    )  # fmt: skip
    app = Starlette(
        routes=routes,
        middleware=cross_origin(settings.allowed_origins),
        lifespan=lifespan,
        exception_handlers=error_handlers(),
    )
    app.state.router = router
    return app
