"""The engines of a router: which of them gets a request, which are left alone for a while, and how they come and go."""

from __future__ import annotations

import re
import threading
from typing import Any

import httpx
import pytest

from serinus.core.clock import ManualClock, WallClock
from serinus.core.errors import BadRequest, UnknownModel
from serinus.core.rng import Rng
from serinus.front import RouterSettings, create_router_app
from serinus.front.backoff import Backoff
from serinus.front.circuit import Circuit, CircuitLimits, CircuitState
from serinus.front.fleet import Fleet, NoEngineAlive
from serinus.front.metrics import RouterMetrics
from serinus.front.upstream import Upstream
from serinus.testing.fake_engine import fake_continue
from serinus.testing.running_front import serving
from serinus.wire.messages import Generate

CLOCK = WallClock()
GREEDY = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 5, "temperature": 0}}
EXPECTED = fake_continue([1, 2, 3], 5, vocab_size=267)
ABC = ("http://a:1", "http://b:1", "http://c:1")


def fleet(clock: ManualClock | None = None, urls: tuple[str, ...] = ABC, **settings: Any) -> Fleet:
    made = RouterSettings(decode_urls=urls, prefill_urls=("http://p:1",), **settings)
    new = Fleet(made, RouterMetrics(engine="router"), clock or ManualClock())
    for member in new.members:
        member.alive = True
    return new


def busy(member: Any, count: int) -> None:
    """So many requests are with this engine."""
    member.open.update(Upstream("http://x:1", connect_s_max=1) for _ in range(count))


def prompt(kind: int, tail: str = "") -> bytes:
    """A body; those of one kind begin with the same four blocks."""
    return b'{"n": %d, "prompt": "%s"}' % (len(tail), (f"{kind}".zfill(8) * 70 + tail).encode())


# ---- policies -----------------------------------------------------------------------------------------------------


def test_a_prompt_goes_to_the_engine_that_had_the_longest_beginning_of_it() -> None:
    some = fleet()
    first = {kind: some.pick_decode(prompt(kind)).url for kind in range(9)}
    assert set(first.values()) == set(ABC), "prompts that share nothing are spread"
    again = {kind: some.pick_decode(prompt(kind, f"and more {kind}")).url for kind in reversed(range(9))}
    assert again == first
    chat = b'{"messages": [{"role": "user", "content": "%s"}' % (b"hello there " * 60)
    whole, turn = some.pick_decode(chat + b"]}"), some.pick_decode(chat + b', {"role": "assistant"}]}')
    assert whole is turn


def test_an_engine_that_has_too_much_to_do_is_not_preferred() -> None:
    some = fleet()
    liked = some.pick_decode(prompt(1))
    busy(liked, 8)
    assert some.pick_decode(prompt(1)) is liked
    busy(liked, 1)
    other = some.pick_decode(prompt(1))
    assert other is not liked
    for member in some.decode:
        member.open.clear()
        busy(member, 29 if member is liked else 20)
    assert some.pick_decode(prompt(1)) in (liked, other), "half as many more are no reason"


def test_an_engine_whose_cache_is_empty_again_is_not_preferred() -> None:
    some = fleet()
    liked = some.pick_decode(prompt(1))
    some.lost(liked, "it died")
    liked.alive = True
    assert some.pick_decode(prompt(1)) is not liked


def test_what_is_remembered_of_prompts_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serinus.front.policies._BLOCKS_KEPT", 32)
    some = fleet()
    for kind in range(100):
        some.pick_decode(prompt(kind))
    assert len(some._policy._seen) == 32  # type: ignore[attr-defined]
    assert some.pick_decode(prompt(99)) is some.pick_decode(prompt(99, "more"))


@pytest.mark.parametrize("policy", ["cache_aware", "least_loaded", "round_robin"])
def test_equally_loaded_engines_take_turns_and_dead_ones_are_left_out(policy: str) -> None:
    some = fleet(policy=policy)
    assert {some.pick_decode(b"").url for _ in range(6)} == set(ABC)
    some.lost(some.decode[0], "it died")
    assert {some.pick_decode(b"").url for _ in range(6)} == set(ABC[1:])
    with pytest.raises(NoEngineAlive, match="it died"):
        some.pick_decode(b"", but=some.decode[1:])
    assert some.pick_prefill(b"") is None, "a prefill engine without an address was suggested"


def test_in_turn_means_whatever_they_have_to_do_and_least_loaded_whatever_they_had() -> None:
    turns, least = fleet(policy="round_robin"), fleet(policy="least_loaded")
    for some in (turns, least):
        busy(some.decode[0], 9)
    body = prompt(1)
    assert [turns.pick_decode(body).url for _ in range(6)] == [*ABC, *ABC]
    assert {least.pick_decode(body).url for _ in range(6)} == set(ABC[1:])


# ---- circuits -----------------------------------------------------------------------------------------------------


def test_a_circuit_opens_after_failures_in_a_row_and_closes_after_successes() -> None:
    circuit = Circuit(CircuitLimits(failures=3, successes=2, open_s=30.0))
    assert [circuit.failed(1.0, 0.5), circuit.failed(2.0, 0.5)] == [False, False]
    circuit.succeeded(1.5)
    assert [circuit.failed(now, 2.0) for now in (3.0, 4.0, 5.0)] == [False, False, True]
    assert (circuit.state(34.9), circuit.lets_in(34.9)) == (CircuitState.OPEN, False)
    assert (circuit.state(35.0), circuit.lets_in(35.0)) == (CircuitState.HALF_OPEN, True)
    circuit.sent(35.0)
    assert not circuit.lets_in(36.0), "one at a time"
    for sent_at in (2.0, 4.9):  # long streams, from before it opened
        circuit.succeeded(sent_at)
        circuit.left(sent_at)
        assert not circuit.failed(36.0, sent_at)
        assert (circuit.state(36.0), circuit.lets_in(36.0)) == (CircuitState.HALF_OPEN, False)
    circuit.left(35.0)
    assert circuit.lets_in(36.0)
    circuit.sent(36.0)
    assert circuit.failed(37.0, 36.0), "one failure opens it again"
    for now in (67.0, 68.0):
        assert circuit.state(now) is CircuitState.HALF_OPEN
        circuit.sent(now)
        circuit.succeeded(now)
    assert circuit.state(68.0) is CircuitState.CLOSED
    assert not circuit.failed(69.0, 68.0)


def test_no_circuit_opens_where_none_should() -> None:
    circuit = Circuit(CircuitLimits(failures=0))
    assert not any(circuit.failed(float(now), float(now)) for now in range(100))
    assert circuit.lets_in(100.0)


def test_an_engine_whose_circuit_is_open_gets_requests_only_where_no_other_takes_them() -> None:
    clock = ManualClock()
    some = fleet(clock, policy="round_robin", cb_failure_threshold=2)
    for _ in range(2):
        some.failed(some.decode[0], "it answered 500", clock.now())
    assert {some.pick_decode(b"").url for _ in range(6)} == set(ABC[1:])
    for member in some.decode[1:]:
        some.lost(member, "it died")
    assert some.pick_decode(b"").url == ABC[0]
    clock.advance(31.0)
    for member in some.decode[1:]:
        member.alive = True
    assert {some.pick_decode(b"").url for _ in range(6)} == set(ABC), "it is tried again"


@pytest.mark.slow
def test_an_engine_that_answers_500_again_and_again_is_left_alone_and_shown(route: Any) -> None:
    with route(2, 0, policy="round_robin", cb_failure_threshold=2) as running:
        running.decode[0].engine.convicts = (3,)
        statuses = [running.http.post("/generate", json=GREEDY).status_code for _ in range(8)]
        assert sorted(statuses) == [200] * 6 + [500] * 2
        shown = running.http.get("/workers").json()["workers"]
        assert [each["circuit"] for each in shown] == ["open", "closed"]
        text = running.http.get("/metrics").text
        assert re.search(rf'serinus:router_circuit_open{{[^}}]*to="{shown[0]["url"]}"}} 1.0', text)


@pytest.mark.slow
def test_requests_that_reach_their_deadline_say_nothing_of_the_engine(route: Any) -> None:
    with route(1, 0, cb_failure_threshold=2) as running:
        running.decode[0].engine.refuse, running.decode[0].engine.refuse_status = "too late", 504
        assert [running.http.post("/generate", json=GREEDY).status_code for _ in range(3)] == [504] * 3
        assert [each["circuit"] for each in running.http.get("/workers").json()["workers"]] == ["closed"]


@pytest.mark.slow
def test_no_more_engines_are_tried_than_the_operator_allows() -> None:
    urls = tuple(f"http://127.0.0.1:{port}" for port in range(1, 5))
    app = create_router_app(RouterSettings(decode_urls=urls, poll_s=1000.0, retry_max_retries=1))
    with serving(app) as server, httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=60) as http:
        members = app.state.router.fleet.members
        end = CLOCK.now() + 60
        while any(member.why == "not looked at yet" for member in members):
            assert CLOCK.now() < end
            http.get("/server_info")
        for member in members:
            member.alive = True  # as where they went since the last look
        answer = http.post("/generate", json=GREEDY)
        assert (answer.status_code, "front: 2 tries of this request failed" in answer.text) == (503, True)
        assert sum(member.alive for member in members) == 2
        assert re.search(r"serinus:router_retries_total{[^}]*} 1.0", http.get("/metrics").text)


# ---- models -------------------------------------------------------------------------------------------------------


def test_requests_go_to_engines_of_the_model_that_they_name() -> None:
    some = fleet(urls=("http://a:1", "x=http://b:1"))
    some.decode[0].info, some.decode[1].info = {"served_model_name": "a"}, {"served_model_name": "b"}
    assert some.models == ["a", "x"]
    assert [some.model_of(b'{"model": "%s"}' % name) for name in (b"a", b"x")] == ["a", "x"]
    assert some.pick_decode(b"", model="x").url == "http://b:1"
    with pytest.raises(UnknownModel, match="got 'b', expected one of a, x"):
        some.model_of(b'{"model": "b"}')
    with pytest.raises(BadRequest, match="model: got None, expected one of a, x"):
        some.model_of(b'{"input_ids": [1]}')
    assert some.model_of(b"no JSON") == "a", "an engine says what is wrong with it"
    some.lost(some.decode[1], "it died")
    with pytest.raises(NoEngineAlive, match="no decode engine of x is alive"):
        some.pick_decode(b"", model="x")


def test_one_model_alone_is_not_looked_for_in_bodies() -> None:
    some = fleet()
    for member in some.decode:
        member.info = {"served_model_name": "a"}
    assert some.model_of(b'{"model": "whatever"}') == ""


@pytest.mark.slow
def test_a_router_before_two_models_lists_both_and_sends_each_request_where_its_model_is(route: Any) -> None:
    with route(2, 0, models=("first", "second")) as running:
        listed = running.http.get("/v1/models").json()
        assert (listed["object"], [each["id"] for each in listed["data"]]) == ("list", ["first", "second"])
        assert running.http.get("/v1/models/second").json()["id"] == "second"
        assert "expected one of first, second" in running.http.get("/v1/models/third").json()["error"]["message"]
        for name, front in zip(("first", "second"), running.decode, strict=True):
            for _ in range(2):
                answer = running.http.post("/v1/completions", json={"model": name, "prompt": "x", "max_tokens": 2})
                assert (answer.status_code, answer.json()["model"]) == (200, name)
            assert len(front.engine.of(Generate)) == 2
        lost = running.http.post("/v1/completions", json={"model": "third", "prompt": "x"})
        assert lost.status_code == 404
        assert running.http.post("/generate", json=GREEDY).status_code == 400
        assert running.http.post("/generate", json={**GREEDY, "model": "second"}).json()["output_ids"] == EXPECTED


# ---- engines come and go --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_engine_is_drained_and_comes_back_at_run_time(route: Any) -> None:
    admin = {"authorization": "Bearer a"}
    with route(2, 0, keys={"admin_api_key": "a"}, stall=(True, True), policy="round_robin") as running:
        running.http.headers.update(admin)
        box: list[httpx.Response] = []
        url = f"{running.http.base_url}/generate"
        thread = threading.Thread(target=lambda: box.append(httpx.post(url, json=GREEDY, timeout=60)))
        thread.start()
        running.until(lambda: any(front.engine.of(Generate) for front in running.decode))
        has = next(front for front in running.decode if front.engine.of(Generate))
        other = next(front for front in running.decode if front is not has)
        other.engine.let_go()
        drained = running.http.delete("/workers", params={"url": has.url})
        assert (drained.status_code, drained.json()["draining"], drained.json()["open_requests"]) == (202, True, 1)
        for _ in range(3):
            assert running.http.post("/generate", json=GREEDY).json()["output_ids"] == EXPECTED
        assert len(has.engine.of(Generate)) == 1
        has.engine.let_go()
        thread.join(60)
        assert box[0].json()["output_ids"] == EXPECTED, "what it had goes to its end"
        running.until(lambda: len(running.router.fleet.members) == 1)
        assert has.url not in running.http.get("/metrics").text.partition("router_engine_up")[2]
        body = {"url": has.url, "worker_type": "regular"}
        assert running.http.post("/workers", json=body).status_code == 202
        running.until(lambda: running.alive() == [True, True])
        for _ in range(2):
            assert running.http.post("/generate", json=GREEDY).status_code == 200
        assert len(has.engine.of(Generate)) == 2
        shown = running.http.get("/workers").json()["workers"]
        assert [(each["url"], each["is_healthy"], each["model_id"]) for each in shown] == [
            (front.url, True, "canary") for front in (other, has)
        ]


@pytest.mark.slow
def test_the_last_engine_may_be_drained_and_called_back_before_it_has_left(route: Any) -> None:
    with route(1, 0, keys={"api_key": "k"}, stall=(True,)) as running:
        running.http.headers.update({"authorization": "Bearer k"})
        thread = threading.Thread(target=lambda: running.http.post("/generate", json=GREEDY))
        thread.start()
        (front,) = running.decode
        front.engine.wait_for(lambda engine: bool(engine.of(Generate)))
        with httpx.Client(base_url=running.http.base_url, headers=running.http.headers, timeout=60) as http:
            assert http.delete("/workers", params={"url": front.url}).status_code == 202
            refused = http.post("/generate", json=GREEDY)
            assert (refused.status_code, "expected one of 0" in refused.text) == (503, True)
            assert http.post("/workers", json={"url": front.url}).json()["draining"] is False
            front.engine.let_go()
            assert http.post("/generate", json=GREEDY).status_code == 200
        thread.join(60)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "query", "body", "status", "said"),
    [
        ("POST", "", {"url": "a:1"}, 400, "url: got 'a:1', expected http://host:port"),
        ("POST", "", {"url": "http://"}, 400, "url: got 'http://', expected http://host:port"),
        ("POST", "", {"url": "http://a:99999999"}, 400, "url: got 'http://a:99999999', expected"),
        ("POST", "", {"url": "http://a..b:1"}, 400, "url: got 'http://a..b:1', expected"),
        ("POST", "", {"url": "http://a:1", "worker_type": "encode"}, 400, "expected one of decode, regular"),
        ("POST", "", {"uri": "http://a:1"}, 400, "uri"),
        ("DELETE", "?url=http://nobody:1", None, 404, "got 'http://nobody:1', expected one of http://127.0.0.1"),
    ],
)
def test_wrong_orders_are_refused(route: Any, method: str, query: str, body: Any, status: int, said: str) -> None:
    with route(1, 0, keys={"api_key": "k"}) as running:
        running.http.headers.update({"authorization": "Bearer k"})
        answer = running.http.request(method, f"/workers{query}", json=body)
        assert (answer.status_code, said in answer.text) == (status, True), answer.text


@pytest.mark.slow
def test_a_router_that_asks_for_no_key_lets_no_client_change_its_engines(route: Any) -> None:
    with route(1, 0) as running:
        assert running.http.get("/workers").status_code == 200
        answer = running.http.post("/workers", json={"url": "http://evil:1"})
        assert (answer.status_code, "--admin-api-key" in answer.text) == (403, True)
    with route(1, 0, keys={"api_key": "k", "admin_api_key": "a"}) as running:
        user = {"authorization": "Bearer k"}
        assert running.http.post("/workers", json={"url": "http://evil:1"}, headers=user).status_code == 401


# ---- prefill engines, and pauses -----------------------------------------------------------------------------------


def prefills(policy: str = "cache_aware") -> Fleet:
    made = RouterSettings(decode_urls=("http://d:1",), prefill_urls=ABC, policy=policy)
    some = Fleet(made, RouterMetrics(engine="router"), ManualClock())
    for member in some.members:
        member.alive, member.info = True, {"pd_address": "tcp://x:1"}
    return some


def prefill_of(some: Fleet, body: bytes) -> Any:
    chosen = some.pick_prefill(body)
    assert chosen is not None
    return chosen


def test_prompts_that_begin_alike_go_to_one_prefill_engine_unless_too_much_waits_there() -> None:
    some = prefills()
    first = {kind: prefill_of(some, prompt(kind)).url for kind in range(9)}
    assert set(first.values()) == set(ABC)
    assert {kind: prefill_of(some, prompt(kind, "and more")).url for kind in reversed(range(9))} == first
    liked = prefill_of(some, prompt(1))
    liked.waiting_bytes = 64 << 10
    assert prefill_of(some, prompt(1)) is liked
    liked.waiting_bytes += 1
    assert prefill_of(some, prompt(1)) is not liked
    liked.waiting_bytes = 0
    some.lost(liked, "it died")
    liked.alive = True
    assert prefill_of(some, prompt(1)) is not liked, "its cache is empty"


def test_other_policies_hold_for_prefill_engines_too() -> None:
    turns, least = prefills("round_robin"), prefills("least_loaded")
    for some in (turns, least):
        some.prefill[0].waiting_bytes = 1
    assert [prefill_of(turns, prompt(1)).url for _ in range(6)] == [*ABC, *ABC]
    assert {prefill_of(least, prompt(1)).url for _ in range(6)} == set(ABC[1:])


def test_pauses_double_up_to_a_bound_and_a_seed_repeats_their_random_part() -> None:
    pauses = [Backoff(Rng(7), first_s=0.1, most_s=1.0).pause_s(number) for number in range(100)]
    backoff = Backoff(Rng(7), first_s=0.1, most_s=1.0)
    drawn = [backoff.pause_s(number) for number in range(100)]
    assert drawn[0] == pauses[0]
    for number, pause in enumerate(drawn):
        whole = min(1.0, 0.1 * 2**number)
        assert 0.5 * whole <= pause <= whole
    assert len({round(pause, 6) for pause in drawn[10:]}) > 50


@pytest.mark.slow
def test_a_request_that_no_engine_took_goes_to_all_again_after_a_pause(route: Any) -> None:
    with route(2, 0, retry_first_s=0.05, retry_max_retries=40, poll_s=20.0) as running:
        for front in running.decode:
            front.client.drain()  # 503 to what comes; the router does not look meanwhile

        def open_again() -> None:
            running.decode[1].client._draining = False

        threading.Timer(0.3, open_again).start()
        answer = running.http.post("/generate", json=GREEDY)
        assert answer.status_code == 200, answer.text
        assert answer.json()["output_ids"] == EXPECTED


@pytest.mark.slow
def test_tries_end_where_no_engine_ever_takes_the_request(route: Any) -> None:
    with route(2, 0, retry_first_s=0.001, retry_max_retries=6, poll_s=20.0) as running:
        for front in running.decode:
            front.client.drain()
        answer = running.http.post("/generate", json=GREEDY)
        assert answer.status_code == 503
        assert "has no room" in answer.text
        sent = sum(float(line.rsplit(" ", 1)[1]) for line in running.http.get("/metrics").text.splitlines()
                   if line.startswith("serinus:router_requests_total{"))  # fmt: skip
        assert 1 <= sent <= 7  # fewer where the router has seen meanwhile that they drain
