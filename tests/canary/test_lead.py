"""The leader's half of the canary, over a line whose ranks answer what the test says."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from serinus.cache import Tier
from serinus.cache.ledger import STATE_MASK, PageState
from serinus.canary import (
    CanaryAnswer,
    CanaryLead,
    CheckRows,
    RingOverflow,
    StartCanary,
    SweepSlots,
    Verdict,
    Violation,
)
from serinus.canary.commands import HostPages, TellCounts
from serinus.canary.copies import CopyCheck
from serinus.canary.perturb import Injection
from serinus.core.clock import ManualClock
from serinus.core.metrics import Metrics
from serinus.core.parts import OwnPages, PageSpan, Part
from serinus.core.plan import StepPlan
from serinus.core.settings import CanarySettings
from serinus.front.calls import RequestFailed
from serinus.front.exchange import error_of
from serinus.kernels import Reason
from serinus.testing.answering_line import AnsweringLine
from serinus.testing.builders import make_request
from serinus.testing.tiny_engine import TinyEngine

PLAN = StepPlan(step=1, work=())
ANY_REASON = "KV integrity: verify_real_kv_hash at slot {page}, position 0 (TAIL_K_FULL, step 1)"
OWN = OwnPages(
    tokens=np.arange(4, dtype=np.int32),
    spans=(PageSpan(part=Part.FULL, first=0, pages=np.array([2], np.int32)),),
)


class Rank:
    """Keeps every command, and answers what the test says to the next check of an arrival."""

    def __init__(self) -> None:
        self.commands: list[Any] = []
        self.found: tuple[Violation, ...] = ()
        self.swept: tuple[Violation, ...] = ()
        self.checked = 5
        """Slots of each row that it verifies by command."""

    def obey(self, command: Any) -> CanaryAnswer | None:
        self.commands.append(command)
        number = getattr(command, "number", 0)
        found = self.found if isinstance(command, CheckRows) else ()
        if isinstance(command, TellCounts):
            found, self.swept = self.swept, ()
        if not number:
            return None
        checked = None
        if isinstance(command, CheckRows):
            checked = [[self.checked] * len(command.rows) if part is Part.FULL else [] for part in Part]
        return CanaryAnswer(number=number, violations=found, slots_due=4, slots_checked=4, checked=checked)


def line_to(count: int = 1) -> AnsweringLine:
    return AnsweringLine([Rank() for _ in range(count)])


def violation(rid: str, page: int, reasons: Reason = Reason.VERIFY_REAL_KV_HASH) -> Violation:
    return Violation(
        step=1, tag="TAIL_K_FULL", reasons=reasons, part=Part.FULL, slot=4 * page, page=page, position=0,
        stored_position=0, stored_token=5, expected_token=5, stored_hash=1, expected_hash=1, stored_digest=2,
        found_digest=3, rid=rid,
    )  # fmt: skip


def lead_over(line: AnsweringLine, engine: TinyEngine, clock: ManualClock | None = None, **settings: Any) -> CanaryLead:
    return CanaryLead(
        CanarySettings(**{"kv_canary": "raise", **settings}), line, engine.cache, engine.scheduler,
        clock=clock or ManualClock(),        parts=[Part.FULL], names=["TP0 PP0", "TP1 PP0"] if line.size > 1 else [""],
    )  # fmt: skip


@pytest.fixture
def engine() -> TinyEngine:
    """One request runs; its pages are its own."""
    engine = TinyEngine()
    engine.scheduler.add(make_request("runs", list(range(20, 29)), max_new_tokens=8, ignore_eos=True))
    engine.step()
    return engine


def page_of(engine: TinyEngine, rid: str) -> int:
    own = engine.scheduler.prompt_pages(rid)
    assert own is not None
    return int(own.spans[0].pages[0])


def test_ranks_are_started_once_and_swept_before_every_step_that_is_due(engine: TinyEngine) -> None:
    line = line_to()
    lead = lead_over(line, engine, kv_canary_sweep_interval=3)
    for _ in range(7):
        lead.begin(PLAN)
    line.pump()
    commands = line.ranks[0].commands
    assert [type(command) for command in commands] == [StartCanary, SweepSlots, SweepSlots]
    assert commands[1].ends_pass, "33 pages are one walk"
    assert lead.view()["sweep_passes"] == 2


@pytest.mark.parametrize("is_idle", [False, True])
@pytest.mark.parametrize("turn_s", [1.0, 7.0, 260.0, 900.0])
def test_a_pass_over_the_cache_ends_within_the_time_asked_for_idle_or_not(
    engine: TinyEngine, turn_s: float, is_idle: bool
) -> None:
    line, clock = line_to(), ManualClock(5.0)
    lead = lead_over(line, engine, clock, kv_canary_sweep_seconds=3600.0)

    def pages_swept() -> list[int]:
        line.pump()
        commands = [each for each in line.ranks[0].commands if isinstance(each, SweepSlots)]
        return [slot // 4 for each in commands for slot in each.slots[::4].tolist()]

    engine.scheduler.abort("runs", "a client left")
    cached = sorted(
        np.flatnonzero((engine.cache.ledgers[Tier.DEVICE, Part.FULL].owner_P & STATE_MASK) == PageState.TREE).tolist()
    )
    for _ in range(int(3600 / turn_s)):
        clock.advance(turn_s)
        lead.idle() if is_idle else lead.begin(PLAN)
    assert cached
    assert set(pages_swept()) == set(cached)
    assert len(pages_swept()) <= 2 * len(cached), "a second pass may have begun"
    assert lead.view()["sweep_passes"] >= 1


def test_what_an_idle_engine_finds_is_filed_at_once(engine: TinyEngine) -> None:
    line, clock = line_to(), ManualClock()
    lead = lead_over(line, engine, clock)
    line.ranks[0].swept = (violation("", page_of(engine, "runs")),)
    lead.idle()
    assert not len(lead.violations)
    clock.advance(3600.0)
    lead.idle()
    assert len(lead.violations) == 1
    (verdict,) = lead.judge(())
    assert verdict.rid == "runs"


def test_an_idle_engine_condemns_what_was_cached_since_its_last_step_too(engine: TinyEngine) -> None:
    """A page that was loaded or handed out after the last step began is swept as it is now."""
    line, clock, prompt = line_to(), ManualClock(), list(range(50, 59))
    lead = lead_over(line, engine, clock)
    lead.begin(PLAN)
    engine.scheduler.add(make_request("later", prompt, max_new_tokens=1, ignore_eos=True))
    engine.step()
    (page, *_) = engine.cache.ledgers[Tier.DEVICE, Part.FULL].owner_P.nonzero()[0][-2:].tolist()
    assert engine.cache.probe("", np.array(prompt, np.int32)).device == 8
    line.ranks[0].swept = (replace(violation("", page), tag="SWEEP_K_FULL"),)
    clock.advance(3600.0)
    lead.idle()
    assert engine.cache.probe("", np.array(prompt, np.int32)).device < 8, "it is not found again, sweep by sweep"


def test_wrong_bytes_fail_every_user_of_the_page_and_quarantine_it(engine: TinyEngine) -> None:
    lead, page = lead_over(line_to(), engine), page_of(engine, "runs")
    (verdict,) = lead.judge([(0, violation("", page))])
    assert verdict.rid == "runs"
    assert verdict.reason == f"KV integrity: verify_real_kv_hash at slot {4 * page}, position 0 (TAIL_K_FULL, step 1)"
    said = f"{verdict.reason}; request chatcmpl-6fc7fd..."  # as front.calls ends it
    _, body = error_of(RequestFailed(said, 500))
    for told, page_of_docs in ((body.decode(), "docs/CANARY.md"), (verdict.reason, "docs/howto/canary.md")):
        quoted = (Path(__file__).parents[2] / page_of_docs).read_text()
        assert re.sub(r"\d+", "N", told) in re.sub(r"\d+", "N", quoted), f"{page_of_docs} quotes what a client is told"
    assert engine.cache.stats().pages.quarantined == 2, "the page, and the page of the tree behind it"
    (known,) = lead.violations
    assert known.owner.startswith("TREE(")
    assert known.users == ("runs",)
    assert "allocate" in known.history


@pytest.fixture
def both(engine: TinyEngine) -> TinyEngine:
    """Two requests run: `runs` and `other`."""
    engine.scheduler.add(make_request("other", list(range(50, 59)), max_new_tokens=8, ignore_eos=True))
    engine.step()
    return engine


def test_a_wrong_row_fails_its_own_request_alone_and_condemns_nothing(both: TinyEngine) -> None:
    line = line_to()
    lead = lead_over(line, both)
    found = violation("other", page_of(both, "runs"), Reason.VERIFY_POSITION)
    assert [verdict.rid for verdict in lead.judge([(0, found), (0, found)])] == ["other"]
    (check,) = (each for each in line.ranks[0].commands if isinstance(each, CheckRows))
    (row,) = check.rows
    assert row.tokens.tolist() == list(range(50, 59)), "its own pages, once, as far as they are computed"
    assert both.cache.stats().pages.quarantined == 0


def test_a_stamp_condemns_the_page_where_it_is_wrong_and_touches_all_its_users(both: TinyEngine) -> None:
    """The slot behind it is reported: a stamp is held against the one before it."""
    line, page = line_to(), page_of(both, "runs")
    lead = lead_over(line, both)
    line.ranks[0].found = (violation("runs", page, Reason.VERIFY_TOKEN),)
    own = both.scheduler.prompt_pages("runs")
    assert own is not None
    found = replace(violation("runs", int(own.spans[0].pages[1]), Reason.VERIFY_CHAIN_HASH), position=4)
    assert [verdict.rid for verdict in lead.judge([(0, found)])] == ["runs"]
    assert both.cache.stats().pages.quarantined == 2, "the page before it, and what was computed from that"
    assert both.cache.probe("", np.arange(20, 29, dtype=np.int32)).device == 0


def test_a_stamp_that_the_step_itself_wrote_condemns_its_page(both: TinyEngine) -> None:
    """No check by itself reaches so far: that KV is not committed."""
    line = line_to()
    own = both.scheduler.prompt_pages("runs")
    assert own is not None
    page = int(own.spans[0].pages[2])
    lead, found = lead_over(line, both), replace(violation("runs", page, Reason.VERIFY_TOKEN), position=11)
    assert [verdict.rid for verdict in lead.judge([(0, found)])] == ["runs"]
    assert page in both.cache.tiers.quarantine.banned[Part.FULL]


@pytest.mark.parametrize(
    ("reason", "offset"), [(Reason.VERIFY_CHAIN_HASH, 0), (Reason.VERIFY_CHAIN_HASH, 1), (Reason.VERIFY_POSITION, 0)]
)
def test_a_sweep_condemns_what_it_finds_and_the_page_before_where_that_may_be_at_fault(
    engine: TinyEngine, reason: Reason, offset: int
) -> None:
    lead = lead_over(line_to(), engine)
    own = engine.scheduler.prompt_pages("runs")
    assert own is not None
    first, second = own.spans[0].pages[:2].tolist()
    engine.run()
    found = replace(violation("", second, reason), tag="SWEEP_K_FULL", slot=4 * second + offset, position=4 + offset)
    assert lead.judge([(0, found)]) == ()
    kept = 0 if reason is Reason.VERIFY_CHAIN_HASH and not offset else 4
    assert engine.cache.probe("", np.arange(20, 29, dtype=np.int32)).device == kept
    assert (first in engine.cache.tiers.quarantine.banned[Part.FULL]) == (not kept)


def test_what_a_step_found_of_a_page_that_was_handed_out_since_is_nobodys_fault(engine: TinyEngine) -> None:
    lead = lead_over(line_to(), engine)
    lead.begin(PLAN)
    engine.scheduler.abort("runs", "its client left")
    engine.cache.evict(99)
    engine.scheduler.add(make_request("late", list(range(70, 79)), max_new_tokens=8))
    engine.step()
    page = page_of(engine, "late")
    assert lead.judge([(0, violation("runs", page))]) == (Verdict(rid="runs", reason=ANY_REASON.format(page=4 * page)),)
    lead.begin(PLAN)
    assert [each.rid for each in lead.judge([(0, replace(violation("", page), step=2))])] == ["late"]


def test_a_page_that_is_handed_out_right_after_a_step_began_is_not_what_that_step_read() -> None:
    engine = TinyEngine()
    lead = lead_over(line_to(), engine)
    lead.begin(PLAN)
    engine.scheduler.add(make_request("late", list(range(70, 79)), max_new_tokens=8))
    engine.step()
    page = page_of(engine, "late")
    assert [each.rid for each in lead.judge([(0, violation("before", page))])] == ["before"]
    assert engine.cache.stats().pages.quarantined == 0


def test_of_a_copy_on_the_host_as_much_is_kept_as_every_rank_found_sound() -> None:
    engine = TinyEngine(host_pages=33)
    engine.scheduler.add(make_request("runs", list(range(20, 37)), max_new_tokens=8, ignore_eos=True))
    engine.step()
    engine.run()

    def answers(copies: tuple[HostPages, ...]) -> list[CanaryAnswer]:
        return [CanaryAnswer(number=1, sound=(count,) * len(copies)) for count in (4, 2, 3)]

    match = engine.cache.match_prefix("", np.arange(20, 36, dtype=np.int32), 16)
    engine.cache.release(match.lease)
    check = CopyCheck(CanarySettings(kv_canary="heal"), engine.cache, answers)
    checked = check.verified(Part.FULL, int(match.pages[0]))
    assert checked
    assert {count for of_node in checked.values() for count in of_node.values()} == {2}


def test_a_fault_that_is_found_in_every_step_is_one_incident_and_one_line(
    engine: TinyEngine, caplog: pytest.LogCaptureFixture
) -> None:
    lead, page = lead_over(line_to(), engine, kv_canary="log"), page_of(engine, "runs")
    damaged = violation("runs", page)
    with caplog.at_level("ERROR", "serinus.canary"):
        for step in range(3, 10):
            lead.judge([(0, replace(damaged, step=step)), (0, replace(damaged, step=step, tag="TAIL_V_FULL"))])
        lead.judge([(0, replace(damaged, step=10, slot=4 * page + 1))])
        lead.judge([(0, replace(damaged, step=10, reasons=Reason.VERIFY_POSITION))])
    lines = [record.message for record in caplog.records]
    assert [line.split(" step=")[1].split()[0] for line in lines] == ["3", "10", "10"]
    view = lead.view()
    assert view["incidents_total"] == len(view["incidents"]) == 3
    first = view["incidents"][0]
    assert (first["first_step"], first["last_step"], first["count"]) == (3, 9, 14)
    assert first["tags"] == ["TAIL_K_FULL", "TAIL_V_FULL"]
    assert "allocate" in first["history"]


def test_the_first_incidents_are_kept_and_the_latest(engine: TinyEngine) -> None:
    lead, page = lead_over(line_to(), engine, kv_canary="log"), page_of(engine, "runs")
    for position in range(300):
        found = replace(violation("runs", page), slot=position, position=position)
        lead.judge([(0, found), (0, found)])
    view = lead.view()
    assert view["incidents_total"] == 300
    assert [each["slot"] for each in view["incidents"]] == [*range(128), *range(172, 300)]


def test_every_count_of_the_canary_exists_from_the_start_at_zero(engine: TinyEngine) -> None:
    lead, metrics = lead_over(line_to(), engine, kv_canary="log"), Metrics("unified-0", "unified")
    lead.refresh(metrics)
    zeros = metrics.by_labels("kv_canary_violations")
    assert set(zeros.values()) == {0.0}
    assert ("verify_real_kv_hash", "SWEEP_K_FULL") in zeros
    assert ("write_token", "HEAD_V_FULL") in zeros
    assert not [label for label in zeros if "SWA" in label[1] or label == ("write_token", "TAIL_K_FULL")]
    assert b"serinus:kv_canary_incidents_total{" in metrics.render()
    lead.judge([(0, violation("runs", page_of(engine, "runs")))] * 2)
    lead.refresh(metrics)
    assert metrics.by_labels("kv_canary_violations").keys() == zeros.keys()
    assert metrics.get("kv_canary_violations", "verify_real_kv_hash", "TAIL_K_FULL") == 2
    assert metrics.get("kv_canary_incidents") == 1


def test_seconds_since_cached_pages_were_verified_end_with_a_sweep_a_hit_or_a_running_request(
    engine: TinyEngine,
) -> None:
    clock, metrics = ManualClock(100.0), Metrics("unified-0", "unified")
    lead = lead_over(line_to(), engine, clock, kv_canary_sweep_interval=3)

    def ages() -> tuple[float, ...]:
        lead.refresh(metrics)
        return tuple(metrics.get("kv_canary_last_verified_seconds", page) for page in ("oldest", "median"))

    another = TinyEngine()
    another.scheduler.add(make_request("any", [1, 2, 3]))
    plan = another.scheduler.plan(0.0)
    assert plan is not None

    def begin(rid: str = "", *, goes_on: bool = False) -> None:
        work = tuple(replace(each, rid=rid, whole=not goes_on) for each in plan.work if rid)
        lead.begin(replace(PLAN, work=work))

    assert ages() == (0.0, 0.0)
    clock.advance(10.0)
    assert ages() == (10.0, 10.0)
    begin("runs")
    assert ages() == (0.0, 0.0)
    clock.advance(0.5)
    begin("runs", goes_on=True)
    assert ages() == (0.5, 0.5), "of a request that goes on it is noted once in a second"
    clock.advance(0.5)
    begin("gone")
    clock.advance(4.5)
    assert ages() == (5.5, 5.5)
    engine.scheduler.abort("runs", "a client left")
    begin()
    begin()
    assert ages() == (5.5, 5.5)
    begin()
    assert ages() == (0.0, 0.0), "the sixth step sweeps what no request uses"


@pytest.mark.parametrize("mode", ["raise", "log"])
def test_where_a_ring_could_not_hold_all_every_request_of_the_step_is_suspect(engine: TinyEngine, mode: str) -> None:
    line = line_to()
    lead = lead_over(line, engine, kv_canary=mode)
    over = RingOverflow(
        step=1,
        part=Part.FULL,
        check="around forward passes",
        lost=7,
        rids=("runs", "gone"),
        pages=np.empty(0, np.int32),
    )
    verdicts = lead.judge([(0, over)])
    assert [verdict.rid for verdict in verdicts] == (["runs", "gone"] if mode == "raise" else [])
    assert not lead.judge([]), "it was told once"
    metrics = Metrics("e", "unified")
    lead.refresh(metrics)
    assert re.search(r'kv_canary_violations_total{[^}]*reason="ring_overflow"[^}]*} 7', metrics.render().decode())
    ledger = engine.cache.ledgers[Tier.DEVICE, Part.FULL]
    states = ledger.owner_P[engine.scheduler.rows_of(["runs"])[Part.FULL]] & STATE_MASK
    assert all(state == PageState.QUARANTINED for state in states[:2]) is (mode == "raise"), "what the tree had of it"
    if mode == "raise":
        assert "7 violations more than the ring has rows for" in verdicts[0].reason


def test_in_mode_log_nothing_follows_but_the_report(engine: TinyEngine) -> None:
    line = line_to()
    lead = lead_over(line, engine, kv_canary="log")
    line.ranks[0].found = (violation("comes", 2),)
    assert lead.arrived("comes", OWN).reason == ""
    assert not lead.judge([(0, violation("runs", 1))])
    assert engine.cache.stats().pages.quarantined == 0
    assert [each["rid"] for each in lead.view()["incidents"]] == ["comes", "runs"]


def test_an_arrival_is_refused_for_its_own_damage_and_another_request_fails_with_the_next_step(
    engine: TinyEngine,
) -> None:
    """The rings of an accelerator are read one step late: an arrival check may read what the last step noted."""
    line, page = line_to(2), page_of(engine, "runs")
    lead = lead_over(line, engine)
    line.ranks[1].found = (violation("runs", page), violation("comes", 2))
    reason = lead.arrived("comes", OWN).reason
    assert "at slot 8, position 0 of rank TP1 PP0" in reason
    assert [verdict.rid for verdict in lead.judge([])] == ["runs"]
    assert not lead.judge([])
    line.ranks[1].found = (violation("runs", page),)
    assert lead.arrived("sound", OWN).reason == "", "what is wrong elsewhere does not refuse this one"
    assert lead.view()["pages"]["failed"] == [], "what came wrong is no failure of the page that took it"


def test_of_several_ranks_the_one_that_verified_least_is_told(engine: TinyEngine) -> None:
    line = line_to(2)
    lead = lead_over(line, engine)
    assert (lead.check({"runs": OWN}).slots, lead.arrived("comes", OWN).slots) == ({"runs": 5}, 5)
    line.ranks[1].checked = 3
    assert (lead.check({"runs": OWN}).slots, lead.arrived("comes", OWN).slots) == ({"runs": 3}, 3)


def test_ranks_are_listed_where_there_are_several_and_faults_bear_the_name_of_their_rank(engine: TinyEngine) -> None:
    one, two = (lead_over(line_to(size), engine) for size in (1, 2))
    injection = Injection(mode="real_kv_used", step=3)
    one.judge([(0, injection)])
    two.judge([(1, injection)])
    assert one.injections == [injection]
    assert two.injections == [replace(injection, rank="TP1 PP0")]
    assert "ranks" not in one.view()
    assert [rank["rank"] for rank in two.view()["ranks"]] == ["TP0 PP0", "TP1 PP0"]
    assert two.view()["slots_checked"] == 8
