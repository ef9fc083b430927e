"""Token oracle: a sampler that ignores the logits. What it emits is a function of request and position alone, so that
a later reader of a token can tell whether it is the one that was emitted (`--sampling-backend token_oracle`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from serinus.core.plan import SampleSpec
from serinus.core.rng import MASK64, splitmix64
from serinus.runner.grammar_masks import StepMasks
from serinus.runner.sampler import Chosen


class OracleSampler:
    """Chooses tokens like Sampler; without log-probabilities."""

    def sample(self, logits_BV: torch.Tensor, specs: Sequence[SampleSpec], masks: StepMasks | None = None) -> Chosen:
        """One token per row; of the logits only their width is read, of masks nothing."""
        vocab_size = logits_BV.shape[1]
        tokens = [oracle_token(spec, spec.position, vocab_size) for spec in specs]
        return Chosen(tokens_B=torch.tensor(tokens, device=logits_BV.device))


def oracle_token(spec: SampleSpec, position: int, vocab_size: int) -> int:
    """The token at `position` of the request that `spec` is of; never one that would end it."""
    state = splitmix64(spec.seed & MASK64) ^ position
    for _ in range(1000):
        state = splitmix64(state)
        token = state % vocab_size
        if token not in spec.stop_ids:
            return token
    return state % vocab_size
