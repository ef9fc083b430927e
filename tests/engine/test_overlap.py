"""Steps that are begun before the one before them is read: the same answers, tokens and ends as without, to the bit."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from serinus import LLM, SamplingParams
from serinus.core.errors import InvariantError
from serinus.core.parts import Part
from serinus.core.plan import StepPlan, TableWrite
from serinus.core.request import FinishReason, Request, TokenLogprobs
from serinus.engine.messages import FrontMessage
from serinus.models.small_checkpoints import make_toy
from serinus.ranks.steps_ahead import StepsAhead
from serinus.wire.messages import Abort

SHAPES: dict[str, dict[str, Any]] = {
    "full": {}, "sliding": {"window": 10, "layer_types": "SFS"},
}  # fmt: skip
CANARIES: dict[str, dict[str, Any]] = {
    "none": {"kv_canary": "none"}, "full": {"kv_canary": "heal", "kv_canary_coverage": "full"},
    "rotating": {"kv_canary": "raise", "kv_canary_coverage": "rotating:3"},
}  # fmt: skip


@pytest.fixture(params=list(SHAPES), scope="module")
def toy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_toy(
        tmp_path_factory.mktemp("toy"), vocab=64, context=128, tokenizer=False, kv_heads=2, **SHAPES[request.param]
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    tokens: dict[str, list[int]]
    logprobs: dict[str, list[TokenLogprobs]]
    ends: dict[str, FinishReason]
    taken: int
    dropped: int
    chunks: int
    """Prompt chunks that were queued when their plan came."""


@pytest.fixture
def serve(toy: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    made: list[LLM] = []

    def begin(*, overlaps: bool, **settings: Any) -> LLM:
        monkeypatch.setattr("serinus.engine.planning.overlaps", lambda parts: overlaps)
        given = {"max_total_tokens": 104, "page_size": 4, "max_running_requests": 6, "chunked_prefill_size": 8}
        given |= {"max_step_ms": 0, **settings}
        made.append(LLM(str(toy), skip_tokenizer_init=True, enable_sanity_check=True, **given))
        return made[-1]

    yield begin
    for llm in made:
        llm.close()


@pytest.fixture(scope="module")
def waited(toy: Path) -> dict[tuple[str, int], Answers]:
    """(canary, seed) -> what one rank that waits answers, once a test asked."""
    return {}


def requests_of(seed: int, *, plain: bool) -> list[tuple[int, Request, int | None]]:
    """(turn in which it comes, request, how many of its tokens it is aborted after). `plain`: none has a penalty or
    asks for log-probabilities: their passes are ahead, their tokens chosen when the ones before are on the host."""
    rng = random.Random(seed)
    stem = [rng.randrange(1, 64) for _ in range(24)]
    made: list[tuple[int, Request, int | None]] = []
    for index in range(20):
        prompt = stem[: rng.choice((0, 8, 9, 20))] + [rng.randrange(1, 64) for _ in range(rng.randint(1, 20))]
        given: dict[str, Any] = {"temperature": rng.choice((0.0, 1.0)), "max_new_tokens": rng.choice((1, 2, 9, 30, 50))}
        match rng.randrange(3 if plain else 0, 8):
            case 0:
                given["repetition_penalty"] = 1.3
            case 1 | 2:
                given["logprobs"] = 2
            case 3 | 4:
                given |= {"min_new_tokens": min(4, given["max_new_tokens"]), "stop_token_ids": tuple(range(20, 50))}
            case 5 | 6:
                given["stop_token_ids"] = tuple(range(20, 26))
        sampling = SamplingParams(ignore_eos=rng.random() < 0.7, **given)
        request = Request(
            rid=f"r{index}", prompt=np.array(prompt, np.int32), sampling=sampling, seed=index, stream=True
        )
        made.append((rng.choice((0, 0, 3, 11, 12, 25)), request, rng.choice((None, None, None, 1, 7))))
    return made


def run(llm: LLM, requests: Sequence[tuple[int, Request, int | None]]) -> Answers:
    engine, tokens, ends = llm._engine, dict[str, list[int]](), dict[str, FinishReason]()
    logprobs = dict[str, list[TokenLogprobs]]()
    runner = llm._built.line.body._runner
    assert isinstance(runner, StepsAhead)
    taken, dropped = runner.taken, runner.dropped
    cut = {request.rid: count for _, request, count in requests}
    messages: list[FrontMessage] = []
    chunks: dict[int, int] = {}
    turn = 0
    while len(ends) < len(requests):
        messages += [FrontMessage(front="f", message=each) for at, each, _ in requests if at == turn]
        output = llm._turn(messages)
        messages, turn = [], turn + 1
        chunks |= {p.step: sum(len(w.tokens) > 1 for w in p.work) for p, _ in engine._open if p.takes is not None}
        for delta in (delta for _, deltas in output.deltas for delta in deltas):
            got = tokens.setdefault(delta.rid, [])
            got += delta.token_ids
            logprobs.setdefault(delta.rid, []).extend(delta.logprobs or ())
            if delta.finish is not None:
                ends[delta.rid] = delta.finish
                receipt = None if delta.usage is None else delta.usage.kv_integrity
                assert receipt is None or receipt.slots_checked == receipt.slots_due
            elif cut[delta.rid] == len(got):
                messages.append(FrontMessage(front="f", message=Abort(rid=delta.rid, reason="enough")))
        if engine.line.size > 1 and engine.wait_s:
            engine.line.wait_any((), engine.wait_s)
        assert turn < 4000
    while not engine.idle:
        llm._turn([])
    engine.scheduler.sanity_check()
    taken, dropped = runner.taken - taken, runner.dropped - dropped
    return Answers(
        tokens=tokens, logprobs=logprobs, ends=ends, taken=taken, dropped=dropped, chunks=sum(chunks.values())
    )  # fmt: skip


def assert_same(found: Answers, expected: Answers, seed: int) -> None:
    """The same ends, tokens and log-probabilities; of what was aborted one may have some more."""
    assert found.ends == expected.ends, seed
    for rid, end in expected.ends.items():
        for name in ("tokens", "logprobs"):
            shorter, longer = sorted((getattr(each, name)[rid] for each in (expected, found)), key=len)
            assert shorter == (longer[: len(shorter)] if end is FinishReason.ABORT else longer), (seed, rid, name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("toy", "canary"),
    [
        ("full", "none"),
        ("sliding", "full"),
        ("sliding", "rotating"),
        pytest.param("full", "full", marks=pytest.mark.proof),
        pytest.param("full", "rotating", marks=pytest.mark.proof),
        pytest.param("sliding", "none", marks=pytest.mark.proof),
    ],
    indirect=["toy"],
)
def test_answers_are_those_of_an_engine_that_waits(serve: Any, waited: Any, canary: str) -> None:
    """Under stops, aborts and shared prefixes; requests come in the midst of others."""
    for seed in range(2):
        found = run(serve(overlaps=True, **CANARIES[canary]), requests_of(seed, plain=seed % 2 == 0))
        assert_same(found, _waits(serve, waited, canary, seed), seed)
        assert found.taken > 40
        assert found.chunks > 4
        assert any(found.logprobs.values()) is (seed == 1)


def _waits(serve: Any, waited: dict[tuple[str, int], Answers], canary: str, seed: int) -> Answers:
    """The answers of an engine of one rank that waits, which is asked once for both tests."""
    if (canary, seed) not in waited:
        answers = run(serve(overlaps=False, **CANARIES[canary]), requests_of(seed, plain=seed % 2 == 0))
        assert answers.taken == answers.dropped == answers.chunks == 0
        waited[canary, seed] = answers
    return waited[canary, seed]


def _first_step(serve: Any) -> tuple[StepsAhead, StepPlan]:
    """An engine's runner behind the first step of a request, and that step's plan."""
    llm = serve(overlaps=True)
    request = Request(
        rid="a", prompt=np.arange(1, 7, dtype=np.int32), sampling=SamplingParams(max_tokens=3), seed=1, stream=True
    )
    llm._turn([FrontMessage(front="f", message=request)])
    llm._turn([])
    return llm._built.line.body._runner, llm._engine._open[0][0]


def test_tables_are_written_also_where_nothing_goes_on_behind_a_step_that_was_ahead(serve: Any) -> None:
    """Tables and pools are made in torch's inference mode, the turn of an engine is not in it."""
    runner, plan = _first_step(serve)
    ahead, slots = plan.ahead, np.arange(8, 12)
    assert ahead is not None
    writes = (TableWrite(row=5, start=0, slots=slots),)
    before = runner.taken
    result = runner.run(
        StepPlan(step=plan.step + 1, work=ahead.work, table_writes=writes, takes=np.arange(len(ahead.work)))
    )
    assert result is not None
    assert runner.taken == before + 1
    assert runner._runner._tables[Part.FULL].table[5, :4].tolist() == slots.tolist()


@pytest.mark.parametrize(("takes", "rid"), [(1, "a"), (0, "b")])
def test_a_plan_that_takes_what_was_not_queued_is_an_error(serve: Any, takes: int, rid: str) -> None:
    """A place behind the pass, or one of another request: the leader and this rank disagree on what is queued."""
    runner, plan = _first_step(serve)
    assert plan.ahead is not None
    work = tuple(replace(each, rid=rid) for each in plan.ahead.work)
    with pytest.raises(InvariantError, match=rf"step {plan.step + 1} takes \[{takes}\] of the pass ahead"):
        runner.run(StepPlan(step=plan.step + 1, work=work, table_writes=(), takes=np.array([takes])))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("toy", "canary"),
    [
        ("sliding", "rotating"),
        pytest.param("full", "none", marks=pytest.mark.proof),
        pytest.param("full", "full", marks=pytest.mark.proof),
        pytest.param("full", "rotating", marks=pytest.mark.proof),
        pytest.param("sliding", "none", marks=pytest.mark.proof),
        pytest.param("sliding", "full", marks=pytest.mark.proof),
    ],
    indirect=["toy"],
)
def test_two_slices_that_overlap_answer_as_one_rank_that_waits(serve: Any, waited: Any, canary: str) -> None:
    """The second slice, a process of its own, has its passes ahead by plans as they travel, and tokens by broadcast.
    The pool still holds what the requests before left behind, of other prompts."""
    slices = serve(overlaps=True, tp_size=2, device="cpu", **CANARIES[canary])
    for seed in range(2):
        found = run(slices, requests_of(seed, plain=seed % 2 == 0))
        assert_same(found, _waits(serve, waited, canary, seed), seed)
        assert found.taken > 20
        assert found.chunks > 4


@pytest.mark.slow
@pytest.mark.parametrize("toy", ["full", pytest.param("sliding", marks=pytest.mark.proof)], indirect=True)
def test_a_fault_of_one_slice_is_healed_where_slices_overlap(serve: Any) -> None:
    """No slice has a pass ahead where one of them has faults: all queue the same passes."""
    faults = {
        "kv_canary_perturb": "real_kv_used=0.1", "kv_canary_perturb_rank": 1, "kv_canary_perturb_target": "full",
    }  # fmt: skip
    requests = requests_of(5, plain=True)
    expected = run(serve(overlaps=False), requests)
    llm = serve(overlaps=True, tp_size=2, device="cpu", kv_canary_coverage="full", **faults)
    found = run(llm, requests)
    assert (found.tokens, found.ends, found.taken) == (expected.tokens, expected.ends, 0)
    assert llm._engine.canary is not None
    assert llm._engine.canary.view()["violations"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("toy", ["sliding", pytest.param("full", marks=pytest.mark.proof)], indirect=True)
def test_receipts_have_what_is_due_where_pages_have_their_turn_together(serve: Any, monkeypatch: Any) -> None:
    """Attention reads 64 positions at a time: `run` holds each receipt against what was verified."""
    for name in ("serinus.canary.lanes.turn_size", "serinus.engine.planning.turn_size"):
        monkeypatch.setattr(name, lambda page_size: 3 * page_size)
    for seed in range(4):
        assert run(serve(overlaps=seed % 2 == 0, **CANARIES["rotating"]), requests_of(seed, plain=False)).tokens
