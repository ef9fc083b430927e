"""Engines of several ranks over the real packages: each rank reaches into the pool of its counterpart."""

from __future__ import annotations

from pathlib import Path

import pytest

from serinus.models.small_checkpoints import make_toy
from tests.ranks.pair import answers, count, pair, prompts_of, toy_answers


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
@pytest.mark.parametrize("backend", ["nixl", "mooncake"])
def test_ranks_hand_over_to_their_counterparts(tmp_path: Path, backend: str, tp: int, pp: int) -> None:
    toy = make_toy(tmp_path, vocab=64, context=128, layers=4, kv_heads=4, tokenizer=False)
    shape = {"tp_size": tp, "pp_size": pp}
    prompts = prompts_of(5)
    with pair(toy, shape, shape, backend) as engines:
        assert answers(engines, prompts, 7) == toy_answers(toy, prompts, 7)
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
    prompts = prompts_of(5)
    with pair(toy, ours, theirs, backend, kv_canary="raise", kv_canary_real_data="all") as engines:
        assert answers(engines, prompts, 7) == toy_answers(toy, prompts, 7)
        assert count(engines.decode, "num_transfer_failed_reqs") == 0
        assert count(engines.decode, "kv_transfer_pages") > 20
