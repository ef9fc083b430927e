"""One request, one trace: from the client through the router and the decode engine, and over the wire to prefill.

Three real processes send their spans to a receiver of OTLP over HTTP, which stands here. Their logs are JSON.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from serinus.testing.servers import Server

from .cluster import HTTP, generate
from .conftest import HANDS_OVER, small
from .otlp import Receiver

pytestmark = pytest.mark.slow
TRACE, CLIENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PROMPT = [5 + i * 7 % 300 for i in range(200)]


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    with Receiver() as made:
        yield made


@pytest.fixture(scope="module")
def traced(checkpoint: Path, receiver: Receiver) -> Iterator[Server]:
    """Router, decode and prefill, which send their spans every 0.2 s."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")
        words = ("--otlp-traces-endpoint", receiver.url, "--log-format", "json")
        with Server(
            "up",
            str(checkpoint),
            "--prefill",
            "1",
            "--decode",
            "1",
            *words,
            *HANDS_OVER,
            *small(),
            ready=r'ready to roll.*"rank": "up"',
        ) as server:
            yield server


def names(spans: list[dict[str, Any]]) -> set[tuple[str, str]]:
    return {(span["service"], span["name"]) for span in spans}


def test_one_trace_goes_through_router_decode_and_prefill(traced: Server, receiver: Receiver) -> None:
    body = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    answer = HTTP.post(f"{traced.url}/v1/completions", json=body, headers={"traceparent": f"00-{TRACE}-{CLIENT}-01"})
    assert answer.status_code == 200, answer.text
    wanted = {("serinus-router", "POST /v1/completions"), ("serinus-decode", "POST /v1/completions")}
    wanted |= {("serinus-decode", name) for name in ("queue", "handoff", "handoff.grant", "handoff.pieces")}
    wanted |= {("serinus-decode", "handoff.verify"), ("serinus-decode", "decode")}
    wanted |= {("serinus-prefill", name) for name in ("queue", "prefill", "handoff", "handoff.grant")}
    receiver.wait(lambda: wanted <= names(receiver.of(TRACE)), f"some of {wanted}")
    spans = {(span["service"], span["name"]): span for span in receiver.of(TRACE)}
    router, front = (spans[f"serinus-{role}", "POST /v1/completions"] for role in ("router", "decode"))
    assert router["parent"] == CLIENT
    assert front["parent"] == router["id"]
    assert spans["serinus-decode", "handoff"]["parent"] == front["id"]
    assert spans["serinus-prefill", "queue"]["parent"] == front["id"]
    handoff = spans["serinus-decode", "handoff"]
    for name in ("grant", "pieces", "verify"):
        assert spans["serinus-decode", f"handoff.{name}"]["parent"] == handoff["id"]
    for span in receiver.of(TRACE):  # what prefill and the front have to tidy up may end after the answer
        assert router["start"] - 0.01 <= span["start"] <= min(span["end"], router["end"] + 0.01), (span, router)
    assert spans["serinus-decode", "decode"]["end"] <= router["end"] + 0.01
    chunks = [span for span in receiver.of(TRACE) if span["name"] == "prefill"]
    assert sum(span["values"]["serinus.tokens"] for span in chunks) == len(PROMPT)
    assert len(chunks) >= 4, "chunks of 64 tokens"
    values = front["values"]
    assert values["gen_ai.usage.input_tokens"] == values["gen_ai.usage.prompt_tokens"] == len(PROMPT)
    assert values["gen_ai.usage.output_tokens"] == 6
    assert values["gen_ai.operation.name"] == "text_completion"
    assert values["gen_ai.request.model"]
    assert 0 < values["gen_ai.latency.time_to_first_token"] < values["gen_ai.latency.e2e"]
    assert handoff["values"]["serinus.prefill_engine"] == "prefill-0"
    assert handoff["values"]["serinus.pages"] == len(PROMPT) // 8


def test_what_is_not_sampled_is_not_sent_and_what_has_no_trace_begins_one(traced: Server, receiver: Receiver) -> None:
    trace = "1" * 32
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 2, "temperature": 0}}
    HTTP.post(f"{traced.url}/generate", json=body, headers={"traceparent": f"00-{trace}-{CLIENT}-00"})
    before = {span["trace"] for span in receiver.spans}
    generate(traced.url, PROMPT[:20], 3)
    receiver.wait(lambda: len({span["trace"] for span in receiver.spans} - before) == 1, "the trace of the second")
    assert not receiver.of(trace)


def test_a_client_that_leaves_is_an_abort_in_its_trace(traced: Server, receiver: Receiver) -> None:
    trace = "2" * 32
    body = {"prompt": PROMPT[:40], "max_tokens": 400, "temperature": 0, "ignore_eos": True, "stream": True}
    headers = {"traceparent": f"00-{trace}-{CLIENT}-01"}
    with HTTP.stream("POST", f"{traced.url}/v1/completions", json=body, headers=headers) as answer:
        next(answer.iter_lines())
    receiver.wait(lambda: ("serinus-decode", "abort") in names(receiver.of(trace)), "an abort")
    (abort,) = (span for span in receiver.of(trace) if span["name"] == "abort")
    assert abort["error"]


def test_every_line_of_the_log_is_an_object_that_names_its_process(traced: Server) -> None:
    lines = [json.loads(line) for line in traced.output.splitlines()]
    assert all({"ts", "level", "logger", "message"} <= line.keys() for line in lines)
    assert {"prefill-0", "decode-0"} <= {line.get("engine") for line in lines}
    (asked,) = (line for line in lines if line.get("trace_id") == TRACE and line.get("engine") == "decode-0")
    assert (asked["path"], asked["status"], asked["method"]) == ("/v1/completions", 200, "POST")
    assert {line.get("engine") for line in lines if line.get("trace_id") == TRACE} == {"decode-0", None}, (
        "and the router"
    )
    steps = [line for line in lines if line["message"].startswith("Prefill batch")]
    assert all(line["new_tokens"] > 0 for line in steps)
    assert steps
