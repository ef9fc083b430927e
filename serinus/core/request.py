"""One request as plain data: Request goes into the engine, TokenDelta comes out; both travel as they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from serinus.core.bounds import Count, Ids, Name, Priority, Seconds, Text, TopIds, TopLogprobs, Weight
from serinus.core.sampling import SamplingParams


class FinishReason(Enum):
    """Why an answer ended; the value is what clients read (`finish_reason`)."""

    STOP = "stop"
    """An end-of-sequence token, a stop token, or a stop text."""
    LENGTH = "length"
    """max_new_tokens, or the end of the context."""
    ABORT = "abort"
    """The client or an operator ended it."""
    ERROR = "error"
    """It could not be served; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Log-probabilities at one place of the sequence, under the model's own distribution (before penalties)."""

    logprob: float | None
    """Of the token that stands there; None for the first token of a prompt."""
    top_ids: TopIds = ()
    """The likeliest tokens, best first."""
    top_logprobs: TopLogprobs = ()
    """The log-probabilities of `top_ids`."""
    hidden: Annotated[bytes, Meta(max_length=1 << 20)] = b""
    """The last hidden state from which that token was chosen, behind the final norm: fp32, little-endian; where
    SamplingParams.hidden_state asks for it. Or what SamplingParams.pooling makes of those of the prompt."""


Places = Annotated[tuple[TokenLogprobs, ...], Meta(max_length=1 << 20)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The API key that a request came with, as far as the queue goes by it. Requests without one are one share."""

    name: Name = ""
    """The name of the key, never the key."""
    weight: Weight = 1.0
    """Its part of the work while others wait, against their weights."""
    queued_max: Count = 0
    """Requests of it that may wait in one engine; 0 = as many as of all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One sequence to continue. `n` answers are `n` requests: the front splits them.

    Raises ValueError: the prompt is not one row of ids.
    """

    rid: Name
    """Unique among the requests of this engine."""
    prompt: NDArray[np.int32]
    """Token ids, at least one."""
    sampling: SamplingParams
    """How tokens are chosen; `n` is 1 here."""
    seed: int
    """Seed of this sequence's sampler; drawn by the front where the client gave none."""
    cache_salt: Name = ""
    """Requests share KV only with requests of the same salt."""
    priority: Priority = 0
    """Smaller = served sooner, under the schedule policy `priority`; and its cached prefix stays longer, under the
    eviction policy of that name."""
    share: Share = Share()
    """The API key that it came with."""
    prefill_address: Name = ""
    """Control address of the prefill engine the router suggests; empty = none."""
    timeout_s: Seconds = 0.0
    """Seconds from its arrival within which it must end, in whatever state it is; 0 = none."""
    traceparent: Name = ""
    """W3C form of the span of a trace under which it runs; empty = it is not traced."""
    stream: bool = False
    """Its tokens are shown as they come; otherwise only its whole answer is."""
    arrival: float = 0.0
    """Clock.now() when the request reached this engine."""

    def __post_init__(self) -> None:
        if self.prompt.ndim != 1:
            raise ValueError(f"core: a prompt of shape {self.prompt.shape}, expected one row of ids")


@dataclass(frozen=True, slots=True, kw_only=True)
class KvIntegrity:
    """The receipt of an answer: what the canary verified of the KV that it was computed on."""

    coverage: Name
    """How decode steps are checked: full, or rotating:N."""
    slots_due: int
    """Slots that had to be verified for it, over all of its steps and parts; a slot counts each time. The leader works
    them out of the steps that it planned."""
    slots_checked: int
    """Slots that were verified for it, as the ranks counted them while they did it, in all lanes; of several ranks the
    lowest number. Equal to `slots_due`, or the canary is broken and nothing is vouched for."""
    horizon: int
    """KV of this many tokens, from the first of the prompt on, is verified: of all but the last token of an answer; 0
    where fewer slots were verified than were due."""
    sources: Annotated[Mapping[str, int], Meta(max_length=16)]
    """Of the tokens that it was computed on, how many had their KV from where: device, host, storage (found cached),
    peer, computed."""
    heals: int
    """Times that it went back because wrong KV was found."""
    heal_reasons: Annotated[tuple[Text, ...], Meta(max_length=1 << 16)]
    """What was found, each time."""
    repaired_from: Annotated[Mapping[str, int], Meta(max_length=16)]
    """Tokens whose KV was given up by heals, by where it came from instead."""
    chain_hash: Name
    """Hash of all tokens of prompt and answer, 16 hex digits: that of the stamps, content alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a request cost and where each part ran; complete in the delta that ends it."""

    prompt_tokens: int
    """Length of the prompt."""
    completion_tokens: int
    """Tokens generated so far."""
    cached_tokens: Annotated[Mapping[str, int], Meta(max_length=16)] = field(default_factory=dict)
    """Prompt tokens whose KV was found, by tier: device, host, storage."""
    prefill_engine: str = ""
    """Name of the engine that computed the prompt; empty = this one."""
    handoff_tokens: int = 0
    """Prompt tokens whose KV came from that engine."""
    handoff_backend: str = ""
    """How it travelled: cuda_ipc, shm, tcp..."""
    handoff_pages: int = 0
    """Pages it came in."""
    handoff_bytes: int = 0
    """Bytes of KV that came."""
    handoff_seconds: float = 0.0
    """Seconds this engine spent taking them in."""
    local_reason: str = ""
    """Why a decode engine computed the prompt itself (short, peer_gone...: docs/HANDOFF.md); empty = it did not."""
    retractions: int = 0
    """Times the request gave its pages back and was computed again."""
    queue_seconds: float = 0.0
    """From arrival to the first step (or the grant) that worked for it."""
    first_token_seconds: float = 0.0
    """From arrival to its first token, as the engine saw it."""
    kv_integrity: KvIntegrity | None = None
    """With a canary, in the delta that ends the request."""


@dataclass(slots=True, kw_only=True)
class TokenDelta:
    """What one step brought to one request. Not frozen for its cost alone, as SeqWork; nothing changes one."""

    rid: Name
    token_ids: Ids = ()
    """New tokens, in order; a stop token that ended the answer is among them."""
    logprobs: Places = ()
    """One per new token where asked for, else empty."""
    prompt_logprobs: Places = ()
    """One per prompt token, once, where asked for."""
    finish: FinishReason | None = None
    """Set in the last delta of a request, and only there."""
    matched_stop: int | None = None
    """The token id that ended it, where one did."""
    error: Text = ""
    """With ERROR or ABORT: what happened, in words."""
    error_status: int = 500
    """With ERROR: the HTTP status that fits."""
    wrong_token: int | None = None
    """With ERROR: index, in the answer, of the first token that left and turned out wrong."""
    usage: Usage | None = None
    """In the first and the last delta of a request."""
