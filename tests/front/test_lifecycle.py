"""Clients that hang up, engines that load, refuse or die, servers that drain: nothing is left behind."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from serinus.core.clock import WallClock
from serinus.front import EngineClient, EngineDown, FrontSettings, create_app
from serinus.front.proofs import proof_of
from serinus.testing.fake_engine import FakeEngine
from serinus.testing.running_front import RunningFront, front_settings, running_front, serving
from serinus.wire.messages import Abort, Generate, Message

pytestmark = pytest.mark.slow

CLOCK = WallClock()
ASK: dict[str, Any] = {"prompt": "hello", "max_tokens": 100, "rid": "one"}


@pytest.fixture
def settings(byte_folder: Path) -> FrontSettings:
    return front_settings(model_path=str(byte_folder), served_model_name="canary")


def aborts(engine: FakeEngine) -> list[Abort]:
    return [message for message in engine.received if isinstance(message, Abort)]


def seen(kind: type[Message], count: int = 1) -> Callable[[FakeEngine], bool]:
    return lambda engine: len(engine.of(kind)) >= count


def stalled(new_endpoint: Callable[[], str]) -> FakeEngine:
    return FakeEngine(endpoint=new_endpoint(), vocab_size=267, stall=True)


def in_thread(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Run `work` aside; its result, or the error it raised, arrives in the list."""
    box: list[Any] = []

    def run() -> None:
        try:
            box.append(work())
        except httpx.HTTPError as err:
            box.append(err)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, box


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_hangs_up_before_the_first_token_aborts_its_request(
    settings: FrontSettings, new_endpoint: Callable[[], str], stream: bool
) -> None:
    with running_front(settings, stalled(new_endpoint)) as front:
        body = json.dumps({**ASK, "stream": stream, "n": 2}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()

        async def ask_and_leave() -> None:
            _, writer = await asyncio.open_connection("127.0.0.1", front.server.port)
            writer.write(head + body)
            await asyncio.to_thread(front.engine.wait_for, seen(Generate, 2))
            writer.close()
            await writer.wait_closed()

        asyncio.run(ask_and_leave())
        front.engine.wait_for(lambda engine: not engine.running)
        assert {(abort.rid, abort.silent) for abort in aborts(front.engine)} == {("one-0", True), ("one-1", True)}
        front.engine.let_go()
        assert front.post("/v1/completions", {**ASK, "max_tokens": 2}).status_code == 200
        assert 'status="499"' in front.http.get("/metrics").text


def test_a_client_that_leaves_in_the_middle_of_a_stream_aborts_its_request(
    settings: FrontSettings, new_endpoint: Callable[[], str]
) -> None:
    engine = FakeEngine(endpoint=new_endpoint(), vocab_size=267, context_length=100_000, step_s=0.01)
    with running_front(settings, engine) as front:
        body = {**ASK, "max_tokens": 90_000, "stream": True}
        with front.http.stream("POST", "/v1/completions", json=body) as response:
            assert next(response.iter_lines()).startswith("data: ")
        front.engine.wait_for(lambda engine: not engine.running)
        assert [abort.rid for abort in aborts(front.engine)] == ["one"]


def test_a_request_can_be_aborted_by_its_id(settings: FrontSettings, new_endpoint: Callable[[], str]) -> None:
    with running_front(settings, stalled(new_endpoint)) as front:
        thread, box = in_thread(lambda: front.post("/v1/completions", {**ASK, "n": 2}))
        front.engine.wait_for(seen(Generate, 2))
        with httpx.Client(base_url=front.url) as other:
            assert other.post("/abort_request", json={"rid": "unknown"}).json() == {"aborted": 0}
            assert other.post("/abort_request", json={"rid": "one"}).json() == {"aborted": 2}
        thread.join(60)
        choices = box[0].json()["choices"]
        assert [choice["finish_reason"] for choice in choices] == ["abort", "abort"]
        assert not front.engine.running


def test_all_requests_can_be_aborted(settings: FrontSettings, new_endpoint: Callable[[], str]) -> None:
    with running_front(settings, stalled(new_endpoint)) as front:
        body = {"text": "x", "sampling_params": {"max_new_tokens": 9}}
        thread, box = in_thread(lambda: front.post("/generate", body))
        front.engine.wait_for(seen(Generate))
        with httpx.Client(base_url=front.url) as other:
            assert other.post("/abort_request?abort_all=true").json() == {"aborted": 1}
            assert other.post("/abort_request", json={}).status_code == 400
        thread.join(60)
        reason = box[0].json()["meta_info"]["finish_reason"]
        assert (reason["type"], reason["message"]) == ("abort", "aborted by /abort_request")


def test_two_requests_cannot_have_one_id(settings: FrontSettings, new_endpoint: Callable[[], str]) -> None:
    with running_front(settings, stalled(new_endpoint)) as front:
        thread, box = in_thread(lambda: front.post("/v1/completions", ASK))
        front.engine.wait_for(seen(Generate))
        with httpx.Client(base_url=front.url) as other:
            response = other.post("/v1/completions", json=ASK)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "rid")
        front.engine.let_go()
        thread.join(60)
        assert box[0].status_code == 200


@pytest.mark.parametrize("stream", [True, False])
def test_what_the_engine_refuses_is_a_4xx_also_for_streams(
    settings: FrontSettings, new_endpoint: Callable[[], str], stream: bool
) -> None:
    engine = FakeEngine(endpoint=new_endpoint(), vocab_size=267, refuse="sched: the prompt needs 9 pages, expected 8")
    with running_front(settings, engine) as front:
        response = front.post("/v1/completions", {**ASK, "stream": stream, "n": 3})
        assert response.status_code == 400
        assert response.json()["error"]["message"] == "sched: the prompt needs 9 pages, expected 8"
        assert front.client.open_count == 0


def test_until_the_engine_is_loaded_requests_get_503(settings: FrontSettings, new_endpoint: Callable[[], str]) -> None:
    client = EngineClient(new_endpoint())
    with serving(create_app(settings, client)) as server, httpx.Client(base_url=f"http://127.0.0.1:{server.port}") as h:
        for method, path in (("GET", "/health"), ("GET", "/server_info"), ("POST", "/v1/completions")):
            response = h.request(method, path, json=ASK if method == "POST" else None)
            assert response.status_code == 503, path
            assert "loading" in response.json()["error"]["message"]
        assert h.get("/metrics").status_code == 200


def test_when_the_engine_dies_all_clients_are_told(settings: FrontSettings, new_endpoint: Callable[[], str]) -> None:
    with running_front(settings, stalled(new_endpoint)) as front:
        thread, box = in_thread(lambda: front.post("/v1/completions", ASK))
        front.engine.wait_for(seen(Generate))
        front.client.engine_gone("the engine fake-0 died of SIGKILL")
        thread.join(60)
        assert box[0].status_code == 503
        assert "SIGKILL" in box[0].json()["error"]["message"]
        assert front.http.get("/health").status_code == 503
        assert front.post("/generate", {"text": "x"}).status_code == 503
        assert front.http.get("/metrics").status_code == 200


def test_an_engine_that_says_that_it_broke_is_gone(settings: FrontSettings, new_endpoint: Callable[[], str]) -> None:
    engine = FakeEngine(endpoint=new_endpoint(), vocab_size=267, breaks="the engine stopped: ValueError: broken")
    with running_front(settings, engine) as front:
        under_way, later = front.post("/v1/completions", ASK), front.post("/v1/completions", ASK)
        for answer in (under_way, later):
            assert (answer.status_code, "ValueError" in answer.json()["error"]["message"]) == (503, True)
        assert "x-serinus-broke" in under_way.headers
        assert "x-serinus-broke" not in later.headers, "the engine never had it"


def test_health_says_that_the_engine_is_degraded_and_requests_are_still_answered(
    byte_folder: Path, new_endpoint: Callable[[], str]
) -> None:
    engine = FakeEngine(endpoint=new_endpoint(), vocab_size=267, degraded="9 KV pages failed twice")
    with running_front(front_settings(model_path=str(byte_folder), watchdog_s_max=0.0), engine) as front:
        end = CLOCK.now() + 60
        while (answer := front.http.get("/health")).status_code != 503:
            assert CLOCK.now() < end
        assert "degraded, requests are still answered: 9 KV pages failed twice" in answer.json()["error"]["message"]
        assert front.post("/v1/completions", ASK).status_code == 200
        assert front.http.get("/server_info").json()["degraded"] == "9 KV pages failed twice"


def test_health_says_that_the_engine_stands_still_and_when_it_goes_on(
    byte_folder: Path, new_endpoint: Callable[[], str]
) -> None:
    def ask_until(status: int) -> httpx.Response:
        end = CLOCK.now() + 60
        while (answer := front.http.get("/health")).status_code != status:
            assert CLOCK.now() < end, f"/health is {answer.status_code}, never {status}"
        return answer

    engine = FakeEngine(endpoint=new_endpoint(), vocab_size=267, mute=True)
    stuck: list[str] = []
    with running_front(
        front_settings(model_path=str(byte_folder), watchdog_s_max=0.25), engine, on_stuck=stuck.append
    ) as front:
        answers = [ask_until(503), front.http.get("/server_info"), front.post("/v1/completions", ASK)]
        assert [answer.status_code for answer in answers] == [503] * 3
        assert all("has not ended its step" in answer.json()["error"]["message"] for answer in answers)
        end = CLOCK.now() + 60
        while not stuck:
            assert CLOCK.now() < end
            front.http.get("/health")
        assert stuck == ["stood in one step for 0.25 s (--watchdog-timeout)"]
        engine.mute = False
        ask_until(200)
        end = CLOCK.now() + 60
        while front.post("/v1/completions", ASK).status_code != 200:  # on a busy machine it may be late again
            assert CLOCK.now() < end


def test_a_stream_whose_engine_dies_ends_with_an_error_event(
    settings: FrontSettings, new_endpoint: Callable[[], str]
) -> None:
    engine = FakeEngine(endpoint=new_endpoint(), vocab_size=267, context_length=100_000, max_total_tokens=200_000)
    with running_front(settings, engine) as front:
        lines: list[str] = []
        with front.http.stream(
            "POST", "/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}], "stream": True}
        ) as response:
            rows = (line for line in response.iter_lines() if line)
            lines.append(next(rows))
            front.client.engine_gone("gone")
            lines.extend(rows)
        assert lines[-1] == "data: [DONE]"
        assert json.loads(lines[-2].removeprefix("data: "))["error"]["code"] == "service_unavailable"


def test_a_frame_that_cannot_be_read_fails_the_open_answers_and_is_counted(
    settings: FrontSettings, new_endpoint: Callable[[], str], caplog: pytest.LogCaptureFixture
) -> None:
    with running_front(settings, stalled(new_endpoint)) as front, caplog.at_level("WARNING", logger="serinus"):
        thread, box = in_thread(lambda: front.post("/v1/completions", ASK))
        front.engine.wait_for(seen(Generate))
        front.engine.garble = True
        front.engine.let_go()
        thread.join(60)
        assert box[0].status_code == 500
        assert "could not be read" in box[0].json()["error"]["message"]
        assert any("dropped a frame of the engine" in record.getMessage() for record in caplog.records)
        front.engine.wait_for(lambda engine: not engine.running)
        front.engine.garble = False
        assert front.post("/v1/completions", {**ASK, "max_tokens": 2}).status_code == 200
        assert (
            'serinus:wire_bad_frames_total{engine="engine-0",rank="front",reason="crc"'
            in front.http.get("/metrics").text
        )


def test_a_draining_front_ends_what_runs_and_takes_nothing_new(
    settings: FrontSettings, new_endpoint: Callable[[], str]
) -> None:
    with running_front(settings, stalled(new_endpoint)) as front:
        thread, box = in_thread(lambda: front.post("/v1/completions", {**ASK, "max_tokens": 3}))
        front.engine.wait_for(seen(Generate))
        with httpx.Client(base_url=front.url) as other:
            assert other.get("/server_info").json()["draining"] is False
            front.client.drain()
            assert other.get("/health").status_code == 503
            response = other.post("/v1/completions", json={**ASK, "rid": "two"})
            assert response.status_code == 503
            assert "draining" in response.json()["error"]["message"]
        front.server.stop()
        assert front.client.draining
        front.engine.let_go()
        thread.join(60)
        assert box[0].status_code == 200
        assert box[0].json()["usage"]["completion_tokens"] == 3


def test_a_second_stop_does_not_wait(settings: FrontSettings, new_endpoint: Callable[[], str]) -> None:
    with running_front(settings, stalled(new_endpoint)) as front:
        thread, box = in_thread(lambda: front.post("/v1/completions", ASK))
        front.engine.wait_for(seen(Generate))
        front.server.stop()
        front.server.stop()
        thread.join(60)
        assert not thread.is_alive()
        assert isinstance(box[0], httpx.HTTPError) or box[0].status_code >= 500


def test_health_generate_needs_a_token_in_time(byte_folder: Path, new_endpoint: Callable[[], str]) -> None:
    settings = front_settings(model_path=str(byte_folder), health_generate_s_max=0.05)
    with running_front(settings, stalled(new_endpoint)) as front:
        response = front.http.get("/health_generate")
        assert response.status_code == 503
        front.engine.wait_for(lambda engine: not engine.running)
        front.engine.let_go()
        front.engine.wait_for(lambda engine: not engine.stall)
    with running_front(front_settings(model_path=str(byte_folder)), FakeEngine(endpoint=new_endpoint())) as front:
        assert front.http.get("/health_generate").status_code == 200


def test_a_tokenizer_that_does_not_load_is_reported(tmp_path: Path, new_endpoint: Callable[[], str]) -> None:
    failed: list[str] = []
    told = threading.Event()

    def on_failed(reason: str) -> None:
        failed.append(reason)
        told.set()

    with FakeEngine(endpoint=new_endpoint()) as engine:
        app = create_app(
            front_settings(model_path=str(tmp_path / "none")), EngineClient(engine.endpoint), on_failed=on_failed
        )
        with serving(app):
            assert told.wait(60)
    assert "is no directory" in failed[0]


def test_a_server_without_a_tokenizer_takes_and_gives_ids(new_endpoint: Callable[[], str]) -> None:
    settings = front_settings(model_path="toy", skip_tokenizer_init=True)
    with running_front(settings, FakeEngine(endpoint=new_endpoint(), vocab_size=100)) as front:
        answer = front.post("/generate", {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 4}}).json()
        assert (answer["text"], len(answer["output_ids"])) == ("", 4)
        assert front.post("/v1/completions", {"prompt": [1, 2], "max_tokens": 2}).status_code == 200
        for path, body in (
            ("/generate", {"text": "x"}),
            ("/v1/completions", {"prompt": "x"}),
            ("/v1/completions", {"prompt": [1], "stop": "x"}),
            ("/v1/completions", {"prompt": [1], "echo": True}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
            ("/tokenize", {"prompt": "x"}),
        ):
            response = front.post(path, body)
            assert response.status_code == 400, path
            assert "without a tokenizer" in response.json()["error"]["message"]


def test_a_lazy_tokenizer_loads_when_a_text_comes(byte_folder: Path, new_endpoint: Callable[[], str]) -> None:
    settings = front_settings(model_path=str(byte_folder), role="prefill")
    with running_front(settings, FakeEngine(endpoint=new_endpoint(), vocab_size=267)) as front:
        assert front.post("/tokenize", {"prompt": "the"}).json()["count"] == 2


def test_the_suggested_prefill_engine_reaches_the_engine(front: RunningFront) -> None:
    address = "tcp://10.0.0.1:9"
    headers = {"x-serinus-prefill": address, "x-serinus-proof": proof_of(address, ["a router's"])}
    front.post("/v1/completions", {"prompt": "x", "max_tokens": 1}, **headers)
    last = front.engine.of(Generate)[-1]
    assert isinstance(last, Generate)
    assert last.request.prefill_address == address


def test_an_engine_that_is_gone_before_the_start_is_said(new_endpoint: Callable[[], str]) -> None:
    async def start() -> None:
        client = EngineClient(new_endpoint())
        client.engine_gone("died while loading")
        await client.start()

    with pytest.raises(EngineDown, match="died while loading"):
        asyncio.run(start())
