"""Engines on a GPU with tiers below: answers are the toy model's own, with backups that are late too, and the canary,
which digests every byte, stays silent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from serinus.cache import Tier
from serinus.core.moves import MoveKind
from serinus.core.parts import Part
from serinus.engine import LLM
from serinus.models import load_spec
from serinus.models.small_checkpoints import make_toy
from serinus.testing.oracle import toy_continue

from .test_tiers import PROMPTS, answers, tiered

pytestmark = pytest.mark.gpu

KINDS: dict[str, dict[str, Any]] = {
    "full": {}, "mixed": {"window": 6, "layer_types": "SFS"}, "sliding": {"window": 9}, "latent": {"latent": True},
}  # fmt: skip


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_right_and_the_canary_is_silent_whatever_went_to_pinned_memory(
    tmp_path: Path, kind: str, policy: str
) -> None:
    toy = make_toy(tmp_path, tokenizer=False, **KINDS[kind])
    watched = {"kv_canary": "raise", "kv_canary_coverage": "full"}
    with LLM(str(toy), device="cuda", **tiered(hicache_write_policy=policy, **watched)) as llm:
        spec, built = load_spec(toy), llm._built
        assert built.tiers is not None
        assert built.canary is not None
        for turn, prompt in enumerate(PROMPTS):
            if turn % 3 == 0:  # what is evicted now waits for its backup, what is loaded comes late
                for stream in [each for kind_ in MoveKind for each in built.tiers.mover.streams.of(kind_)]:
                    with torch.cuda.stream(stream):
                        torch.cuda._sleep(100_000_000)
            assert answers(llm, [prompt]) == [toy_continue(spec, prompt, 5)]
        stats = built.cache.stats()
        assert stats.loaded_tokens > 0, stats
        assert stats.evicted_pages > 0, stats
        assert built.canary.violation_count == 0
        built.engine.scheduler.sanity_check()


def test_files_behind_pinned_memory_are_read_by_the_next_engine(tmp_path: Path) -> None:
    toy = make_toy(tmp_path / "toy", tokenizer=False)
    folder = tmp_path / "kv"
    stored = {"hicache_storage_backend": "file", "hicache_storage_dir": str(folder),
              "hicache_storage_prefetch_policy": "wait_complete", "kv_canary": "raise"}  # fmt: skip
    for turn in range(2):
        with LLM(str(toy), device="cuda", **tiered(**stored)) as llm:
            assert answers(llm, PROMPTS[turn : turn + 1]) == [toy_continue(load_spec(toy), PROMPTS[turn], 5)]
            assert llm._built.cache.stats().prefetched_tokens == 40 * turn


def test_a_byte_that_changed_in_pinned_memory_is_found_on_the_device_before_it_is_used(tmp_path: Path) -> None:
    toy = make_toy(tmp_path, tokenizer=False)
    with LLM(str(toy), device="cuda", **tiered(kv_canary="heal", kv_canary_sweep_interval=0)) as llm:
        built, expected = llm._built, [toy_continue(load_spec(toy), prompt, 5) for prompt in PROMPTS[:2]]
        assert built.tiers is not None
        assert built.canary is not None
        assert answers(llm, PROMPTS[:1]) == expected[:1]
        built.cache.evict(1 << 30, Tier.DEVICE, Part.FULL)
        assert built.canary.violation_count == 0
        built.tiers.host[Part.FULL].data_PY[:, 0] ^= 1
        assert answers(llm, PROMPTS[1:2]) == expected[1:]
        assert built.canary.violation_count > 0
