"""From a step's logits to its tokens: what each SampleSpec asks for, in the terms of the kernels.

What the parameters do to a row, and in which order, is said in `kernels/ref/sampling.py`. A row is sampled the same
whatever else is in the batch. Knows no requests, only SampleSpec. Shapes: B = rows, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from serinus.core.plan import SampleSpec, SeqResult
from serinus.core.request import TokenLogprobs
from serinus.kernels import Kernels, RowSampling, carry_words
from serinus.runner.grammar_masks import StepMasks

_COLDEST = 1e-20
"""Temperatures below this are this: its inverse, times a difference of scores, stays within fp32."""


@dataclass(slots=True, kw_only=True)
class Chosen:
    """The tokens of some rows, on the device where they were chosen and on their way to the host."""

    tokens_B: torch.Tensor
    """int64. On a device what chooses them may be queued and not done."""
    logprobs: Mapping[int, TokenLogprobs] = field(default_factory=dict)
    """By row, where asked for: of the distribution that the row may be chosen from, the model's own or what a grammar
    leaves of it."""
    _copy_B: torch.Tensor = field(init=False)
    _copied: Any = None

    def __post_init__(self) -> None:
        self._copy_B = self.tokens_B
        if self.tokens_B.is_cuda:
            self._copy_B = torch.empty(len(self.tokens_B), dtype=torch.int64, pin_memory=True)
            carry_words(self._copy_B, self.tokens_B)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def read(self) -> list[SeqResult]:
        """Them on the host. Waits until the device has chosen them, and for nothing that was queued behind that."""
        if self._copied is not None:
            self._copied.synchronize()
        return [SeqResult(token=token, logprobs=self.logprobs.get(i)) for i, token in enumerate(self._copy_B.tolist())]


class Sampler:
    """Chooses tokens. Stateless: everything comes with the call."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def sample(self, logits_BV: torch.Tensor, specs: Sequence[SampleSpec], masks: StepMasks | None = None) -> Chosen:
        """Choose one token per row.

        Args:
            logits_BV: raw logits, fp32 or bf16; before anything else those that `masks` forbid are -inf.
            specs: one per row.
            masks: what the grammars of some rows allow.
        Cost: some passes over each row, on a CPU at most 5 ms for 16 rows of 151,936 on one core; no host wait, but
        where log-probabilities are asked for.
        """
        last = frozenset() if masks is None else masks.last
        forbid = None if masks is None else (masks.rows, masks.words_RW)
        asked = [i for i, spec in enumerate(specs) if spec.params.logprobs is not None]
        if forbid is not None and asked:  # log-probabilities are of the masked logits
            self._kernels.mask_logits(logits_BV, *forbid)
            forbid = None
        rows = [_row(spec, may_stop=row in last) for row, spec in enumerate(specs)]
        tokens_B = self._kernels.choose_tokens(logits_BV, rows, forbid)
        if not asked:
            return Chosen(tokens_B=tokens_B)
        tokens: list[int] = tokens_B.tolist()
        rows_BV = logits_BV if len(asked) == len(specs) else logits_BV[asked]
        counts = [specs[i].params.logprobs or 0 for i in asked]
        logprobs = token_logprobs(self._kernels, rows_BV, [tokens[i] for i in asked], counts)
        return Chosen(tokens_B=tokens_B, logprobs=dict(zip(asked, logprobs, strict=True)))


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
