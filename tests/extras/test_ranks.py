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


@pytest.mark.parametrize("backend", ["nixl", "mooncake"])
def test_layouts_that_differ_are_refused_in_words_and_computed_here(tmp_path: Path, backend: str) -> None:
    toy = make_toy(tmp_path, vocab=64, context=128, layers=4, kv_heads=4, tokenizer=False)
    with pair(toy, {"tp_size": 2}, {}, backend) as engines:
        prompt = list(range(30))
        engines.add("r", prompt, 5)
        engines.run()
        assert engines.tokens("r") == toy_continue(load_spec(toy), prompt, 5)
        assert engines.decode.built.metrics.by_labels("num_recomputed_requests")
        assert [peer.reason for peer in engines.port_of(engines.decode).machine.peers] == [
            "pd: layout differs in tp: 2 here, 1 there; only shm and tcp cut pages anew, the data backend moves them"
            " whole"
        ]
