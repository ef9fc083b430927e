"""Bodies of the endpoints that agents use besides chat completions: OpenAI's responses, Anthropic's messages."""

from __future__ import annotations

from typing import Any

import msgspec

from serinus.front.schemas import OpenAiBody


class _AgentBody(OpenAiBody, kw_only=True):
    """What both share, besides the sampling fields."""

    chat_template_kwargs: dict[str, Any] | None = None
    include_reasoning: bool | None = None
    """False = thoughts are not shown."""


class ResponsesBody(_AgentBody, kw_only=True):
    """Body of /v1/responses, as OpenAI has it."""

    input: str | list[dict[str, Any]]
    """A text, or the items of the conversation so far: this server keeps none."""
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    include: list[str] | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    background: bool | None = None
    truncation: str | None = None
    conversation: Any = None
    prompt: Any = None
    top_logprobs: Any = None


class MessagesBody(_AgentBody, kw_only=True):
    """Body of /v1/messages, as Anthropic has it."""

    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    stop_sequences: list[str] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    """`format`: a JSON Schema of the answer; `effort`."""
    metadata: dict[str, Any] | None = None
    speed: str | None = None
    """Of no effect: there is one. Else it would be `seed` misspelled."""
    container: Any = None
    mcp_servers: Any = None


class EmbeddingsBody(msgspec.Struct, kw_only=True):
    """Body of /v1/embeddings, as OpenAI has it."""

    input: str | list[str | int | list[int]]
    """A text, texts, token ids, or lists of token ids."""
    model: str | None = None
    encoding_format: str | None = None
    """float (default) or base64."""
    dimensions: int | None = None
    """Of the model, or nothing."""
    user: str | None = None
    priority: int | None = None
    timeout: float | None = None
    cache_salt: str | None = None
