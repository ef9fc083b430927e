"""The chain hash of a request's first n tokens: the same whichever way n was come to."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from serinus.core.stamps import CHAIN_ANCHOR, chain_hashes
from serinus.kernels import load
from serinus.sched.token_chain import TokenChain


@pytest.mark.parametrize("hashes", [chain_hashes, load("cpu").chain_hashes], ids=["spec", "compiled"])
def test_any_walk_over_growing_and_changing_tokens_gives_the_hash_of_the_prefix(hashes: Any) -> None:
    rng = random.Random(3)
    chain, known = TokenChain(hashes), 0
    tokens = np.zeros(400, np.int32)
    for _ in range(450):
        if rng.random() < 0.1:
            known = rng.randrange(known + 1)  # healed: what follows is computed again
            chain.cut(known)
        grown = rng.choice((0, 1, 1, 1, 7, 40))
        grown = min(grown, len(tokens) - known)
        tokens[known : known + grown] = [rng.randrange(1 << 31) for _ in range(grown)]
        known += grown
        count = rng.choice((known, max(0, known - 1), rng.randrange(known + 1)))
        expected = [CHAIN_ANCHOR, *chain_hashes(tokens[:count]).tolist()][-1]
        assert chain.at(tokens, count) == expected, f"{count} of {known}"
