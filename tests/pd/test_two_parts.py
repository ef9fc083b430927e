"""A model with full and sliding layers, handed over between two real engines: wrong KV would be a wrong token."""

from __future__ import annotations

from pathlib import Path

import pytest

from serinus.models import load_spec
from serinus.models.small_checkpoints import make_toy
from serinus.selftest import EnginePair
from serinus.testing.oracle import toy_continue


@pytest.mark.slow
def test_pages_of_both_parts_land_and_the_window_goes_on(tmp_path: Path) -> None:
    toy = make_toy(tmp_path / "toy", vocab=64, context=256, tokenizer=False, window=6, layer_types="SFS")
    both = EnginePair(toy, page_size=4, max_total_tokens=256, chunked_prefill_size=16)
    spec = load_spec(toy)
    lengths = {"r0": (37, 6), "r1": (41, 9), "r2": (5, 3), "r3": (60, 20)}
    prompts = {rid: [(i * 7 + j) % 64 for j in range(lengths[rid][0])] for i, rid in enumerate(lengths)}
    for rid, (_, count) in lengths.items():
        both.add(rid, prompts[rid], count)
    both.run_until_idle()
    for rid, (_, count) in lengths.items():
        assert both.tokens(rid) == toy_continue(spec, prompts[rid], count)
        usage = both.deltas[rid][-1].usage
        assert usage is not None
        assert usage.prefill_engine == "prefill-0"
    both.check()
    assert both.port_of(both.prefill).machine.handoff_count == 0
