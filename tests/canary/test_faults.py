"""Faults ordered while an engine runs: with a bound and an end, only where the settings allow it, and told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from serinus.canary import LeadFaults, perturb
from serinus.core.errors import BadRequest, ConfigError
from serinus.selftest import CanaryPDFixture, make_canary_toy
from serinus.wire.fault_order import FaultOrder


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_canary_toy(tmp_path_factory.mktemp("toy"), "full")


def running(toy: Path, **settings: object) -> tuple[CanaryPDFixture, LeadFaults]:
    """A pair whose decode engine takes orders, with two requests far from their ends."""
    pair = CanaryPDFixture(toy, decode_settings={"kv_canary_perturb_api": True, **settings})
    rids = pair.send_parallel_short_requests(2, distinct_prompts=True, new_tokens=40)
    assert pair.run_until(lambda: all(len(pair.tokens(rid)) > 2 for rid in rids))
    faults = pair.lead("decode").faults
    assert faults is not None
    return pair, faults


def steps(pair: CanaryPDFixture, count: int) -> None:
    """So many steps of the decode engine."""
    end = pair.canary("decode").steps + count
    assert pair.run_until(lambda: pair.canary("decode").steps >= end)


def test_an_order_plants_up_to_its_bound_and_tells_where(toy: Path) -> None:
    pair, _ = running(toy)
    assert perturb(pair.lead("decode")) == {
        "enabled": True, "active": False, "perturb": {}, "ranks": [], "injected": [],
    }  # fmt: skip
    order = json.dumps({"perturb": {"real_kv_used": 1}, "count": 3, "seed": 4}).encode()
    view = perturb(pair.lead("decode"), order)
    assert (view["active"], view["perturb"], view["count"]) == (True, {"real_kv_used": 1.0}, 3)
    steps(pair, 6)
    injected = perturb(pair.lead("decode"))["injected"]
    assert len(injected) == 3
    assert all(each["page"] and each["rid"] and each["place"]["half"] in "KV" for each in injected)
    assert {v.slot for v in pair.violations("decode")} == {each["slot"] for each in injected}


def test_an_order_ends_after_its_steps(toy: Path) -> None:
    pair, faults = running(toy)
    faults.order(FaultOrder(perturb={"real_kv_used": 1}, count=99, steps=4))
    assert faults.view()["steps_left"] == 4
    steps(pair, 8)
    assert len(pair.injections("decode")) == 4
    assert not faults.view()["active"]


def test_an_order_ends_after_its_seconds(toy: Path) -> None:
    pair, faults = running(toy)
    faults.order(
        FaultOrder(perturb={"real_kv_used": 1}, count=99, seconds=0.05)
    )  # a turn advances this clock by 0.01 s
    steps(pair, 12)
    assert 1 <= len(pair.injections("decode")) <= 5
    assert not faults.view()["active"]


def test_an_empty_order_ends_what_was_planned(toy: Path) -> None:
    pair, faults = running(toy)
    faults.order(FaultOrder(perturb={"real_kv_used": 1}, count=99))
    steps(pair, 2)
    faults.order(FaultOrder(perturb={}))
    steps(pair, 1)  # the step that was commanded before it
    before = len(pair.injections("decode"))
    assert before
    steps(pair, 3)
    assert len(pair.injections("decode")) == before


def test_orders_that_make_no_sense_in_this_engine_are_refused_and_it_goes_on(toy: Path) -> None:
    pair, faults = running(toy)
    for chances, said in (
        ({"transfer_bytes": 1}, "without --disaggregation-mode prefill"),
        ({"real_kv_unused_cache": 1}, "without --kv-canary-sweep-interval"),
        ({"real_kv_usde": 1}, "expected one of req_to_token"),
        ({"real_kv_used": 2}, "expected 0 to 1"),
    ):
        with pytest.raises(ConfigError, match=said):
            faults.order(FaultOrder(perturb=chances))
    with pytest.raises(ConfigError, match="--kv-canary-perturb-rank is 1, expected one of 0"):
        faults.order(FaultOrder(perturb={"real_kv_used": 1}, rank=1))
    for wrong in ({"count": 0}, {"steps": 0}, {"seconds": 0.0}, {"seconds": 1e9}, {"seed": -1}):
        with pytest.raises(BadRequest, match=next(iter(wrong))):
            FaultOrder(perturb={"real_kv_used": 1}, **wrong)  # type: ignore[arg-type]
    pair.run()
    pair.assert_no_violation()
    assert not pair.injections("decode")


def test_an_engine_that_was_not_started_for_it_plants_nothing(toy: Path) -> None:
    pair = CanaryPDFixture(toy, perturb_decode="real_kv_used=0")
    order = b'{"perturb": {"real_kv_used": 1}}'
    with pytest.raises(ConfigError, match="only if it was started with --kv-canary-perturb-api"):
        perturb(pair.lead("decode"), order)
    for lead in (pair.lead("prefill"), None):
        with pytest.raises(ConfigError, match="expected one started with"):
            perturb(lead, order)
        assert not perturb(lead)["enabled"]
