"""The answer is the same wherever it was computed: transformers, one engine, prefill and decode apart."""

from __future__ import annotations

import json

import jsonschema
import pytest

from serinus.testing.servers import Server

from .cluster import HTTP, Reference, engines, generate, generate_all, handed_over, idle, metric, mixed_prompts, until

pytestmark = pytest.mark.slow
REQUESTS = 64


@pytest.fixture(scope="session")
def load(reference: Reference) -> list[tuple[list[int], int]]:
    return mixed_prompts(REQUESTS, reference.vocab_size, seed=5)


@pytest.fixture(scope="session")
def expected(reference: Reference, load: list[tuple[list[int], int]]) -> list[list[int]]:
    return [reference.greedy(prompt, count) for prompt, count in load]


def own_tokens(load: list[tuple[list[int], int]]) -> list[int]:
    """How many tokens of each prompt no other prompt begins with: no order of events makes them cached."""

    def shared(one: list[int], other: list[int]) -> int:
        return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))

    prompts = [prompt for prompt, _count in load]
    return [len(one) - max(shared(one, other) for other in prompts if other is not one) for one in prompts]


def counts(url: str) -> dict[str, float]:
    """Pages sent and received, and failed handoffs, of all engines behind a router since they started."""
    pages = {way: metric(url, "kv_transfer_pages_total", direction=way) for way in ("sent", "received")}
    return {**pages, "failed": metric(url, "num_transfer_failed_reqs_total")}


def test_one_engine_answers_64_concurrent_requests_as_transformers_does(
    unified: Server, load: list[tuple[list[int], int]], expected: list[list[int]]
) -> None:
    answers = generate_all(unified.url, load)
    assert [answer["output_ids"] for answer in answers] == expected
    idle(unified.url)


def test_prefill_and_decode_apart_answer_64_concurrent_requests_as_transformers_does(
    pair: Server, load: list[tuple[list[int], int]], expected: list[list[int]]
) -> None:
    until(lambda: handed_over(pair.url, [7] * 99), "prompts are handed over")
    HTTP.post(f"{pair.url}/flush_cache")
    idle(pair.url)
    before = counts(pair.url)
    answers = generate_all(pair.url, load)
    assert [answer["output_ids"] for answer in answers] == expected
    handed = [answer["meta_info"] for answer in answers if answer["meta_info"]["handoff_tokens"]]
    fresh = [answer["meta_info"] for answer, own in zip(answers, own_tokens(load), strict=True) if own >= 16]
    assert len(fresh) > REQUESTS // 4
    assert all(meta in handed for meta in fresh), "what no other prompt can have cached is handed over"
    assert {meta["prefill_engine"] for meta in handed} == {"prefill-0"}
    assert {meta["decode_engine"] for meta in handed} == {"decode-0"}
    idle(pair.url)
    pages = sum(meta["handoff_pages"] for meta in handed)
    assert counts(pair.url) == {**before, "sent": before["sent"] + pages, "received": before["received"] + pages}


def test_decode_asks_only_for_what_its_own_prefix_cache_lacks(pair: Server, reference: Reference) -> None:
    prompt = [(7 * i) % 500 for i in range(131)]
    HTTP.post(f"{pair.url}/flush_cache")
    first = generate(pair.url, prompt, 6)
    again = generate(pair.url, [*prompt, *range(30)], 6)
    assert first["meta_info"]["handoff_tokens"] == 131
    assert again["meta_info"]["handoff_tokens"] == 161 - 128
    assert again["meta_info"]["cached_tokens_details"] == {"device": 128}
    assert again["output_ids"] == reference.greedy([*prompt, *range(30)], 6)


def test_a_short_prompt_is_not_worth_a_handoff(pair: Server) -> None:
    meta = generate(pair.url, [3, 1, 4, 1, 5], 4)["meta_info"]
    assert meta["handoff_tokens"] == 0
    assert meta["local_reason"] == "short"
    assert meta["prefill_engine"] == "decode-0"


def test_the_router_shows_both_engines_and_their_metrics(pair: Server) -> None:
    assert {name: info["role"] for name, info in engines(pair.url).items()} == {
        "prefill-0": "prefill",
        "decode-0": "decode",
    }
    assert metric(pair.url, "max_total_num_tokens", engine="prefill-0", role="prefill") == 4096
    assert metric(pair.url, "max_total_num_tokens", engine="decode-0", role="decode") == 4096


SCHEMA = {
    "x-guidance": {"whitespace_flexible": False},
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "kind": {"enum": ["red", "blue"]}},
    "required": ["name", "kind"],
    "additionalProperties": False,
}


def test_answers_under_a_schema_are_valid_and_the_same_in_a_stream_and_from_a_prefill_engine(
    unified: Server, pair: Server
) -> None:
    asked = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}
    message = {"role": "user", "content": "Tell me of a thing, by its name and its kind, please."}
    body = {"messages": [message], "seed": 3, "temperature": 0.9, "response_format": asked, "max_tokens": 150}
    until(lambda: handed_over(pair.url, [9] * 99), "prompts are handed over")
    texts = []
    for url in (unified.url, pair.url):
        answer = HTTP.post(f"{url}/v1/chat/completions", json=body).json()["choices"][0]
        assert answer["finish_reason"] == "stop"
        texts.append(answer["message"]["content"])
        streamed = HTTP.post(f"{url}/v1/chat/completions", json={**body, "stream": True}).text
        events = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
        texts.append("".join(event["choices"][0]["delta"].get("content") or "" for event in events))
        wrong = {**asked, "json_schema": {"schema": {"properties": {"a": {"not": {}}}}}}
        refused = HTTP.post(f"{url}/v1/chat/completions", json={**body, "response_format": wrong})
        assert (refused.status_code, "#/properties/a/not" in refused.text) == (400, True)
    assert len(set(texts)) == 1, texts
    jsonschema.validate(json.loads(texts[0]), SCHEMA)
