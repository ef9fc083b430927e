"""next_token_swap: two requests' sampled tokens are exchanged; KV is left alone."""

from __future__ import annotations

from dataclasses import replace

from serinus.canary.perturb.plan import Injection
from serinus.core.plan import StepResult
from serinus.core.rng import Rng


def run(rng: Rng, result: StepResult, rids: tuple[str, ...], step: int) -> tuple[StepResult, Injection | None]:
    """The result with two different tokens exchanged; as it was, and None, where there are no two."""
    chosen = [i for i, seq in enumerate(result.seqs) if seq.token is not None]
    if len(chosen) < 2:
        return result, None
    one, other = rng.sample(chosen, 2)
    mine, yours = result.seqs[one].token, result.seqs[other].token
    if mine is None or yours is None or mine == yours:
        return result, None
    seqs = list(result.seqs)
    seqs[one], seqs[other] = replace(seqs[one], token=yours), replace(seqs[other], token=mine)
    injection = Injection(mode="next_token_swap", step=step, rid=rids[one], before=mine, after=yours)
    return replace(result, seqs=tuple(seqs)), injection
