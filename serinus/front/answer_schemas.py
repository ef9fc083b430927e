"""What completions, chats and the native endpoint answer, as types: for the description at /openapi.json, which tests
hold the answers against.

An answer has the fields that are declared here and no others; one with `UNSET` is not always there.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from serinus.core.request import KvIntegrity
from serinus.front.exchange import ErrorInfo


class HttpAnswer(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One with the fields declared, and no others."""


# ---- what answers share ----------------------------------------------------------------------------------------------


class PromptDetails(HttpAnswer, kw_only=True):
    """A part of usage, of /v1/responses too."""

    cached_tokens: int


class CompletionDetails(HttpAnswer, kw_only=True):
    """A part of usage, of /v1/responses too."""

    reasoning_tokens: int


class OpenAiUsage(HttpAnswer, kw_only=True):
    """Token counts, as OpenAI has them."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails | UnsetType = UNSET
    completion_tokens_details: CompletionDetails | UnsetType = UNSET
    """Of chats, where thoughts are told apart."""
    kv_integrity: KvIntegrity | list[KvIntegrity | None] | UnsetType = UNSET
    """With a canary: the receipt of the answer, or of each."""


class NativeFinish(HttpAnswer, kw_only=True):
    """Why an answer ended, in SGLang's form."""

    type: Literal["stop", "length", "abort", "error"]
    length: int | UnsetType = UNSET
    matched: int | str | UnsetType | None = UNSET
    """The token or the text that it ended with."""
    message: str | UnsetType = UNSET
    status_code: int | UnsetType | None = UNSET
    err_type: str | UnsetType | None = UNSET


class MetaInfo(HttpAnswer, kw_only=True):
    """SGLang's meta_info, and where each part of the request ran."""

    id: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    cached_tokens_details: dict[str, int]
    """Tokens found, by tier."""
    finish_reason: NativeFinish | None
    e2e_latency: float
    prefill_engine: str
    decode_engine: str
    handoff_tokens: int | UnsetType = UNSET
    handoff_backend: str | UnsetType = UNSET
    """How KV travelled: cuda_ipc, shm, tcp..."""
    handoff_pages: int | UnsetType = UNSET
    handoff_bytes: int | UnsetType = UNSET
    handoff_seconds: float | UnsetType = UNSET
    local_reason: str | UnsetType = UNSET
    """Why a decode engine computed the prompt itself."""
    retractions: int | UnsetType = UNSET
    queue_seconds: float | UnsetType = UNSET
    first_token_seconds: float | UnsetType = UNSET
    kv_integrity: KvIntegrity | UnsetType = UNSET
    input_token_logprobs: list[list[Any]] | UnsetType = UNSET
    """[log-probability, token id, text or null] for each token."""
    output_token_logprobs: list[list[Any]] | UnsetType = UNSET
    input_top_logprobs: list[list[Any] | None] | UnsetType = UNSET
    output_top_logprobs: list[list[Any] | None] | UnsetType = UNSET


class _Head(HttpAnswer, kw_only=True):
    id: str
    created: int
    model: str
    system_fingerprint: str


class _Choice(HttpAnswer, kw_only=True):
    index: int
    finish_reason: Literal["stop", "length", "abort", "error", "tool_calls"] | None
    meta_info: MetaInfo | UnsetType = UNSET
    """Where return_meta_info asks for it."""
    kv_integrity: KvIntegrity | UnsetType = UNSET


# ---- /v1/completions -------------------------------------------------------------------------------------------------


class CompletionLogprobs(HttpAnswer, kw_only=True):
    """Of the tokens of one answer."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float | None] | None]
    text_offset: list[int]


class CompletionChoice(_Choice, kw_only=True):
    """One answer, or a piece of it."""

    text: str
    logprobs: CompletionLogprobs | None


class Completion(_Head, kw_only=True):
    """The whole answer of /v1/completions."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: OpenAiUsage


class CompletionChunk(_Head, kw_only=True):
    """One event of its stream."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: OpenAiUsage | UnsetType | None = UNSET


# ---- /v1/chat/completions --------------------------------------------------------------------------------------------


class LikelyToken(HttpAnswer, kw_only=True):
    """One of the likeliest at a place."""

    token: str
    logprob: float | None
    bytes: list[int]


class ChatToken(LikelyToken, kw_only=True):
    """The token at a place."""

    top_logprobs: list[LikelyToken]


class ChatLogprobs(HttpAnswer, kw_only=True):
    """Of the tokens of one answer."""

    content: list[ChatToken]
    refusal: None


class CalledFunction(HttpAnswer, kw_only=True):
    """Name and arguments of a call."""

    arguments: str
    """JSON; in a stream a piece of it."""
    name: str | UnsetType = UNSET


class CalledTool(HttpAnswer, kw_only=True):
    """A function that the model calls."""

    function: CalledFunction
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    index: int | UnsetType = UNSET
    """There in a stream."""


class ChatMessage(HttpAnswer, kw_only=True):
    """What the model answered."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[CalledTool] | UnsetType = UNSET


class ChatDelta(HttpAnswer, kw_only=True):
    """A piece of it."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[CalledTool] | UnsetType = UNSET


class ChatChoice(_Choice, kw_only=True):
    """One of the answers."""

    message: ChatMessage
    logprobs: ChatLogprobs | None


class ChatChunkChoice(_Choice, kw_only=True):
    """A piece of one."""

    delta: ChatDelta
    logprobs: ChatLogprobs | None


class Chat(_Head, kw_only=True):
    """The whole answer of /v1/chat/completions."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: OpenAiUsage


class ChatChunk(_Head, kw_only=True):
    """One event of its stream."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: OpenAiUsage | UnsetType | None = UNSET


# ---- /generate, /tokenize, /detokenize -------------------------------------------------------------------------------


class Generated(HttpAnswer, kw_only=True):
    """Answer of /generate to one prompt; each event of a stream has all of it so far."""

    text: str
    output_ids: list[int]
    meta_info: MetaInfo
    index: int | UnsetType = UNSET
    """In a stream of several."""


class FailedMeta(HttpAnswer, kw_only=True):
    """The id of one that failed."""

    id: str


class NotGenerated(HttpAnswer, kw_only=True):
    """What stands in place of one of several answers of /generate that failed."""

    error: ErrorInfo
    meta_info: FailedMeta


class Tokenized(HttpAnswer, kw_only=True):
    """Answer of /tokenize; lists of lists where there were several texts."""

    tokens: list[int | list[int]]
    count: int | list[int]
    max_model_len: int | None


class Detokenized(HttpAnswer, kw_only=True):
    """The whole answer of /detokenize."""

    text: str | list[str]
    prompt: str | list[str]
