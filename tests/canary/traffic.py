"""Traffic with all that moves pages, for pairs in which nothing is planted."""

from __future__ import annotations

from serinus.selftest import CanaryPDFixture
from serinus.testing.oracle import toy_continue

__all__ = ["mixed_traffic"]


def mixed_traffic(pair: CanaryPDFixture, *, prompts: int, turns: int) -> tuple[int, int]:
    """Long answers to so many shared prompts, and short ones, half of them aborted at various moments; then all shared
    prompts again. Returns requests, and those that were aborted. Raises AssertionError: an answer is not the toy's."""
    shared = [pair.random_prompt(33) for _ in range(prompts)]
    requests = aborts = 0
    for turn in range(turns):
        rids = [pair.send([*shared[turn % prompts], *pair.random_prompt(3)], new_tokens=30) for _ in range(3)]
        rids += pair.send_parallel_short_requests(2, distinct_prompts=turn % 2 == 0, new_tokens=6)
        for _ in range(3 + turn * 3 % 40):
            pair.turn()
        for rid in rids[turn % 2 :: 2]:
            if pair.finish(rid) is None:
                pair.pair.abort(rid)
                aborts += 1
        pair.run()
        for again in shared:
            rids.append(pair.send(again, new_tokens=2))
            pair.run()
        for rid in rids:
            answer = pair.tokens(rid)
            assert answer == toy_continue(pair.pair.decode.built.spec, pair.prompts[rid], 30)[: len(answer)]
        requests += len(rids)
    return requests, aborts
