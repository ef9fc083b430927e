"""/v1/completions, through the official client and by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import openai
import pytest

from serinus.core.request import TokenLogprobs
from serinus.front.render import completion_logprobs
from serinus.testing.fake_engine import FakeEngine, fake_continue
from serinus.testing.running_front import RunningFront, front_settings, running_front
from serinus.testing.small_tokenizers import make_piece_tokenizer
from serinus.text import Tokenizer, load_tokenizer
from serinus.wire.messages import Abort

VOCAB = 267


@pytest.fixture(scope="module")
def client(front: RunningFront) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0)


def answer(tokenizer: Tokenizer, prompt: str, count: int) -> str:
    return tokenizer.decode(fake_continue(tokenizer.encode(prompt), count, vocab_size=VOCAB))


def test_a_text_is_continued(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    done = client.completions.create(model="canary", prompt="hello the", max_tokens=9, temperature=0)
    assert done.choices[0].text == answer(tokenizer, "hello the", 9)
    assert done.choices[0].finish_reason == "length"
    assert done.usage is not None
    assert (done.usage.prompt_tokens, done.usage.completion_tokens, done.usage.total_tokens) == (4, 9, 13)
    assert done.object == "text_completion"
    assert done.model == "canary"


def test_sixteen_tokens_are_the_default(client: openai.OpenAI) -> None:
    done = client.completions.create(model="canary", prompt="x")
    assert done.usage is not None
    assert done.usage.completion_tokens == 16


def test_texts_ids_and_lists_of_ids_are_prompts_too(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("hello the")
    one = answer(tokenizer, "hello the", 5)
    other = answer(tokenizer, "abc", 5)
    for prompt, texts in (
        (["hello the", "abc"], [one, other]),
        (ids, [one]),
        ([ids, tokenizer.encode("abc")], [one, other]),
    ):
        done = client.completions.create(model="canary", prompt=prompt, max_tokens=5, temperature=0)
        assert [choice.text for choice in done.choices] == texts
        assert [choice.index for choice in done.choices] == list(range(len(texts)))


def test_the_stream_is_the_answer_in_pieces(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    stream = client.completions.create(
        model="canary",
        prompt="abc",
        max_tokens=20,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == answer(tokenizer, "abc", 20)
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["length"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 20
    assert {chunk.id for chunk in chunks} == {chunks[0].id}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_each_chunk_can_carry_the_usage_so_far(front: RunningFront, path: str) -> None:
    body = {"prompt": "the ", "messages": [{"role": "user", "content": "x"}], "max_tokens": 9, "n": 2}
    options = {"include_usage": True, "continuous_usage_stats": True}
    *events, last = front.events(path, {**body, "stream_options": options})
    counts: dict[int, list[int]] = {0: [], 1: []}
    for event in events:
        usage = event["usage"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        counts[event["choices"][0]["index"]].append(usage["completion_tokens"])
    assert all(each == sorted(each) and each[-1] == 9 for each in counts.values())
    assert last["usage"]["completion_tokens"] == 18
    plain = front.events(path, {**body, "stream_options": {"continuous_usage_stats": True}})
    assert all("usage" not in event for event in plain)  # as in vLLM: only together with include_usage


def test_answers_say_which_system_made_them(front: RunningFront) -> None:
    body = {"prompt": "x", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    made = set()
    for path in ("/v1/completions", "/v1/chat/completions"):
        made.add(front.post(path, body).json()["system_fingerprint"])
        made |= {event["system_fingerprint"] for event in front.events(path, body)}
    assert len(made) == 1
    assert made.pop().startswith("fp_")


def test_a_stream_without_usage_carries_none(front: RunningFront) -> None:
    events = front.events("/v1/completions", {"prompt": "abc", "max_tokens": 3})
    assert all("usage" not in event for event in events)


def test_several_answers_differ_by_their_seeds_and_repeat_with_them(client: openai.OpenAI) -> None:
    def ask() -> list[str]:
        done = client.completions.create(model="canary", prompt="abc", max_tokens=8, n=3, seed=7)
        assert done.usage is not None
        assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (1, 24)
        return [choice.text for choice in done.choices]

    first = ask()
    assert len(set(first)) == 3
    assert ask() == first
    single = client.completions.create(model="canary", prompt="abc", max_tokens=8, seed=7)
    assert single.choices[0].text == first[0]


def test_without_a_seed_answers_differ(client: openai.OpenAI) -> None:
    texts = {client.completions.create(model="canary", prompt="abc", max_tokens=12).choices[0].text for _ in range(3)}
    assert len(texts) == 3


def test_a_stream_of_several_answers_keeps_them_apart(front: RunningFront, tokenizer: Tokenizer) -> None:
    body = {"prompt": ["abc", "hello"], "max_tokens": 6, "temperature": 0}
    texts = ["", ""]
    for event in front.events("/v1/completions", body):
        texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert texts == [answer(tokenizer, "abc", 6), answer(tokenizer, "hello", 6)]


def test_echo_shows_the_prompt_and_its_logprobs(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    done = client.completions.create(
        model="canary", prompt="hello the", max_tokens=2, temperature=0, echo=True, logprobs=2
    )
    choice = done.choices[0]
    assert choice.text == "hello the" + answer(tokenizer, "hello the", 2)
    shown = choice.logprobs
    assert shown is not None
    assert shown.tokens is not None
    assert shown.tokens[:4] == ["he", "ll", "o", " the"]
    assert shown.text_offset is not None
    assert shown.text_offset[:5] == [0, 2, 4, 5, 9]
    assert shown.token_logprobs == [None, -0.5, -0.5, -0.5, -0.5, -0.5]
    assert shown.top_logprobs is not None
    assert shown.top_logprobs[1] == {"ll": -0.5, "<eos>": -1.5}


def test_echo_alone_generates_nothing(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("hello the")
    answer = client.completions.create(model="canary", prompt="hello the", max_tokens=0, echo=True, logprobs=2, n=2)
    for choice in answer.choices:
        assert (choice.text, choice.finish_reason) == ("hello the", "length")
        assert choice.logprobs is not None
        assert len(choice.logprobs.tokens or ()) == len(choice.logprobs.token_logprobs or ()) == len(ids)
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(ids), 0)
    stream = client.completions.create(model="canary", prompt="hello the", max_tokens=0, echo=True, stream=True)
    choices = [chunk.choices[0] for chunk in stream]
    assert ("".join(each.text for each in choices), choices[-1].finish_reason) == ("hello the", "length")


@pytest.mark.parametrize("field", ["max_new_tokens", "max_tokens"])
def test_a_native_request_may_ask_for_the_prompt_alone(front: RunningFront, field: str) -> None:
    body = {"input_ids": [1, 2, 3], "return_logprob": True, "logprob_start_len": 0}
    answer = front.post("/generate", {**body, "sampling_params": {field: 0}}).json()
    info = answer["meta_info"]
    assert (answer["text"], answer["output_ids"], info["completion_tokens"]) == ("", [], 0)
    assert info["finish_reason"] == {"type": "length", "length": 0}
    assert (len(info["input_token_logprobs"]), info["output_token_logprobs"]) == (3, [])


def test_values_that_ask_for_nothing_are_taken(front: RunningFront) -> None:
    plain = {"prompt": "hello", "max_tokens": 3, "seed": 7}
    for values in ({"top_k": 0}, {"best_of": 1}, {"best_of": 2, "n": 2}):
        answer = front.post("/v1/completions", {**plain, **values})
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["text"] == front.post("/v1/completions", plain).json()["choices"][0]["text"]


def test_an_event_of_a_stream_is_one_line_for_every_reader(front: RunningFront) -> None:
    """That of httpx ends lines where Python's str.splitlines does."""
    prompt = "a\x85b\u2028c\u2029d\x0b\x0c\x1c\r\n"
    body = {"prompt": prompt, "max_tokens": 0, "echo": True, "stream": True}
    with front.http.stream("POST", "/v1/completions", json=body) as response:
        events = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {")]
    assert "".join(choice["text"] for event in events for choice in event["choices"]) == prompt


def test_echo_of_ids_shows_their_text_once_also_in_a_stream(front: RunningFront, tokenizer: Tokenizer) -> None:
    body = {"prompt": tokenizer.encode("hello"), "max_tokens": 4, "temperature": 0, "echo": True, "logprobs": 0}
    events = front.events("/v1/completions", body)
    assert "".join(e["choices"][0]["text"] for e in events) == "hello" + answer(tokenizer, "hello", 4)
    tokens = [token for e in events for token in e["choices"][0]["logprobs"]["tokens"]]
    offsets = [offset for e in events for offset in e["choices"][0]["logprobs"]["text_offset"]]
    assert len(tokens) == 3 + 4
    assert offsets == sorted(offsets)


def test_parts_of_characters_are_named_by_their_bytes_and_keep_their_own_values(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("里x")
    place = TokenLogprobs(logprob=-3.0, top_ids=(0xFF, 0xFE), top_logprobs=(-0.1, -2.0))
    shown = completion_logprobs(tokenizer, ids, [place] * 4, [0, 0, 0, 1])
    assert shown["tokens"] == ["bytes:\\xe9", "bytes:\\x87", "bytes:\\x8c", "x"]
    assert shown["top_logprobs"] == [
        {"bytes:\\xff": -0.1, "bytes:\\xfe": -2.0, token: -3.0} for token in shown["tokens"]
    ]


def test_a_likelier_token_of_the_same_text_leaves_the_chosen_one_its_value(tokenizer: Tokenizer) -> None:
    chosen, likelier = 999, 990  # ids of no vocabulary: both print nothing
    place = TokenLogprobs(logprob=-3.0, top_ids=(likelier, 4), top_logprobs=(-0.1, -0.2))
    shown = completion_logprobs(tokenizer, [chosen], [place], [0])
    assert shown["top_logprobs"][0][""] == shown["token_logprobs"][0] == -3.0


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("prompt", "begin", "places"),
    [
        ("é 里 the<eos>日", "é 里 the<eos>日", [0, 0, 1, 2, 2, 2, 3, 7, 12, 12, 12, 13]),
        ([0xE9, 0x87, 264, 0x8C, 120], "里x", [0, 0, 0, 0, 1, 2]),
    ],
)
def test_offsets_of_tokens_lie_in_the_text(
    front: RunningFront, prompt: str | list[int], begin: str, places: list[int], streamed: bool
) -> None:
    body = {"prompt": prompt, "max_tokens": 40, "temperature": 0, "echo": True, "logprobs": 2}
    if streamed:
        choices = [event["choices"][0] for event in front.events("/v1/completions", body)]
    else:
        choices = front.post("/v1/completions", body).json()["choices"]
    text = "".join(choice["text"] for choice in choices)
    tokens = [token for choice in choices for token in choice["logprobs"]["tokens"]]
    offsets = [offset for choice in choices for offset in choice["logprobs"]["text_offset"]]
    assert (text[: len(begin)], offsets[: len(places)]) == (begin, places)
    answered = dict(zip(tokens, offsets, strict=True))
    whole = {token: offset for token, offset in answered.items() if not token.startswith(("bytes:", "<"))}
    assert 10 < len(whole) < len(answered)
    # behind a part of a character that was none, it comes first
    assert all(token in text[offset : offset + len(token) + 3] for token, offset in whole.items())


@pytest.mark.parametrize(
    ("prompt", "tokens", "offsets"),
    [
        ("the</s>a", ["<s>", " ", "t", "h", "e", "</s>", "a"], [0, 0, 0, 1, 2, 3, 7]),
        ("<s>the", ["<s>", "t", "h", "e"], [0, 3, 4, 5]),
        ([1, 262, 2, 263], ["<s>", "t", "</s>", "h"], [0, 0, 1, 1]),
    ],
)
def test_offsets_count_special_tokens_of_the_prompt_where_they_were_written(
    tmp_path: Path, new_endpoint: Callable[[], str], prompt: str | list[int], tokens: list[str], offsets: list[int]
) -> None:
    folder = make_piece_tokenizer(tmp_path / "piece")
    vocab_size = load_tokenizer(str(folder)).vocab_size
    engine = FakeEngine(endpoint=new_endpoint(), vocab_size=vocab_size)
    with running_front(front_settings(model_path=str(folder), served_model_name="canary"), engine) as front:
        body = {"prompt": prompt, "max_tokens": 0, "echo": True, "logprobs": 0}
        shown = front.post("/v1/completions", body).json()["choices"][0]["logprobs"]
    assert (shown["tokens"], shown["text_offset"]) == (tokens, offsets)


def test_a_stop_text_ends_the_answer_and_the_engine_is_told(
    front: RunningFront, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(front.engine, "step_s", 0.01)  # the engine must not be done before it is told
    whole = answer(tokenizer, "stop me", 60)
    stop = whole[10:13]
    body = {"prompt": "stop me", "max_tokens": 200, "temperature": 0, "stop": [stop], "rid": "stopped"}
    choice = front.post("/v1/completions", body).json()["choices"][0]
    assert choice["text"] == whole[: whole.index(stop)]
    assert choice["finish_reason"] == "stop"
    front.engine.wait_for(lambda engine: "stopped" not in engine.running)
    said = [message for message in front.engine.of(Abort) if isinstance(message, Abort) and message.rid == "stopped"]
    assert {(abort.silent, abort.matched_stop) for abort in said} == {(True, True)}
    streamed = front.events("/v1/completions", body)
    assert "".join(event["choices"][0]["text"] for event in streamed) == choice["text"]


def test_meta_info_says_where_each_part_ran(front: RunningFront) -> None:
    body = {"prompt": "abc", "max_tokens": 2, "return_meta_info": True}
    info = front.post("/v1/completions", body).json()["choices"][0]["meta_info"]
    assert (info["prefill_engine"], info["decode_engine"], info["completion_tokens"]) == ("fake-0", "fake-0", 2)
    last = front.events("/v1/completions", body)[-1]["choices"][0]
    assert last["meta_info"]["finish_reason"] == {"type": "length", "length": 2}


def test_cached_tokens_are_in_the_usage(front: RunningFront) -> None:
    usage = front.post("/v1/completions", {"prompt": "x" * 20, "max_tokens": 2, "n": 2}).json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 16}
    assert usage["prompt_tokens"] == 20
