"""Does each step: StepPlan in, tensors, one forward pass, sampling, StepResult out. Decides nothing."""

from serinus.runner.flight import Behind, Flight
from serinus.runner.grammar_masks import GrammarMasks
from serinus.runner.graphs import batch_sizes
from serinus.runner.runner import Runner
from serinus.runner.sampler import Sampler
from serinus.runner.token_oracle import oracle_token

__all__ = [
    "Behind",
    "Flight",
    "GrammarMasks",
    "Runner",
    "Sampler",
    "batch_sizes",
    "oracle_token",
]
