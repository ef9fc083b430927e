"""A step for which there is no memory fails its requests; the engine, its pages and its canary go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from serinus.core.clock import ManualClock
from serinus.core.config import ServeConfig, from_names
from serinus.core.request import FinishReason
from serinus.engine.build import build_engine
from serinus.models import NullHook, compose_hooks, load_spec
from serinus.models.small_checkpoints import make_toy
from serinus.runner.runner import is_out_of_memory
from serinus.selftest import EngineDriver, EnginePair
from serinus.testing.oracle import toy_continue
from tests.ranks.crew import crew

_TOO_MUCH = 1 << 60


class Hungry(NullHook):
    """Wants more memory than there is, once it is told to."""

    def can_replay(self, room: int) -> bool:
        return False  # it acts between layers

    def __init__(self, runner: Any, when: str = "computed") -> None:
        self.is_hungry = False
        self.when, self.skips = when, 0
        """Passes that have what they want before."""
        runner._hook = compose_hooks([runner._hook, self])

    def before_layer(self, layer_index: int) -> None:
        if self.is_hungry and self.when == "computed" and self.skips < 0:
            self.eat()

    def stage(self, batch: object, put: object) -> None:
        self.skips -= self.is_hungry
        if self.is_hungry and self.when == "staged" and self.skips < 0:
            self.eat()

    def eat(self) -> None:
        self.is_hungry = False
        torch.empty(_TOO_MUCH, dtype=torch.uint8)


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_toy(tmp_path_factory.mktemp("toy"), vocab=64, context=256, kv_heads=2, tokenizer=False)


@pytest.mark.parametrize("when", ["staged", "computed"])
@pytest.mark.parametrize("canary", [{"kv_canary": "none"}, {"kv_canary": "raise"}])
def test_its_requests_fail_and_the_engine_goes_on(toy: Path, canary: dict[str, str], when: str) -> None:
    names = {"model_path": str(toy), "page_size": 4, "max_total_tokens": 256, "decode_log_interval": 0, **canary}
    driver = EngineDriver(build_engine(from_names(ServeConfig, names), ManualClock()))
    hungry = Hungry(driver.line.body._runner._runner, when)
    prompts = {"decodes": list(range(1, 20)), "prefills": list(range(30, 50)), "later": list(range(3, 25))}
    driver.add("decodes", prompts["decodes"], 40)
    while len(driver.tokens("decodes")) < 3:
        driver.turn()
    driver.add("prefills", prompts["prefills"], 8)
    hungry.is_hungry = True
    driver.turn()
    driver.add("later", prompts["later"], 8)
    driver.run()
    for rid in ("decodes", "prefills"):
        last = driver.deltas[rid][-1]
        assert (last.finish, last.error_status) == (FinishReason.ERROR, 500)
        assert "no memory for a step of 21 tokens in 2 requests" in last.error
    assert driver.tokens("later") == toy_continue(load_spec(toy), prompts["later"], 8)
    scheduler, cache = driver.engine.scheduler, driver.built.cache
    scheduler.sanity_check()
    assert scheduler.stats().used_tokens == 0
    assert cache.probe("", np.asarray(prompts["prefills"], np.int32)).device == 0, "nothing of the step is published"
    if canary["kv_canary"] != "none":
        rank = driver.built.canary
        assert rank is not None
        assert rank.checked_slots() == sum(rank.due_slots.values())
        assert driver.engine.canary is not None
        assert driver.engine.canary.view()["violations"] == 0
    driver.built.close()


def test_a_prefill_engine_without_memory_sends_the_prompt_home(toy: Path) -> None:
    both = EnginePair(toy, page_size=4, max_total_tokens=256, chunked_prefill_size=16)
    hungry = Hungry(both.prefill.line.body._runner._runner)
    prompt = list(range(1, 61))
    both.add("a", prompt, 6)
    while not both.port_of(both.decode).machine.landed_pages("a"):
        both.turn_decode()
        both.turn_prefill()
    hungry.is_hungry = True
    both.run_until_idle()
    both.check()
    assert both.tokens("a") == toy_continue(load_spec(toy), prompt, 6)
    assert not hungry.is_hungry
    assert [driver.engine.scheduler.stats().used_tokens for driver in (both.decode, both.prefill)] == [0, 0]


@pytest.mark.parametrize("which", ["the step", "the pass ahead"])
@pytest.mark.parametrize("when", ["staged", "computed"])
@pytest.mark.parametrize("canary", [{"kv_canary": "none"}, {"kv_canary": "raise"}])
def test_newcomers_of_a_pass_ahead_go_on_where_there_was_no_memory_for_it_or_for_the_step_before(
    toy: Path, canary: dict[str, str], when: str, which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their rows were written with the plan that said them, whichever of the two passes failed."""
    monkeypatch.setattr("serinus.engine.planning.overlaps", lambda parts: True)
    names = {"model_path": str(toy), "page_size": 4, "max_total_tokens": 512, "chunked_prefill_size": 16}
    given = {**names, "decode_log_interval": 0, "max_step_ms": 0, **canary}
    driver = EngineDriver(build_engine(from_names(ServeConfig, given), ManualClock()))
    hungry = Hungry(driver.line.body._runner._runner, when)
    prompts = {f"r{i}": list(range(i, i + 16)) for i in range(9)}
    for rid, prompt in prompts.items():
        driver.add(rid, prompt, 4)
    hungry.is_hungry, hungry.skips = True, int(which == "the pass ahead")
    driver.turn()
    plan = driver.engine._open[0][0]
    assert plan.ahead is not None
    assert [(work.rid, len(work.tokens)) for work in plan.ahead.work] == [("r0", 1), ("r1", 16)]
    assert not hungry.is_hungry
    driver.run()
    failed = [rid for rid in prompts if driver.deltas[rid][-1].finish is FinishReason.ERROR]
    assert failed == (["r0"] if which == "the step" else [])
    for rid in prompts.keys() - set(failed):
        assert driver.tokens(rid) == toy_continue(load_spec(toy), prompts[rid], 4), rid
    driver.engine.scheduler.sanity_check()
    assert driver.engine.scheduler.stats().used_tokens == 0
    if canary["kv_canary"] != "none":
        assert driver.engine.canary is not None
        view = driver.engine.canary.view()
        assert view["violations"] == 0
        assert view["slots_checked"] == view["slots_due"] > 0
    driver.built.close()


@pytest.mark.parametrize("slices", [1, 2])
def test_requests_of_a_queued_pass_fail_alone_where_no_memory_is_left_to_choose_their_tokens(
    toy: Path, slices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Penalties: the pass is computed ahead, and its logits are made when the next plan says how to choose."""
    monkeypatch.setattr("serinus.engine.planning.overlaps", lambda parts: True)
    with crew(toy, tp_size=slices) as engine:
        ahead = [engine.line.body._runner, *(loop.body._runner for _, loop in sorted(engine.ranks.loops.items()))]
        for victim in range(slices):
            rid, prompt = f"a-{victim}", list(range(victim, victim + 20))
            engine.add(rid, prompt, 40, repetition_penalty=1.5)
            while len(engine.tokens(rid)) < 4:
                engine.turn()
                engine.wait()
            model, taken = ahead[victim]._runner._model, ahead[victim].taken
            made = model.logits

            def logits(*given: Any, victim: int = victim, made: Any = made, taken: int = taken) -> Any:
                if ahead[victim].taken == taken:  # it is not the choice behind a pass that was taken
                    return made(*given)
                ahead[victim]._runner._model.logits = made
                return torch.empty(_TOO_MUCH, dtype=torch.uint8)

            model.logits = logits
            later = f"b-{victim}"
            engine.add(later, prompt[::-1], 8)
            engine.run()
            last = engine.deltas[rid][-1]
            assert (last.finish, last.error_status) == (FinishReason.ERROR, 500)
            assert "no memory" in last.error
            assert ahead[victim].taken > taken
            assert engine.tokens(later) == toy_continue(load_spec(toy), prompt[::-1], 8)
        engine.engine.scheduler.sanity_check()
        assert engine.engine.scheduler.stats().used_tokens == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tp", "pp", "canary"),
    [
        (2, 1, {"kv_canary": "none"}),
        (1, 3, {"kv_canary": "raise"}),
        pytest.param(2, 1, {"kv_canary": "raise"}, marks=pytest.mark.proof),
        pytest.param(1, 3, {"kv_canary": "none"}, marks=pytest.mark.proof),
        pytest.param(2, 2, {"kv_canary": "none"}, marks=pytest.mark.proof),
        pytest.param(2, 2, {"kv_canary": "raise"}, marks=pytest.mark.proof),
    ],
)
def test_whichever_rank_has_no_memory_the_ranks_leave_the_step_together(
    toy: Path, tp: int, pp: int, canary: dict[str, str]
) -> None:
    spec = load_spec(toy)
    with crew(toy, tp_size=tp, pp_size=pp, **canary) as engine:
        runners = [engine.line.body._runner, *(loop.body._runner for _, loop in sorted(engine.ranks.loops.items()))]
        hungry = [Hungry(runner._runner if pp == 1 else runner) for runner in runners]
        for victim in range(tp * pp):
            prompts = {f"{name}-{victim}": list(range(at, at + 20)) for at, name in enumerate(("a", "b", "c"))}
            for rid, prompt in prompts.items():
                engine.add(rid, prompt, 12)
            while any(len(engine.tokens(rid)) < 3 for rid in prompts):
                engine.turn()
                engine.wait()
            hungry[victim].is_hungry = True
            engine.run()
            failed = [rid for rid in prompts if engine.finish(rid) is FinishReason.ERROR]
            assert failed, f"rank {victim} had no memory, and no request failed"
            for rid in failed:
                assert engine.deltas[rid][-1].error_status == 500
                assert "no memory on " in engine.deltas[rid][-1].error
            for rid in prompts.keys() - set(failed):
                assert pp > 1, "all requests are in each step"
                assert engine.tokens(rid) == toy_continue(spec, prompts[rid], 12)
            engine.add(f"later-{victim}", [9, 8, 7, victim], 9)
            engine.run()
            assert engine.tokens(f"later-{victim}") == toy_continue(spec, [9, 8, 7, victim], 9)
        engine.engine.scheduler.sanity_check()
        assert engine.engine.scheduler.stats().used_tokens == 0
        if engine.engine.canary is not None:
            view = engine.engine.canary.view()
            assert view["violations"] == 0
            assert view["slots_checked"] == view["slots_due"]
    assert engine.ranks.errors() == {}


@pytest.mark.parametrize("kind", [{}, {"latent": True}])
def test_of_chunks_that_were_planned_behind_one_without_memory_no_violation_is_told(
    tmp_path: Path, kind: dict[str, Any]
) -> None:
    toy = make_toy(tmp_path, vocab=64, context=256, kv_heads=1, tokenizer=False, **kind)
    with crew(toy, pp_size=2, chunked_prefill_size=8, kv_canary="log", kv_canary_sweep_seconds=0) as engine:
        hungry = Hungry(engine.line.body._runner)
        prompts = {"a": list(range(1, 61)), "b": list(range(60, 0, -1))}
        engine.add("a", prompts["a"], 4)
        hungry.is_hungry, hungry.skips = True, 2
        engine.run()
        assert engine.finish("a") is FinishReason.ERROR
        engine.add("b", prompts["b"], 4)
        engine.run()
        assert engine.tokens("b") == toy_continue(load_spec(toy), prompts["b"], 4)
        assert engine.engine.canary is not None
        view = engine.engine.canary.view()
        assert (view["violations"], view["slots_checked"]) == (0, view["slots_due"])


def test_every_allocator_that_fails_is_known_and_nothing_else() -> None:
    def of(call: Any) -> Exception:
        with pytest.raises(Exception) as caught:  # noqa: PT011
            call()
        return caught.value

    assert is_out_of_memory(of(lambda: torch.empty(_TOO_MUCH, dtype=torch.uint8)))
    assert is_out_of_memory(of(lambda: np.empty(_TOO_MUCH, np.uint8)))
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"))
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(of(lambda: torch.zeros(2) @ torch.zeros(3)))
    assert not is_out_of_memory(ValueError("out of memory"))
