"""Several engines behind one address: which of them gets a request, and what clients see when an engine fails."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from contextlib import closing
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from serinus.core.clock import ManualClock, WallClock
from serinus.core.errors import ConfigError
from serinus.core.request import Request as TokenRequest
from serinus.front import RouterSettings, create_router_app
from serinus.front.fleet import Fleet
from serinus.front.metrics import RouterMetrics
from serinus.testing.fake_engine import fake_continue
from serinus.testing.running_front import RunningFront, serving
from serinus.wire.messages import Abort, Generate

pytestmark = pytest.mark.slow

CLOCK = WallClock()
GREEDY = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 5, "temperature": 0}}
EXPECTED = fake_continue([1, 2, 3], 5, vocab_size=267)


def requests_of(front: RunningFront) -> list[TokenRequest]:
    return [message.request for message in front.engine.received if isinstance(message, Generate)]


def holder(running: Any) -> RunningFront:
    """The front whose engine has a request: comments of a stream may leave before the request reached it."""
    running.until(lambda: any(requests_of(front) for front in running.decode))
    return next(front for front in running.decode if requests_of(front))


def test_requests_go_to_decode_with_a_prefill_engine_suggested(route: Any) -> None:
    with route(1, 2) as running:
        for _ in range(4):
            answer = running.http.post("/generate", json=GREEDY).json()
            assert answer["output_ids"] == EXPECTED
            assert answer["meta_info"]["decode_engine"] == "decode-0"
        suggested = {request.prefill_address for request in requests_of(running.decode[0])}
        assert suggested == {"tcp://prefill-0:1", "tcp://prefill-1:1"}
        assert not requests_of(running.prefill[0])


def test_a_prefill_engine_that_listens_on_every_interface_is_suggested_at_the_host_of_its_url(route: Any) -> None:
    with route(1, 1, pd_address="tcp://[::]:7") as running:
        assert running.http.post("/generate", json=GREEDY).json()["output_ids"] == EXPECTED
        assert [request.prefill_address for request in requests_of(running.decode[0])] == ["tcp://127.0.0.1:7"]


def test_a_client_cannot_name_the_prefill_engine_through_the_router(route: Any) -> None:
    with route(1, 0) as running:
        running.http.post("/generate", json=GREEDY, headers={"x-serinus-prefill": "tcp://evil:1"})
        assert [request.prefill_address for request in requests_of(running.decode[0])] == [""]


@pytest.mark.parametrize("name", ["a b", "caf\u00e9/\u20ac", "x HTTP/1.1\rx-serinus-prefill: tcp://evil:1\r", "50%"])
def test_a_path_reaches_the_engine_as_the_client_wrote_it(route: Any, name: str) -> None:
    with route(1, 0) as running:
        answer = running.http.get(f"/v1/models/{quote(name)}")
        assert answer.status_code == 404
        assert answer.json()["error"]["message"] == f"model: got {name!r}, expected 'canary'"


def test_an_engine_that_answers_strangely_is_looked_at_again() -> None:
    async def strange(request: Request) -> JSONResponse:
        return JSONResponse({"error": "no such page"}, 404)

    with serving(Starlette(routes=[Route("/server_info", strange)])) as server:
        settings = RouterSettings(decode_urls=(f"http://127.0.0.1:{server.port}",))
        fleet = Fleet(settings, RouterMetrics(engine="router"), ManualClock())
        asyncio.run(fleet.look(fleet.decode[0]))
    assert fleet.decode[0].why.endswith("answered 404: no such page")


def test_streams_pass_through_unchanged(route: Any) -> None:
    with route(1, 0) as running:
        body = {"prompt": [1, 2, 3], "max_tokens": 40, "temperature": 0, "stream": True, "store": True}
        through = running.http.post("/v1/completions", json=body)
        direct = running.decode[0].http.post("/v1/completions", json=body)
        assert through.headers["content-type"] == direct.headers["content-type"]
        assert through.headers["x-serinus-ignored"] == direct.headers["x-serinus-ignored"] == "store"

        def texts(response: httpx.Response) -> list[str]:
            rows = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
            assert rows[-1] == "[DONE]"
            return [json.loads(row)["choices"][0]["text"] for row in rows[:-1]]

        assert texts(through) == texts(direct)


def test_refusals_pass_through_unchanged(route: Any) -> None:
    with route(1, 0) as running:
        for path, body in (("/generate", {"text": ""}), ("/v1/completions", {"model": "x", "prompt": "x"})):
            through, direct = running.http.post(path, json=body), running.decode[0].http.post(path, json=body)
            assert (through.status_code, through.json()) == (direct.status_code, direct.json())
        assert running.http.get("/nothing").status_code == 404


def test_the_least_loaded_engine_gets_the_next_request(route: Any) -> None:
    with route(2, 0, stall=(True, True), policy="least_loaded") as running:
        threads = [
            threading.Thread(
                target=httpx.post, args=(f"{running.http.base_url}/generate",), kwargs={"json": GREEDY, "timeout": 60}
            )
            for _ in range(6)
        ]
        for count, thread in enumerate(threads, 1):
            thread.start()
            running.until(lambda n=count: sum(len(requests_of(front)) for front in running.decode) == n)
        assert [len(requests_of(front)) for front in running.decode] == [3, 3]
        for front in running.decode:
            front.engine.let_go()
        for thread in threads:
            thread.join(60)


def test_a_request_is_sent_again_when_its_engine_dies_before_the_first_token(route: Any) -> None:
    with route(2, 1, stall=(True, True)) as running:
        box: list[httpx.Response] = []
        url = f"{running.http.base_url}/generate"
        thread = threading.Thread(
            target=lambda: box.append(httpx.post(url, json={**GREEDY, "stream": True}, timeout=60))
        )
        thread.start()
        running.until(lambda: any(requests_of(front) for front in running.decode))
        first = next(front for front in running.decode if requests_of(front))
        other = next(front for front in running.decode if front is not first)
        other.engine.let_go()
        first.client.engine_gone("killed")
        thread.join(60)
        assert box[0].status_code == 200
        events = [line for line in box[0].text.split("\n\n") if line]
        assert json.loads(events[-2].removeprefix("data: "))["output_ids"] == EXPECTED
        assert "serinus:router_retries_total" in running.http.get("/metrics").text
        running.until(lambda: sum(running.alive()) == 2)
        assert running.http.post("/generate", json=GREEDY).json()["output_ids"] == EXPECTED


def test_a_request_is_sent_again_when_the_whole_server_vanishes(route: Any) -> None:
    with route(2, 0, stall=(True, True)) as running:
        box: list[httpx.Response] = []
        url = f"{running.http.base_url}/generate"
        thread = threading.Thread(target=lambda: box.append(httpx.post(url, json=GREEDY, timeout=60)))
        thread.start()
        running.until(lambda: any(requests_of(front) for front in running.decode))
        first = next(front for front in running.decode if requests_of(front))
        next(front for front in running.decode if front is not first).engine.let_go()
        first.server.stop(now=True)
        thread.join(60)
        assert box[0].json()["output_ids"] == EXPECTED


@pytest.mark.parametrize("how", ["the engine", "the whole server"])
def test_a_request_under_which_two_engines_broke_goes_to_no_third(route: Any, how: str) -> None:
    with route(4, 0, stall=(True,) * 4) as running:
        box: list[httpx.Response] = []
        url, name = f"{running.http.base_url}/generate", {"x-request-id": "poison-7"}
        thread = threading.Thread(target=lambda: box.append(httpx.post(url, json=GREEDY, headers=name, timeout=60)))
        thread.start()
        broken: list[str] = []
        for count in (1, 2):
            running.until(lambda count=count: sum(bool(requests_of(front)) for front in running.decode) == count)
            front = next(each for each in running.decode if requests_of(each) and not each.client.down)
            broken.append(front.url)
            if how == "the engine":
                front.client.engine_gone("died of SIGSEGV")
            else:
                front.server.stop(now=True)
                running.until(lambda front=front: bool(front.client.down))
        thread.join(60)
        assert box[0].status_code == 500
        said = box[0].json()["error"]["message"]
        assert said.startswith(f"front: request poison-7 was under way at {broken[0]} and {broken[1]} when they broke")
        assert ("SIGSEGV" in said) == (how == "the engine")
        assert sum(bool(requests_of(front)) for front in running.decode) == 2
        families = {f.name: f for f in text_string_to_metric_families(running.http.get("/metrics").text)}
        counts = [families[f"serinus:router_{name}"].samples[0].value for name in ("retries", "given_up_requests")]
        assert counts == [1, 1]


def test_engines_that_cannot_be_reached_or_have_no_room_never_had_the_request(route: Any) -> None:
    with route(2, 0) as running:
        full, free = running.decode
        full.client.drain()
        urls = ("http://127.0.0.1:1", "http://127.0.0.1:2", "http://127.0.0.1:3", full.url, free.url)
        app = create_router_app(RouterSettings(decode_urls=urls, poll_s=1000.0))
        with serving(app) as server:
            second = type(running)(server, app.state.router, running.decode, [])
            members = second.router.fleet.members
            second.until(lambda: all(member.why != "not looked at yet" for member in members))
            for member in members:
                member.alive = True  # as where they went since the last look
            with closing(second.http):
                answer = second.http.post("/generate", json=GREEDY)
        assert answer.json()["output_ids"] == EXPECTED
        assert [member.alive for member in members] == [False, False, False, True, True]


def test_a_stream_that_breaks_midway_ends_with_an_error_event(route: Any) -> None:
    with route(1, 0) as running:
        running.decode[0].engine.step_s = 0.01  # it has minutes to go
        body = {"text": "x", "stream": True, "sampling_params": {"max_new_tokens": 90_000}}
        with running.http.stream("POST", "/generate", json=body) as response:
            parts = response.iter_bytes()
            came = next(parts)
            running.decode[0].server.stop(now=True)
            came += b"".join(parts)
        rows = [row for row in came.decode().splitlines() if row]
        assert rows[-1] == "data: [DONE]"
        assert json.loads(rows[-2].removeprefix("data: "))["error"]["code"] == "service_unavailable"
        assert all(json.loads(row.removeprefix("data: ")) for row in rows[:-1])


@pytest.mark.parametrize("how", ["the engine", "its server"])
def test_a_stream_that_breaks_midway_is_an_error_to_clients_of_every_kind_and_counts(route: Any, how: str) -> None:
    """Those of Anthropic skip events without a name: a half answer would look whole."""
    with route(1, 0, cb_failure_threshold=1) as running:
        running.decode[0].engine.step_s = 0.01  # it has minutes to go
        body = {"model": "canary", "max_tokens": 90_000, "messages": [{"role": "user", "content": "x"}], "stream": True}
        with running.http.stream("POST", "/v1/messages", json=body) as response:
            parts = response.iter_bytes()
            came = b""
            while b"text_delta" not in came:
                came += next(parts)
            if how == "the engine":
                running.decode[0].client.engine_gone("died of SIGKILL")
            else:
                running.decode[0].server.stop(now=True)
            came += b"".join(parts)
        *_, last = (event for event in came.decode().split("\n\n") if event)
        name, data = last.split("\n")
        said = json.loads(data.removeprefix("data: "))
        assert (name, said["type"], said["error"]["code"]) == ("event: error", "error", "service_unavailable")
        assert how != "the engine" or "died of SIGKILL" in said["error"]["message"]
        text = running.http.get("/metrics").text
        assert re.search(r"serinus:router_broken_streams_total{[^}]*} 1.0", text)
        assert running.http.get("/workers").json()["workers"][0]["circuit"] == "open"


def test_a_stream_of_responses_that_breaks_midway_ends_with_an_error_of_its_form(route: Any) -> None:
    """Its clients go by the `type` of events."""
    with route(1, 0) as running:
        running.decode[0].engine.step_s = 0.01
        body = {"model": "canary", "max_output_tokens": 90_000, "input": "x", "stream": True}
        with running.http.stream("POST", "/v1/responses", json=body) as response:
            parts = response.iter_bytes()
            came = b""
            while b"output_text.delta" not in came:
                came += next(parts)
            running.decode[0].server.stop(now=True)
            came += b"".join(parts)
    *_, last = (event for event in came.decode().split("\n\n") if event)
    name, data = last.split("\n")
    said = json.loads(data.removeprefix("data: "))
    assert (name, said["type"], said["code"], said["param"]) == ("event: error", "error", "service_unavailable", None)
    assert said["message"] == said["error"]["message"]


def test_a_header_that_is_no_ascii_is_no_error(route: Any) -> None:
    with route(1, 0) as running:
        answer = running.http.post("/generate", json=GREEDY, headers={"user-agent": "Müller/1".encode()})
        assert answer.status_code == 200


def test_without_a_decode_engine_requests_get_503(route: Any) -> None:
    with route(1, 1) as running:
        running.decode[0].client.engine_gone("died of SIGKILL")
        answer = running.http.post("/v1/completions", json={"prompt": "x"})
        assert answer.status_code == 503
        assert "SIGKILL" in answer.json()["error"]["message"]
        running.until(lambda: running.alive() == [False, True])
        answer = running.http.post("/v1/completions", json={"prompt": "x"})
        assert answer.status_code == 503
        assert "no decode engine is alive" in answer.json()["error"]["message"]
        assert running.http.get("/health").status_code == 503
        running.prefill[0].client.engine_gone("gone too")
        running.until(lambda: not any(running.alive()))
        assert running.http.post("/flush_cache").status_code == 503


def test_a_degraded_engine_gets_no_new_requests(route: Any) -> None:
    with route(2, 0) as running:
        running.decode[0].engine.degraded = "9 KV pages failed twice"
        running.until(lambda: running.alive() == [False, True])
        for _ in range(3):
            assert running.http.post("/generate", json=GREEDY).status_code == 200
        assert len(requests_of(running.decode[1])) == 3
        assert not requests_of(running.decode[0])


def test_without_a_prefill_engine_none_is_suggested(route: Any) -> None:
    with route(1, 1) as running:
        running.prefill[0].client.engine_gone("gone")
        running.until(lambda: running.alive() == [True, False])
        assert running.http.post("/generate", json=GREEDY).status_code == 200
        assert requests_of(running.decode[0])[-1].prefill_address == ""


def test_a_client_that_hangs_up_is_hung_up_on_the_engine_too(route: Any) -> None:
    with route(1, 0) as running:
        running.decode[0].engine.step_s = 0.01  # it has minutes to go
        body = {"text": "x", "stream": True, "rid": "left", "sampling_params": {"max_new_tokens": 90_000}}
        with running.http.stream("POST", "/generate", json=body) as response:
            next(response.iter_lines())
        running.decode[0].engine.wait_for(lambda engine: not engine.running)
        aborts = [m for m in running.decode[0].engine.received if isinstance(m, Abort)]
        assert [abort.rid for abort in aborts] == ["left"]
        assert not running.router.fleet.decode[0].open


def test_metrics_of_all_engines_come_as_one_text(route: Any) -> None:
    with route(2, 1) as running:
        running.http.post("/generate", json=GREEDY)
        text = running.http.get("/metrics").text
        families = {family.name: family for family in text_string_to_metric_families(text)}
        engines = {sample.labels["engine"] for sample in families["serinus:num_running_reqs"].samples}
        assert engines == {"decode-0", "decode-1", "prefill-0"}
        roles = {sample.labels["role"] for sample in families["serinus:http_requests"].samples}
        assert roles == {"decode", "prefill", "router"}
        types = [line for line in text.splitlines() if line.startswith("# TYPE")]
        assert len(types) == len({line.split()[2] for line in types})


def test_orders_reach_every_engine(route: Any) -> None:
    with route(1, 1) as running:
        assert running.http.post("/flush_cache").text == "Cache flushed.\n"
        assert running.http.post("/abort_request", json={"rid": "x"}).json() == {"aborted": 0}
        assert running.http.post("/abort_request", json={}).status_code == 400
        assert running.http.get("/v1/models").json()["data"][0]["id"] == "canary"
        assert running.http.get("/health_generate").status_code == 200
        assert running.http.post("/tokenize", json={"prompt": "the"}).json()["count"] == 2
        info = running.http.get("/get_server_info").json()
        assert [engine["kind"] for engine in info["engines"]] == ["decode", "prefill"]
        assert info["served_model_name"] == "canary"
        assert {"/generate", "/workers"} <= set(running.http.get("/openapi.json").json()["paths"])


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"router_secrets": (), "api_key": "k"},
        {"router_secrets": (), "api_key": "k", "admin_api_key": "a"},
        {"router_secrets": (), "admin_api_key": "a"},
    ],
)
def test_engines_take_the_routers_suggestion_and_no_clients(route: Any, keys: dict[str, Any]) -> None:
    user = {"authorization": "Bearer k"}
    forged = {**user, "x-serinus-prefill": "tcp://evil:1", "x-serinus-proof": "guess"}
    with route(1, 1, keys=keys) as running:
        for headers in (user, forged):
            assert running.http.post("/generate", json=GREEDY, headers=headers).status_code == 200
        suggested = [request.prefill_address for request in requests_of(running.decode[0])]
        assert suggested == ["tcp://prefill-0:1", "tcp://prefill-0:1"]


def test_keys_are_asked_at_the_router_and_shown_to_the_engines(route: Any) -> None:
    with route(1, 1, keys={"api_key": "k", "admin_api_key": "a"}) as running:
        assert running.http.post("/generate", json=GREEDY).status_code == 401
        user, admin = {"authorization": "Bearer k"}, {"authorization": "Bearer a"}
        assert running.http.post("/generate", json=GREEDY, headers=user).status_code == 200
        assert running.http.post("/flush_cache", headers=user).status_code == 401
        assert running.http.post("/flush_cache", headers=admin).status_code == 200
        assert running.http.get("/health").status_code == 200


@pytest.mark.parametrize(
    "settings",
    [
        {"decode_urls": ()},
        {"decode_urls": ("a:1",)},
        {"decode_urls": ("http://a:1",), "prefill_urls": ("ftp://b:1",)},
        {"decode_urls": ("http://a:1",), "poll_s": 0},
        {"decode_urls": ("=http://a:1",)},
        {"decode_urls": ("m=a:1",)},
    ],
)
def test_wrong_router_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="expected"):
        RouterSettings(**settings)


def test_a_stream_that_has_no_token_yet_is_tried_elsewhere_when_its_engine_dies(route: Any) -> None:
    with route(2, 1, keep_alive_s=0.01, stall=(True, True)) as running:
        body = {**GREEDY, "stream": True}
        with running.http.stream("POST", "/generate", json=body) as response, httpx.Client() as http:
            parts = response.iter_bytes()
            assert next(parts).strip() == b""
            first = holder(running)
            assert running.router.fleet.prefill[0].waiting_bytes > 0
            next(front for front in running.decode if front is not first).engine.let_go()
            first.client.engine_gone("killed")
            events = [row for row in b"".join(parts).decode().split("\n\n") if row.strip()]
            assert http.get(f"{running.http.base_url}/load").json() == {"server_load": 0}
        assert (response.status_code, events[-1]) == (200, "data: [DONE]")
        assert json.loads(events[-2].removeprefix("data: "))["output_ids"] == EXPECTED
        assert not any("error" in event for event in events)
        assert running.router.fleet.prefill[0].waiting_bytes == 0


def test_a_stream_without_a_token_ends_with_the_reason_when_all_engines_died(route: Any) -> None:
    with route(2, 0, keep_alive_s=0.01, stall=(True, True)) as running:
        with running.http.stream("POST", "/generate", json={**GREEDY, "stream": True}) as response:
            parts = response.iter_bytes()
            assert next(parts).strip() == b""
            first = holder(running)
            second = next(front for front in running.decode if front is not first)
            second.client.engine_gone("killed")  # before the router could send it the request
            running.until(lambda: not all(running.alive()))
            first.client.engine_gone("killed")
            events = [row for row in b"".join(parts).decode().split("\n\n") if row.strip()]
        error, done = events
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == "service_unavailable"
        assert done == "data: [DONE]"
