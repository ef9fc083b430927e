"""How each kind of server is asked: path and body of a request. Answers are read in `answer.py`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from serinus.cli.bench.dataset import Prompt
from serinus.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking:
    """What holds for all requests of a run."""

    model: str
    """The name the server knows the model by."""
    ignore_eos: bool = True
    """Generate the whole output length."""
    stream: bool = True
    """Ask for events; without them there is no time to first token."""
    temperature: float = 0.0
    extra: Mapping[str, Any] | None = None
    """Laid over the body (--extra-request-body)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """One kind of server."""

    path: str
    """Path of the endpoint that is measured."""
    native: bool
    """Answers are SGLang's (`text`, `meta_info`), not OpenAI's (`choices`, `usage`)."""
    needs_text: bool
    """It takes texts only."""
    body_of: Callable[[Prompt, Asking], dict[str, Any]]
    """The body of a request, less `extra`."""

    def body(self, prompt: Prompt, asking: Asking) -> bytes:
        """The JSON of a request. Raises ConfigError where the prompt is ids and the server takes texts only."""
        if self.needs_text and prompt.text is None:
            raise ConfigError("bench: this backend takes texts only, expected a --tokenizer to make them with")
        return json.dumps({**self.body_of(prompt, asking), **(asking.extra or {})}).encode()


def _completions(prompt: Prompt, asking: Asking) -> dict[str, Any]:
    return {"prompt": prompt.text if prompt.text is not None else list(prompt.ids), **_openai(prompt, asking)}


def _chat(prompt: Prompt, asking: Asking) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": prompt.text}], **_openai(prompt, asking)}


def _openai(prompt: Prompt, asking: Asking) -> dict[str, Any]:
    body = {
        "model": asking.model,
        "max_tokens": prompt.output_tokens,
        "temperature": asking.temperature,
        "ignore_eos": asking.ignore_eos,
        "stream": asking.stream,
    }
    return {**body, "stream_options": {"include_usage": True}} if asking.stream else body


def _native(prompt: Prompt, asking: Asking) -> dict[str, Any]:
    what = {"text": prompt.text} if prompt.text is not None else {"input_ids": list(prompt.ids)}
    return {
        **what,
        "sampling_params": {
            "max_new_tokens": prompt.output_tokens,
            "temperature": asking.temperature,
            "ignore_eos": asking.ignore_eos,
        },
        "stream": asking.stream,
    }


_OPENAI = Dialect(path="/v1/completions", native=False, needs_text=False, body_of=_completions)
_CHAT = Dialect(path="/v1/chat/completions", native=False, needs_text=True, body_of=_chat)
_NATIVE = Dialect(path="/generate", native=True, needs_text=False, body_of=_native)

DIALECTS: dict[str, Dialect] = {
    "serinus": _NATIVE,
    "sglang": _NATIVE,
    "openai": _OPENAI,
    "openai-chat": _CHAT,
    "vllm": _OPENAI,
    "vllm-chat": _CHAT,
    "sglang-oai": _OPENAI,
    "sglang-oai-chat": _CHAT,
}
"""By the names people give to --backend."""
