"""Engines of several ranks over the real packages: each rank reaches into the pool of its counterpart."""

from __future__ import annotations

from pathlib import Path

import pytest

from serinus.models import load_spec
from serinus.models.small_checkpoints import make_toy
from serinus.testing.oracle import toy_continue
from tests.ranks.pair import count, pair


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
@pytest.mark.parametrize("backend", ["nixl", "mooncake"])
def test_ranks_hand_over_to_their_counterparts(tmp_path: Path, backend: str, tp: int, pp: int) -> None:
    toy = make_toy(tmp_path, vocab=64, context=128, layers=4, kv_heads=4, tokenizer=False)
    spec, shape = load_spec(toy), {"tp_size": tp, "pp_size": pp}
    prompts = {f"r{i}": [(7 * i + j) % 64 for j in range(3 + 9 * i)] for i in range(5)}
    with pair(toy, shape, shape, backend) as engines:
        for rid, prompt in prompts.items():
            engines.add(rid, prompt, 7)
        engines.run()
        assert {rid: engines.tokens(rid) for rid in prompts} == {
            rid: toy_continue(spec, prompt, 7) for rid, prompt in prompts.items()
        }
        assert count(engines.decode, "num_transfer_failed_reqs") == 0
        assert count(engines.decode, "kv_transfer_pages") > 20


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"tp_size": 2}, {}),
        ({}, {"tp_size": 2}),
        ({"pp_size": 2}, {"tp_size": 2}),
        ({"page_size": 8}, {"page_size": 4, "tp_size": 2}),
    ],
)
@pytest.mark.parametrize("backend", ["nixl", "mooncake"])
def test_ranks_read_whole_pages_of_engines_that_are_cut_otherwise(
    tmp_path: Path, backend: str, ours: dict[str, int], theirs: dict[str, int]
) -> None:
    toy = make_toy(tmp_path, vocab=64, context=128, layers=4, kv_heads=4, tokenizer=False)
    spec = load_spec(toy)
    prompts = {f"r{i}": [(7 * i + j) % 64 for j in range(3 + 9 * i)] for i in range(5)}
    with pair(toy, ours, theirs, backend, kv_canary="raise", kv_canary_real_data="all") as engines:
        for rid, prompt in prompts.items():
            engines.add(rid, prompt, 7)
        engines.run()
        assert {rid: engines.tokens(rid) for rid in prompts} == {
            rid: toy_continue(spec, prompt, 7) for rid, prompt in prompts.items()
        }
        assert count(engines.decode, "num_transfer_failed_reqs") == 0
        assert count(engines.decode, "kv_transfer_pages") > 20
