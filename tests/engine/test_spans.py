"""What engines record of traced requests: plain data, with the times of their turns."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from serinus.core.clock import ManualClock
from serinus.core.config import ServeConfig, from_names
from serinus.core.trace import SPANS_MAX, SpanRecord
from serinus.engine.build import build_engine
from serinus.engine.messages import FrontMessage
from serinus.engine.spans import SpanLog
from serinus.models.small_checkpoints import make_toy
from serinus.selftest import EnginePair
from serinus.selftest.driver import EngineDriver
from serinus.testing.builders import make_request
from serinus.wire.messages import StopEngine

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
PROMPT = list(range(1, 38))
SMALL = {"page_size": 4, "max_total_tokens": 256, "chunked_prefill_size": 16}


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_toy(tmp_path_factory.mktemp("toy"), vocab=64, context=256, tokenizer=False)


def pair(toy: Path, **settings: Any) -> EnginePair:
    return EnginePair(toy, **{"otlp_traces_endpoint": "http://127.0.0.1:4318", **SMALL, **settings})


def traced(rid: str, *, remote: bool = True, tokens: int = 5) -> Any:
    request = make_request(rid, PROMPT, max_new_tokens=tokens, ignore_eos=True)
    return replace(request, traceparent=PARENT, prefill_address="local://prefill" if remote else "")


def taken(driver: EngineDriver) -> list[SpanRecord]:
    """The records that an engine has sent to its front, or would."""
    assert driver.engine.spans is not None
    return [*driver.spans, *driver.engine.spans.take()]


def run(both: EnginePair, request: Any) -> tuple[list[SpanRecord], list[SpanRecord]]:
    """What the decode and the prefill engine record of one request."""
    both.send(request)
    both.run_until_idle()
    return taken(both.decode), taken(both.prefill)


def test_a_request_computed_elsewhere_has_its_spans_on_both_sides(toy: Path) -> None:
    decode, prefill = run(pair(toy), traced("a"))
    assert [record.name for record in decode] == ["handoff", "queue", "decode"]
    assert [record.name for record in prefill] == ["queue", "prefill", "prefill", "prefill", "handoff"]
    assert {record.traceparent for record in (*decode, *prefill)} == {PARENT}
    handoff = decode[0]
    assert [name for name, _, _ in handoff.parts] == ["handoff.grant", "handoff.pieces", "handoff.verify"]
    edges = [time for _, start, end in handoff.parts for time in (start, end)]
    assert edges == sorted(edges)
    assert (edges[0], edges[-1]) == (handoff.start, handoff.end)
    assert handoff.attributes["serinus.pages"] == 10
    assert sum(record.attributes.get("serinus.tokens", 0) for record in prefill) == len(PROMPT)
    for record in (*decode, *prefill):
        assert record.start <= record.end, record
    assert decode[-1].attributes["gen_ai.usage.output_tokens"] == 5


def test_spans_of_what_ends_after_a_signal_to_stop_go_to_the_front_all_the_same(toy: Path) -> None:
    """The signal comes as a message of no front, to which nothing is sent."""
    names = {"model_path": str(toy), "otlp_traces_endpoint": "http://127.0.0.1:4318", "decode_log_interval": 0}
    with closing(build_engine(from_names(ServeConfig, {**names, **SMALL}), ManualClock())) as built:
        messages = [
            FrontMessage(front="front-1", message=traced("a", remote=False)),
            FrontMessage(front="", message=StopEngine(drain=True)),
        ]
        found: list[tuple[str, str]] = []
        while not built.engine.ended:
            output, messages = built.turn(messages), []
            built.line.flush()
            found += [(output.spans_to, record.name) for record in output.spans]
        assert found == [("front-1", name) for name in ("queue", "prefill", "prefill", "prefill", "decode")]


def test_a_request_computed_here_has_chunks_and_no_handoff(toy: Path) -> None:
    names = {"model_path": str(toy), "otlp_traces_endpoint": "http://127.0.0.1:4318", "decode_log_interval": 0}
    config = from_names(ServeConfig, {**names, **SMALL})
    with closing(build_engine(config, ManualClock())) as built:
        driver = EngineDriver(built)
        driver.send(traced("a", remote=False))
        driver.run()
        found = taken(driver)
    assert [record.name for record in found] == ["queue", "prefill", "prefill", "prefill", "decode"]
    assert [record.attributes["serinus.first"] for record in found[1:4]] == [0, 16, 32]


def test_nothing_is_recorded_of_requests_without_a_trace_or_without_an_endpoint(toy: Path) -> None:
    assert run(pair(toy), replace(traced("a"), traceparent="")) == ([], [])
    quiet = pair(toy, otlp_traces_endpoint="")
    quiet.send(traced("a"))
    quiet.run_until_idle()
    assert not quiet.decode.spans
    assert not quiet.decode.engine.spans._traced
    assert not quiet.prefill.engine.spans._traced


def test_an_abort_ends_all_that_was_under_way_on_both_sides(toy: Path) -> None:
    both = pair(toy)
    both.send(traced("a", tokens=100))
    for _ in range(3):
        both.turn_prefill()
        both.turn_decode()
    both.abort("a")
    both.run_until_idle()
    decode, prefill = taken(both.decode), taken(both.prefill)
    assert [record.name for record in decode][-1] == "abort"
    assert decode[-1].error == "test"
    handoffs = [record for record in (*decode, *prefill) if record.name == "handoff"]
    assert handoffs
    assert not both.decode.engine.spans._traced
    assert not both.prefill.engine.spans._traced


def test_records_that_no_front_takes_are_bounded() -> None:
    log = SpanLog()
    for number in range(20 * SPANS_MAX):
        log.begin(traced(str(number)))
        log.failed(str(number), "x" * 5000)
    batches = []
    while batch := log.take():
        batches.append(len(batch))
    assert max(batches) == SPANS_MAX
    assert sum(batches) == 16 * SPANS_MAX
