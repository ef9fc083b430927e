"""When an answer ends, and whether a request can be taken at all. Pure rules over one request."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from serinus.core.errors import BadRequest, PromptTooLong
from serinus.core.handoff import HandoffSpec
from serinus.core.request import FinishReason, Request
from serinus.sched.request_state import ReqState
from serinus.sched.settings import SchedSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitReason:
    """Why a request ended."""

    finish: FinishReason
    matched_stop: int | None = None
    """The token that ended it, where one did."""


_LENGTH = ExitReason(finish=FinishReason.LENGTH)


def stop_ids_of(request: Request, settings: SchedSettings) -> tuple[int, ...]:
    """The model's end-of-sequence tokens (unless ignored) and the request's own; each once."""
    eos_ids = () if request.sampling.ignore_eos else settings.eos_ids
    return tuple(dict.fromkeys((*eos_ids, *request.sampling.stop_token_ids)))


def token_limit(request: Request, settings: SchedSettings, pool_tokens: int) -> int:
    """Known tokens at which the request ends with LENGTH.

    A request that asks for more than the pool holds runs until it has the whole pool: the oldest request can take the
    pages of all others, so at `pool_tokens` no other request is left to retract.
    """
    limit = min(settings.context_length, pool_tokens)
    wanted = request.sampling.max_new_tokens
    return limit if wanted is None else min(limit, len(request.prompt) + wanted)


def deadline_of(request: Request, settings: SchedSettings) -> float:
    """Clock at which it must have ended: by its own timeout, or by that of all; inf = there is none."""
    bounds = [seconds for seconds in (request.timeout_s, settings.request_s_max) if seconds > 0]
    return request.arrival + min(bounds, default=math.inf)


def ending_with(state: ReqState, token: int, *, ends: bool = False) -> ExitReason | None:
    """How the request ends with this token, if it is its next one; None = it goes on. `ends`: its grammar is complete
    with it. A stop token comes before that, and both before the length."""
    stops = token in state.stop_set
    if ends or (stops and state.generated + 1 > state.min_new):
        return ExitReason(finish=FinishReason.STOP, matched_stop=token if stops else None)
    return _LENGTH if state.known + 1 >= state.limit else None


def check_request(request: Request, settings: SchedSettings, pool_tokens: int) -> None:
    """Refuse what can never be served.

    Raises BadRequest (empty prompt, ids outside the vocabulary) or PromptTooLong (no room for the prompt and one
    token in the context or in the pool). Cost: one pass over the prompt.
    """
    prompt = request.prompt
    if prompt.ndim != 1 or len(prompt) == 0:
        raise BadRequest("prompt", prompt.tolist(), "at least one token")
    low, high = int(prompt.min()), int(prompt.max())
    if low < 0 or high >= settings.vocab_size:
        at = int(np.argmax((prompt < 0) | (prompt >= settings.vocab_size)))
        raise BadRequest(f"prompt[{at}]", int(prompt[at]), f"a token id from 0 to {settings.vocab_size - 1}")
    for name, ids in (("stop_token_ids", request.sampling.stop_token_ids), ("logit_bias", request.sampling.logit_bias)):
        for token in ids:
            if token >= settings.vocab_size:
                raise BadRequest(name, token, f"token ids from 0 to {settings.vocab_size - 1}")
    for bound, what in ((settings.context_length, "the context"), (pool_tokens, "the KV pool")):
        if len(prompt) + 1 > bound:
            raise PromptTooLong(
                "prompt",
                f"{len(prompt)} tokens",
                f"at most {bound - 1} ({what} holds {bound}, one of them generated)",
                context=bound,
            )


def check_handoff(handoff: HandoffSpec, request: Request, page_size: int) -> None:
    """Raises BadRequest where `held` is no page-aligned proper prefix of the prompt."""
    if not 0 <= handoff.held < len(request.prompt) or handoff.held % page_size:
        raise BadRequest(
            "held", handoff.held, f"a multiple of {page_size} from 0 to {len(request.prompt) - 1} (prompt length - 1)"
        )
