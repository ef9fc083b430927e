"""What is computed again after a heal may be wrong itself, before that is found."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from serinus.core.parts import Part
from serinus.core.request import FinishReason
from serinus.selftest import EnginePair, make_canary_toy
from serinus.testing.oracle import toy_continue

PROMPT, TOKENS = list(range(20, 42)), 24


@pytest.fixture
def pair(tmp_path: Path) -> EnginePair:
    return EnginePair(
        make_canary_toy(tmp_path / "toy", "full"), page_size=4, max_total_tokens=512, max_running_requests=4,
        kv_canary="heal", kv_canary_real_data="all", kv_canary_coverage="rotating:16", kv_canary_stats_interval=0,
    )  # fmt: skip


def test_a_token_that_contradicts_one_that_left_is_believed_once_all_it_was_computed_on_is_verified(
    pair: EnginePair,
) -> None:
    """A stream is healed and computed again; meanwhile a page becomes wrong whose turn comes later. The token computed
    on it is another one than was given out, and that one was right: the stream must not end with the contrary."""
    scheduler = pair.decode.engine.scheduler
    pair.add("r", PROMPT, TOKENS, remote=False, stream=True)
    while len(pair.tokens("r")) < 12:
        pair.turn_decode()
    state = scheduler._states["r"]
    scheduler.heals.heal("r", "a first fault", pair.clock.now())
    while not (state.running and state.computed > len(PROMPT)):
        pair.turn_decode()
    assert state.known < state.left, "it was computed again before anything could go wrong"
    turn = state.computed % 16
    page = next(int(page) for at, page in enumerate(state.full.named()[:4]) if (turn - at) % 16 > 1)
    half = pair.decode.built.pools[Part.FULL].layers[0][0]
    half[page * 4].view(torch.int16).bitwise_xor_(1)
    while pair.decode.finish("r") is None:
        pair.turn_decode()
    last = pair.deltas["r"][-1]
    assert pair.decode.finish("r") is FinishReason.LENGTH, last
    assert pair.tokens("r") == toy_continue(pair.decode.built.spec, PROMPT, TOKENS)
    assert last.usage is not None
    assert last.usage.kv_integrity is not None
    assert last.usage.kv_integrity.heals == 2
    pair.close()
