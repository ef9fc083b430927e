"""Optimistic prefill between two real engines: prompts are computed before decode has pages for them."""

from __future__ import annotations

from pathlib import Path

import pytest

from serinus.core.rng import Rng
from serinus.models import load_spec
from serinus.models.small_checkpoints import make_toy
from serinus.selftest import EnginePair
from serinus.testing.oracle import toy_continue


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_toy(tmp_path_factory.mktemp("toy"), vocab=64, context=256, tokenizer=False)


def pair(toy: Path, **settings: object) -> EnginePair:
    values = {"page_size": 4, "max_total_tokens": 64, "chunked_prefill_size": 32, "optimistic_prefill": True}
    return EnginePair(toy, **{**values, **settings})


def test_a_prompt_is_finished_before_decode_has_pages_and_lands_at_once_when_it_has(toy: Path) -> None:
    both = pair(toy)
    first, second = list(range(1, 41)), list(range(3, 43))
    both.add("a", first, 20)
    both.add("b", second, 6)
    for _ in range(12):
        both.turn_decode()
        both.turn_prefill()
    assert both.port_of(both.prefill).machine.parked_tokens == 40, "b is computed, and a has all the pages of decode"
    both.run_until_idle()
    for rid, prompt, count in (("a", first, 20), ("b", second, 6)):
        assert both.tokens(rid) == toy_continue(load_spec(toy), prompt, count)
        usage = both.deltas[rid][-1].usage
        assert usage is not None
        assert usage.prefill_engine == "prefill-0"
    assert both.port_of(both.prefill).machine.handoff_count == 0
    assert both.prefill.built.metrics.count("kv_transfer_grant_wait_seconds") == 2
    both.check()


def test_what_is_parked_beyond_the_budget_is_forgotten_and_computed_again_from_the_cache(toy: Path) -> None:
    both = pair(toy, park_tokens=30)
    first, second = list(range(1, 41)), list(range(3, 43))
    both.add("a", first, 20)
    both.add("b", second, 6)
    both.run_until_idle()
    assert both.prefill.built.metrics.get("kv_transfer_forgotten") == 1
    usage = both.deltas["b"][-1].usage
    assert usage is not None
    assert dict(usage.cached_tokens) == {"device": 36}, "of the second computation"
    assert both.tokens("b") == toy_continue(load_spec(toy), second, 6)
    both.check()


def test_a_prompt_that_turns_out_to_be_cached_is_taken_back(toy: Path) -> None:
    both = pair(toy, min_remote_tokens=8)
    prompt = list(range(1, 41))
    both.add("a", prompt, 12)
    both.add("b", prompt, 12)
    both.run_until_idle()
    assert both.decode.built.metrics.get("num_local_prompts", "short") == 1
    assert both.tokens("b") == toy_continue(load_spec(toy), prompt, 12)
    assert both.port_of(both.prefill).machine.handoff_count == 0
    assert both.prefill.built.metrics.by_labels("num_bootstrap_failed_reqs") == {}, "that is no failure"


@pytest.mark.parametrize("policy", ["recompute", "error"])
def test_a_prompt_that_waits_for_pages_of_decode_beyond_the_deadline_is_asked_for_again(toy: Path, policy: str) -> None:
    both = pair(
        toy, max_total_tokens=512, handoff_s_max=3.0, decode_settings={"max_running_requests": 1, "on_failure": policy}
    )
    prompt = list(range(1, 41))
    both.add("long", [9] * 9, 200)
    both.add("waits", prompt, 4)
    for _ in range(40):
        both.clock.advance(0.1)
        both.turn_decode()
        both.turn_prefill()
    assert both.decode.built.metrics.by_labels("num_bootstrap_failed_reqs") == {("deadline",): 1}
    assert both.port_of(both.prefill).machine.handoff_count == 0, "its pages are for others now"
    both.run_until_idle()
    assert both.tokens("waits") == toy_continue(load_spec(toy), prompt, 4)
    usage = both.deltas["waits"][-1].usage
    assert usage is not None
    assert (usage.prefill_engine, usage.local_reason) == ("prefill-0", "")
    both.check()


def test_tokens_that_both_engines_have_cached_count_once(toy: Path) -> None:
    """Also where the prompt was asked for before decode knew what it has, or prefill's pages are larger."""
    for early, page_size in ((True, 4), (False, 16), (True, 16)):
        both = pair(toy, max_total_tokens=256, optimistic_prefill=early, prefill_settings={"page_size": page_size})
        both.prefill.add("guest", list(range(1, 50)), 1)
        both.add("a", list(range(1, 46)), 1)
        both.run_until_idle()
        both.add("b", list(range(1, 61)), 1)
        both.run_until_idle()
        usage = both.deltas["b"][-1].usage
        assert usage is not None
        assert (dict(usage.cached_tokens), usage.handoff_tokens) == ({"device": 48}, 16), f"early {early}, {page_size}"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_any_mix_of_arrivals_turns_and_aborts_with_early_orders_leaves_nothing(toy: Path, seed: int) -> None:
    rng = Rng(seed)
    both = pair(toy, park_tokens=rng.choice([0, 30, 1000]), min_remote_tokens=rng.choice([1, 12]))
    asked: dict[str, tuple[list[int], int]] = {}
    aborted: set[str] = set()
    for step in range(120):
        roll = rng.random()
        if roll < 0.12:
            rid, start = f"r{step}", rng.randrange(3)
            prompt = list(range(1 + start, 1 + start + rng.randint(1, 50)))
            asked[rid] = prompt, rng.randint(1, 12)
            both.add(rid, *asked[rid])
        elif roll < 0.55:
            both.turn_decode()
        elif roll < 0.95:
            both.turn_prefill()
        elif asked:
            rid = rng.choice(sorted(asked))
            if both.decode.finish(rid) is None:
                aborted.add(rid)
                both.abort(rid)
    both.run_until_idle()
    for rid, (prompt, count) in asked.items():
        if rid not in aborted:
            assert both.tokens(rid) == toy_continue(load_spec(toy), prompt, count), f"seed {seed}: {rid}"
    both.check()
    for _ in range(4):
        both.turn_decode()
        both.turn_prefill()
    assert both.port_of(both.prefill).machine.handoff_count == 0
    assert both.port_of(both.decode).machine.handoff_count == 0
