"""What messages are made of: bounded types, the base classes, and the pieces that several messages share."""

from __future__ import annotations

from typing import Annotated

import msgspec

__all__ = [
    "Blobs",
    "Count",
    "Ids",
    "Mac",
    "MessageBase",
    "Name",
    "Names",
    "Pages",
    "PartBase",
    "Priority",
    "Sampling",
    "Seconds",
    "Text",
    "Tiers",
    "TokenLp",
    "TokenLps",
    "TopIds",
    "TopLogprobs",
    "UsageOut",
]

Name = Annotated[str, msgspec.Meta(max_length=256)]
Text = Annotated[str, msgspec.Meta(max_length=16_384)]
Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Priority = Annotated[int, msgspec.Meta(ge=-(1 << 31), le=(1 << 31) - 1)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e6)]
Pages = Annotated[list[Count], msgspec.Meta(max_length=1 << 20)]
# Containers are bounded one by one: their length is checked before anything of that length is allocated.
Ids = Annotated[tuple[int, ...], msgspec.Meta(max_length=1 << 20)]
TopIds = Annotated[tuple[int, ...], msgspec.Meta(max_length=1 << 10)]
TopLogprobs = Annotated[tuple[float, ...], msgspec.Meta(max_length=1 << 10)]
Names = Annotated[tuple[Name, ...], msgspec.Meta(max_length=64)]
Mac = Annotated[bytes, msgspec.Meta(max_length=64)]
Blobs = Annotated[tuple[Annotated[bytes, msgspec.Meta(max_length=1 << 16)], ...], msgspec.Meta(max_length=1 << 10)]
Tiers = Annotated[dict[str, int], msgspec.Meta(max_length=16)]


class MessageBase(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True, array_like=False):
    """A message: immutable, tagged with its class name, unknown fields refused."""


class PartBase(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A piece of a message."""


class Sampling(PartBase, frozen=True, kw_only=True):
    """core.SamplingParams on the wire (what the engine needs of it; texts stay with the front)."""

    max_new_tokens: int | None = None
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Annotated[dict[int, float], msgspec.Meta(max_length=1 << 16)] = {}
    stop_token_ids: TopIds = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None


class TokenLp(PartBase, frozen=True, kw_only=True):
    """core.TokenLogprobs on the wire."""

    logprob: float | None
    top_ids: TopIds = ()
    top_logprobs: TopLogprobs = ()


TokenLps = Annotated[tuple[TokenLp, ...], msgspec.Meta(max_length=1 << 20)]


class UsageOut(PartBase, frozen=True, kw_only=True):
    """core.Usage on the wire."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: Tiers = {}
    prefill_engine: str = ""
    handoff_tokens: int = 0
    handoff_pages: int = 0
    handoff_bytes: int = 0
    handoff_seconds: float = 0.0
    local_reason: str = ""
    retractions: int = 0
    queue_seconds: float = 0.0
    first_token_seconds: float = 0.0
