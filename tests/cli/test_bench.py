"""The load generator: prompts that repeat, bytes understood whatever their cuts, numbers computed by hand."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serinus.cli import main
from serinus.cli.bench import (
    DIALECTS,
    Arrival,
    BenchAnswer,
    DatasetSpec,
    Goodput,
    Load,
    Prompt,
    RequestTrace,
    make_prompts,
    make_report,
    read_answer,
    result_block,
)
from serinus.cli.bench.command import run
from serinus.cli.bench.dialect import Asking
from serinus.cli.bench.report import percentile
from serinus.cli.main import COMMANDS
from serinus.core.errors import ConfigError
from tests.cli.stub import chunked, plain, sse, stub_server

BENCH = next(command for command in COMMANDS if command.name == "bench serve")
PROMPT = Prompt(ids=(1, 2, 3), token_count=3, output_tokens=4)


class Words:
    """A tokenizer of words, as a DatasetSpec needs one."""

    def encode(self, text: str) -> list[int]:
        return [int(word[1:]) for word in text.split()]

    def decode(self, ids: list[int]) -> str:
        return " ".join(f"w{i}" for i in ids)


def heard(parts: list[bytes], times: list[float], status: int = 200) -> RequestTrace:
    """A request; the body of its answer came in these parts at these times."""
    arrivals = [Arrival(time=time, data=data) for time, data in zip(times, parts, strict=True)]
    return RequestTrace(sent=10.0, ended=times[-1], status=status, arrivals=arrivals)


def native(count: int, **meta: Any) -> dict[str, Any]:
    return {"text": "x" * count, "meta_info": {"prompt_tokens": 3, "completion_tokens": count, **meta}}


# ---- prompts ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["random", "random-ids", "generated-shared-prefix"])
def test_the_same_seed_gives_the_same_prompts(name: str) -> None:
    spec = DatasetSpec(name=name, count=5, input_tokens=20, group_count=2, group_prompts=3, system_tokens=10, seed=7)
    first = make_prompts(spec, vocab_size=1000, texts=None, as_text=False)
    assert first == make_prompts(spec, vocab_size=1000, texts=None, as_text=False)
    other = DatasetSpec(name=name, count=5, input_tokens=20, group_count=2, group_prompts=3, system_tokens=10, seed=8)
    assert first != make_prompts(other, vocab_size=1000, texts=None, as_text=False)


def test_random_lengths_stay_between_ratio_and_length() -> None:
    spec = DatasetSpec(count=200, input_tokens=100, output_tokens=10, range_ratio=0.5)
    prompts = make_prompts(spec, vocab_size=1000, texts=None, as_text=False)
    assert {len(p.ids) for p in prompts} <= set(range(50, 101))
    assert {p.output_tokens for p in prompts} == set(range(5, 11))
    fixed = make_prompts(
        DatasetSpec(count=9, input_tokens=8, range_ratio=1.0), vocab_size=99, texts=None, as_text=False
    )
    assert {p.token_count for p in fixed} == {8}
    assert all(0 <= i < 99 for p in fixed for i in p.ids)


def test_groups_share_their_system_prompt_and_nothing_else() -> None:
    spec = DatasetSpec(
        name="generated-shared-prefix", group_count=3, group_prompts=4, system_tokens=30, question_tokens=5
    )
    prompts = make_prompts(spec, vocab_size=50_000, texts=None, as_text=False)
    groups: dict[tuple[int, ...], set[tuple[int, ...]]] = {}
    for prompt in prompts:
        groups.setdefault(prompt.ids[:30], set()).add(prompt.ids[30:])
    assert len(prompts) == 12
    assert [len(questions) for questions in groups.values()] == [4, 4, 4]


def test_sharegpt_takes_the_first_two_turns_that_fit(tmp_path: Path) -> None:
    records = [
        {"conversations": [{"value": "w1 w2 w3"}, {"value": "w4 w5 w6 w7"}, {"value": "w8"}]},
        {"conversations": [{"value": "w1"}, {"value": "w2 w3"}]},
        {"conversations": [{"value": "w1 w2"}]},
        {"conversations": [{"value": "w1 " * 1025}, {"value": "w1 w2"}]},
        "no record",
    ]
    file = tmp_path / "share.json"
    file.write_text(json.dumps(records))
    spec = DatasetSpec(name="sharegpt", path=str(file), count=10)
    assert make_prompts(spec, vocab_size=10, texts=Words(), as_text=True) == [
        Prompt(ids=(1, 2, 3), text="w1 w2 w3", token_count=3, output_tokens=4)
    ]


@pytest.mark.parametrize(
    ("spec", "texts", "as_text", "complaint"),
    [
        (DatasetSpec(name="mooncake"), None, False, "--dataset-name is 'mooncake'"),
        (DatasetSpec(name="sharegpt", path="none.json"), Words(), True, "none.json"),
        (DatasetSpec(name="sharegpt"), Words(), True, "needs a file"),
        (DatasetSpec(name="sharegpt", path="x"), None, False, "needs a tokenizer"),
        (DatasetSpec(), None, True, "expected --tokenizer"),
    ],
)
def test_a_dataset_that_cannot_be_made_is_refused(
    spec: DatasetSpec, texts: Words | None, as_text: bool, complaint: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        make_prompts(spec, vocab_size=10, texts=texts, as_text=as_text)
    assert complaint in str(raised.value)


def test_texts_are_as_long_as_the_tokenizer_says() -> None:
    spec = DatasetSpec(count=3, input_tokens=6, range_ratio=1.0)
    for prompt in make_prompts(spec, vocab_size=1000, texts=Words(), as_text=True):
        assert prompt.text is not None
        assert len(Words().encode(prompt.text)) == prompt.token_count == 6


def test_arrivals_are_a_seeded_poisson_process() -> None:
    starts = Load(request_rate=10.0, seed=3).starts(4000)
    assert starts == Load(request_rate=10.0, seed=3).starts(4000)
    assert starts[0] == 0.0
    assert starts == sorted(starts)
    assert starts[-1] == pytest.approx(400, rel=0.1)
    assert Load().starts(3) == [0.0, 0.0, 0.0]


# ---- answers ----------------------------------------------------------------------------------------------------


@given(st.integers(1, 6), st.data())
def test_a_streamed_body_is_understood_however_it_is_cut(count: int, data: st.DataObject) -> None:
    events = sse([native(n + 1) for n in range(count)])
    whole = b"".join(events)
    cuts = sorted(data.draw(st.sets(st.integers(1, len(whole) - 1), max_size=10)))
    pieces = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    answer = read_answer(PROMPT, heard(pieces, [11.0 + i for i in range(len(pieces))]), native=True)
    assert (answer.error, answer.output_tokens, answer.text) == ("", count, "x" * count)
    ends, place = [], 0
    for event in events[:-1]:
        place += len(event)
        ends.append(1.0 + sum(cut < place for cut in cuts))  # the piece that holds the event's last byte
    assert answer.first == ends[0]
    assert answer.gaps == [later - earlier for earlier, later in pairwise(ends)]


def test_native_events_give_first_token_gaps_and_cached_tokens() -> None:
    events = [native(1), native(2), native(4, cached_tokens=2, cached_tokens_details={"device": 2})]
    answer = read_answer(PROMPT, heard(sse(events), [11.0, 11.5, 12.5, 12.6]), native=True)
    assert answer.error == ""
    assert answer.first == pytest.approx(1.0)
    assert answer.gaps == pytest.approx([0.5, 0.5, 0.5])
    assert (answer.output_tokens, answer.prompt_tokens, answer.text, answer.cached) == (4, 3, "xxxx", {"device": 2})
    assert answer.latency == pytest.approx(2.6)
    assert answer.per_token == pytest.approx(1.6 / 3)


def test_openai_streams_count_tokens_by_usage() -> None:
    events = [
        {"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]},
        {"choices": [{"delta": {"content": "a"}, "finish_reason": None}]},
        {"choices": [{"delta": {"content": "bc"}, "finish_reason": "length"}]},
        {
            "choices": [],
            "usage": {"prompt_tokens": 9, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 8}},
        },
    ]
    answer = read_answer(PROMPT, heard(sse(events), [10.2, 11.0, 11.4, 11.5, 11.5]), native=False)
    assert (answer.text, answer.output_tokens, answer.prompt_tokens, answer.cached) == ("abc", 3, 9, {"device": 8})
    assert answer.first == pytest.approx(1.0)
    assert answer.gaps == pytest.approx([0.4])


def test_whole_answers_have_only_a_latency() -> None:
    openai = {"choices": [{"text": "ab"}], "usage": {"prompt_tokens": 3, "completion_tokens": 4}}
    answer = read_answer(PROMPT, heard([json.dumps(openai).encode()], [12.0]), native=False)
    assert (answer.first, answer.latency, answer.output_tokens, answer.gaps) == (2.0, 2.0, 4, [])
    answer = read_answer(PROMPT, heard([json.dumps(native(4)).encode()], [12.0]), native=True)
    assert (answer.first, answer.output_tokens, answer.text) == (2.0, 4, "xxxx")


@pytest.mark.parametrize(
    ("parts", "status", "complaint"),
    [
        ([b'{"error": {"message": "too long"}}'], 400, "HTTP 400: "),
        (sse([{"error": {"message": "engine gone"}}]), 200, "engine gone"),
        ([b"data: {nonsense\n\n"], 200, "cannot be read"),
        (sse([{"unexpected": 1}]), 200, "cannot be read"),
        ([b"data: [DONE]\n\n"], 200, "without tokens"),
    ],
)
def test_an_answer_that_is_none_is_an_error_and_no_number(parts: list[bytes], status: int, complaint: str) -> None:
    answer = read_answer(PROMPT, heard(parts, [11.0] * len(parts), status), native=True)
    assert complaint in answer.error
    report = make_report([answer], 1.0, {})
    assert (report.completed, report.failed, report.output_tokens) == (0, 1, 0)


# ---- numbers ----------------------------------------------------------------------------------------------------


def test_percentiles_lie_between_ranks() -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.5
    assert percentile([1.0, 2.0], 99) == pytest.approx(1.99)
    assert percentile([], 50) == 0.0
    assert percentile([5.0], 99) == 5.0


def answer_of(first: float, gaps: list[float], sent: float = 0.0) -> BenchAnswer:
    return BenchAnswer(
        prompt_tokens=10,
        output_tokens=1 + len(gaps),
        sent=sent,
        latency=first + sum(gaps),
        first=first,
        gaps=gaps,
        cached={"device": 4},
    )


def test_goodput_counts_answers_within_every_limit() -> None:
    quick, slow = answer_of(0.1, [0.01] * 5), answer_of(0.1, [0.1] * 5)
    goodput = Goodput.parse(["ttft:200", "tpot:50"])
    assert make_report([quick, slow], 2.0, {}, goodput).good == 1
    assert make_report([quick, slow], 2.0, {}, Goodput.parse(["ttft:200"])).good == 2
    assert make_report([quick, slow], 2.0, {}, Goodput.parse(["e2el:100"])).good == 0


def test_the_block_is_the_one_that_people_know() -> None:
    report = make_report(
        [answer_of(0.1, [0.01, 0.03]), answer_of(0.3, [0.02, 0.02], sent=1.0)],
        2.0,
        {"backend": "serinus", "request_rate": "inf", "max_concurrency": None},
    )
    expected = """\
============ Serving Benchmark Result ============
Backend:                                 serinus
Traffic request rate:                    inf
Max request concurrency:                 not set
Successful requests:                     2
Benchmark duration (s):                  2.00
Total input tokens:                      20
Total generated tokens:                  6
Request throughput (req/s):              1.00
Input token throughput (tok/s):          10.00
Output token throughput (tok/s):         3.00
Peak output token throughput (tok/s):    3.00
Peak concurrent requests:                1
Total token throughput (tok/s):          13.00
Concurrency:                             0.24
----------------End-to-End Latency----------------
Mean E2E Latency (ms):                   240.00
Median E2E Latency (ms):                 240.00
P90 E2E Latency (ms):                    320.00
P95 E2E Latency (ms):                    330.00
P99 E2E Latency (ms):                    338.00
---------------Time to First Token----------------
Mean TTFT (ms):                          200.00
Median TTFT (ms):                        200.00
P90 TTFT (ms):                           280.00
P95 TTFT (ms):                           290.00
P99 TTFT (ms):                           298.00
-----Time per Output Token (excl. 1st token)------
Mean TPOT (ms):                          20.00
Median TPOT (ms):                        20.00
P90 TPOT (ms):                           20.00
P95 TPOT (ms):                           20.00
P99 TPOT (ms):                           20.00
---------------Inter-Token Latency----------------
Mean ITL (ms):                           20.00
Median ITL (ms):                         20.00
P90 ITL (ms):                            27.00
P95 ITL (ms):                            28.50
P99 ITL (ms):                            29.70
Max ITL (ms):                            30.00
----------------Cache Hit Details-----------------
Cached tokens:                           8
Cache hit rate (%):                      40.00
Device cached tokens:                    8
=================================================="""
    assert result_block(report) == expected


def test_a_native_request_asks_for_ids_and_an_openai_one_for_its_model() -> None:
    asking = Asking(model="m", extra={"top_k": 1})
    body = json.loads(DIALECTS["sglang"].body(PROMPT, asking))
    assert body["input_ids"] == [1, 2, 3]
    assert body["sampling_params"] == {"max_new_tokens": 4, "temperature": 0.0, "ignore_eos": True}
    assert (body["stream"], body["top_k"]) == (True, 1)
    body = json.loads(DIALECTS["openai"].body(PROMPT, asking))
    assert (body["model"], body["prompt"], body["max_tokens"]) == ("m", [1, 2, 3], 4)
    assert body["stream_options"] == {"include_usage": True}
    with pytest.raises(ConfigError, match="takes texts only"):
        DIALECTS["openai-chat"].body(PROMPT, asking)


# ---- the whole command ------------------------------------------------------------------------------------------


def bench_against(answers: Any, *words: str) -> tuple[int, Any]:
    """Run `serinus bench serve WORDS` against a stub; exit code and what the stub was asked."""

    async def both() -> tuple[int, Any]:
        async with stub_server(answers) as (port, asked):
            code = await asyncio.to_thread(run, BENCH, ["--port", str(port), *words])
            return code, asked

    return asyncio.run(both())


def healthy(path: str, body: Any) -> list[bytes]:
    if path == "/v1/models":
        return plain({"data": [{"id": "m"}]})
    if path == "/server_info":
        return plain({"vocab_size": 1000, "model_path": "nowhere"})
    if path == "/flush_cache":
        return plain({})
    if path == "/generate":
        return chunked(sse([native(n + 1) for n in range(body["sampling_params"]["max_new_tokens"])]))
    return plain({"error": path}, 404)


def test_a_run_writes_the_block_and_a_line_of_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "runs.jsonl"
    words = ("--num-prompts", "6", "--random-input-len", "8", "--random-output-len", "5", "--random-range-ratio", "1")
    code, asked = bench_against(
        healthy, *words, "--max-concurrency", "2", "--flush-cache", "--output-file", str(file), "--output-details"
    )
    assert code == 0
    out = capsys.readouterr().out
    assert "Successful requests:                     6\n" in out
    assert "Total generated tokens:                  30\n" in out
    assert len(asked.bodies("/generate")) == 7  # one of them warms up
    assert len(asked.bodies("/flush_cache")) == 1
    (line,) = [json.loads(text) for text in file.read_text().splitlines()]
    assert (line["completed"], line["total_input_tokens"], line["total_output_tokens"]) == (6, 18, 30)
    assert line["output_lens"] == [5] * 6
    assert line["max_concurrent_requests"] <= 2
    assert line["p99_ttft_ms"] >= line["median_ttft_ms"] > 0


def test_failed_requests_are_counted_and_told(capsys: pytest.CaptureFixture[str]) -> None:
    def refusing(path: str, body: Any) -> list[bytes]:
        return plain({"error": {"message": "no room"}}, 503) if path == "/generate" else healthy(path, body)

    code, _ = bench_against(refusing, "--num-prompts", "3", "--random-input-len", "4", "--warmup-requests", "0")
    out = capsys.readouterr().out
    assert code == 1
    assert "Failed requests:                         3" in out
    assert "failed (3x): HTTP 503" in out


def test_a_warm_up_that_fails_ends_the_run_in_words() -> None:
    def refusing(path: str, body: Any) -> list[bytes]:
        return plain({"error": {"message": "no room"}}, 503) if path == "/generate" else healthy(path, body)

    with pytest.raises(ConfigError, match="the warm-up request failed: HTTP 503"):
        bench_against(refusing, "--num-prompts", "3", "--random-input-len", "4")


def test_a_connection_that_breaks_midway_is_a_failed_request(capsys: pytest.CaptureFixture[str]) -> None:
    def breaking(path: str, body: Any) -> list[bytes]:
        answer = healthy(path, body)
        return answer[:3] if path == "/generate" else answer

    code, _ = bench_against(breaking, "--num-prompts", "2", "--random-input-len", "4", "--warmup-requests", "0")
    assert code == 1
    assert "closed the connection before its answer was whole" in capsys.readouterr().out


def test_without_a_server_the_reason_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "--port", "1", "--num-prompts", "1"]) == 2
    assert "no answer at http://127.0.0.1:1" in capsys.readouterr().err


def test_the_key_is_sent(capsys: pytest.CaptureFixture[str]) -> None:
    _, asked = bench_against(healthy, "--num-prompts", "1", "--random-input-len", "4", "--api-key", "secret")
    assert all("authorization: Bearer secret" in head for _, head, _ in asked.requests)
    assert asked.requests
