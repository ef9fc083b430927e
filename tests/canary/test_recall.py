"""Recalls: what one engine condemns is condemned by those that gave or took it; no two go on telling each other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from serinus.cache import Condemned, Tier
from serinus.canary import Verdict, Violation
from serinus.canary.recalls import Recalls
from serinus.canary.violation import OVERFLOW
from serinus.core.handoff import HandoffFinding, PageTrace
from serinus.core.parts import PageSpan, Part
from serinus.core.request import FinishReason
from serinus.kernels import Reason
from serinus.selftest import CanaryPDFixture, make_canary_toy
from serinus.testing.builders import make_request
from serinus.testing.oracle import toy_continue
from serinus.testing.tiny_engine import TinyEngine

WRONG = Violation(
    step=1, tag="TAIL_K_FULL", reasons=Reason.VERIFY_REAL_KV_HASH, part=Part.FULL, slot=4, page=1, position=0,
    stored_position=0, stored_token=5, expected_token=5, stored_hash=1, expected_hash=1, stored_digest=2,
    found_digest=3,
)  # fmt: skip


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_canary_toy(tmp_path_factory.mktemp("recall") / "full", "full")


def cached(pair: CanaryPDFixture, side: str, rid: str) -> int:
    """Tokens of a prompt that an engine would find."""
    return pair.built(side).cache.probe("", np.array(pair.prompts[rid], np.int32)).total


def damage(pair: CanaryPDFixture, side: str, rid: str, page: int) -> None:
    """One slot of a cached page of a prompt, so that the next read of it finds that."""
    cache = pair.built(side).cache
    match = cache.match_prefix("", np.array(pair.prompts[rid], np.int32), len(pair.prompts[rid]))
    cache.release(match.lease)
    with torch.inference_mode():
        pair.built(side).pools[Part.FULL].layers[0][0][4 * int(match.pages[page])] += 1


def settled(pair: CanaryPDFixture) -> None:
    """A few turns, so that what engines tell each other has come."""
    for _ in range(10):
        pair.turn()


def checks(pair: CanaryPDFixture, rid: str) -> Any:
    return toy_continue(pair.pair.decode.built.spec, pair.prompts[rid], 8)


def test_what_decode_finds_wrong_is_condemned_at_the_prefill_engine_that_sent_it(toy: Path) -> None:
    pair = CanaryPDFixture(toy, kv_canary="raise")
    (rid,) = pair.send_parallel_short_requests(1, distinct_prompts=True, prompt_tokens=16)
    pair.run()
    before = cached(pair, "prefill", rid)
    damage(pair, "decode", rid, 1)
    pair.send(pair.prompts[rid], rid="again")
    pair.run()
    assert pair.tokens("again") == checks(pair, rid), "found when its prompt arrived, and computed there"
    settled(pair)
    assert (before, cached(pair, "prefill", rid)) == (16, 4)
    for side in ("prefill", "decode"):
        assert len(pair.lead(side).view()["told"]) == (side == "prefill"), "told once, and not told back"
    pair.send(pair.prompts[rid], rid="third")
    pair.run()
    assert pair.tokens("third") == checks(pair, rid)


@pytest.mark.parametrize("mode", ["raise", "heal"])
def test_what_prefill_finds_wrong_is_condemned_behind_it_at_the_decode_engine_that_took_it(
    toy: Path, mode: str
) -> None:
    pair = CanaryPDFixture(toy, kv_canary=mode, prefill_settings={"kv_canary_sweep_interval": 1}, max_total_tokens=800)
    (rid,) = pair.send_parallel_short_requests(1, distinct_prompts=True, prompt_tokens=16)
    pair.run()
    pair.send(pair.prompts[rid], rid="long", new_tokens=60)
    pair.run_until(lambda: len(pair.tokens("long")) > 2, turns_max=100)
    damage(pair, "prefill", rid, 1)
    pair.send_parallel_short_requests(1, distinct_prompts=True)
    pair.run()
    asked = pair.built("decode").metrics.get("kv_canary_heals", "asked_again")
    assert (cached(pair, "prefill", rid), asked) == ((4, 0) if mode == "raise" else (16, 1)), "asked, it computes anew"
    end = pair.pair.deltas["long"][-1]
    if mode == "raise":
        assert (end.finish, end.error_status) == (FinishReason.ERROR, 500)
        assert "recalled by prefill-0: KV integrity: verify_real_kv_hash" in end.error
        assert cached(pair, "decode", rid) == 8, "the wrong page itself was verified when it came"
    else:
        assert pair.tokens("long") == toy_continue(pair.pair.decode.built.spec, pair.prompts[rid], 60)
    pair.send(pair.prompts[rid], rid="third")
    pair.run()
    assert pair.tokens("third") == checks(pair, rid)


def test_of_violations_that_no_row_was_left_for_everything_that_was_looked_at_is_recalled(toy: Path) -> None:
    """All KV of eight requests changes between two steps: the ring has rows for that of three."""
    pair = CanaryPDFixture(toy, kv_canary="raise", max_total_tokens=8000)
    rids = [pair.send(pair.random_prompt(200), new_tokens=40) for _ in range(8)]
    pair.run_until(lambda: all(len(pair.tokens(rid)) > 2 for rid in rids), turns_max=2000)
    assert [cached(pair, "prefill", rid) for rid in rids] == [200] * 8
    with torch.inference_mode():
        for half in pair.built("decode").pools[Part.FULL].layers[0]:
            half.view(torch.int16).bitwise_xor_(1)
    pair.run()
    settled(pair)
    assert pair.lead("decode").violations.counts[OVERFLOW] > 0
    assert all(pair.failed(rid) for rid in rids)
    assert [cached(pair, "prefill", rid) for rid in rids] == [0] * 8


def test_a_recall_goes_on_over_every_other_connection_with_its_tokens_though_engines_have_one_name(toy: Path) -> None:
    pair = CanaryPDFixture(toy, kv_canary="raise")
    (rid,) = pair.send_parallel_short_requests(1, distinct_prompts=True, prompt_tokens=24)
    pair.run()
    prompt, cache = np.array(pair.prompts[rid], np.int32), pair.built("prefill").cache
    match = cache.match_prefix("", prompt, 24)
    cache.release(match.lease)
    (trace,) = cache.ledgers[Tier.DEVICE, Part.FULL].traces_of(match.pages)
    for peer, first in (("other", 3), ("third", 5)):
        span = PageSpan(part=Part.FULL, first=first, pages=match.pages[first : first + 2])
        cache.trace([PageTrace(arrived=False, engine=trace.engine, peer=peer, xid=peer, rid=peer, span=span)])
    lead = pair.lead("prefill")
    recall = HandoffFinding(
        engine=trace.engine, peer=trace.peer, xid=trace.xid, rid=rid, part="FULL", position=4, reason="wrong",
        tokens=prompt.tobytes(), is_recall=True,
    )  # fmt: skip
    lead.heard(recall)
    told = {each.peer: each.tokens for each in lead.take_findings()}
    assert told == dict.fromkeys(("other", "third"), prompt[:8].tobytes()), "and not to the engine that told of it"
    pair.close()


@pytest.fixture
def runs() -> TinyEngine:
    """One request runs, the KV of 9 tokens of it computed; its first page came by a handoff."""
    engine = TinyEngine()
    engine.scheduler.add(make_request("runs", list(range(20, 29)), max_new_tokens=8, ignore_eos=True))
    engine.step()
    own = engine.scheduler.prompt_pages("runs")
    assert own is not None
    span = PageSpan(part=Part.FULL, first=0, pages=own.spans[0].pages[:1])
    engine.cache.trace([PageTrace(arrived=True, engine="sender", peer="in-1", xid="x", rid="r", span=span)])
    return engine


def test_of_one_handoff_only_a_lower_position_is_recalled_once_more(runs: TinyEngine) -> None:
    recalls, own = Recalls(runs.cache, runs.scheduler), runs.scheduler.prompt_pages("runs")
    assert own is not None
    gone = Condemned(tokens=4, pages={Part.FULL: own.spans[0].pages[:1]}, prefix=b"")
    told = [
        [each.position for each in recalls.told(replace(WRONG, position=position), gone)]
        for position in (9, 9, 13, 5, 5, 0)
    ]
    assert told == [[8], [], [], [4], [], [0]]


@pytest.mark.parametrize(("position", "is_touched"), [(0, True), (8, True), (9, False)])
def test_a_recall_without_tokens_touches_the_request_of_its_handoff_as_far_as_that_is_computed(
    runs: TinyEngine, position: int, is_touched: bool
) -> None:
    for names in ({"rid": "runs", "xid": "x"}, {"rid": "r", "xid": "runs"}):
        recall = HandoffFinding(engine="sender", peer="in-1", part="FULL", position=position, reason="why", **names)
        verdicts, others = Recalls(runs.cache, runs.scheduler).heard(recall)
        assert verdicts == [Verdict(rid="runs", reason="recalled by sender: why")] * is_touched
        assert not others


SHAPES: dict[str, dict[str, Any]] = {
    "two slices": {"tp_size": 2},
    "two stages": {"pp_size": 2},
    "larger pages at prefill": {"prefill_settings": {"page_size": 8}},
    "larger pages at decode": {"decode_settings": {"page_size": 8}},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_recall_reaches_an_engine_of_any_shape_in_whole_pages_of_its_own(toy: Path, shape: str) -> None:
    """Position 9 is wrong at decode: the prefill engine keeps what it has before its own page of that position."""
    pair = CanaryPDFixture(toy, kv_canary="heal", max_total_tokens=800, **SHAPES[shape])
    sizes = {side: pair.built(side).cache.page_size for side in ("prefill", "decode")}
    (rid,) = pair.send_parallel_short_requests(1, distinct_prompts=True, prompt_tokens=24)
    pair.run()
    assert cached(pair, "prefill", rid) == 24
    cache = pair.built("decode").cache
    match = cache.match_prefix("", np.array(pair.prompts[rid], np.int32), 24)
    cache.release(match.lease)
    size = sizes["decode"]
    with torch.inference_mode():
        pair.built("decode").pools[Part.FULL].layers[0][0][size * int(match.pages[9 // size]) + 9 % size] += 1
    pair.send([*pair.prompts[rid], 3, 5, 7], rid="again")
    pair.run_until(lambda: len(pair.lead("prefill").view()["told"]) > 0, turns_max=500)
    start = 9 // size * size // sizes["prefill"] * sizes["prefill"]
    assert cached(pair, "prefill", rid) == start
    pair.run()
    assert pair.tokens("again") == toy_continue(pair.pair.decode.built.spec, [*pair.prompts[rid], 3, 5, 7], 8)
    assert not pair.lead("decode").view()["told"], "it is not told back"
    pair.close()
