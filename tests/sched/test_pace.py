"""How long a step may take, by measured time, and how long and short prompts share it."""

from __future__ import annotations

from typing import Any

import pytest

from serinus.core.plan import StepPlan
from serinus.core.rng import Rng
from serinus.testing.tiny_engine import TinyEngine

LONG = list(range(1, 8001))
TOKEN_S, ROW_S, STEP_S = 0.001, 0.002, 0.02
"""What a prompt token, a decoding row and any step take on the machine of these tests."""


class Machine(TinyEngine):
    """An engine whose steps take time, by a rule."""

    def __init__(self, **settings: Any) -> None:
        numbers = {"page_size": 16, "page_count": 2049, "context_length": 16384, "vocab_size": 10_000, **settings}
        super().__init__(**{"chunked_prefill_size": 2048, "max_running_requests": 8, **numbers})
        self.token_s, self.step_s = TOKEN_S, STEP_S
        self.plans: list[tuple[dict[str, int], float]] = []
        """Of each step, tokens by request, and the seconds it took."""

    def plan(self) -> StepPlan | None:
        plan = super().plan()
        if plan is not None:
            tokens = {work.rid: len(work.tokens) for work in plan.work}
            prompt = sum(len(work.tokens) for work in plan.work if work.start + 1 < self.prompts[work.rid])
            seconds = self.step_s + prompt * self.token_s + (plan.token_count - prompt) * ROW_S
            self.plans.append((tokens, seconds))
            self.clock.advance(seconds - 0.01)  # a commit takes the rest
        return plan

    def add(self, rid: str, prompt: Any, **sampling: Any) -> Any:
        self.prompts = {**getattr(self, "prompts", {}), rid: len(prompt)}
        return super().add(rid, prompt, **sampling)


def with_streams(**settings: Any) -> Machine:
    """Four requests that decode for long, and then one long prompt."""
    machine = Machine(**settings)
    for i in range(4):
        machine.add(f"s{i}", [7000 + i], max_new_tokens=400)
    while len(machine.answers) < 4:
        machine.step()
    machine.add("long", LONG, max_new_tokens=1)
    machine.plans.clear()
    while "long" not in machine.answers:
        machine.step()
    return machine


def test_a_step_stays_within_its_bound_at_the_measured_rate() -> None:
    plans = with_streams(step_s_max=0.3).plans
    assert max(seconds for _, seconds in plans) < 0.3001
    ideal = len(LONG) * TOKEN_S / (0.3 - STEP_S - 4 * ROW_S)
    assert len(plans) <= 1.15 * ideal + 1, "the time there is is used"


def test_without_a_bound_only_the_chunk_bounds_a_step() -> None:
    assert [tokens["long"] for tokens, _ in with_streams().plans] == [2048, 2048, 2048, 1856]


def test_a_chunk_that_is_set_stays_an_upper_bound() -> None:
    assert max(tokens["long"] for tokens, _ in with_streams(step_s_max=0.3, chunked_prefill_size=64).plans) == 64


def test_a_prompt_gets_on_where_decoding_alone_takes_longer_than_the_bound() -> None:
    plans = with_streams(step_s_max=0.02).plans
    assert {tokens["long"] for tokens, _ in plans[1:-1]} <= {32, 64}


def test_one_slow_step_costs_little() -> None:
    machine = Machine(step_s_max=0.3)
    machine.add("long", LONG, max_new_tokens=1)
    for slow in (False, False, True, *[False] * 9):
        machine.token_s = 20 * TOKEN_S if slow else TOKEN_S
        machine.step()
    counts = [tokens["long"] for tokens, _ in machine.plans]
    assert counts[2] > 250
    assert counts[3] < 200, "a slow step counts at once"
    assert counts[-1] > 200, "and is forgotten soon"


def test_steps_of_few_tokens_do_not_make_long_prompts_crawl() -> None:
    machine = Machine(step_s_max=0.3)
    for i in range(20):
        machine.add(f"tiny-{i}", [9, i], max_new_tokens=1)
        machine.step()
    machine.plans.clear()
    machine.add("long", LONG, max_new_tokens=1)
    for _ in range(3):
        machine.step()
    assert [tokens["long"] for tokens, _ in machine.plans][2] > 220


def test_a_machine_whose_steps_are_slow_by_themselves_is_not_asked_for_many_of_them() -> None:
    """Shorter chunks would not keep the bound: they only cost more steps."""
    machine = Machine(step_s_max=0.3)
    machine.step_s = 0.35
    machine.add("long", LONG, max_new_tokens=1)
    for _ in range(12):
        machine.step()
    counts = [tokens["long"] for tokens, _ in machine.plans]
    assert min(counts[6:]) > 0.8 * 0.35 / TOKEN_S, f"tokens get as long as the step by itself: {counts}"
    assert max(seconds for _, seconds in machine.plans) < 2.2 * 0.35


@pytest.mark.parametrize("first", [["long"], ["long", "longer"]])
def test_a_short_prompt_does_not_wait_for_the_long_ones_before_it(first: list[str]) -> None:
    machine = Machine(chunked_prefill_size=256)
    for i, rid in enumerate(first):
        machine.add(rid, [i, *LONG], max_new_tokens=1)
    machine.step()
    machine.add("short", [5] * 40, max_new_tokens=1)
    machine.step()
    assert "short" in machine.answers
    tokens = machine.plans[-1][0]
    assert sum(tokens.values()) > 256 - 16 * 2, f"of the budget no more is left than parts of pages: {tokens}"
    assert tokens["long"] >= 96
    machine.run()
    machine.check_drained()


def test_a_long_prompt_alone_or_before_longer_ones_has_the_whole_step() -> None:
    machine = Machine(chunked_prefill_size=256)
    machine.add("long", LONG[:600], max_new_tokens=1)
    machine.add("longer", LONG[:5000][::-1], max_new_tokens=1)
    for _ in range(2):
        machine.step()
    assert [tokens for tokens, _ in machine.plans] == [{"long": 256}, {"long": 256}]


@pytest.mark.parametrize(("page", "bound"), [(128, 256), (16, 40), (4, 4)])
def test_no_step_has_more_prompt_tokens_than_its_bound(page: int, bound: int) -> None:
    """However many prompts share it; memory is kept free for so many."""
    rng = Rng(page)
    for _ in range(200):
        engine = TinyEngine(
            page_size=page, page_count=80, context_length=1536, vocab_size=1000, chunked_prefill_size=bound,
            enable_prefix=False,
        )  # fmt: skip
        for number in range(rng.randrange(2, 5)):
            engine.add(f"r{number}", [number] * rng.randrange(1, 3 * bound), max_new_tokens=1)
        while (out := engine.step()) is not None:
            assert out.prompt_tokens <= bound


def test_what_shorter_ones_cannot_take_goes_back_to_the_long_one() -> None:
    machine = Machine(chunked_prefill_size=256, page_count=520)
    machine.add("long", LONG, max_new_tokens=1)
    machine.step()
    machine.add("no-room", LONG[:700][::-1], max_new_tokens=1)
    machine.step()
    assert machine.plans[-1][0] == {"long": 256}
