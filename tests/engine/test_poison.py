"""What is wrong in the cache is condemned for any reason, with all computed from it; what is innocent stays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from serinus.cache import PageState
from serinus.core.moves import MoveDone, MoveKind
from serinus.core.parts import Part
from serinus.core.request import FinishReason
from serinus.kernels import StampLane
from serinus.models.small_checkpoints import make_toy
from serinus.testing.oracle import toy_continue
from serinus.wire.messages import EngineCall
from tests.engine.test_canary import SHARED, TIERED, Watched

RAISE = {"kv_canary": "raise", "kv_canary_sweep_interval": 0}
PROMPT = [*SHARED[0], 201]


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_toy(tmp_path_factory.mktemp("poison") / "full", tokenizer=False)


def cached_pages(engine: Watched) -> list[int]:
    """The pages of the only cached prompt, in order."""
    found = engine.built.cache.match_prefix("", np.array(PROMPT, np.int32), 40)
    engine.built.cache.release(found.lease)
    return [int(page) for page in found.pages]


def answers(engine: Watched, rids: list[str], count: int = 8) -> list[bool]:
    """Whether each request got the right answer; the others must have a 500."""
    right = []
    for rid in rids:
        end = engine.end_of(rid)
        right.append(end.finish is not FinishReason.ERROR)
        if right[-1]:
            assert engine.tokens(rid) == toy_continue(engine.built.spec, PROMPT, count)
        else:
            assert end.error_status == 500
    return right


@pytest.mark.parametrize("slot", [0, 3], ids=["first slot of a page", "last slot of a page"])
@pytest.mark.parametrize("field", range(4), ids=["token", "position", "chain", "digest"])
@pytest.mark.parametrize("lane", [StampLane.HEAD_K, StampLane.TAIL_V], ids=["head", "tail"])
def test_one_bit_of_a_cached_stamp_costs_one_request_and_no_more(
    toy: Path, lane: StampLane, field: int, slot: int
) -> None:
    engine = Watched(toy, **RAISE)
    engine.add("warm", PROMPT)
    engine.run()
    page = cached_pages(engine)[4]
    stamps = engine.built.pools[Part.FULL].stamps_LS4
    assert stamps is not None
    stamps.numpy()[lane, 4 * page + slot, field] ^= 1
    rids = [f"r{turn}" for turn in range(4)]
    for rid in rids:
        engine.add(rid, PROMPT)
        engine.run()
    assert answers(engine, rids) == [False, True, True, True]
    assert engine.built.cache.ledger.owner_P[page] % 8 == PageState.QUARANTINED, "the page that was damaged"
    engine.built.cache.sanity_check()


def test_a_token_that_is_wrong_in_every_lane_of_a_stamp_condemns_its_own_page(toy: Path) -> None:
    """The slot behind it is reported, on the next page; only the request's own tokens tell which page is at fault."""
    engine = Watched(toy, **RAISE)
    engine.add("warm", PROMPT)
    engine.run()
    page = cached_pages(engine)[4]
    stamps = engine.built.pools[Part.FULL].stamps_LS4
    assert stamps is not None
    stamps.numpy()[:, 4 * page + 3, 0] ^= 1
    rids = [f"r{turn}" for turn in range(3)]
    for rid in rids:
        engine.add(rid, PROMPT)
        engine.run()
    assert answers(engine, rids) == [False, True, True]
    assert engine.built.cache.ledger.owner_P[page] % 8 == PageState.QUARANTINED


def test_a_load_that_failed_is_computed_again_and_fails_no_request(toy: Path) -> None:
    engine = Watched(toy, **TIERED, **RAISE, max_running_requests=8, max_total_tokens=240)
    engine.add("warm", PROMPT)
    engine.run()
    cache, tiers = engine.built.cache, engine.built.tiers
    assert tiers is not None
    cache.evict(60)
    for page in cache.host_pages(Part.FULL):
        tiers.host[Part.FULL].data_PY[int(page), 0] ^= 1
    end, failed = cache.tiers._end, []

    def fails(done: MoveDone) -> None:
        if cache.tiers.table.get(done.op).kind is MoveKind.LOAD and not failed:
            failed.append(done.op)
            done = MoveDone(op=done.op, ok=False, seconds=done.seconds)
        end(done)

    cache.tiers._end = fails  # type: ignore[method-assign]
    rids = [f"r{turn}" for turn in range(6)]
    for rid in rids:
        engine.add(rid, PROMPT)
    engine.run()
    assert failed
    assert answers(engine, rids) == [True] * 6
    assert engine.lead.view()["incidents_total"] == 0, "nothing is said of what never came"
    assert cache.stats().pages.quarantined == 0
    engine.built.close()


def test_a_damaged_row_of_the_devices_table_fails_its_request_and_flushes_no_prefix(toy: Path) -> None:
    engine = Watched(toy, **RAISE, max_total_tokens=400)
    other = [*SHARED[1][:20], 202]
    for rid, prompt in (("warm", PROMPT), ("other", other)):
        engine.add(rid, prompt, count=30)
    while len(engine.tokens("other")) < 4:
        engine.turn()
    tables: Any = engine.built.line.body._runner._runner._tables
    states = engine.built.engine.scheduler._states
    rows = tables[Part.FULL].table
    rows.numpy()[states["warm"].row, 8:12] = rows.numpy()[states["other"].row, 8:12]
    engine.run()
    assert engine.end_of("warm").error_status == 500
    assert engine.tokens("other") == toy_continue(engine.built.spec, other, 30)
    assert engine.built.cache.stats().pages.quarantined == 0
    assert engine.built.cache.probe("", np.array(PROMPT, np.int32)).device == 40, "the prompt is cached as before"
    engine.add("again", PROMPT)
    engine.run()
    assert answers(engine, ["again"]) == [True]


def test_pages_that_fail_twice_are_retired_listed_and_too_many_of_them_degrade_the_engine(
    toy: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Watched(toy, **RAISE, kv_canary_retire_max=1, max_total_tokens=400)

    def fail(pages: int) -> None:
        """Damage the first pages of the cached prompt, have them found, and flush."""
        engine.add("warm", PROMPT)
        engine.run()
        stamps = engine.built.pools[Part.FULL].stamps_LS4
        assert stamps is not None
        for page in cached_pages(engine)[:pages]:
            stamps.numpy()[StampLane.TAIL_K, 4 * page, 3] ^= 1
        engine.add("bad", PROMPT)
        engine.run()
        assert engine.end_of("bad").error_status == 500
        engine.built.cache.reset()

    view = engine.lead.view()["pages"]
    assert (view["scope"], view["failed"]) == ("none", [])
    fail(1)
    assert engine.lead.view()["pages"]["scope"] == "page"
    fail(1)
    view = engine.lead.view()["pages"]
    assert (view["retired"], view["degraded"], view["by_rank"]) == (1, "", {"": 1})
    (page,) = view["failed"]
    assert (page["failures"], page["state"]) == (2, "retired")
    with caplog.at_level("ERROR", "serinus.canary"):
        fail(2)
        fail(2)
        engine.add("after", PROMPT)
        engine.run()
    view = engine.lead.view()["pages"]
    assert view["retired"] == 3
    assert view["scope"] == "everywhere"
    assert "expected at most 1 (--kv-canary-retire-max)" in view["degraded"]
    info = json.loads(engine.engine.calls.answer(EngineCall(call=1, what="info"), 0.0, 0).body)
    assert info["degraded"] == view["degraded"]
    assert sum("kv_canary degraded" in record.message for record in caplog.records) == 1
    assert sum("kv_canary retired: part=FULL" in record.message for record in caplog.records) == 3
    assert answers(engine, ["after"]) == [True]
    assert set(cached_pages(engine)).isdisjoint(page["page"] for page in view["failed"] if page["state"] == "retired")


def test_a_prompt_that_retired_pages_leave_no_room_for_is_refused(toy: Path) -> None:
    engine = Watched(toy, **RAISE)
    cache = engine.built.cache
    for _ in range(2):
        engine.add("first", list(range(20, 70)))
        engine.run()
        cached = np.flatnonzero(cache.ledger.owner_P % 8 == PageState.TREE)
        cache.condemn(Part.FULL, cached.astype(np.int32))
        cache.release_all_quarantined()
    assert cache.stats().pages.retired == 1, "one page in sixteen"
    engine.add("long", list(range(20, 138)))
    engine.add("short", PROMPT[:10])
    engine.run()
    end = engine.end_of("long")
    assert end.error_status == 503
    assert "KV pages are retired" in end.error
    assert engine.tokens("short") == toy_continue(engine.built.spec, PROMPT[:10], 8)
