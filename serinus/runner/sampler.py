"""From a step's logits to its tokens: what each SampleSpec asks for, in the terms of the kernels.

What the parameters do to a row, and in which order, is said in `kernels/ref/sampling.py`. A row is sampled the same
whatever else is in the batch. Knows no requests, only SampleSpec. Shapes: B = rows, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from serinus.core.plan import SampleSpec
from serinus.core.request import TokenLogprobs
from serinus.kernels import Kernels, RowSampling
from serinus.runner.grammar_masks import StepMasks

__all__ = ["Sampled", "Sampler", "token_logprobs"]

_COLDEST = 1e-20
"""Temperatures below this are this: its inverse, times a difference of scores, stays within fp32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """What was chosen for one row."""

    token: int
    """Id of the chosen token."""
    logprobs: TokenLogprobs | None = None
    """Of the distribution that the row may be chosen from, where asked for: the model's own, or what a grammar leaves
    of it."""
    ends: bool = False
    """As SeqResult has it."""
    failure: str = ""
    """As SeqResult has it; the token means nothing then."""


class Sampler:
    """Chooses tokens. Stateless: everything comes with the call."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def sample(
        self, logits_BV: torch.Tensor, specs: Sequence[SampleSpec], masks: StepMasks | None = None
    ) -> list[Sampled]:
        """Choose one token per row.

        Args:
            logits_BV: raw logits, fp32 or bf16; those of tokens that `masks` forbid become -inf, before anything else.
            specs: one per row.
            masks: what the grammars of some rows allow.
        Cost: some passes over each row, on a CPU at most 5 ms for 16 rows of 151,936 on one core; one host wait, or
        two where log-probabilities are asked for.
        """
        last: frozenset[int] = frozenset()
        if masks is not None:
            self._kernels.mask_logits(logits_BV, masks.rows, masks.words_RW)
            last = masks.last
        rows = [_row(spec, may_stop=row in last) for row, spec in enumerate(specs)]
        tokens = self._kernels.choose_tokens(logits_BV, rows)
        asked = [i for i, spec in enumerate(specs) if spec.params.logprobs is not None]
        if not asked:
            return [Sampled(token=token) for token in tokens]
        rows_BV = logits_BV if len(asked) == len(specs) else logits_BV[asked]
        counts = [specs[i].params.logprobs or 0 for i in asked]
        logprobs = token_logprobs(self._kernels, rows_BV, [tokens[i] for i in asked], counts)
        found = dict(zip(asked, logprobs, strict=True))
        return [Sampled(token=token, logprobs=found.get(i)) for i, token in enumerate(tokens)]


def token_logprobs(
    kernels: Kernels, logits_BV: torch.Tensor, chosen: Sequence[int], counts: Sequence[int]
) -> list[TokenLogprobs]:
    """Log-probabilities of the distribution that these logits mean: of chosen[i], and of the counts[i] likeliest of row
    i."""
    tops = kernels.top_tokens(logits_BV, chosen, counts)
    return [TokenLogprobs(logprob=top.logprob, top_ids=top.ids, top_logprobs=top.logprobs) for top in tops]


def _row(spec: SampleSpec, *, may_stop: bool = False) -> RowSampling:
    """`may_stop`: although it has not as many tokens as it was to have at least."""
    params, bias = spec.params, spec.params.bias
    return RowSampling(
        seed=spec.seed,
        position=spec.position,
        temperature=0.0 if params.greedy else max(params.temperature, _COLDEST),
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        bias=None if bias is None else (bias.ids, bias.values_of_ids),
        history=spec.history,
        repetition_penalty=params.repetition_penalty,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        forbidden=spec.stop_ids if spec.generated < params.min_new_tokens and not may_stop else (),
    )
