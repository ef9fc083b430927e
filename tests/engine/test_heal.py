"""Mode heal on a whole engine: what is damaged is computed again, clients get the right answer, neighbours go on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from serinus.core.request import FinishReason, KvIntegrity, Request
from serinus.core.sampling import SamplingParams
from serinus.core.stamps import chain_hashes
from serinus.engine.healing import TokenBudget
from serinus.kernels import Kernels, load
from serinus.selftest.mutants import WEAKNESSES
from serinus.testing.oracle import toy_continue
from tests.cells import diagonal
from tests.engine.test_canary import KINDS, SHARED, Watched, toys

__all__ = ["toys"]

ROTATING = {"kv_canary": "heal", "kv_canary_coverage": "rotating:4"}


def add(engine: Watched, rid: str, prompt: list[int], count: int, *, stream: bool, **sampling: Any) -> None:
    params = SamplingParams(**{"temperature": 0, "max_new_tokens": count, "ignore_eos": True, **sampling})
    engine.send(Request(rid=rid, prompt=np.asarray(prompt, np.int32), sampling=params, seed=7, stream=stream))


def run_until(engine: Watched, rid: str, count: int) -> None:
    """Until a request knows so many tokens of its answer."""
    while rid not in engine.engine.scheduler or engine.engine.scheduler._states[rid].generated < count:
        engine.turn()


def damage(engine: Watched, rid: str, position: int) -> None:
    """Make the keys of a position of a running request quite another vector, in all layers: its answer changes."""
    state = engine.engine.scheduler._states[rid]
    slot = int(engine.built.line.body._runner._runner._tables[engine.part].table[state.row][position])
    for lane in (*engine.built.pools[engine.part].k, *engine.built.pools[engine.part].v):
        lane.view(len(lane), -1).view(torch.float32)[slot] += 100.0


def heals(engine: Watched, result: str) -> float:
    return engine.built.metrics.get("kv_canary_heals", result)


@pytest.mark.parametrize(("kind", "coverage"), diagonal(KINDS, ["full", "rotating:4"]))
def test_a_damaged_request_gets_the_right_answer_and_its_neighbour_notices_nothing(
    toys: dict[str, Path], kind: str, coverage: str
) -> None:
    engine = Watched(toys[kind], kv_canary="heal", kv_canary_coverage=coverage)
    first, other = [*SHARED[0], 201], [*SHARED[1][:20], 202]
    add(engine, "first", first, 30, stream=False)
    add(engine, "other", other, 30, stream=True)
    run_until(engine, "first", 6)
    damage(engine, "first", engine.engine.scheduler._states["first"].computed - 1)
    engine.run()
    assert heals(engine, "recomputed") == 1
    assert engine.tokens("first") == toy_continue(engine.built.spec, first, 30)
    assert engine.finish("first") is FinishReason.LENGTH
    assert engine.tokens("other") == toy_continue(engine.built.spec, other, 30)
    assert all(len(delta.token_ids) == 1 for delta in engine.deltas["other"])
    engine.lead.refresh(engine.built.metrics)
    engine.engine.scheduler.sanity_check()
    add(engine, "again", first, 10, stream=False)
    engine.run()
    assert engine.tokens("again") == toy_continue(engine.built.spec, first, 10)


def test_an_eager_stream_with_a_wrong_token_ends_with_an_error_that_names_it(toys: dict[str, Path]) -> None:
    engine = Watched(toys["full"], **ROTATING)
    prompt = [*SHARED[0], 201]
    right = toy_continue(engine.built.spec, prompt, 30)
    add(engine, "one", prompt, 30, stream=True)
    run_until(engine, "one", 8)
    damage(engine, "one", 20)
    engine.run()
    shown, end = engine.tokens("one"), engine.end_of("one")
    assert shown != right[: len(shown)], "no wrong token left: the story tells nothing"
    wrong = next(i for i, (got, expected) in enumerate(zip(shown, right, strict=False)) if got != expected)
    assert (end.finish, end.error_status, end.wrong_token) == (FinishReason.ERROR, 500, wrong)
    assert f"token {wrong} of this answer" in end.error
    assert f"id {shown[wrong]}, computed again it is {right[wrong]}" in end.error
    assert "verify_real_kv_hash" in end.error


@pytest.mark.parametrize(("mode", "stream"), [("confirmed", True), ("eager", True), ("eager", False)])
def test_confirmed_tokens_and_log_probabilities_are_never_wrong(toys: dict[str, Path], mode: str, stream: bool) -> None:
    """A stream with log-probabilities is confirmed in either mode."""
    engine = Watched(toys["full"], **ROTATING, kv_canary_stream=mode)
    prompt = [*SHARED[0], 201]
    right = toy_continue(engine.built.spec, prompt, 30)
    add(engine, "one", prompt, 30, stream=stream, logprobs=1)
    for at in (8, 15):
        run_until(engine, "one", at)
        shown = engine.tokens("one")
        assert at - 4 <= len(shown) <= at, "tokens leave at most 3 steps late"
        damage(engine, "one", 20 + at)
        while heals(engine, "recomputed") < 1 + (at > 8):
            engine.turn()
            assert engine.tokens("one") == right[: len(engine.tokens("one"))]
    engine.run()
    assert engine.tokens("one") == right
    assert engine.finish("one") is FinishReason.LENGTH
    places = [place for delta in engine.deltas["one"] for place in delta.logprobs]
    clean = Watched(toys["full"])
    add(clean, "one", prompt, 30, stream=stream, logprobs=1)
    clean.run()
    expected = [place for delta in clean.deltas["one"] for place in delta.logprobs]
    assert [place.logprob for place in places] == pytest.approx([place.logprob for place in expected], abs=1e-4)


def test_penalties_and_stops_are_those_of_the_clean_answer(toys: dict[str, Path]) -> None:
    asked: dict[str, Any] = {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "temperature": 1.0}
    prompt, answers = [*SHARED[0], 201], []
    for is_damaged in (False, True):
        engine = Watched(toys["full"], **ROTATING)
        add(engine, "one", prompt, 40, stream=False, **asked)
        run_until(engine, "one", 10)
        if is_damaged:
            damage(engine, "one", 25)
        engine.run()
        assert heals(engine, "recomputed") == is_damaged
        answers.append(engine.tokens("one"))
    assert answers[0] == answers[1]


def test_a_request_that_is_damaged_again_and_again_ends_with_the_500(toys: dict[str, Path]) -> None:
    engine = Watched(toys["full"], kv_canary="heal", kv_canary_heals_max=2)
    add(engine, "one", [*SHARED[0], 201], 40, stream=False)
    for turn in range(3):
        run_until(engine, "one", 5 + 3 * turn)
        damage(engine, "one", 44)
        engine.turn()
        engine.turn()
    engine.run()
    end = engine.end_of("one")
    assert (end.finish, end.error_status) == (FinishReason.ERROR, 500)
    assert "healed 2 times, --kv-canary-heals-max is 2" in end.error
    assert (heals(engine, "recomputed"), heals(engine, "heals_max")) == (2, 1)


def test_the_budget_of_recomputed_tokens_is_kept(toys: dict[str, Path]) -> None:
    engine = Watched(toys["full"], kv_canary="heal", kv_canary_heal_tokens_per_second=1)
    for rid in ("one", "two"):
        add(engine, rid, [*SHARED[0], 201], 20, stream=False)
        run_until(engine, rid, 5)
        damage(engine, rid, 20)
        engine.run()
    assert engine.finish("one") is FinishReason.LENGTH
    assert "--kv-canary-heal-tokens-per-second, 1, is used up" in engine.end_of("two").error


def test_the_budget_of_recomputed_tokens_grows_with_time_to_what_ten_seconds_allow() -> None:
    budget = TokenBudget(100)
    asked = [(0, 0.0), (1000, 0.0), (1000, 0.5), (1060, 0.5), (1060, 1.0), (3060, 99.0), (4061, 99.0)]
    assert [budget.allows(spent, now) for spent, now in asked] == [True, False, True, False, True, True, False]


def test_a_healed_request_can_be_aborted_while_it_waits(toys: dict[str, Path]) -> None:
    engine = Watched(toys["full"], kv_canary="heal")
    add(engine, "one", [*SHARED[0], 201], 30, stream=False)
    run_until(engine, "one", 5)
    damage(engine, "one", 30)
    while not heals(engine, "recomputed"):
        engine.turn()
    engine.abort("one")
    engine.run()
    assert engine.finish("one") is FinishReason.ABORT
    engine.engine.scheduler.sanity_check()
    assert engine.engine.idle


def receipt(engine: Watched, rid: str) -> KvIntegrity:
    usage = engine.end_of(rid).usage
    assert usage is not None
    assert usage.kv_integrity is not None
    return usage.kv_integrity


@pytest.mark.parametrize(("kind", "coverage"), diagonal(KINDS, ["full", "rotating:4"]))
def test_receipts_tell_all_that_was_checked_and_nothing_else(toys: dict[str, Path], kind: str, coverage: str) -> None:
    engine = Watched(toys[kind], kv_canary="heal", kv_canary_coverage=coverage, kv_canary_sweep_interval=0)
    prompts = {"one": [*SHARED[0], 201], "two": [*SHARED[0], 202], "three": SHARED[1][:7]}
    for rid, prompt in prompts.items():
        add(engine, rid, prompt, 20, stream=False)
        run_until(engine, rid, 3)
    engine.run()
    receipts = {rid: receipt(engine, rid) for rid in prompts}
    checks = engine.lead.view()["checks"]
    due = checks["head"]["due"] + checks.get("end", {"due": 0})["due"]
    assert sum(each.slots_due for each in receipts.values()) == due > 0
    assert all(each.slots_checked == each.slots_due for each in receipts.values())
    for rid, prompt in prompts.items():
        tokens = np.asarray([*prompt, *engine.tokens(rid)], np.int32)
        each = receipts[rid]
        assert (each.coverage, each.heals) == (coverage, 0)
        assert each.chain_hash == f"{int(chain_hashes(tokens)[-1]) & (1 << 64) - 1:016x}"
        assert sum(each.sources.values()) == each.horizon
    assert receipts["one"].sources["device"] == 0 < receipts["two"].sources["device"]


def skipping(kernels: Kernels, *, skips: bool) -> Kernels:
    """The verify op passes over every third slot, and counts it by lane as if it had not. The watch calls it."""

    def verify(
        stamps_LS4: torch.Tensor, lane: int, slots_E: torch.Tensor, positions_E: torch.Tensor, *rest: Any
    ) -> None:
        *arguments, checked_L, by_sequence_N4 = rest if len(rest) == 8 else (*rest, None)
        left_E = (torch.arange(len(positions_E)) % 3 == 0) & (positions_E >= 0) & skips
        kept_E = torch.where(left_E, -1, positions_E)
        kernels.canary_verify(stamps_LS4, lane, slots_E, kept_E, *arguments, checked_L, by_sequence_N4)
        with torch.inference_mode():
            checked_L[lane : lane + 2] += int(left_E.sum())

    return replace(kernels, canary_verify=verify, canary_watch=load("cpu", "ref").canary_watch)


@pytest.mark.parametrize("skips", [False, True])
def test_a_receipt_tells_what_was_verified_not_what_should_have_been(
    toys: dict[str, Path], monkeypatch: pytest.MonkeyPatch, skips: bool
) -> None:
    """Ranks that agree with themselves, and skip slots: their own counts, by check, are as they had to be."""
    monkeypatch.setattr("serinus.canary.make.load", lambda device: skipping(load(device), skips=skips))
    engine = Watched(toys["full"], **ROTATING)
    add(engine, "one", [*SHARED[0], 201], 20, stream=False)
    engine.run()
    view, each = engine.lead.view(), receipt(engine, "one")
    assert view["slots_due"] == view["slots_checked"]
    assert (each.slots_checked < each.slots_due) is skips
    assert each.horizon == (0 if skips else 61), "nobody knows which slots were not verified"
    assert sum(each.sources.values()) == 61
    assert engine.built.metrics.get("kv_canary_short_receipts") == skips


def test_turns_that_ranks_leave_out_are_missed_by_the_leader(toys: dict[str, Path]) -> None:
    (weakness,) = (each for each in WEAKNESSES if each.name == "turns leave one residue out")
    with weakness.apply():
        engine = Watched(toys["full"], **ROTATING)
        add(engine, "one", [*SHARED[0], 201], 20, stream=False)
        engine.run()
    view, each = engine.lead.view(), receipt(engine, "one")
    assert view["slots_due"] == view["slots_checked"], "the rank does what it believes is due"
    assert (each.slots_checked < each.slots_due, each.horizon) == (True, 0)


def test_the_receipt_of_a_healed_answer_tells_why_and_how(toys: dict[str, Path]) -> None:
    engine = Watched(toys["full"], kv_canary="heal")
    add(engine, "one", [*SHARED[0], 201], 20, stream=False)
    run_until(engine, "one", 6)
    damage(engine, "one", 41)
    engine.run()
    each = receipt(engine, "one")
    assert (each.heals, each.slots_checked) == (1, each.slots_due)
    assert "verify_real_kv_hash" in each.heal_reasons[0]
    assert each.repaired_from["device"] == 40, "the pages before the damaged one were found again"
    assert 5 <= each.repaired_from["computed"] <= 8
    assert engine.tokens("one") == toy_continue(engine.built.spec, [*SHARED[0], 201], 20)


def test_an_answer_that_a_stop_text_ends_as_it_is_healed_has_the_receipt_of_what_it_was_computed_on(
    toys: dict[str, Path],
) -> None:
    engine = Watched(toys["full"], **ROTATING, kv_canary_stream="confirmed")
    prompt = [*SHARED[0], 201]
    add(engine, "one", prompt, 60, stream=True)
    run_until(engine, "one", 12)
    damage(engine, "one", 8)
    engine.abort("one", matched=True)
    while engine.end_of("one").finish is None:
        engine.turn()
    answer, each = engine.tokens("one"), receipt(engine, "one")
    assert (heals(engine, "recomputed"), engine.end_of("one").finish) == (1, FinishReason.STOP)
    assert answer == toy_continue(engine.built.spec, prompt, len(answer))
    assert (each.heals, each.slots_checked) == (1, each.slots_due)
    assert each.horizon == sum(each.sources.values()) >= len(prompt) + len(answer) - 1


@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_request_is_verified_before_it_gives_its_pages_back(toys: dict[str, Path], is_damaged: bool) -> None:
    engine = Watched(toys["full"], **{**ROTATING, "kv_canary_coverage": "rotating:64"}, max_total_tokens=240)
    prompts = {"one": SHARED[0][:10], "two": SHARED[1][:10]}
    for rid, prompt in prompts.items():
        add(engine, rid, prompt, 140, stream=True)
    run_until(engine, "two", 104)
    if is_damaged:
        damage(engine, "two", 30)  # its turn comes in the 22nd step from here
    while engine.engine.scheduler._states["two"].running:
        engine.turn()
    assert engine.engine.scheduler._states["two"].generated < 115, "it gave its pages back before"
    assert heals(engine, "recomputed") == is_damaged
    engine.run()
    usage = engine.end_of("two").usage
    assert usage is not None
    assert usage.retractions == (not is_damaged)
    for rid, prompt in prompts.items():
        right, shown, wrong = toy_continue(engine.built.spec, prompt, 140), engine.tokens(rid), engine.end_of(rid)
        if is_damaged and rid == "two":
            assert wrong.wrong_token is not None
            assert shown[: wrong.wrong_token] == right[: wrong.wrong_token] != shown[: wrong.wrong_token + 1]
        else:
            assert shown == right
