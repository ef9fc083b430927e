"""Whatever is sent, the answer names the field, its value and what was expected, and the server goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.client import HTTPConnection
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from serinus.core.errors import (
    BadRequest,
    CapacityError,
    ConfigError,
    InvariantError,
    PeerError,
    RateLimited,
    SerinusError,
    Unauthorized,
    UnknownModel,
)
from serinus.front import bind
from serinus.front.calls import RequestFailed
from serinus.front.exchange import error_of as error_body
from serinus.front.parse import parse_body
from serinus.front.proofs import proof_of
from serinus.front.schemas import ChatBody, CompletionBody, GenerateBody
from serinus.testing.running_front import RunningFront

CHAT = "/v1/chat/completions"


@pytest.fixture(autouse=True)
def _alive_after_all(front: RunningFront) -> Iterator[None]:
    yield
    assert front.http.get("/health").status_code == 200
    assert not front.engine.running
    assert front.client.open_count == 0


def error_of(front: RunningFront, raw: bytes, path: str = "/v1/completions") -> tuple[int, dict[str, Any]]:
    response = front.http.post(path, content=raw, headers={"content-type": "application/json"})
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return response.status_code, error


@pytest.mark.parametrize(
    ("raw", "param", "said"),
    [
        (b"", "body", "a JSON object"),
        (b"   ", "body", "a JSON object"),
        (b"{", "body", "valid JSON"),
        (b"[]", "body", "object"),
        (b"null", "body", "object"),
        (b'"x"', "body", "object"),
        (b'{"prompt": "x"', "body", "valid JSON"),
        (b'{"prompt": "x"} trailing', "body", "valid JSON"),
        (b'{"prompt": "x", "temperature": NaN}', "body", "valid JSON"),
        (b'{"prompt": "x", "temperature": Infinity}', "body", "valid JSON"),
        (b'{"prompt": "x", "temperature": 1e999}', "temperature", "got 1e999, expected a number from -1.8e308"),
        (b'{"prompt": "x", "top_k": -1e999}', "top_k", "got -1e999, expected a number"),
        (b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}", "seed", "got 999"),
        (b'{"prompt": "x", "logit_bias": {"1": 2, "3": 1e999}}', "logit_bias[...]", "got 1e999, expected a number"),
        (b'{"prompt": "x", "logit_bias": {"1": 2, "3": "a"}}', "logit_bias[...]", "got 'a', expected float"),
        (b'{"prompt": [[5, 1e999]]}', "prompt[0][1]", "got 1e999, expected"),
        (b'{"prompt": "x", "temperature": 1e999, "user": ', "body", "valid JSON"),
        (b'{"user": "' + b"y" * 100 + b'", "prompt": nope}', "body", 'prompt": nope'),
        (b'{"prompt": "\xff\xfe"}', "body", "UTF-8"),
        (b'{"prompt": "x", "user": "\xff"}', "body", "UTF-8"),
        (b'{"prompt": "x", "other": "\xff"}', "body", "UTF-8"),
        (b'{"prompt": "\\ud800"}', "body", "valid JSON"),
        (b'{"other": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "body", "sane depth"),
        (b"{}", "prompt", "required"),
        (b'{"prompt": null}', "prompt", "got None"),
        (b'{"prompt": 5}', "prompt", "got 5, expected str | array"),
        (b'{"prompt": ["a", {"b": 1}]}', "prompt[1]", "expected int | str | array"),
        (b'{"prompt": "x", "max_tokens": "many"}', "max_tokens", "got 'many', expected int | null"),
        (b'{"prompt": "x", "max_tokens": 1.5}', "max_tokens", "got 1.5"),
        (b'{"prompt": "x", "max_tokens": true}', "max_tokens", "got True"),
        (b'{"prompt": "x", "stop": [3]}', "stop[0]", "got 3, expected str"),
        (b'{"prompt": "x", "stream_options": {"include_usage": "yes"}}', "stream_options.include_usage", "bool"),
    ],
)
def test_a_body_that_cannot_be_read_is_explained(front: RunningFront, raw: bytes, param: str, said: str) -> None:
    status, error = error_of(front, raw)
    assert (status, error["param"]) == (400, param)
    assert said in error["message"]


@pytest.mark.parametrize(
    ("change", "field", "said"),
    [
        ({"prompt": ""}, "prompt", "not empty"),
        ({"prompt": []}, "prompt", "none empty"),
        ({"prompt": [[]]}, "prompt", "none empty"),
        ({"prompt": ["x", 1]}, "prompt", "one kind only"),
        ({"prompt": "x" * 300}, "prompt", "got 300, expected at most 255 tokens: the prompt has 300, the answer"),
        ({"prompt": [267]}, "prompt", "got 267, expected token ids from 0 to 266"),
        ({"prompt": [-1]}, "prompt", "got -1"),
        ({"rid": "a line\nof a log"}, "rid", "expected an id of at most 256 printable characters"),
        ({"max_tokens": 0}, "max_tokens", "got 0, expected at least 1, or 0 together with echo"),
        ({"max_tokens": -5}, "max_tokens", "got -5"),
        ({"max_tokens": 256}, "max_tokens", "got 256, expected at most 255: the prompt has 1"),
        ({"max_tokens": 10**30}, "max_tokens", "at most 255"),
        ({"temperature": -0.1}, "temperature", "got -0.1"),
        ({"top_p": 1.01}, "top_p", "above 0, at most 1"),
        ({"top_k": -2}, "top_k", "-1 or 0 (all)"),
        ({"top_k": 10**20}, "top_k", "64-bit"),
        ({"min_p": 2}, "min_p", "between 0 and 1"),
        ({"frequency_penalty": 3}, "frequency_penalty", "between -2 and 2"),
        ({"presence_penalty": -3}, "presence_penalty", "between -2 and 2"),
        ({"repetition_penalty": 0}, "repetition_penalty", "above 0"),
        ({"seed": 1 << 64}, "seed", "64-bit"),
        ({"n": 0}, "n", "between 1 and 128"),
        ({"n": 129}, "n", "between 1 and 128"),
        ({"n": 100, "prompt": ["a", "b"]}, "n", "at most 128 sequences"),
        ({"best_of": 2}, "best_of", "not supported"),
        ({"best_of": 1, "n": 2}, "best_of", "n or nothing"),
        ({"best_of": 3, "n": 2}, "best_of", "n or nothing"),
        ({"best_of": True}, "best_of", "n or nothing"),
        ({"suffix": "end"}, "suffix", "not supported"),
        ({"logprobs": 21}, "logprobs", "between 0 and 20"),
        ({"logprobs": -1}, "logprobs", "between 0 and 20"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "token ids"),
        ({"logit_bias": {"5": 101}}, "logit_bias", "between -100 and 100"),
        ({"logit_bias": {"267": 1}}, "logit_bias", "0 to 266"),
        ({"stop": ""}, "stop", "not empty"),
        ({"stop": ["x"] * 65}, "stop", "at most 64"),
        ({"stop": "x" * 2000}, "stop", "1024"),
        ({"stop_token_ids": [300]}, "stop_token_ids", "0 to 266"),
        ({"stop_token_ids": [1] * 1025}, "stop_token_ids", "got 1025, expected at most 1024 ids"),
        ({"logit_bias": {str(i): 1 for i in range(65537)}}, "logit_bias", "got 65537, expected at most 65536 tokens"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens", "got 9, expected at most 8, the most there may be"),
        ({"temperature": 1e308}, "temperature", "0 (greedy) to 10,000"),
        ({"prompt": ["x"] * 200}, "prompt", "got 200, expected at most 128 sequences"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema", "required"),
        ({"response_format": {"type": "yaml"}}, "response_format.type", "json_object"),
        ({"guided_json": "{"}, "guided_json", "valid JSON (Expecting property name"),
        ({"guided_json": "[]"}, "guided_json", "a JSON Schema"),
        ({"guided_choice": []}, "guided_choice", "at least one"),
        ({"guided_choice": ["a", ""]}, "guided_choice", "not empty"),
        ({"regex": ""}, "regex", "the text of a regular expression"),
        ({"regex": "a" * 300_000}, "regex", "at most 262144"),
        ({"regex": "a", "ebnf": 'root ::= "a"'}, "ebnf", "nothing beside regex"),
        ({"structural_tag": "[]"}, "structural_tag", "an object with `structures`"),
        (
            {"structured_outputs": {"regex": "a", "choice": ["b"]}},
            "structured_outputs.choice",
            "structured_outputs.regex",
        ),
        ({"use_beam_search": True}, "use_beam_search", "not supported"),
    ],
)
def test_a_wrong_value_is_named(front: RunningFront, change: dict[str, Any], field: str, said: str) -> None:
    status, error = error_of(front, json.dumps({"prompt": "x", **change}).encode())
    assert (status, error["param"], error["type"]) == (400, field, "invalid_request_error"), error
    assert said in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": "x" * 300}, "prompt"),
        ("/v1/completions", {"prompt": "x" * 200_000}, "prompt"),
        ("/v1/completions", {"prompt": [1] * 256}, "prompt"),
        ("/v1/completions", {"prompt": "x", "max_tokens": 256}, "max_tokens"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 300}]}, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}] * 257}, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 200_000}]}, "messages"),
        ("/generate", {"text": "x", "sampling_params": {"max_new_tokens": 256}}, "max_new_tokens"),
    ],
)
def test_what_does_not_fit_the_context_is_said_in_the_words_that_clients_look_for(
    front: RunningFront, path: str, body: dict[str, Any], param: str
) -> None:
    for stream in (False, True):
        status, error = error_of(front, json.dumps({**body, "stream": stream}).encode(), path)
        assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", param)
        assert "This model's maximum context length is 256 tokens" in error["message"]


def test_what_is_too_long_is_said_with_all_that_is_counted_and_what_to_change(front: RunningFront) -> None:
    """With a limit of its own, without one, and where only the answer is too long."""
    holds = "the context holds 256 for both (--context-length); shorten the prompt"
    chat, text, long = [{"role": "user", "content": "x" * 300}], [1] * 200, [1] * 300
    for path, body, said in (
        ("/v1/completions", {"prompt": long, "max_tokens": 16}, "prompt: got 300, expected at most 255 tokens: "
         f"the prompt has 300, max_tokens is 16, {holds}"),
        ("/v1/completions", {"prompt": text, "max_tokens": 100}, "max_tokens: got 100, expected at most 56: "
         f"the prompt has 200, max_tokens is 100, {holds} or lower max_tokens"),
        (CHAT, {"messages": chat}, f"the answer needs 1, {holds}"),
    ):  # fmt: skip
        _, error = error_of(front, json.dumps(body).encode(), path)
        assert f"{said}. This model's maximum context length is 256 tokens" in error["message"]


def test_a_text_that_is_too_long_to_be_counted_says_nothing_of_the_context(front: RunningFront) -> None:
    status, error = error_of(front, json.dumps({"prompt": "x" * 20_000_000}).encode(), "/tokenize")
    assert (status, error["code"]) == (400, None)
    assert "maximum context" not in error["message"]


def test_a_prefill_address_that_the_wire_would_not_take_is_refused(front: RunningFront) -> None:
    address = "t" * 257
    headers = {"x-serinus-prefill": address, "x-serinus-proof": proof_of(address, ["a router's"])}
    response = front.http.post("/v1/completions", json={"prompt": "x"}, headers=headers)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prefill_address")


def test_an_unknown_model_is_not_found(front: RunningFront) -> None:
    for path in ("/v1/completions", "/v1/chat/completions", "/generate", "/tokenize"):
        response = front.post(path, {"model": "gpt-9", "prompt": "x", "messages": [{}], "text": "x"})
        assert response.status_code == 404
        assert "expected 'canary'" in response.json()["error"]["message"]
        error = response.json()["error"]
        assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert front.http.get("/v1/models/gpt-9").status_code == 404


def test_the_code_of_an_error_is_a_text_or_null_whatever_the_error() -> None:
    """OpenAI's clients read it as such; the status is the HTTP answer's."""
    errors: list[SerinusError] = [
        BadRequest("n", 0, "at least 1"), UnknownModel("model: got 'x'"), Unauthorized("key"), RateLimited("enough"),
        CapacityError("no room"), PeerError("gone"), InvariantError("broken"), RequestFailed("KV integrity", 500),
        RequestFailed("leaving", 503), RequestFailed("KV integrity", 500, wrong_token=3),
    ]  # fmt: skip
    codes = [json.loads(error_body(each)[1])["error"]["code"] for each in errors]
    assert codes == [
        None, "model_not_found", None, "rate_limit_exceeded", "service_unavailable", "service_unavailable", None, None,
        "service_unavailable", "kv_integrity",
    ]  # fmt: skip


def test_unknown_fields_are_ignored_and_null_is_nothing(front: RunningFront) -> None:
    body = {"prompt": "x", "max_tokens": 1, "surprise": {"a": [1]}, "temperature": None, "stop": None, "n": None}
    answer = front.post("/v1/completions", body)
    assert answer.status_code == 200, answer.text


def test_a_huge_body_is_refused_before_it_is_read(front: RunningFront) -> None:
    limit = 32 << 20
    connection = HTTPConnection("127.0.0.1", front.server.port, timeout=60)
    connection.putrequest("POST", "/generate")
    connection.putheader("content-length", str(limit + 1))
    connection.endheaders()
    with connection.getresponse() as answer:
        assert answer.status == 413
        assert b"expected at most 33554432" in answer.read()
    connection.close()


@pytest.mark.slow
def test_a_huge_body_of_unknown_length_is_refused_too(front: RunningFront) -> None:
    def endless() -> Iterator[bytes]:
        for _ in range(40):
            yield b" " * (1 << 20)

    response = front.http.post("/generate", content=endless())
    assert response.status_code == 413


def test_unknown_paths_and_methods_are_answered_in_the_same_form(front: RunningFront) -> None:
    assert front.http.get("/v2/nothing").status_code == 404
    assert "openapi.json" in front.http.get("/v2/nothing").json()["error"]["message"]
    assert front.http.get("/v1/completions").status_code == 405
    assert front.http.get("/v1/completions").json()["error"]["type"] == "invalid_request_error"


def test_a_port_in_use_is_said_at_once(front: RunningFront) -> None:
    with pytest.raises(ConfigError, match=f"port {front.server.port} .*expected a free one"):
        bind("127.0.0.1", front.server.port)
    with pytest.raises(ConfigError, match="expected an address of this machine"):
        bind("no.such.host.invalid", 0)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
NAMES = st.sampled_from([*CompletionBody.__struct_fields__, *ChatBody.__struct_fields__, "text", "input_ids"])


def refusal_of(raw: bytes, body_type: type[CompletionBody | ChatBody | GenerateBody]) -> BadRequest | None:
    """The refusal of a body; None where it was taken. Any other error fails the test."""
    try:
        parse_body(raw, body_type)
    except BadRequest as err:
        return err
    return None


@pytest.mark.slow
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=st.dictionaries(NAMES, JSON, max_size=6), body_type=st.sampled_from([CompletionBody, ChatBody]))
def test_any_json_is_either_read_or_refused_by_name(
    body: dict[str, Any], body_type: type[CompletionBody | ChatBody]
) -> None:
    refusal = refusal_of(json.dumps(body).encode(), body_type)
    assert refusal is None or (refusal.field and refusal.expected)


@pytest.mark.slow
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(raw=st.binary(max_size=60))
def test_any_bytes_are_either_read_or_refused_by_name(raw: bytes) -> None:
    refusal = refusal_of(raw, GenerateBody)
    assert refusal is None or (refusal.field and refusal.expected)
