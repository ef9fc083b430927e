"""Does each step: StepPlan in, tensors, one forward pass, sampling, StepResult out. Decides nothing."""

from serinus.runner.runner import Runner
from serinus.runner.sampler import Sampled, Sampler

__all__ = ["Runner", "Sampled", "Sampler"]
