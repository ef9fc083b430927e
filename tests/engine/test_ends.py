"""At the end of an answer, and before its pages are for others, all that it was computed on is verified."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from serinus.canary import CheckRows
from serinus.core.request import FinishReason, Request
from serinus.core.rng import Rng
from serinus.core.sampling import SamplingParams
from serinus.testing.oracle import toy_continue
from tests.cells import diagonal
from tests.engine.test_canary import KINDS, SHARED, Watched, toys

__all__ = ["toys"]

ROTATING = {"kv_canary": "raise", "kv_canary_coverage": "rotating:16", "kv_canary_sweep_interval": 0}
PROMPT = [*SHARED[0], 201]
STOPS = tuple(range(0, 256, 2))


def add(engine: Watched, rid: str, prompt: list[int], count: int, **sampling: Any) -> None:
    params = SamplingParams(**{"temperature": 0, "max_new_tokens": count, "ignore_eos": True, **sampling})
    engine.send(Request(rid=rid, prompt=np.asarray(prompt, np.int32), sampling=params, seed=7, stream=True))


def damage(engine: Watched, rid: str, position: int) -> None:
    """Make the KV of a position of a running request quite another: its answer changes."""
    state = engine.engine.scheduler._states[rid]
    slot = int(engine.built.line.body._runner._runner._tables[engine.part].table[state.row][position])
    for lane in (*engine.built.pools[engine.part].k, *engine.built.pools[engine.part].v):
        lane.view(len(lane), -1).view(torch.float32)[slot] += 100.0


def run_until(engine: Watched, rid: str, count: int) -> None:
    """Until a request knows so many tokens of its answer."""
    while rid not in engine.engine.scheduler or engine.engine.scheduler._states[rid].generated < count:
        engine.turn()


def checks(engine: Watched, monkeypatch: pytest.MonkeyPatch) -> list[CheckRows]:
    """The checks of rows that are commanded from now on."""
    said: list[CheckRows] = []
    obey = engine.rank.obey

    def heard(command: Any) -> Any:
        if isinstance(command, CheckRows):
            said.append(command)
        return obey(command)

    acts = engine.built.line.body._acts
    monkeypatch.setitem(acts, CheckRows, heard)
    return said


@pytest.mark.parametrize(("kind", "end"), diagonal(KINDS, ["length", "stop token"]))
def test_no_answer_that_ends_is_wrong_however_late_it_was_damaged(toys: dict[str, Path], kind: str, end: str) -> None:
    engine, rng = Watched(toys[kind], **ROTATING), Rng(3)
    stops: dict[str, Any] = {} if end == "length" else {"stop_token_ids": STOPS, "min_new_tokens": 12}
    clean = Watched(toys[kind], **ROTATING)
    add(clean, "r", PROMPT, 60, **stops)
    clean.run()
    right = clean.tokens("r")
    wrong_shown = 0
    for number in range(10):
        rid = f"r{number}"
        add(engine, rid, PROMPT, 18 if end == "length" else 60, **stops)
        run_until(engine, rid, rng.randint(6, 12))
        state = engine.engine.scheduler._states[rid]
        if state.phase.name == "DECODE":
            damage(engine, rid, rng.randint(state.rows[-1].first * 4, state.computed - 1))
        engine.run()
        shown = engine.tokens(rid)
        wrong_shown += shown != right[: len(shown)]
        if engine.finish(rid) is not FinishReason.ERROR:
            assert shown == right[: len(shown)], f"{rid} ended as if it were right"
        engine.engine.scheduler.sanity_check()
    assert wrong_shown >= 3, "no stream showed a wrong token before it was found: the story tells nothing"
    add(engine, "after", PROMPT, 30)
    engine.run()
    assert engine.tokens("after") == toy_continue(engine.built.spec, PROMPT, 30)


def test_requests_that_end_together_are_checked_by_one_command_and_none_twice(
    toys: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Watched(toys["full"], **ROTATING)
    said = checks(engine, monkeypatch)
    prompts = {"a": [5, 6, 7], "b": [8, 9, 10]}
    for rid, prompt in prompts.items():
        add(engine, rid, prompt, 9)
    engine.run()
    assert not said, "their last step was known to be that, and verified all of them"
    stops = tuple(range(engine.built.spec.vocab_size))
    for rid, prompt in prompts.items():
        add(engine, f"{rid}2", prompt, 20, stop_token_ids=stops, min_new_tokens=8)
    engine.run()
    assert engine.finish("a2") is engine.finish("b2") is FinishReason.STOP
    assert len(said) == 1, [[row.rid for row in each.rows] for each in said]
    (check,) = said
    assert {row.rid for row in check.rows} == {"a2", "b2"}
    assert all(len(row.tokens) == 3 + 8 for row in check.rows), "the last token has no KV yet"
    view = engine.lead.view()["checks"]["end"]
    assert view["due"] == view["checked"] == 2 * (3 + 8 + 1), "every slot, and the last one as the request's own"


@pytest.mark.parametrize("coverage", ["full", "rotating:1"])
def test_where_every_step_verifies_all_nothing_is_read_again_at_the_end(
    toys: dict[str, Path], coverage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Watched(toys["full"], **{**ROTATING, "kv_canary_coverage": coverage})
    said = checks(engine, monkeypatch)
    add(engine, "a", PROMPT, 30, stop_token_ids=STOPS, min_new_tokens=5)
    engine.run()
    assert engine.finish("a") is FinishReason.STOP
    assert not said


@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_stop_text_ends_an_answer_when_all_of_it_is_known_to_be_right(
    toys: dict[str, Path], is_damaged: bool
) -> None:
    engine = Watched(toys["full"], **ROTATING)
    add(engine, "a", PROMPT, 60)
    run_until(engine, "a", 10)
    state = engine.engine.scheduler._states["a"]
    assert state.verified < state.computed
    if is_damaged:
        damage(engine, "a", 44)
    engine.abort("a", matched=True)
    engine.run()
    assert engine.finish("a") is (FinishReason.ERROR if is_damaged else FinishReason.STOP)
    cached = engine.built.cache.probe("", np.array([*PROMPT, *engine.tokens("a")], np.int32)).device
    assert cached == (40 if is_damaged else (len(PROMPT) + 9) // 4 * 4), "what was verified is published, and no more"


def test_a_stop_text_in_a_stream_that_heals_is_an_error_where_it_was_in_wrong_tokens(toys: dict[str, Path]) -> None:
    engine = Watched(toys["full"], **{**ROTATING, "kv_canary": "heal"})
    right = toy_continue(engine.built.spec, PROMPT, 60)
    for rid, is_damaged in (("sound", False), ("healed", True), ("wrong", True)):
        add(engine, rid, PROMPT, 60)
        run_until(engine, rid, 10)
        if is_damaged:
            damage(engine, rid, 44)
        if rid == "wrong":
            run_until(engine, rid, 13)
        engine.abort(rid, matched=True)
        engine.run()
    assert engine.finish("sound") is FinishReason.STOP
    shown = engine.tokens("healed")
    assert engine.finish("healed") in (FinishReason.STOP, FinishReason.LENGTH)
    assert shown == right[: len(shown)]
    assert len(shown) <= 11
    end = engine.end_of("wrong")
    assert (end.finish, end.error_status) == (FinishReason.ERROR, 500)
    assert end.wrong_token is not None


def test_an_abort_publishes_what_is_verified_and_no_more(toys: dict[str, Path]) -> None:
    engine = Watched(toys["full"], **ROTATING)
    add(engine, "a", PROMPT, 60)
    run_until(engine, "a", 30)
    state = engine.engine.scheduler._states["a"]
    verified, known = state.verified, [*PROMPT, *engine.tokens("a")]
    assert len(PROMPT) < verified <= state.computed - 15
    engine.abort("a")
    engine.run()
    assert engine.built.cache.probe("", np.array(known, np.int32)).device in (
        verified // 4 * 4,
        (verified + 1) // 4 * 4,
    )


def test_what_is_damaged_between_two_chunks_of_a_prompt_is_found_by_the_next_one(toys: dict[str, Path]) -> None:
    engine = Watched(toys["full"], **ROTATING)
    prompt = [*SHARED[0], *SHARED[1]]
    add(engine, "a", prompt, 4)
    while "a" not in engine.engine.scheduler or engine.engine.scheduler._states["a"].computed < 32:
        engine.turn()
    damage(engine, "a", 5)
    engine.run()
    assert engine.finish("a") is FinishReason.ERROR
    assert engine.tokens("a") == []
