"""/generate in the form SGLang's users know."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from serinus.core.rng import choice_seed
from serinus.testing.fake_engine import FakeEngine, fake_continue
from serinus.testing.running_front import RunningFront, front_settings, running_front
from serinus.text import Tokenizer
from serinus.wire.messages import Generate

VOCAB = 267
GREEDY = {"temperature": 0, "max_new_tokens": 6}


def test_a_text_is_answered_with_text_ids_and_meta_info(front: RunningFront, tokenizer: Tokenizer) -> None:
    answer = front.post("/generate", {"text": "hello the", "sampling_params": GREEDY, "rid": "mine"}).json()
    expected = fake_continue(tokenizer.encode("hello the"), 6, vocab_size=VOCAB)
    assert answer["output_ids"] == expected
    assert answer["text"] == tokenizer.decode(expected)
    info = answer["meta_info"]
    assert (info["id"], info["prompt_tokens"], info["completion_tokens"]) == ("mine", 4, 6)
    assert info["finish_reason"] == {"type": "length", "length": 6}
    assert (info["prefill_engine"], info["decode_engine"]) == ("fake-0", "fake-0")
    assert info["e2e_latency"] > 0


def test_ids_are_a_prompt_too(front: RunningFront) -> None:
    answer = front.post("/generate", {"input_ids": [1, 2, 3], "sampling_params": GREEDY}).json()
    assert answer["output_ids"] == fake_continue([1, 2, 3], 6, vocab_size=VOCAB)


def test_an_answer_without_a_limit_ends_with_the_context(front: RunningFront) -> None:
    ids = list(range(1, 201))  # the default of 128 new tokens does not fit behind them
    answer = front.post("/generate", {"input_ids": ids, "sampling_params": {"temperature": 0}}).json()
    assert answer["meta_info"]["prompt_tokens"] == 200
    refused = front.post("/generate", {"input_ids": ids, "sampling_params": {"max_new_tokens": 128}}).json()["error"]
    assert (refused["param"], refused["code"]) == ("max_new_tokens", "context_length_exceeded")
    assert "at most 56: the prompt has 200, max_new_tokens is 128, the context holds 256" in refused["message"]
    refused = front.post("/generate", {"input_ids": ids, "sampling_params": {"max_tokens": 57}}).json()["error"]
    assert refused["param"] == "max_tokens"
    short = front.post("/v1/completions", {"model": "canary", "prompt": ids + ids[:50]})  # 16 by default
    assert short.status_code == 200, short.text


def test_a_batch_is_answered_in_order(front: RunningFront) -> None:
    body = {
        "input_ids": [[1], [2, 3]],
        "sampling_params": [{"temperature": 0, "max_new_tokens": 2}, {"temperature": 0, "max_new_tokens": 3}],
        "rid": ["a", "b"],
    }
    answers = front.post("/generate", body).json()
    assert [len(answer["output_ids"]) for answer in answers] == [2, 3]
    assert [answer["meta_info"]["id"] for answer in answers] == ["a", "b"]
    assert isinstance(front.post("/generate", {"text": ["one"], "sampling_params": GREEDY}).json(), list)


def test_more_sequences_than_one_request_may_have_are_refused(front: RunningFront) -> None:
    three: dict[str, Any] = {"text": ["x"] * 3, "sampling_params": [{"n": 60}, {"n": 60}, {"n": 60}]}
    for field, body in {"text": {"text": ["x"] * 129}, "n": three}.items():
        response = front.post("/generate", body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, field)
        assert "expected at most 128 sequences" in response.json()["error"]["message"]


def test_a_list_of_another_length_than_the_prompts_is_refused(front: RunningFront) -> None:
    error = front.post("/generate", {"text": ["x", "y"], "sampling_params": [{}]}).json()["error"]
    assert error["message"].startswith("sampling_params: got 'a list of 1', expected one value, or a list of 2"), error


def test_several_answers_of_one_prompt_are_a_list(front: RunningFront) -> None:
    answers = front.post("/generate", {"text": "x", "sampling_params": {"n": 2, "max_new_tokens": 8}}).json()
    assert len(answers) == 2
    assert answers[0]["output_ids"] != answers[1]["output_ids"]


def test_each_of_n_answers_has_the_seed_that_an_llm_gives_it(front: RunningFront) -> None:
    sampling = {"n": 3, "seed": 7, "max_new_tokens": 8}
    answers = front.post("/generate", {"input_ids": [5, 6, 7], "sampling_params": sampling}).json()
    expected = [fake_continue([5, 6, 7], 8, vocab_size=VOCAB, seed=choice_seed(7, choice)) for choice in range(3)]
    assert [answer["output_ids"] for answer in answers] == expected


def test_a_stream_shows_the_whole_answer_each_time(front: RunningFront, tokenizer: Tokenizer) -> None:
    events = front.events("/generate", {"text": "abc", "sampling_params": GREEDY})
    expected = fake_continue(tokenizer.encode("abc"), 6, vocab_size=VOCAB)
    for earlier, later in pairwise(events):
        assert later["text"].startswith(earlier["text"])
        assert len(later["output_ids"]) > len(earlier["output_ids"])
        assert earlier["meta_info"]["finish_reason"] is None
    assert events[-1]["output_ids"] == expected
    assert events[-1]["text"] == tokenizer.decode(expected)
    assert events[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 6}


def test_a_streamed_batch_names_the_place_of_each_event(front: RunningFront) -> None:
    events = front.events("/generate", {"input_ids": [[1], [2]], "sampling_params": GREEDY})
    last = {event["index"]: event["output_ids"] for event in events}
    assert last == {i: fake_continue([i + 1], 6, vocab_size=VOCAB) for i in (0, 1)}


def test_logprobs_of_answer_and_prompt(front: RunningFront) -> None:
    body = {
        "input_ids": [5, 6, 7],
        "sampling_params": GREEDY,
        "return_logprob": True,
        "logprob_start_len": 1,
        "top_logprobs_num": 2,
    }
    info = front.post("/generate", body).json()["meta_info"]
    assert info["input_token_logprobs"] == [[-0.5, 6, None], [-0.5, 7, None]]
    assert [entry[1] for entry in info["output_token_logprobs"]] == fake_continue([5, 6, 7], 6, vocab_size=VOCAB)
    assert info["input_top_logprobs"][0] == [[-0.5, 6, None], [-1.5, 7, None]]
    assert len(info["output_top_logprobs"]) == 6
    whole = front.post("/generate", {**body, "logprob_start_len": 0, "return_text_in_logprobs": True}).json()
    assert whole["meta_info"]["input_token_logprobs"][0][0] is None
    assert whole["meta_info"]["input_token_logprobs"][1] == [-0.5, 6, "\x06"]
    none = front.post("/generate", {**body, "logprob_start_len": -1}).json()["meta_info"]
    assert none["input_token_logprobs"] == []


def test_a_stop_token_is_named(front: RunningFront) -> None:
    expected = fake_continue([9], 6, vocab_size=VOCAB)
    params = {**GREEDY, "max_new_tokens": 50, "stop_token_ids": [expected[4]]}
    answer = front.post("/generate", {"input_ids": [9], "sampling_params": params}).json()
    assert answer["output_ids"] == expected[:5]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": expected[4]}


def test_cached_tokens_are_shown_by_tier(front: RunningFront) -> None:
    info = front.post("/generate", {"input_ids": [1] * 20, "sampling_params": GREEDY}).json()["meta_info"]
    assert info["cached_tokens"] == 16
    assert info["cached_tokens_details"] == {"device": 16}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"text": "x", "sampling_params": {"max_new_tokens": 1}}),
        ("/v1/completions", {"model": "canary", "prompt": "x", "max_tokens": 1}),
        ("/v1/chat/completions", {"model": "canary", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}),
    ],
)
def test_a_priority_reaches_the_engine_from_every_endpoint(
    front: RunningFront, path: str, body: dict[str, Any]
) -> None:
    for asked, expected in ((-5, -5), (None, 0)):
        assert front.post(path, {**body, "priority": asked}).status_code == 200
        message = front.engine.of(Generate)[-1]
        assert isinstance(message, Generate)
        assert message.request.priority == expected
    refused = front.post(path, {**body, "priority": 1.5})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "priority")


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "text"),
        ({"text": "x", "input_ids": [1]}, "text"),
        ({"text": ""}, "text"),
        ({"text": []}, "text"),
        ({"text": ["a", ""]}, "text"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [[]]}, "input_ids"),
        ({"input_ids": [1, [2]]}, "input_ids"),
        ({"input_ids": [267]}, "input_ids"),
        ({"input_ids": [-1]}, "input_ids"),
        ({"input_ids": [1 << 80]}, "input_ids"),
        ({"input_ids": [True]}, "input_ids[0]"),
        ({"input_ids": [1] * 256}, "input_ids"),
        ({"text": "x", "sampling_params": {"max_new_tokens": -1}}, "max_new_tokens"),
        ({"text": "x", "sampling_params": {"max_new_tokens": 256}}, "max_new_tokens"),
        ({"text": "x", "sampling_params": {"temperature": -1}}, "temperature"),
        ({"text": "x", "sampling_params": {"top_p": 0}}, "top_p"),
        ({"text": "x", "sampling_params": {"regex": "a("}}, "sampling_params.regex"),
        ({"text": "x", "sampling_params": {"n": 129}}, "n"),
        ({"text": ["x"] * 5, "sampling_params": {"n": 100}}, "n"),
        ({"text": "x", "sampling_params": [{}, {}]}, "sampling_params"),
        ({"text": ["x", "y"], "rid": ["a"]}, "rid"),
        ({"text": ["x", "y"], "rid": ["a", "a"]}, "rid"),
        ({"text": "x", "rid": "r" * 300}, "rid"),
        ({"text": "x", "top_logprobs_num": 21}, "top_logprobs_num"),
        ({"text": "x", "return_logprob": True, "logprob_start_len": 9}, "logprob_start_len"),
        ({"text": "x", "logprob_start_len": -2}, "logprob_start_len"),
        ({"text": "x", "image_data": "y"}, "image_data"),
        ({"text": "x", "cache_salt": "s" * 300}, "cache_salt"),
        ({"text": "x", "priority": 1 << 31}, "priority"),
        ({"text": "x", "priority": "high"}, "priority"),
    ],
)
def test_a_wrong_request_is_refused_by_field(front: RunningFront, body: dict[str, Any], field: str) -> None:
    response = front.post("/generate", body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == field
    assert front.http.get("/health").status_code == 200
    assert not front.engine.running


def test_a_timeout_goes_to_the_engine_and_a_wrong_one_is_refused(front: RunningFront) -> None:
    ask = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 2}}
    assert front.post("/generate", {**ask, "rid": "timed", "timeout": 2.5}).status_code == 200
    assert front.post("/v1/completions", {"prompt": "x", "rid": "timed-2", "timeout": 3}).status_code == 200
    chat = {"messages": [{"role": "user", "content": "x"}], "rid": "timed-3", "timeout": 4, "max_tokens": 2}
    assert front.post("/v1/chat/completions", chat).status_code == 200
    came = {m.request.rid: m.request.timeout_s for m in front.engine.received if isinstance(m, Generate)}
    assert [came[rid] for rid in ("timed", "timed-2", "timed-3")] == [2.5, 3.0, 4.0]
    for wrong in (0, -1, 1e7):
        answer = front.post("/generate", {**ask, "timeout": wrong})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "timeout"


def test_a_prompt_of_a_batch_that_fails_leaves_the_others_their_answers(byte_folder: Path, tmp_path: Path) -> None:
    engine = FakeEngine(endpoint=f"ipc://{tmp_path}/e", vocab_size=267, convicts=(66,))
    settings = front_settings(model_path=str(byte_folder), served_model_name="canary")
    ask = {"input_ids": [[1, 2], [66, 3], [4, 5]], "sampling_params": {"max_new_tokens": 4, "temperature": 0}}
    with running_front(settings, engine) as front:
        whole = front.post("/generate", ask)
        streamed = front.events("/generate", ask)
        alone = front.post("/generate", {**ask, "input_ids": [66, 3]})
        all_fail = front.post("/generate", {**ask, "input_ids": [[66, 3], [66, 4]]})
        assert not front.client.open_count
    assert whole.status_code == 200
    first, bad, last = whole.json()
    assert first["output_ids"] == fake_continue([1, 2], 4, vocab_size=267)
    assert last["output_ids"] == fake_continue([4, 5], 4, vocab_size=267)
    assert bad["error"]["message"] == f"KV integrity: convicted; request {bad['meta_info']['id']}"
    assert (bad["error"]["type"], bad["error"]["code"]) == ("internal_server_error", None)
    assert bad["meta_info"]["id"].endswith("-1")
    final = {each["index"]: each for each in streamed}
    assert [final[i]["output_ids"] for i in (0, 2)] == [first["output_ids"], last["output_ids"]]
    assert final[1]["error"]["message"] == f"KV integrity: convicted; request {final[1]['meta_info']['id']}"
    for answer in (alone, all_fail):
        assert answer.status_code == 500, "nothing was answered"
        assert answer.json()["error"]["message"].startswith("KV integrity: convicted; request gen-")


def test_a_500_names_the_id_by_which_the_logs_have_its_request(
    byte_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine's id, which answers have as `id`: not that of the HTTP request, which has another beginning."""
    engine = FakeEngine(endpoint=f"ipc://{tmp_path}/e", vocab_size=267, convicts=(66,))
    settings = front_settings(model_path=str(byte_folder), served_model_name="canary")
    asks = (("/generate", {"input_ids": [66, 3]}), ("/v1/completions", {"prompt": [66, 3], "rid": "mine"}))
    said: dict[str, str] = {}
    with caplog.at_level("INFO", logger="serinus"), running_front(settings, engine) as front:
        for path, ask in asks:
            answer = front.post(path, ask)
            said[answer.json()["error"]["message"].partition("; request ")[2]] = answer.headers["x-request-id"]
        assert list(said) == [m.request.rid for m in front.engine.received if isinstance(m, Generate)]
    logged = {getattr(each, "rid", ""): getattr(each, "x_request_id", "") for each in caplog.records}
    assert {rid: logged.get(rid) for rid in said} == said
    generated, mine = said
    assert generated.startswith("gen-")
    assert mine == "mine"
    assert all(each.startswith("req-") for each in said.values())
