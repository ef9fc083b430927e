"""Engines of several ranks answer as one rank does: the same plans, the same tokens, whatever is aborted when."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from threading import Event
from typing import Any, cast

import pytest
import torch

from serinus.core.errors import ConfigError, PeerGone
from serinus.core.plan import StepPlan, StepResult
from serinus.core.rng import Rng
from serinus.engine import build
from serinus.engine.built import Built
from serinus.models import load_spec
from serinus.models.small_checkpoints import make_toy
from serinus.parallel.thread_comm import ThreadComm
from serinus.ranks import make
from serinus.ranks.body import StepRunner
from serinus.ranks.build import RankParts
from serinus.runner.graphs import StepGraphs
from serinus.testing.oracle import toy_continue
from tests.ranks.crew import crew

MESHES = [(2, 1), (1, 2), (1, 3), (2, 2)]


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_toy(tmp_path_factory.mktemp("toy"), vocab=64, context=128, layers=4, kv_heads=4, tokenizer=False)


@pytest.fixture(scope="module")
def sliding(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sliding")
    return make_toy(folder, vocab=64, context=128, layers=4, kv_heads=2, tokenizer=False, window=8, layer_types="FSFS")


@pytest.mark.slow
@pytest.mark.parametrize(("tp", "pp"), MESHES)
def test_ranks_together_answer_what_one_rank_answers(toy: Path, tp: int, pp: int) -> None:
    spec = load_spec(toy)
    prompts = {f"r{i}": [(7 * i + j) % 64 for j in range(3 + 9 * i)] for i in range(6)}
    with crew(toy, tp_size=tp, pp_size=pp) as engine:
        for rid, prompt in prompts.items():
            engine.add(rid, prompt, 9)
        engine.add("sampled", [5, 6, 7], 9, temperature=0.8, top_p=0.9)
        engine.run()
        found = {rid: engine.tokens(rid) for rid in prompts}
        sampled = engine.tokens("sampled")
        assert engine.line.depth == pp
        assert not any(any(holdings.values()) for holdings in engine.settled())
    assert found == {rid: toy_continue(spec, prompt, 9) for rid, prompt in prompts.items()}
    assert engine.ranks.errors() == {}
    with crew(toy) as alone:
        alone.add("sampled", [5, 6, 7], 9, temperature=0.8, top_p=0.9)
        alone.run()
        assert sampled == alone.tokens("sampled")


@pytest.mark.parametrize("fails", ["", "leader", "follower"])
def test_ranks_forget_recorded_steps_before_their_connections_close(
    toy: Path, fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL ends no communicator that a recorded step names: an engine would never end. Of one that does not come up:
    the rank that fails, as threads close each other's connections."""
    recorded: dict[int, StepGraphs] = {}
    closed: list[tuple[int, tuple[int, ...]]] = []
    is_closing = Event()
    record, close = build.record_steps, ThreadComm.close

    def recording(parts: RankParts, counted: Any) -> None:
        if fails == "follower" and parts.comm.rank == 0:  # it has recorded nothing when its connections are closed
            assert is_closing.wait(30), "the rank that fails has not closed its connections"
        record(parts, counted)
        recorded[parts.comm.rank] = parts.runner.graphs = StepGraphs("cpu", sizes=())
        parts.runner.graphs.record(1, lambda _: torch.zeros(1), cast(Any, None))

    def closing(comm: ThreadComm) -> None:
        closed.append((comm.rank, tuple(recorded[comm.rank]._recorded) if comm.rank in recorded else ()))
        close(comm)
        is_closing.set()

    def failing(*_: Any, **__: Any) -> Built:
        raise ConfigError("no engine")

    for module in (build, make):
        monkeypatch.setattr(module, "record_steps", recording)
    monkeypatch.setattr(ThreadComm, "close", closing)
    if fails:
        monkeypatch.setattr(*((build, "lead") if fails == "leader" else (make, "make_body")), failing)
    with pytest.raises(ConfigError, match="no engine") if fails else nullcontext(), crew(toy, tp_size=2) as engine:
        assert [graphs._recorded.keys() for graphs in recorded.values()] == [{1}, {1}]
        engine.add("asked", [1, 2, 3], 2)
        engine.run()
    assert {rank for rank, _ in closed} == {0, 1}
    asked = {"": (0, 1), "leader": (0,), "follower": (1,)}[fails]
    assert not any(still for rank, still in closed if rank in asked)


def test_a_rank_that_broke_is_named_with_its_error(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its kind, too: the words of a KeyError are a key."""

    def broken(*_: Any) -> StepResult:
        raise KeyError(0)

    with crew(toy, tp_size=2) as engine:
        monkeypatch.setattr(engine.ranks.loops[1].body, "obey", broken)
        engine.add("asked", [1, 2, 3], 2)
        with pytest.raises(PeerGone, match="rank TP1 PP0 is gone: KeyError: 0"):
            engine.run()


def test_a_rank_that_does_not_come_up_is_named_with_its_error(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> RankParts:
        raise RuntimeError("planted")

    monkeypatch.setattr(make, "build_rank", broken)
    with pytest.raises(PeerGone, match="rank TP1 PP0 is gone: RuntimeError: planted"), crew(toy, tp_size=2):
        pass


@pytest.mark.slow
def test_stages_may_lack_a_part_of_the_layers(sliding: Path) -> None:
    """Stage 2 of FSFS cut 1,1,2 has no FULL layer, stage 1 no sliding one."""
    spec = load_spec(sliding)
    with crew(sliding, pp_size=3, pp_layer_partition="1,1,2", max_total_tokens=512) as engine:
        prompts = {f"r{i}": [(5 * i + j) % 64 for j in range(11 + 7 * i)] for i in range(4)}
        for rid, prompt in prompts.items():
            engine.add(rid, prompt, 12)
        engine.run()
        assert {rid: engine.tokens(rid) for rid in prompts} == {
            rid: toy_continue(spec, prompt, 12) for rid, prompt in prompts.items()
        }


class Gated:
    """A runner that waits until it is let go on."""

    def __init__(self, runner: StepRunner) -> None:
        self.open = Event()
        self._runner = runner

    def run(self, plan: StepPlan) -> StepResult | None:
        assert self.open.wait(30), "the last stage was not let go on"
        return self._runner.run(plan)


@pytest.mark.slow
def test_several_steps_are_under_way_at_once_in_a_pipeline(toy: Path) -> None:
    spec = load_spec(toy)
    with crew(toy, pp_size=3) as engine:
        last = engine.ranks.loops[2].body
        last._runner = gate = Gated(last._runner)
        for i in range(6):
            engine.add(f"r{i}", [i, i + 1], 12)
        scheduler = engine.engine.scheduler
        for _ in range(3):
            assert engine.turn() == []
        assert scheduler.under_way == 1, "all prompts are in one step"
        gate.open.set()
        while not engine.turn():
            engine.wait()
        gate.open.clear()
        while scheduler.under_way < 3:
            engine.turn()
        assert scheduler.under_way == 3, "the requests that decode are spread over three steps"
        gate.open.set()
        engine.run()
        assert {f"r{i}": engine.tokens(f"r{i}") for i in range(6)} == {
            f"r{i}": toy_continue(spec, [i, i + 1], 12) for i in range(6)
        }


@pytest.mark.slow
def test_requests_aborted_at_any_moment_leave_nothing_on_any_rank(toy: Path) -> None:
    """A thousand requests, most of them aborted while steps with them are under way, or between steps."""
    rng, spec = Rng(11), load_spec(toy)
    with crew(toy, pp_size=3, max_queued_requests=2000, max_total_tokens=128) as engine:
        scheduler = engine.engine.scheduler
        begun = 0
        kept: dict[str, list[int]] = {}
        here: list[str] = []
        while begun < 1000 or not scheduler.idle:
            for _ in range(rng.randrange(0, 12)):
                if begun < 1000:
                    prompt = [rng.randrange(0, 64) for _ in range(rng.randrange(1, 24))]
                    engine.add(f"r{begun}", prompt, rng.randrange(1, 6))
                    here.append(f"r{begun}")
                    if begun % 50 == 0:
                        kept[f"r{begun}"] = prompt
                    begun += 1
            engine.turn()
            here = [rid for rid in here if rid in scheduler]
            for rid in [rid for rid in here if rid not in kept and rng.random() < 0.35]:
                engine.abort(rid)
            engine.turn()
        engine.run()
        assert not any(any(holdings.values()) for holdings in engine.settled())
        for rid, prompt in kept.items():
            answer = engine.tokens(rid)
            assert answer == toy_continue(spec, prompt, len(answer))
        engine.add("after", [1, 2, 3], 5)
        engine.run()
        assert engine.tokens("after") == toy_continue(spec, [1, 2, 3], 5)
        scheduler.sanity_check()
    assert engine.ranks.errors() == {}


@pytest.mark.slow
def test_a_mesh_that_does_not_fit_the_model_is_refused_in_words(toy: Path) -> None:
    with pytest.raises(ConfigError, match="tp_size is 3"), crew(toy, tp_size=3):
        pass
    with pytest.raises(ConfigError, match="pp_size is 5"), crew(toy, pp_size=5):
        pass
