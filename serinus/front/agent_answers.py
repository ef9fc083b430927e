"""What the endpoints for agents answer, as types: /v1/responses, /v1/messages, /v1/embeddings."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from serinus.front.answer_schemas import CompletionDetails, HttpAnswer, PromptDetails

# ---- /v1/responses ---------------------------------------------------------------------------------------------------


class OutputText(HttpAnswer, kw_only=True, tag_field="type", tag="output_text"):
    """Text of a message."""

    text: str
    annotations: list[Any]
    logprobs: list[Any]


class ReasoningText(HttpAnswer, kw_only=True, tag_field="type", tag="reasoning_text"):
    """Text of the thoughts."""

    text: str


class _Item(HttpAnswer, kw_only=True):
    id: str
    status: Literal["in_progress", "completed", "incomplete"]


class MessageItem(_Item, kw_only=True, tag_field="type", tag="message"):
    """Text that the model answered."""

    role: Literal["assistant"]
    content: list[OutputText]


class ReasoningItem(_Item, kw_only=True, tag_field="type", tag="reasoning"):
    """What the model thought."""

    summary: list[Any]
    content: list[ReasoningText]


class CallItem(_Item, kw_only=True, tag_field="type", tag="function_call"):
    """A function that it calls."""

    call_id: str
    name: str
    arguments: str


class ResponseUsage(HttpAnswer, kw_only=True):
    """Token counts of /v1/responses."""

    input_tokens: int
    input_tokens_details: PromptDetails
    output_tokens: int
    output_tokens_details: CompletionDetails
    total_tokens: int


class ResponseObject(HttpAnswer, kw_only=True):
    """Answer of /v1/responses: what was asked for, and `output`."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    background: bool
    error: dict[str, str] | None
    incomplete_details: dict[str, str] | None
    instructions: str | None
    max_output_tokens: int | None
    model: str
    output: list[MessageItem | ReasoningItem | CallItem]
    parallel_tool_calls: bool
    previous_response_id: None
    reasoning: dict[str, Any]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float
    truncation: str
    usage: ResponseUsage | None
    metadata: dict[str, Any]


class ResponseEvent(msgspec.Struct, kw_only=True):
    """One event of its stream; what else it has, `type` says, as with OpenAI."""

    type: str
    sequence_number: int


# ---- /v1/messages ----------------------------------------------------------------------------------------------------


class TextBlock(HttpAnswer, kw_only=True, tag_field="type", tag="text"):
    """Text that the model answered."""

    text: str


class ThinkingBlock(HttpAnswer, kw_only=True, tag_field="type", tag="thinking"):
    """What the model thought."""

    thinking: str
    signature: str


class ToolUseBlock(HttpAnswer, kw_only=True, tag_field="type", tag="tool_use"):
    """A function that it calls."""

    id: str
    name: str
    input: Any


class MessageUsage(HttpAnswer, kw_only=True):
    """Token counts of /v1/messages."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class Message(HttpAnswer, kw_only=True):
    """The whole answer of /v1/messages."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(HttpAnswer, kw_only=True):
    """The answer of /v1/messages/count_tokens."""

    input_tokens: int


class MessageEvent(msgspec.Struct, kw_only=True):
    """One event of its stream; what else it has, `type` says, as with Anthropic."""

    type: str


# ---- /v1/embeddings --------------------------------------------------------------------------------------------------


class Embedding(HttpAnswer, kw_only=True):
    """The embedding of one text."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str
    """fp32; with encoding_format base64 its bytes, little-endian."""


class EmbeddingUsage(HttpAnswer, kw_only=True):
    """Tokens of all texts."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(HttpAnswer, kw_only=True):
    """The answer, in the order of the texts."""

    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
