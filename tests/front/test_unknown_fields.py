"""A field that the server does not know is refused where it is a known one misspelled, and told of everywhere else."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

import pytest

from serinus.front.agent_schemas import MessagesBody, ResponsesBody
from serinus.front.parse import unknown_fields
from serinus.front.schemas import ChatBody, CompletionBody, GenerateBody
from serinus.testing.running_front import RunningFront

COMPLETION = {"prompt": "x", "max_tokens": 1}
CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
NATIVE = {"text": "x", "sampling_params": {"max_new_tokens": 1}}

OPENAI = """
    audio frequency_penalty function_call functions logit_bias logprobs max_completion_tokens max_tokens messages
    metadata modalities model moderation n parallel_tool_calls prediction presence_penalty prompt_cache_key
    prompt_cache_options prompt_cache_retention reasoning_effort response_format safety_identifier seed service_tier
    stop store stream stream_options temperature tool_choice tools top_logprobs top_p user verbosity web_search_options
    best_of echo prompt suffix"""
VLLM = """thinking_token_budget include_reasoning use_beam_search top_k min_p repetition_penalty watermarking
    length_penalty stop_token_ids include_stop_str_in_output ignore_eos min_tokens skip_special_tokens
    spaces_between_special_tokens truncate_prompt_tokens truncation_side prompt_logprobs logprob_token_ids
    allowed_token_ids bad_words add_generation_prompt continue_final_message add_special_tokens documents chat_template
    chat_template_kwargs media_io_kwargs mm_processor_kwargs structured_outputs priority request_id session_id
    return_tokens_as_token_ids return_token_ids return_prompt_text cache_salt kv_transfer_params vllm_xargs
    repetition_detection guided_json guided_regex guided_choice guided_grammar"""
SGLANG = """return_hidden_states return_routed_experts routed_experts_start_len return_cached_tokens_details json_schema
    regex ebnf stop_regex no_stop_trim lora_path session_params custom_params custom_logit_processor images_config
    bootstrap_host bootstrap_port bootstrap_room routed_dp_rank disagg_prefill_dp_rank data_parallel_rank rid extra_key
    ngram_corpus_id custom_labels separate_reasoning stream_reasoning max_dynamic_patch min_dynamic_patch input_ids"""

RESPONSES = """background context_management conversation include input instructions max_output_tokens max_tool_calls
    metadata model moderation parallel_tool_calls previous_response_id prompt prompt_cache_key prompt_cache_options
    prompt_cache_retention reasoning safety_identifier service_tier store stream_options temperature text tool_choice
    tools top_logprobs top_p truncation user"""
ANTHROPIC = """betas billing_policy cache_control compaction container context_management diagnostics
    fallback_credit_token fallbacks inference_geo max_tokens mcp_servers messages metadata model output_config
    service_tier speed stop_sequences system thinking thread tool_choice tools user_profile_id workspace_id"""


@pytest.mark.parametrize(
    ("path", "body", "param", "said"),
    [
        ("/v1/completions", {**COMPLETION, "temprature": 0.7}, "temprature", "got 0.7, expected .* 'temperature'"),
        ("/v1/completions", {"prompt": "x", "max_new_tokens": 9}, "max_new_tokens", "'max_tokens'"),
        ("/v1/completions", {**COMPLETION, "topP": 0.7}, "topP", "'top_p'"),
        ("/v1/completions", {**COMPLETION, "reponse_format": {}}, "reponse_format", "'response_format'"),
        ("/v1/chat/completions", {**CHAT, "stops": ["x"]}, "stops", "'stop'"),
        ("/v1/chat/completions", {**CHAT, "chat_template_kwarg": {}}, "chat_template_kwarg", "'chat_template_kwargs'"),
        ("/v1/chat/completions", {**CHAT, "stream_options": {"include_usages": True}}, "stream_options.include_usages",
         "'include_usage'"),
        ("/v1/chat/completions", {**CHAT, "response_format": {"type": "json_object", "schema": {}}},
         "response_format.schema", "got {}, expected one of type, json_schema"),
        ("/v1/chat/completions", {**CHAT, "response_format": {"type": "json_schema", "json_schema": {"schemas": {}}}},
         "response_format.json_schema.schemas", "name, description, schema"),
        ("/v1/completions", {**COMPLETION, "structured_outputs": {"choices": ["a"]}}, "structured_outputs.choices",
         "got ['a'], expected one of json, regex, choice"),
        ("/v1/responses", {"input": "x", "text": {"format": {"type": "json_schema", "shema": {}}}}, "text.format.shema",
         "name, description, schema"),
        ("/v1/responses", {"input": "x", "text": {"format": {"type": "json_object", "schema": {}}}},
         "text.format.schema", "one of type"),
        ("/generate", {**NATIVE, "return_logprobs": True}, "return_logprobs", "'return_logprob'"),
        ("/generate", {"text": "x", "temperature": 0}, "temperature", "got 0, expected it in sampling_params"),
        ("/generate", {"text": "x", "sampling_params": {"temprature": 0}}, "sampling_params.temprature",
         "got 0, expected .* 'temperature'"),
        ("/generate", {"text": "x", "sampling_params": {"best": 2}}, "sampling_params.best",
         "temperature, top_p, top_k"),
        ("/generate", {"text": ["x", "y"], "sampling_params": [{}, {"max_token": 1}]}, "sampling_params[1].max_token",
         "'max_tokens'"),
        ("/tokenize", {"prompt": "x", "add_special_token": True}, "add_special_token", "'add_special_tokens'"),
        ("/v1/completions", {**COMPLETION, "bad_words": ["x"]}, "bad_words", "not supported"),
        ("/v1/completions", {**COMPLETION, "allowed_token_ids": [1]}, "allowed_token_ids", "not supported"),
        ("/v1/completions", {**COMPLETION, **{f"extra{n}": 1 for n in range(33)}}, "body", "at most 32 fields"),
    ],
)  # fmt: skip
def test_a_misspelled_or_misplaced_field_is_refused_with_what_was_meant(
    front: RunningFront, path: str, body: dict[str, Any], param: str, said: str
) -> None:
    response = front.post(path, body)
    error = response.json().get("error")
    assert (response.status_code, error and error["param"]) == (400, param), response.text
    for words in said.split(" .* "):
        assert words in error["message"]


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)])
@pytest.mark.parametrize("stream", [False, True])
def test_fields_of_other_servers_are_ignored_and_the_answer_names_them(
    front: RunningFront, path: str, body: dict[str, Any], stream: bool
) -> None:
    extra = {"prediction": "low", "store": False, "é\r\n": 1, "none": None, "model": "canary"}
    options = {"stream": stream, "stream_options": {"other": True}}
    response = front.post(path, {**body, **extra, **options})
    assert response.status_code == 200
    ignored = "prediction, store, %C3%A9%0D%0A, stream_options.other"
    assert response.headers["x-serinus-ignored"] == ignored
    assert "x-serinus-ignored" not in front.post(path, body).headers


@pytest.mark.parametrize("name", [" a", "a ", "\r\n x: y", "é,", "[-;.$"])
def test_any_name_of_an_ignored_field_makes_a_header(front: RunningFront, name: str) -> None:
    answer = front.http.post("/v1/completions", json={**COMPLETION, name: 1})
    assert answer.status_code == 200
    assert unquote(answer.headers["x-serinus-ignored"]) == name


@pytest.mark.parametrize("number", ["1e400", "1" * 5000])
def test_a_number_that_python_has_no_value_for_is_as_any_other(front: RunningFront, number: str) -> None:
    def post(body: str, path: str = "/v1/completions") -> tuple[int, str | None, str | None]:
        answer = front.http.post(path, content=body % number)
        error = answer.json().get("error", {})
        assert not error or f"{error['param']}: got {number[:60]}" in error["message"]
        return answer.status_code, answer.headers.get("x-serinus-ignored"), error.get("param")

    asks = '{"prompt": "x", "max_tokens": 1, '
    assert post(asks + '"x": [%s]}') == (200, "x", None)
    assert post(asks + '"stream_options": {"x": %s}}') == (200, "stream_options.x", None)
    for field in ("tempratur", "stream_options.include_usages", "response_format.x", "response_format.json_schema.x"):
        *outer, name = field.split(".")
        value = f'"{name}": %s'
        for each in reversed(outer):
            value = f'"{each}": {{"type": "text", {value}}}' if each == "response_format" else f'"{each}": {{{value}}}'
        assert post(asks + value + "}") == (400, None, field)
    for value, field in (('{"x": %s}', "sampling_params.x"), ('[{"x": %s}]', "sampling_params[0].x")):
        assert post(f'{{"text": ["x"], "sampling_params": {value}}}', "/generate") == (400, None, field)


@pytest.mark.parametrize("given", [5, [], "x"])
def test_a_json_schema_of_text_format_that_is_no_object_is_refused(front: RunningFront, given: Any) -> None:
    answer = front.post("/v1/responses", {"input": "x", "text": {"format": {"type": "text", "json_schema": given}}})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "text.format"), answer.text


def test_an_unknown_field_of_any_name_is_refused_with_its_value(front: RunningFront) -> None:
    answer = front.http.post("/canary/perturb", json={"perturb": {}, "a.b[-;": 41})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("a.b[-;: got 41, expected one of")


def test_the_log_names_an_ignored_field_once(front: RunningFront, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", logger="serinus"):
        for _ in range(3):
            assert front.post("/v1/completions", {**COMPLETION, "verbosity": "low"}).status_code == 200
    said = [record.getMessage() for record in caplog.records]
    assert said == ["front: /v1/completions ignores the field 'verbosity', which is none of its own"]


def test_a_field_beside_the_one_it_is_like_is_another_servers(front: RunningFront) -> None:
    response = front.post("/v1/completions", {**COMPLETION, "model": "canary", "models": ["a", "b"]})
    assert (response.status_code, response.headers["x-serinus-ignored"]) == (200, "models")


def test_no_known_field_of_another_server_is_taken_for_a_misspelling() -> None:
    chats = f"{OPENAI} {VLLM} {SGLANG}"
    known = {CompletionBody: chats, ChatBody: chats, ResponsesBody: RESPONSES, MessagesBody: ANTHROPIC}
    for body_type, names in known.items():
        for name in names.split():
            expected = [] if name in body_type.__struct_fields__ else [name]
            assert unknown_fields(b'{"%s": {}}' % name.encode(), body_type) == expected


def test_every_sampling_parameter_of_sglang_is_known() -> None:
    names = """max_new_tokens stop stop_token_ids stop_regex temperature top_p top_k min_p frequency_penalty
        presence_penalty repetition_penalty min_new_tokens n json_schema regex ebnf structural_tag ignore_eos
        skip_special_tokens spaces_between_special_tokens no_stop_trim custom_params stream_interval logit_bias
        sampling_seed"""
    for name in names.split():
        assert unknown_fields(b'{"sampling_params": {"%s": 1}}' % name.encode(), GenerateBody) == []
