"""The verified horizon: whatever byte is flipped whenever, what counts as verified is right."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from serinus.cache import PartGeometry
from serinus.canary.coverage import due_pages, reads_of
from serinus.core.parts import Part
from serinus.core.plan import StepPlan, StepResult
from serinus.core.request import Request
from serinus.core.rng import Rng
from serinus.kernels.ref.canary import canary_due
from serinus.testing.builders import make_request
from serinus.testing.fake_runner import fake_continue
from serinus.testing.tiny_engine import TinyEngine

VOCAB = 1 << 16
LONG = 46


class Watched:
    """An engine whose runner has a canary with the product's coverage, and loses a bit now and then."""

    def __init__(self, seed: int, *, depth: int, stride: int, window: int | None) -> None:
        self.rng = Rng(seed)
        self.stride, self.window = stride, window
        page_size = self.rng.choice([1, 2, 4])
        beside = {} if window is None else {Part.SWA: PartGeometry(pages=160 // page_size, window=window)}
        self.engine = TinyEngine(
            page_size=page_size, page_count=self.rng.randint(100, 240) // page_size, vocab_size=VOCAB, depth=depth,
            max_running_requests=5, chunked_prefill_size=12, verify_steps=stride, beside=beside,
        )  # fmt: skip
        self.run, self.engine.runner.run = self.engine.runner.run, self._run  # type: ignore[method-assign]
        self.sound = {part: content.copy() for part, content in self.engine.runner.content.items()}
        self.requests: dict[str, Request] = {}
        self.expected: dict[str, list[int]] = {}
        self.found: dict[int, list[str]] = {}
        self.happened = Counter[str]()

    def arrive(self) -> None:
        """One more request; some begin alike."""
        prompt = [7] * self.rng.randint(0, 12) + [self.rng.randint(1, 99) for _ in range(self.rng.randint(1, 9))]
        rid, runner = f"r{len(self.requests)}", self.engine.runner
        self.requests[rid] = request = make_request(rid, prompt, max_new_tokens=self.rng.randint(2, LONG - len(prompt)))
        self.expected[rid] = fake_continue(request, LONG - len(prompt), VOCAB, windows=runner.windows)
        self.engine.scheduler.add(request)

    def flip(self) -> None:
        """One bit of a slot that a request uses, now."""
        part = self.rng.choice(list(self.sound))
        rows = self.engine.scheduler.rows_of(self.requests).get(part, np.zeros(0, np.int32))
        if len(rows):
            size = self.engine.settings.page_size
            slot = int(self.rng.choice(rows.tolist())) * size + self.rng.randint(0, size - 1)
            self.engine.runner.content[part][slot] ^= np.uint64(1 << self.rng.randint(0, 63))

    def _run(self, plan: StepPlan) -> StepResult:
        result, runner = self.run(plan), self.engine.runner
        work = plan.work
        rows, starts, wholes = [w.row for w in work], [w.start for w in work], [w.whole for w in work]
        for part, sound in self.sound.items():
            window = self.window if part is Part.SWA else None
            reads = reads_of(rows, starts, wholes, starts, first_name=0, stride=self.stride, window=window)
            due = due_pages(canary_due, reads, self.engine.settings.page_size, window)
            for name, row, low, high, first, stride, _ in due.columns_7B.T.tolist():
                size = self.engine.settings.page_size
                at = np.arange(low, high)
                slots = runner.tables[part][row, at[(at // size >= first) & ((at // size - first) % stride == 0)]]
                wrong = slots[runner.content[part][slots] != sound[slots]]
                if len(wrong):
                    self.found.setdefault(plan.step, []).append(work[name].rid)
            for each in work:
                sound[each.slots[part]] = runner.content[part][each.slots[part]]
        return result

    def commit(self) -> None:
        """What was found in the oldest step, and what follows from it."""
        engine = self.engine
        step = engine._under_way[0].step
        if not engine._results:
            engine.catch_up(1)
        for rid in self.found.pop(step, ()):
            self.happened["found"] += 1
            state = engine.scheduler._states.get(rid)
            if state is not None:
                wrong = state.tokens[state.prompt_len : state.known].tolist() != self.expected[rid][: state.generated]
                self.happened["found after a wrong token"] += wrong
            engine.take(engine.scheduler.abort(rid, "found", untrusted=True))
        engine.commit()
        self.check()

    def check(self) -> None:
        """The tokens up to the horizon are right."""
        for state in self.engine.scheduler._states.values():
            known = state.tokens[state.prompt_len : min(state.known, state.verified + 1)].tolist()
            expected = self.expected[state.rid][: len(known)]
            assert known == expected, f"{state.rid}: verified {state.verified}, {known}, expected {expected}"
            self.happened["behind"] += state.computed - state.verified

    def heal(self) -> None:
        """No page is wrong any more: those that were, no request uses now, or another one has written them."""
        for part, content in self.engine.runner.content.items():
            content[:] = self.sound[part]


def story(seed: int, *, depth: int, stride: int, window: int | None = None) -> Counter[str]:
    """A seed's worth of steps, one flip each time that all is sound."""
    world = Watched(seed, depth=depth, stride=stride, window=window)
    for _ in range(6):
        world.arrive()
        for turn in range(world.rng.randint(20, 45)):
            if turn == 8:
                world.flip()
            if world.rng.random() < 0.1:
                world.arrive()
            scheduler = world.engine.scheduler
            if (scheduler.under_way == depth or world.engine.plan() is None) and scheduler.under_way:
                world.commit()
        while world.engine.scheduler.under_way:
            world.commit()
        world.engine.scheduler.sanity_check()
        world.engine.scheduler.abort_all("the next round begins")
        world.engine.cache.reset()
        world.heal()
    return world.happened


@pytest.mark.parametrize(
    ("stride", "depth", "window"),
    [(1, 2, 6), (2, 1, None), (2, 3, 6), (5, 2, None), (16, 1, 6), (16, 2, None)],
)
def test_no_token_counts_as_verified_that_was_computed_on_a_wrong_byte(
    stride: int, depth: int, window: int | None
) -> None:
    happened = Counter[str]()
    for seed in range(2):
        happened += story(seed, depth=depth, stride=stride, window=window)
    assert happened["found"] > 3, happened
    assert stride == 1 or happened["behind"] > 100, happened
    assert stride == 1 or happened["found after a wrong token"], f"{happened}: each fault was found at once"
