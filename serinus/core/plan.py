"""The step between deciding and doing: StepPlan goes down to the runner, StepResult comes back.

Plain data, no torch. `sched` writes plans and reads results; `runner` reads plans and writes results; neither
knows the other. Nothing changes any of it; what is made for each request and step is not frozen for its cost alone
(a frozen instance takes three times as long to make).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from serinus.core.history import TokenHistory
from serinus.core.parts import Part
from serinus.core.request import TokenLogprobs
from serinus.core.sampling import SamplingParams


@dataclass(slots=True, kw_only=True)
class SampleSpec:
    """How to choose the token that follows the last position of a SeqWork."""

    params: SamplingParams
    """Sampling parameters of the request."""
    seed: int
    """Seed of the request's own sampler; noise is a function of (seed, position, token id) alone."""
    position: int
    """Position the chosen token will have; = prompt length + tokens generated so far."""
    generated: int
    """Tokens generated so far; below params.min_new_tokens the stop ids are forbidden."""
    stop_ids: tuple[int, ...] = ()
    """Ids forbidden while generated < min_new_tokens: end-of-sequence (unless ignored) and stop_token_ids."""
    history: TokenHistory | None = None
    """The tokens that the sequence has, where a penalty needs them."""
    output: NDArray[np.int32] | None = None
    """The tokens generated so far, in order, where a grammar needs them."""


@dataclass(slots=True, kw_only=True)
class SeqWork:
    """One request's part of one step: `tokens` at positions start .. start + n - 1."""

    rid: str
    row: int
    """Row of req_to_token; 0 is padding and never used."""
    start: int
    """Positions with KV that is already there."""
    tokens: NDArray[np.int32]
    """n >= 1 ids to compute."""
    slots: Mapping[Part, NDArray[np.int64]]
    """For each part of the model, FULL first, n slots where their KV goes; never 0."""
    chain: int = 0
    """Chain hash (core.stamps) of the sequence's first `start` tokens: what a canary holds the last slot that this work
    reads against. 0 where no canary looks."""
    sample: SampleSpec | None = None
    """Set when the last of `tokens` is the last known token of the sequence."""
    whole: bool = False
    """Whether a canary verifies in this step all that the sequence reads, whatever its coverage is: prompt chunks, and
    the first step on KV that came from elsewhere."""
    prompt_logprobs: int | None = None
    """Where asked for: k of the log-probabilities of the *next* prompt token at each of the n positions."""
    next_ids: NDArray[np.int32] | None = None
    """With prompt_logprobs: the prompt token after each position; n ids, or n - 1 at the end of the prompt."""
    pooled: int = 0
    """The sum of the hidden states of so many of the n positions is wanted, from the first."""

    @property
    def asks_each(self) -> bool:
        """Whether something is wanted of each of its tokens, not of the last one alone."""
        return self.prompt_logprobs is not None or self.pooled > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TableWrite:
    """req_to_token[row, start : start + len(slots)] = slots, in the table of `part`."""

    row: int
    start: int
    slots: NDArray[np.int64]
    part: Part = Part.FULL
    """The part of the table; each part has its own, with the same rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkAhead:
    """Work of the next plan, as far as it can be said before this one has run: a rank may compute it before its leader
    reads the result of this one. The next plan takes of it, as it is, what still goes on then, and nothing else; if it
    brings other work, nothing of this is part of it."""

    work: tuple[SeqWork, ...]
    """First what goes on by one token that is not known: that of `tokens` means nothing before the next plan, and all
    of this samples. Then prompt chunks, of which everything is known; nothing is wanted of each of their tokens."""
    follows: NDArray[np.int64]
    """Of each that goes on by a token, the number in `StepPlan.work` of what it goes on behind."""
    chooses: bool = True
    """Whether its tokens can be chosen as it is computed; always where there are prompt chunks. Else the next plan says
    how: a grammar or a penalty looks at the token before, and log-probabilities are read on the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """What every rank does in one step. Table writes first, in order; then the forward pass; then sampling."""

    step: int
    """Number of the step, from 1."""
    work: tuple[SeqWork, ...]
    """Decoding requests (n = 1) first, then prompt chunks."""
    table_writes: tuple[TableWrite, ...] = ()
    """Rows that changed since the last plan. Behind a plan with `ahead` none of them changes what that reads."""
    ahead: WorkAhead | None = None
    """What goes on behind it if nothing comes between; None = that cannot be said, or nothing is to be computed
    ahead."""
    takes: NDArray[np.int64] | None = None
    """Where `work` is what the plan before has ahead: of each, its number there. None = it is other work."""

    @property
    def token_count(self) -> int:
        """Tokens computed in this step."""
        return sum(len(w.tokens) for w in self.work)


@dataclass(slots=True, kw_only=True)
class SeqResult:
    """What the runner found for one SeqWork."""

    token: int | None = None
    """The chosen token, where `sample` was set."""
    logprobs: TokenLogprobs | None = None
    """Its log-probabilities, where asked for."""
    ends: bool = False
    """The answer ends with it, whatever token it is: its grammar is complete, and nothing can follow."""
    failure: str = ""
    """Why there is no token, although one was asked for: the grammar cannot be followed. The request fails."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """One per next_ids entry, where asked for."""
    pooled: bytes = b""
    """The sum of hidden states, where asked for and the model gives them out: as TokenLogprobs.hidden has them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The answer to a StepPlan: `seqs[i]` belongs to `plan.work[i]`."""

    step: int
    seqs: tuple[SeqResult, ...] = field(default=())
    mask_seconds: float | None = None
    """Spent on the masks of grammars, beside the forward pass; None = no request has one."""
    mask_wait_seconds: float = 0.0
    """Of these, what the step waited for."""
