"""/cache and /canary: what is cached where, and whether it is sound, of one engine and of all behind a router."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from serinus.core.clock import WallClock
from serinus.front import RouterSettings, create_router_app
from serinus.testing.fake_engine import FakeEngine
from serinus.testing.running_front import RunningFront, front_settings, running_front, serving


def test_the_engine_is_asked_for_as_many_nodes_as_the_query_says(front: RunningFront) -> None:
    assert front.http.get("/cache").json()["tree"]["limit"] == 100
    view = front.http.get("/cache", params={"limit": 7}).json()
    assert (view["engine"], view["tree"]["limit"]) == ("fake-0", 7)


def test_the_canarys_word_is_passed_on(front: RunningFront) -> None:
    assert front.http.get("/canary").json() == {"mode": "none", "engine": "fake-0"}


def test_an_order_of_faults_reaches_the_engine_whole_and_its_refusal_the_client(front: RunningFront) -> None:
    assert front.http.get("/canary/perturb").json() == {"engine": "fake-0", "order": ""}
    body = {"perturb": {"real_kv_used": 0.25}, "target": "full", "count": 3, "steps": 9, "seconds": 5}
    told = json.loads(front.http.post("/canary/perturb", json=body).json()["order"])
    assert told == body
    answer = front.http.post("/canary/perturb", json={"perturb": {"tier_bytes": 1}})
    assert answer.status_code == 400
    assert "perturb: no tier" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "param", "expected"),
    [
        ({"perturb": "all"}, "perturb", "object"),
        ({"perturb": {}, "role": "router"}, "role", "decode, or none"),
        ({"count": 1}, "perturb", "perturb"),
        ({"perturb": {}, "second": 1}, "second", "second"),
    ],
)
def test_an_order_of_faults_that_makes_no_sense_is_refused(
    front: RunningFront, body: dict[str, Any], param: str, expected: str
) -> None:
    answer = front.http.post("/canary/perturb", json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert expected in answer.json()["error"]["message"]


@pytest.mark.parametrize("limit", ["0", "-1", "x", "10001", "", "1e3", "²"])
def test_a_limit_that_makes_no_sense_is_refused(front: RunningFront, limit: str) -> None:
    answer = front.http.get("/cache", params={"limit": limit})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "limit"


def test_only_the_admin_may_look_where_keys_are_set(byte_folder: Path, new_endpoint: Any) -> None:
    engine = FakeEngine(endpoint=new_endpoint(), vocab_size=267)
    settings = front_settings(model_path=str(byte_folder), api_key="user", admin_api_key="admin")
    with running_front(settings, engine) as front:
        for path in ("/cache", "/canary", "/canary/perturb"):
            for key, status in (("user", 401), ("admin", 200)):
                assert front.http.get(path, headers={"authorization": f"Bearer {key}"}).status_code == status
            assert front.http.get(path).status_code == 401


@pytest.mark.slow
def test_a_router_shows_the_trees_of_all_engines(byte_folder: Path, new_endpoint: Any) -> None:
    with ExitStack() as stack:
        fronts = [
            stack.enter_context(
                running_front(
                    front_settings(model_path=str(byte_folder), engine=name, role="decode", admin_api_key="a"),
                    FakeEngine(endpoint=new_endpoint(), engine=name, role="decode", vocab_size=267),
                )
            )
            for name in ("decode-0", "decode-1")
        ]
        settings = RouterSettings(decode_urls=tuple(front.url for front in fronts), poll_s=0.02, admin_api_key="a")
        app = create_router_app(settings)
        url = f"http://127.0.0.1:{stack.enter_context(serving(app)).port}"
        end = WallClock().now() + 60
        while not all(member.alive for member in app.state.router.fleet.members):
            assert WallClock().now() < end, "the router never saw its engines"
            httpx.get(f"{url}/server_info")
        assert httpx.get(f"{url}/cache").status_code == 401
        assert httpx.get(f"{url}/cache?limit=0", headers={"authorization": "Bearer a"}).status_code == 400
        answer = httpx.get(f"{url}/cache?limit=3", headers={"authorization": "Bearer a"}).json()
        assert [member["url"] for member in answer["engines"]] == [front.url for front in fronts]
        assert [member["cache"]["engine"] for member in answer["engines"]] == ["decode-0", "decode-1"]
        assert {member["cache"]["tree"]["limit"] for member in answer["engines"]} == {3}
        canaries = httpx.get(f"{url}/canary", headers={"authorization": "Bearer a"}).json()
        assert [member["canary"]["engine"] for member in canaries["engines"]] == ["decode-0", "decode-1"]
        perturbs = httpx.post(
            f"{url}/canary/perturb", json={"perturb": {}, "role": "decode"}, headers={"authorization": "Bearer a"}
        )
        assert perturbs.status_code == 200
        assert [member["perturb"]["engine"] for member in perturbs.json()["engines"]] == ["decode-0", "decode-1"]
        body = {"perturb": {"tier_bytes": 1}, "role": "decode"}
        refused = httpx.post(f"{url}/canary/perturb", json=body, headers={"authorization": "Bearer a"})
        assert refused.status_code == 400
        assert all("no tier" in member["error"] for member in refused.json()["engines"])
        none = {"perturb": {"tier_bytes": 1}, "role": "prefill"}
        assert httpx.post(f"{url}/canary/perturb", json=none, headers={"authorization": "Bearer a"}).json() == {
            "engines": []
        }
