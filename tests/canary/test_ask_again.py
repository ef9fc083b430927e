"""Mode heal in handoffs: what a prefill engine sent is asked for once more where it is wrong, or becomes so; then it is
computed here. The receipt tells which."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from serinus.core.parts import Part
from serinus.core.request import KvIntegrity
from serinus.selftest import CanaryPDFixture, make_canary_toy
from serinus.testing.oracle import toy_continue

KINDS: dict[str, dict[str, Any]] = {
    "equal": {},
    "smaller pages at decode": {"prefill_settings": {"page_size": 8}, "decode_settings": {"page_size": 4}},
}


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_canary_toy(tmp_path_factory.mktemp("again") / "full", "full")


def receipt(pair: CanaryPDFixture, rid: str) -> KvIntegrity:
    usage = pair.pair.deltas[rid][-1].usage
    assert usage is not None
    assert usage.kv_integrity is not None
    assert usage.kv_integrity.slots_checked == usage.kv_integrity.slots_due
    return usage.kv_integrity


def heals(pair: CanaryPDFixture, result: str, side: str = "decode") -> float:
    return pair.built(side).metrics.get("kv_canary_heals", result)


def right(pair: CanaryPDFixture, rid: str, count: int) -> list[int]:
    return toy_continue(pair.pair.decode.built.spec, pair.prompts[rid], count)


def damage(pair: CanaryPDFixture, rid: str, position: int) -> None:
    """Wrong keys and values of a position of a request that runs at decode: its next tokens would be others."""
    built = pair.built("decode")
    page = built.engine.scheduler._states[rid].full.pages[position // 4]
    with torch.inference_mode():
        for half in built.pools[Part.FULL].layers[0]:
            half[4 * int(page) + position % 4] += 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("coverage", ["full", "rotating:4"])
def test_a_page_damaged_at_decode_is_asked_for_once_more_and_then_computed(toy: Path, kind: str, coverage: str) -> None:
    pair = CanaryPDFixture(toy, kv_canary="heal", kv_canary_coverage=coverage, max_total_tokens=800, **KINDS[kind])
    prompt = pair.random_prompt(37)
    rid = pair.send(prompt, new_tokens=40)
    for turn, at in enumerate((6, 20)):
        pair.run_until(lambda at=at: len(pair.tokens(rid)) >= at, turns_max=500)
        damage(pair, rid, 9)
        pair.run_until(lambda turn=turn: heals(pair, "asked_again") + heals(pair, "recomputed") > turn, turns_max=500)
        assert (heals(pair, "asked_again"), heals(pair, "recomputed")) == (1, turn)
    pair.run()
    assert pair.tokens(rid) == right(pair, rid, 40) or pair.pair.deltas[rid][-1].wrong_token is not None
    each = receipt(pair, rid)
    assert each.heals == 2
    assert each.repaired_from["device"] == 16, "the two sound pages before it, twice"
    assert each.repaired_from["peer"] == 37 - 8, "the rest of the prompt, once"
    assert each.repaired_from["computed"] >= 37 - 8, "and once here"
    again = pair.send(prompt)
    pair.run()
    assert pair.tokens(again) == right(pair, again, 8)


@pytest.mark.parametrize("times", [1, 2])
def test_what_arrives_wrong_is_asked_for_once_more(toy: Path, times: int) -> None:
    pair = CanaryPDFixture(toy, kv_canary="heal", perturb_prefill="transfer_bytes=1", armed=False)
    pair.arm("prefill", count=times)
    (rid,) = pair.send_parallel_short_requests(1, distinct_prompts=True, prompt_tokens=18)
    pair.run()
    assert pair.tokens(rid) == right(pair, rid, 8)
    each = receipt(pair, rid)
    assert len(pair.injections("prefill")) == times
    assert heals(pair, "asked_again") == 1
    assert each.sources["peer"] == (18 if times == 1 else 0)
    assert each.repaired_from == ({"peer": 18} if times == 1 else {"computed": 18})
    assert each.heals == 1
    assert "verify_" in each.heal_reasons[0]


def test_a_prompt_that_a_prefill_engine_finds_wrong_is_computed_at_decode_and_its_receipt_is_whole(toy: Path) -> None:
    """The other direction: what is healed at the prefill engine is handed back."""
    pair = CanaryPDFixture(toy, kv_canary="heal", max_total_tokens=800, prefill_settings={"chunked_prefill_size": 8})
    prompt = pair.random_prompt(37)
    rid = pair.send(prompt)
    prefill = pair.built("prefill")

    def computed() -> int:
        return max((state.computed for state in prefill.engine.scheduler._states.values()), default=0)

    pair.run_until(lambda: computed() >= 16, turns_max=500)
    state = next(iter(prefill.engine.scheduler._states.values()))
    with torch.inference_mode():
        prefill.pools[Part.FULL].layers[0][0][4 * int(state.full.pages[1])] += 1
    pair.run()
    assert pair.tokens(rid) == right(pair, rid, 8)
    assert heals(pair, "handed_back", "prefill") == 1
    each = receipt(pair, rid)
    assert each.sources["peer"] == 0
    assert sum(each.sources.values()) == each.horizon == 37 + 7
