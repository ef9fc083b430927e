"""A page of a sliding part leaves the window within few steps: whether it is its request's must be known by then."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from serinus.core.parts import Part
from serinus.core.rng import Rng
from serinus.selftest import EnginePair, make_canary_toy
from serinus.testing.oracle import toy_continue

PAGE, WINDOW, STRIDE, TOKENS, LENGTH = 4, 9, 16, 24, 22


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["swa", pytest.param("both", marks=pytest.mark.proof)])
def test_a_page_of_the_same_positions_of_another_prompt_is_found_whenever_it_comes(tmp_path: Path, shape: str) -> None:
    """Stamps and all: it agrees with itself, position by position, and only the slot behind it tells that it is
    another prompt's. Steps of a whole rotation, each page that the window reads then, one request each."""
    pair = EnginePair(
        make_canary_toy(tmp_path / "toy", shape), page_size=PAGE, max_total_tokens=1 << 12, max_running_requests=64,
        kv_canary="heal", kv_canary_real_data="all", kv_canary_coverage=f"rotating:{STRIDE}",
        kv_canary_stats_interval=0, kv_canary_retire_max=1_000_000, kv_canary_heal_tokens_per_second=1 << 30,
    )  # fmt: skip
    rng, states, pool = Rng(1), pair.decode.engine.scheduler._states, pair.decode.built.pools[Part.SWA]
    foreign: dict[int, NDArray[np.uint8]] = {}
    pair.add("other", [rng.randrange(5, 512) for _ in range(LENGTH)], TOKENS, remote=False)
    while not pair.decode.engine.idle:
        row = states["other"].windowed[0]
        foreign |= {page: pool.read_pages(row.pages[[page]]) for page in range(row.first, row.end)}
        pair.turn_decode()
    moments = []
    for start in range(LENGTH + 1, LENGTH + 1 + STRIDE, 3):
        moments += [(start, page) for page in range((start - WINDOW + 1) // PAGE, -(-start // PAGE))]
    prompts = {moment: [rng.randrange(5, 512) for _ in range(LENGTH)] for moment in moments}
    for (start, page), prompt in prompts.items():
        rid = f"{start}.{page}"
        pair.add(rid, prompt, TOKENS, remote=False)
        while states[rid].planned < start:
            pair.turn_decode()
        assert states[rid].planned == start, "it computes this position next"
        pool.write_pages(states[rid].windowed[0].pages[[page]], foreign[page])
    while not pair.decode.engine.idle:
        pair.turn_decode()
    for (start, page), prompt in prompts.items():
        usage = pair.deltas[f"{start}.{page}"][-1].usage
        assert pair.tokens(f"{start}.{page}") == toy_continue(pair.decode.built.spec, prompt, TOKENS), (
            f"page {page} was another prompt's from position {start} on: served wrong, {usage}"
        )
        assert usage is not None
        assert usage.kv_integrity is not None
        assert usage.kv_integrity.heals == 1, f"page {page} at position {start}: {usage}"
    pair.close()
