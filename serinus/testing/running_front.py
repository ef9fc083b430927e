"""A front on a real port before a fake engine, for tests: everything but the model is the real thing."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.routing import Route
from starlette.types import ASGIApp

from serinus.core.addresses import http_url
from serinus.core.config import ServeConfig, from_names
from serinus.front import EngineClient, FrontSettings, HttpServer, ServerTls, bind, create_app
from serinus.front.keys import Keys
from serinus.front.metrics import HttpMetrics
from serinus.testing.fake_engine import FakeEngine


class RunningFront:
    """A front being served by a thread, its engine, and a client for it."""

    def __init__(
        self, app: Starlette, engine: FakeEngine, client: EngineClient, server: HttpServer, http: httpx.Client
    ) -> None:
        self.app = app
        self.engine = engine
        self.client = client
        self.server = server
        self.http = http

    @property
    def url(self) -> str:
        return str(self.http.base_url).rstrip("/")

    @property
    def routes(self) -> list[Route]:
        """The routes of its app."""
        return [route for route in self.app.routes if isinstance(route, Route)]

    def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        return self.http.post(path, json=body, headers=headers)

    def events(self, path: str, body: Any) -> list[Any]:
        """All JSON events of a stream; asserts that it ends with [DONE]."""
        response = self.http.post(path, json={**body, "stream": True})
        assert response.status_code == 200, response.text
        lines = [line for line in response.text.split("\n\n") if line]
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


@contextmanager
def serving(
    app: ASGIApp,
    *,
    on_drain: Callable[[], None] | None = None,
    host: str = "127.0.0.1",
    metrics: HttpMetrics | None = None,
    tls: ServerTls | None = None,
    keys: Keys | None = None,
) -> Iterator[HttpServer]:
    """Serve an app on a free port in a thread until left."""
    server = HttpServer(app, bind(host, 0), on_drain=on_drain, metrics=metrics, tls=tls, keys=keys)
    thread = threading.Thread(target=server.run_here, name="front")
    thread.start()
    try:
        yield server
    finally:
        server.stop(now=True)
        thread.join(60)
        assert not thread.is_alive(), "testing: the server did not stop"


def front_settings(**given: Any) -> FrontSettings:
    """Settings of a front by their names alone, whichever group has them."""
    own = {each.name: given.pop(each.name) for each in fields(FrontSettings) if each.name in given}
    config = from_names(ServeConfig, given)
    return FrontSettings(model=config.model, server=config.server, **own)


@contextmanager
def running_front(
    settings: FrontSettings,
    engine: FakeEngine,
    *,
    on_stuck: Callable[[str], None] | None = None,
    tls: ServerTls | None = None,
) -> Iterator[RunningFront]:
    """Start the engine and serve until left; fails where the front does not come up. `on_stuck`: as of create_app.
    `tls`: on https, for clients of the test's own."""
    ready = threading.Event()
    failed: list[str] = []

    def on_failed(reason: str) -> None:
        failed.append(reason)
        ready.set()

    with engine:
        client = EngineClient(engine.endpoint)
        app = create_app(settings, client, on_ready=lambda _: ready.set(), on_failed=on_failed, on_stuck=on_stuck)
        front = app.state.front
        with serving(app, on_drain=client.drain, metrics=front.metrics, tls=tls, keys=front.keys) as server:
            assert ready.wait(60), "testing: the front did not come up"
            assert not failed, f"testing: the front did not come up: {failed}"
            with httpx.Client(base_url=http_url("127.0.0.1", server.port, tls=tls is not None), timeout=30) as http:
                yield RunningFront(app, engine, client, server, http)
