"""Small things that tests build again and again: requests, and the answers that deltas add up to. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from serinus.core.request import FinishReason, Request, Share, TokenDelta, TokenLogprobs
from serinus.core.sampling import SamplingParams


def make_request(
    rid: str,
    prompt: Sequence[int],
    *,
    seed: int = 0,
    cache_salt: str = "",
    priority: int = 0,
    arrival: float = 0.0,
    timeout_s: float = 0.0,
    share: Share | None = None,
    **sampling: Any,
) -> Request:
    """A request with greedy sampling unless told otherwise."""
    params = SamplingParams(**{"temperature": 0.0, **sampling})
    ids = np.array(prompt, np.int32)
    return Request(
        rid=rid, prompt=ids, sampling=params, seed=seed, cache_salt=cache_salt, priority=priority, arrival=arrival,
        timeout_s=timeout_s, share=share or Share(),
    )  # fmt: skip


@dataclass(slots=True)
class Answer:
    """All deltas of one request, put together; complains about one after the end."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    last: TokenDelta | None = None

    @property
    def finish(self) -> FinishReason | None:
        """Why it ended; None while it goes on."""
        return self.last.finish if self.last else None

    def take(self, delta: TokenDelta) -> None:
        """Append the next delta of the request."""
        assert self.finish is None, f"testing: {delta.rid} got {delta} after its end {self.last}"
        self.tokens.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs)
        self.prompt_logprobs.extend(delta.prompt_logprobs)
        self.last = delta
