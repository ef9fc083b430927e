"""An LLM that is closed, interrupted within a step, called by several threads, or that does not come up."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from serinus import LLM, SamplingParams
from serinus.core.errors import CapacityError, PeerGone
from serinus.engine.built import Built
from serinus.models import load_spec
from serinus.models.small_checkpoints import make_toy
from serinus.ranks import LeaderLine
from serinus.ranks.body import RankBody
from serinus.sched import Scheduler
from serinus.testing.oracle import toy_continue

GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_toy(tmp_path_factory.mktemp("toy"), vocab=64, context=128, layers=2, tokenizer=False)


@pytest.fixture
def llm(toy: Path) -> LLM:
    return LLM(str(toy), skip_tokenizer_init=True, page_size=4, max_total_tokens=128)


class TimeIsOver(Exception):
    """What the handler of a program's own alarm raises."""


@pytest.mark.parametrize(
    ("owner", "name"),
    [(Scheduler, "plan"), (Scheduler, "commit"), (LeaderLine, "run"), (LeaderLine, "finished"), (RankBody, "news")],
    ids=lambda each: each if isinstance(each, str) else each.__name__,
)
def test_an_exception_from_outside_within_a_step_is_the_callers_and_the_llm_says_that_it_broke(
    toy: Path, owner: type, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever in a step: else the next call might wait for what is lost, for ever."""
    llm = LLM(str(toy), skip_tokenizer_init=True, page_size=4, max_total_tokens=128)
    act, times = getattr(owner, name), []

    def late(self: Any, *args: Any, **more: Any) -> Any:
        found = act(self, *args, **more)
        times.append(found)
        if len(times) == 4:
            raise TimeIsOver
        return found

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, late)
        with pytest.raises(TimeIsOver):
            llm.generate([[1, 2, 3]], SamplingParams(temperature=0.0, max_tokens=20))
    for act in (lambda: llm.generate([[1, 2, 3]], GREEDY), llm.flush_cache):
        with pytest.raises(PeerGone, match="in the middle of a step: TimeIsOver"):
            act()
    llm.close()


def test_threads_that_share_an_llm_get_their_own_answers(llm: LLM, toy: Path) -> None:
    prompts = {k: [[k, j] for j in range(6)] for k in range(6)}
    with ThreadPoolExecutor(len(prompts)) as threads:
        answers = threads.map(lambda each: llm.generate(each, GREEDY), [*prompts.values()] * 5)
        found = [[list(output.outputs[0].token_ids) for output in answer] for answer in answers]
    spec = load_spec(toy)
    assert found == [[toy_continue(spec, prompt, 5) for prompt in each] for each in prompts.values()] * 5


def test_a_call_within_a_call_is_refused(llm: LLM, toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a handler of a signal may make one."""
    wait = LLM._wait

    def again(self: LLM) -> None:
        with pytest.raises(CapacityError, match="generate is under way"):
            self.generate([[1]], GREEDY)
        with pytest.raises(CapacityError, match="generate is under way"):
            self.flush_cache()
        wait(self)

    monkeypatch.setattr(LLM, "_wait", again)
    (output,) = llm.generate([[9, 9]], GREEDY)
    assert list(output.outputs[0].token_ids) == toy_continue(load_spec(toy), [9, 9], 5)


@pytest.mark.parametrize(
    "settings", [{}, {"enable_hierarchical_cache": True}, {"pp_size": 2}], ids=["one rank", "tiers", "two ranks"]
)
def test_an_llm_that_was_closed_says_so(toy: Path, settings: dict[str, Any]) -> None:
    llm = LLM(str(toy), skip_tokenizer_init=True, page_size=4, max_total_tokens=128, device="cpu", **settings)
    llm.generate([[1, 2, 3]], GREEDY)
    llm.close()
    for act in (lambda: llm.generate([[1, 2, 3]], GREEDY), llm.flush_cache):
        with pytest.raises(PeerGone, match="engine: it was closed"):
            act()
    llm.close()


def test_a_close_that_is_interrupted_ends_everything_all_the_same(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = set(threading.enumerate())
    llm = LLM(
        str(toy), skip_tokenizer_init=True, max_total_tokens=256, enable_hierarchical_cache=True,
        hicache_storage_backend="file", hicache_storage_dir=str(tmp_path),
    )  # fmt: skip

    def interrupted(self: Built) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(Built, "_quiet", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.close()
    assert not set(threading.enumerate()) - before
    assert not llm._built.line.sound
    llm.close()


@pytest.mark.parametrize("fails", ["first_steps", "make_cache", "assemble", "load_tokenizer"])
def test_an_llm_that_does_not_come_up_leaves_no_threads(toy: Path, fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any, **__: Any) -> Any:
        raise RuntimeError("planted")

    module = {"assemble": "ranks.build", "load_tokenizer": "engine.llm"}.get(fails, "engine.build")
    monkeypatch.setattr(f"serinus.{module}.{fails}", failing)
    before = set(threading.enumerate())
    with pytest.raises(RuntimeError, match="planted") as found:
        LLM(
            str(toy), skip_tokenizer_init=fails != "load_tokenizer", grammar_backend="none", max_total_tokens=256,
            enable_hierarchical_cache=True,
        )  # fmt: skip
    assert not set(threading.enumerate()) - before, found  # held here as a notebook holds it
