"""Bodies of the HTTP requests, as msgspec structs: types only; `sampling.py` and `state.py` check what they mean.

A null is the same as a missing field. What becomes of fields that are not declared here, `parse.py` says; well-known
ones that change the answer and are not supported are declared (as `Any`) so that `refuse_unsupported` can name them.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec

from serinus.core.errors import BadRequest


class StreamOptions(msgspec.Struct, kw_only=True):
    """What a stream carries besides text."""

    include_usage: bool | None = None
    """One more chunk at the end, with the usage of the whole request."""
    continuous_usage_stats: bool | None = None
    """With include_usage, as in vLLM: each chunk has the usage of its answer so far."""


class JsonSchemaFormat(msgspec.Struct, kw_only=True):
    """`response_format.json_schema`, as OpenAI has it."""

    name: str | None = None
    """Of no effect: nothing refers to it."""
    description: str | None = None
    """Of no effect: what the model is to know of the schema belongs into the prompt."""
    schema: dict[str, Any] | bool | None = None
    """The JSON Schema of the answer."""
    strict: bool | None = None
    """Of no effect: every schema is enforced."""


class ResponseFormat(msgspec.Struct, kw_only=True):
    """`response_format`, as OpenAI has it; structural tags as SGLang and vLLM have them."""

    type: str
    """text, json_object, json_schema or structural_tag."""
    json_schema: JsonSchemaFormat | None = None
    structures: list[dict[str, Any]] | None = None
    """Of a structural tag: objects with `begin`, `schema` and `end`."""
    triggers: list[str] | None = None
    """Of a structural tag: texts that one of `structures` must follow."""
    format: dict[str, Any] | None = None
    """Of a structural tag in the newer form."""


class StructuredOutputs(msgspec.Struct, kw_only=True):
    """`structured_outputs`, as vLLM has it: one of the first six."""

    json: str | dict[str, Any] | bool | None = None
    """A JSON Schema, or its text."""
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    """Rules of Lark, or of EBNF (`name ::= ...`)."""
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool | None = None
    """With `json` or `json_object`: no whitespace between tokens of JSON."""
    disable_additional_properties: bool | None = None
    """With `json`: objects whose schema does not speak of additionalProperties have none."""
    whitespace_pattern: str | None = None
    """With `json` or `json_object`: a regex of the whitespace between tokens of JSON."""
    disable_fallback: bool | None = None
    """Of no effect: there is one library."""


class SamplingFields(msgspec.Struct, kw_only=True):
    """The sampling parameters that every endpoint takes, under the names of core.SamplingParams, OpenAI and vLLM.

    A field with the name of one of SamplingParams reaches it as it is; `sampling.py` translates the others.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    spaces_between_special_tokens: bool | None = None
    """Of no effect: it is for tokenizers that are not `fast`."""
    n: int | None = None
    seed: int | None = None
    json_schema: str | dict[str, Any] | None = None
    """A JSON Schema that the answer is to follow, or its text."""
    regex: str | None = None
    """A regex that the whole answer is to match."""
    ebnf: str | None = None
    """Rules of EBNF (`root ::= ...`) that the answer is to follow."""
    structural_tag: str | dict[str, Any] | None = None
    """Text that is free up to a trigger, and follows a schema from there to an end."""


class OpenAiBody(SamplingFields, kw_only=True):
    """What /v1/completions and /v1/chat/completions share: OpenAI's fields, then those of SGLang and vLLM."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    include_stop_str_in_output: bool | None = None
    add_special_tokens: bool | None = None
    cache_salt: str | None = None
    priority: int | None = None
    """Smaller = served sooner (--schedule-policy priority), and its cached prefix stays longer (--radix-eviction-policy
    priority)."""
    timeout: float | None = None
    """Seconds within which the answer must be complete, else 504 (or an error event); see --request-timeout."""
    rid: str | None = None
    return_meta_info: bool | None = None
    """Add what /generate calls `meta_info`, one per choice: cached tokens by tier, where each part ran."""
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | bool | None = None
    """vLLM's older name of structured_outputs.json; so are the next."""
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    guided_decoding_backend: str | None = None
    """Of no effect: there is one library."""
    logits_processors: Any = None
    custom_logit_processor: Any = None
    lora_path: Any = None
    use_beam_search: Any = None
    prompt_logprobs: Any = None
    allowed_token_ids: Any = None
    bad_words: Any = None
    stop_regex: Any = None
    truncate_prompt_tokens: Any = None
    session_params: Any = None

    @property
    def salt(self) -> str:
        """What keeps its cached prefix apart from those of others; empty = nothing does."""
        return self.cache_salt or ""


class CompletionBody(OpenAiBody, kw_only=True):
    """Body of /v1/completions, as OpenAI has it."""

    prompt: str | list[str | int | list[int]]
    """A text, a list of texts, one list of token ids, or a list of such lists."""
    echo: bool | None = None
    logprobs: int | None = None
    best_of: Any = None
    suffix: Any = None


class ChatBody(OpenAiBody, kw_only=True):
    """Body of /v1/chat/completions, as OpenAI has it."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    """Given to the template by this name: none, minimal, low, medium, high..."""
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    """False = one call in an answer at most."""
    separate_reasoning: bool | None = None
    """False = thoughts stay in the content."""
    include_reasoning: bool | None = None
    """False = thoughts are not shown."""
    thinking_token_budget: int | None = None
    """Tokens that thoughts may have; then their end is forced."""
    thinking_budget: int | None = None
    """Another name of it (Qwen)."""
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    chat_template: Any = None
    documents: Any = None
    web_search_options: Any = None


class NativeSampling(SamplingFields, kw_only=True):
    """`sampling_params` of /generate, with SGLang's names (vLLM's as aliases)."""

    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    sampling_seed: int | None = None
    stream_interval: int | None = None
    """Of no effect: every token is sent as it comes."""
    stop_regex: Any = None
    custom_params: Any = None


class GenerateBody(msgspec.Struct, kw_only=True):
    """/generate, in the SGLang form: one prompt or a batch; per-prompt fields may be lists of the batch's length."""

    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    sampling_params: NativeSampling | list[NativeSampling] | None = None
    rid: str | list[str] | None = None
    stream: bool | None = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: int | list[int] | None = None
    top_logprobs_num: int | list[int] | None = None
    return_text_in_logprobs: bool | None = None
    cache_salt: str | None = None
    extra_key: str | None = None
    priority: int | None = None
    """Smaller = served sooner (--schedule-policy priority), and its cached prefix stays longer (--radix-eviction-policy
    priority)."""
    timeout: float | None = None
    """Seconds within which the answer must be complete, else 504 (or an error event); see --request-timeout."""
    model: str | None = None
    input_embeds: Any = None
    image_data: Any = None
    video_data: Any = None
    audio_data: Any = None
    lora_path: Any = None
    session_params: Any = None
    custom_logit_processor: Any = None
    token_ids_logprob: Any = None
    return_hidden_states: Any = None

    @property
    def salt(self) -> str:
        """What keeps its cached prefix apart from those of others; empty = nothing does."""
        return self.cache_salt or self.extra_key or ""


class TokenizeBody(msgspec.Struct, kw_only=True):
    """/tokenize: a text (`prompt`, or SGLang's `text`), a list of texts, or the messages of a chat."""

    model: str | None = None
    prompt: str | list[str] | None = None
    text: str | list[str] | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """/detokenize: token ids, one list or several."""

    model: str | None = None
    tokens: list[int | list[int]]
    skip_special_tokens: bool | None = None


class AbortBody(msgspec.Struct, kw_only=True):
    """/abort_request: one request by id, or all."""

    rid: str | None = None
    abort_all: bool | None = None


class WorkerBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """/workers of a router: an engine to add."""

    url: str
    """Where the engine is: http://host:port."""
    worker_type: str = "decode"
    """decode (also: regular, unified), which owns requests, or prefill."""
    model_id: str = ""
    """The name that requests use for its model; default: the engine's own."""


_HARMLESS: dict[str, tuple[Any, ...]] = {
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "suffix": ("",),
    "lora_path": ("",),
}
"""Values of unsupported fields that ask for nothing."""
_SAME_AS = {"best_of": "n"}
"""Unsupported fields that ask for nothing where they repeat another one (1 where it is missing)."""

_INSTEAD: dict[str, str] = {
    "best_of": "n or nothing (not supported; use n)",
    "suffix": "nothing (not supported: these models only continue a text)",
    "functions": "nothing (use tools)",
    "function_call": "nothing (use tool_choice)",
    "chat_template": "nothing (the server's --chat-template is used)",
    "modalities": "['text'] or nothing (text only)",
}


@cache
def _unsupported(body_type: type[msgspec.Struct]) -> tuple[str, ...]:
    """Names of its well-known fields. To find them takes msgspec a millisecond."""
    return tuple(field.name for field in msgspec.structs.fields(body_type) if field.type is Any)


def refuse_unsupported(body: msgspec.Struct) -> None:
    """Raise BadRequest for the first well-known field that asks for what Serinus cannot do yet."""
    for name in _unsupported(type(body)):
        value = getattr(body, name)
        if value is None or value is False or value in ([], {}) or value in _HARMLESS.get(name, ()):
            continue
        twin = _SAME_AS.get(name)
        if twin is not None and type(value) is int and value == (getattr(body, twin) or 1):
            continue
        raise BadRequest(name, value, _INSTEAD.get(name, "nothing (not supported)"))
