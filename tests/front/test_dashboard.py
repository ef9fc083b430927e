"""/dashboard: the page, its stream and its looks, of one engine and of all behind a router."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Set
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from serinus.front import EngineClient, RouterSettings, create_app, create_router_app
from serinus.front.dashboard import Subscription, page_html
from serinus.testing.fake_engine import FakeEngine
from serinus.testing.running_front import RunningFront, front_settings, running_front, serving


def told(
    http: httpx.Client, count: int, *, one_of_each: Set[tuple[str, str]] = frozenset(), **headers: str
) -> list[tuple[str, dict[str, Any]]]:
    """The first events of a stream, each with the engine it is of: so many, and on until each of these (engine, kind)
    came."""
    found: list[tuple[str, dict[str, Any]]] = []
    with http.stream("GET", "/dashboard/events", headers=headers) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        engine = ""
        for line in answer.iter_lines():
            if line.startswith("event: "):
                engine = line[7:]
            elif line.startswith("data: "):
                found.append((engine, json.loads(line[6:])))
                engine = ""
            if len(found) >= count and one_of_each <= {(of, event["kind"]) for of, event in found}:
                break
    return found


def test_the_stream_begins_with_the_whole_state_and_goes_on_with_what_changes(front: RunningFront) -> None:
    (_, first), (_, second) = told(front.http, 2)
    assert (first["kind"], second["kind"]) == ("whole", "delta")
    assert first["pools"][0]["pages"] == 3
    assert first["front"]["engine"] == "fake-0"
    assert first["summary"]["slots"] == 16
    assert second["pools"] == []
    assert second["rates"]["number"] == first["rates"]["number"] + 1
    assert "front" not in second


def test_an_engine_is_asked_for_nothing_while_no_page_is_open(
    front: RunningFront, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serinus.front.dashboard.PERIOD_S", 0.01)  # many of them pass in fifty questions

    def asked() -> int:
        before = front.engine.frames
        for _ in range(50):
            front.http.get("/server_info")
        return front.engine.frames - before

    told(front.http, 5)
    for _ in range(100):  # the front hears a little later that the page was closed
        if not asked():
            break
    assert asked() == 0


def test_a_look_is_passed_on_and_tokens_are_shown_as_text(front: RunningFront) -> None:
    found = front.http.get("/dashboard/look", params={"what": "page", "page": 7, "tier": "host", "part": "swa"}).json()
    assert found["order"] == {"what": "page", "page": 7, "tier": "host", "part": "swa"}
    assert isinstance(found["text"], str)
    refused = front.http.get("/dashboard/look", params={"what": "page", "page": 99})
    assert refused.status_code == 400
    assert "expected less" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ({}, "what: got None, expected page or node"),
        ({"what": "page", "page": "x"}, "page: got 'x', expected a number from 0 to 999999999"),
        ({"what": "node", "node": "-1"}, "node: got '-1', expected a number from 0 to 999999999"),
        ({"what": "page", "rank": 1}, "rank: got '1', expected no field but what, tier, part, page, node"),
    ],
)
def test_a_look_that_is_wrong_is_refused_by_its_field(front: RunningFront, query: dict[str, Any], said: str) -> None:
    refused = front.http.get("/dashboard/look", params=query)
    assert (refused.status_code, refused.json()["error"]["message"]) == (400, said)


def test_the_page_is_one_text_that_needs_no_other_and_holds_no_data(front: RunningFront) -> None:
    answer = front.http.get("/dashboard")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "connect-src 'self'" in policy
    assert "http" not in policy
    text = answer.text
    assert not re.search(r"(?:src|href)\s*=\s*[\"'](?!data:|#)", text)
    assert not re.search(r"@import|url\((?![\"']?data:)", text)
    urls = set(re.findall(r"https?://[\w./-]+", text))
    assert urls <= {"https://github.com/leeoniya/uPlot", "http://www.w3.org/2000/svg"}, urls
    assert text.count("<script") == 1
    assert "fake-0" not in text
    assert page_html()[0] == answer.content


def test_the_licence_of_the_charts_is_there() -> None:
    folder = Path(__file__).parents[2] / "serinus" / "front" / "assets"
    assert "Leon Sorokin" in (folder / "LICENSE-uPlot").read_text()
    assert len(page_html()[0]) < 200_000


@pytest.fixture
def keyed(byte_folder: Path, new_endpoint: Callable[[], str]) -> Iterator[RunningFront]:
    settings = front_settings(model_path=str(byte_folder), api_key="user", admin_api_key="admin")
    with running_front(settings, FakeEngine(endpoint=new_endpoint(), vocab_size=267)) as running:
        yield running


def test_events_and_looks_ask_for_the_admin_key_and_the_page_does_not(keyed: RunningFront) -> None:
    assert keyed.http.get("/dashboard").status_code == 200
    for path in ("/dashboard/events", "/dashboard/look?what=page&page=1"):
        assert keyed.http.get(path).status_code == 401
        assert keyed.http.get(path, headers={"authorization": "Bearer user"}).status_code == 401
    assert told(keyed.http, 1, authorization="Bearer admin")[0][1]["kind"] == "whole"


def test_without_a_dashboard_its_paths_are_unknown(byte_folder: Path, new_endpoint: Callable[[], str]) -> None:
    settings = front_settings(model_path=str(byte_folder), no_dashboard=True)
    with running_front(settings, FakeEngine(endpoint=new_endpoint(), vocab_size=267)) as running:
        for path in ("/dashboard", "/dashboard/events", "/dashboard/look?what=page"):
            assert running.http.get(path).status_code == 404
        router = create_router_app(RouterSettings(decode_urls=(running.url,), dashboard=False))
        with serving(router) as server:
            assert httpx.get(f"http://127.0.0.1:{server.port}/dashboard").status_code == 404


def test_an_engine_that_starts_is_told_apart_from_one_that_is_gone(
    byte_folder: Path, new_endpoint: Callable[[], str]
) -> None:
    client = EngineClient(new_endpoint())
    app = create_app(front_settings(model_path=str(byte_folder)), client)
    with serving(app) as server, httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=30) as http:
        ((_, starting),) = told(http, 1)
        assert (starting["kind"], starting["loading"]) == ("down", True)
        client.engine_gone("the engine fake-0 died of SIGKILL")
        ((_, gone),) = told(http, 1)
        assert (gone["loading"], "SIGKILL" in gone["why"]) == (False, True)


def test_a_stream_ends_when_its_server_drains(byte_folder: Path, new_endpoint: Callable[[], str]) -> None:
    settings = front_settings(model_path=str(byte_folder))
    with (
        running_front(settings, FakeEngine(endpoint=new_endpoint(), vocab_size=267)) as running,
        running.http.stream("GET", "/dashboard/events") as answer,
    ):
        lines = answer.iter_lines()
        next(line for line in lines if line.startswith("data: "))
        running.client.drain()
        list(lines)  # the iterator ends


def test_a_router_shows_all_its_engines_and_one_that_is_gone(
    byte_folder: Path, new_endpoint: Callable[[], str]
) -> None:
    with ExitStack() as stack:
        fronts = [
            stack.enter_context(
                running_front(
                    front_settings(model_path=str(byte_folder), admin_api_key="admin"),
                    FakeEngine(endpoint=new_endpoint(), engine=f"e-{n}", vocab_size=267),
                )
            )
            for n in range(2)
        ]
        dead = "http://127.0.0.1:9"
        urls = tuple(front.url for front in fronts)
        settings = RouterSettings(decode_urls=urls, prefill_urls=(dead,), admin_api_key="admin")
        server = stack.enter_context(serving(create_router_app(settings)))
        http = stack.enter_context(httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=30))
        assert http.get("/dashboard/events").status_code == 401
        wanted = {("", "fleet"), (urls[0], "whole"), (urls[1], "whole"), (dead, "down")}
        found = told(http, 4, one_of_each=wanted, authorization="Bearer admin")
        names = {engine: event["front"]["engine"] for engine, event in found if event["kind"] == "whole"}
        assert names == {urls[0]: "e-0", urls[1]: "e-1"}
        fleet = next(event for _, event in found if event["kind"] == "fleet")
        assert [member["url"] for member in fleet["members"]] == [*urls, dead]
        key = {"authorization": "Bearer admin"}
        look = http.get("/dashboard/look", params={"what": "page", "page": 3, "engine": urls[1]}, headers=key)
        assert look.json()["order"] == {"what": "page", "page": 3}
        elsewhere = http.get("/dashboard/look", params={"what": "page", "engine": "http://example.com"}, headers=key)
        assert elsewhere.status_code == 400


def test_a_page_that_reads_too_slowly_gets_the_whole_state_in_place_of_what_it_missed() -> None:
    one = Subscription()
    one.put(b"d0", b"w0")
    for number in range(1, 8):
        one.put(b"d%d" % number, b"")
    assert not one.lost
    one.put(b"d8", b"")
    assert one.lost
    one.put(b"d9", b"w9")
    one.put(b"d10", b"")
    assert one._events == [b"w9", b"d10"]
