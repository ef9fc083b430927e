"""What every request gets besides its answer: an id, a line in the log, a sign of life before the first token."""

from __future__ import annotations

import json
import logging
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from serinus.core.errors import ConfigError
from serinus.core.log import get_logger
from serinus.core.settings import ServerSettings
from serinus.front import RouterSettings, create_router_app
from serinus.testing.fake_engine import FakeEngine
from serinus.testing.running_front import RunningFront, front_settings, running_front, serving

pytestmark = pytest.mark.slow

ONE = {"prompt": "hello", "max_tokens": 1}


class Lines(logging.Handler):
    """Lines of the front's log that name a request; each is written when its answer has been sent."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: list[str] = []
        self._news = threading.Condition()

    def emit(self, record: logging.LogRecord) -> None:
        with self._news:
            if "x-request-id" in record.getMessage():
                self._lines.append(record.getMessage())
                self._news.notify_all()

    def first(self, count: int) -> list[str]:
        with self._news:
            assert self._news.wait_for(lambda: len(self._lines) >= count, 30), self._lines
            return self._lines


@pytest.fixture
def lines() -> Iterator[Lines]:
    logger, handler = get_logger("front"), Lines()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)


def test_a_request_keeps_the_id_it_came_with(front: RunningFront, lines: Lines) -> None:
    answer = front.post("/v1/completions", ONE, **{"x-request-id": "ticket-7"})
    assert answer.headers["x-request-id"] == "ticket-7"
    (line,) = lines.first(1)
    assert line.startswith("POST /v1/completions, x-request-id: ticket-7, rid: cmpl-")
    assert ", status: 200, seconds: " in line
    assert answer.json()["id"] in line


@pytest.mark.parametrize("given", ["", "x" * 129, "a\tb", "\xe9"])
def test_a_request_without_an_id_for_the_log_gets_one(front: RunningFront, lines: Lines, given: str) -> None:
    headers = [(b"x-request-id", given.encode("latin-1"))] if given else []
    ids = {front.http.post("/v1/completions", json=ONE, headers=headers).headers["x-request-id"] for _ in range(2)}
    assert len(ids) == 2
    assert all(rid.startswith("req-") for rid in ids)
    assert {line.split("x-request-id: ")[1].split(",")[0] for line in lines.first(2)} == ids


def test_refusals_carry_the_id_too(front: RunningFront, lines: Lines) -> None:
    headers = {"x-request-id": "bad-1"}
    refused = front.post("/v1/completions", {**ONE, "max_tokens": -1}, **headers)
    unknown = front.post("/v1/nothing", {}, **headers)
    wrong = front.http.get("/v1/completions", headers=headers)
    assert [answer.status_code for answer in (refused, unknown, wrong)] == [400, 404, 405]
    assert [answer.headers["x-request-id"] for answer in (refused, unknown, wrong)] == ["bad-1"] * 3
    assert "status: 400" in lines.first(1)[0]


def test_what_is_polled_is_no_news(front: RunningFront, lines: Lines) -> None:
    for path in ("/health", "/metrics", "/server_info", "/load"):
        assert front.http.get(path).status_code == 200
    front.post("/tokenize", {"prompt": "x"})
    assert [line.split(",")[0] for line in lines.first(1)] == ["POST /tokenize"]


def test_the_router_passes_the_id_on(front: RunningFront, lines: Lines) -> None:
    app = create_router_app(RouterSettings(decode_urls=(front.url,), poll_s=0.02))
    with serving(app) as server, httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=30) as http:
        while not app.state.router.fleet.decode[0].alive:
            http.get("/server_info")
        for turn, given in enumerate(("ticket-8", "")):
            answer = http.post("/v1/completions", json=ONE, headers={"x-request-id": given} if given else {})
            ids = answer.headers.get_list("x-request-id")
            assert ids == [given] if given else ids[0].startswith("req-")
            engine, router = sorted(lines.first(2 * turn + 2)[-2:], key=lambda line: "rid: -" in line)
            assert f"x-request-id: {ids[0]}, " in engine
            assert answer.json()["id"] in engine
            assert router.startswith(f"POST /v1/completions, x-request-id: {ids[0]}, rid: -, status: 200")
        assert http.get("/version").json() == front.http.get("/version").json()
        assert http.get("/load").json() == {"server_load": 0}
        assert http.get("/ping").status_code == http.post("/ping").status_code == 200


def test_load_counts_the_requests_that_are_being_answered(byte_folder: Path, new_endpoint: Callable[[], str]) -> None:
    engine = FakeEngine(endpoint=new_endpoint(), vocab_size=267, stall=True)
    settings = front_settings(model_path=str(byte_folder), keep_alive_s=0.01)
    with running_front(settings, engine) as front, httpx.Client(base_url=front.url) as other:
        assert other.get("/load").json() == {"server_load": 0}
        with front.http.stream("POST", "/v1/completions", json={**ONE, "stream": True}) as response:
            rows = response.iter_lines()
            assert next(rows) == ": keep-alive"
            assert other.get("/load").json() == {"server_load": 1}
            engine.let_go()
            assert "data: [DONE]" in rows
        assert other.get("/load").json() == {"server_load": 0}


@pytest.mark.parametrize(
    ("path", "body", "sign"),
    [
        ("/v1/completions", {"prompt": "x", "max_tokens": 3}, ": keep-alive"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3}, ": keep-alive"),
        ("/generate", {"text": "x", "sampling_params": {"max_new_tokens": 3}}, ""),
    ],
)
def test_a_stream_shows_signs_of_life_until_its_first_token(
    byte_folder: Path, new_endpoint: Callable[[], str], path: str, body: dict[str, object], sign: str
) -> None:
    engine = FakeEngine(endpoint=new_endpoint(), vocab_size=267, stall=True)
    with running_front(front_settings(model_path=str(byte_folder), keep_alive_s=0.01), engine) as front:
        with front.http.stream("POST", path, json={**body, "stream": True}) as response:
            lines = response.iter_lines()
            assert [next(lines) for _ in range(6)] == [sign, ""] * 3
            engine.let_go()
            rest = [line for line in lines if line not in (sign, "")]
        assert response.status_code == 200
        assert rest[-1] == "data: [DONE]"
        assert all(json.loads(line.removeprefix("data: ")) for line in rest[:-1])


def test_what_fails_after_a_sign_of_life_is_an_event(byte_folder: Path, new_endpoint: Callable[[], str]) -> None:
    engine = FakeEngine(endpoint=new_endpoint(), vocab_size=267, stall=True)
    with running_front(front_settings(model_path=str(byte_folder), keep_alive_s=0.01), engine) as front:
        with front.http.stream("POST", "/v1/completions", json={**ONE, "stream": True}) as response:
            lines = response.iter_lines()
            assert next(lines) == ": keep-alive"
            front.client.engine_gone("it broke")
            *_, error, _, done, _ = list(lines)
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == "service_unavailable"
        assert done == "data: [DONE]"


def test_flushing_takes_a_post(front: RunningFront) -> None:
    answer = front.http.get("/flush_cache")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert front.http.post("/flush_cache").text == "Cache flushed.\n"


@pytest.fixture(scope="module")
def open_front(byte_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFront]:
    """A front that pages of one origin may ask, with a key."""
    engine = FakeEngine(endpoint=f"ipc://{tmp_path_factory.mktemp('open')}/engine", vocab_size=267)
    settings = front_settings(
        model_path=str(byte_folder), api_key="secret", allowed_origins=("https://chat.example.com",)
    )
    with running_front(settings, engine) as running:
        yield running


PREFLIGHT = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}


def test_a_page_of_an_allowed_origin_may_ask(open_front: RunningFront) -> None:
    origin = {"origin": "https://chat.example.com"}
    asked = open_front.http.request("OPTIONS", "/v1/completions", headers={**origin, **PREFLIGHT})
    assert (asked.status_code, asked.headers["access-control-allow-origin"]) == (200, "https://chat.example.com")
    assert asked.headers["access-control-allow-headers"] == "authorization,content-type"
    with_key = {**origin, "authorization": "Bearer secret"}
    for headers, stream, status in ((with_key, False, 200), (with_key, True, 200), (origin, False, 401)):
        answer = open_front.http.post("/v1/completions", json={**ONE, "stream": stream}, headers=headers)
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (status, origin["origin"])
        assert "x-request-id" in answer.headers["access-control-expose-headers"]


def test_pages_of_other_origins_may_not(front: RunningFront, open_front: RunningFront) -> None:
    origin = {"origin": "https://evil.example.com"}
    assert open_front.http.request("OPTIONS", "/v1/completions", headers={**origin, **PREFLIGHT}).status_code == 400
    for server in (front, open_front):
        answer = server.http.get("/health", headers=origin)
        assert "access-control-allow-origin" not in answer.headers
    assert front.http.request("OPTIONS", "/v1/completions", headers={**origin, **PREFLIGHT}).status_code == 405


def test_a_router_lets_pages_ask_too(front: RunningFront) -> None:
    with serving(create_router_app(RouterSettings(decode_urls=(front.url,), allowed_origins=("*",)))) as server:
        answer = httpx.get(f"http://127.0.0.1:{server.port}/version", headers={"origin": "https://any.example.com"})
        assert answer.headers["access-control-allow-origin"] == "*"


@pytest.mark.parametrize("wrong", ["chat.example.com", '["*"]', "https://a.b/page", "https://", "https://*.b", ""])
def test_an_origin_that_no_browser_sends_is_refused(wrong: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"--allowed-origins has {wrong!r}")):
        ServerSettings(allowed_origins=(wrong,))
