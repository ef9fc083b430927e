"""Seeded trouble for one engine with several plans under way, or with steps that begin before their plan comes:
prompts that share beginnings, a pool and a host tier that are too small, loads that fail, aborts between plan and
commit; with `heals` also wild writes into KV, found in the next step that runs, and false alarms.
`python -m tests.sched.depth_drive 500` runs seeds.

Oracles: the fake model's answers, every invariant now and then, ledgers that drain. It counts what happened, so
that a test can say that it did.
"""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np

from serinus.cache import PartGeometry
from serinus.core.moves import MoveKind
from serinus.core.parts import Part
from serinus.core.plan import StepPlan
from serinus.core.request import FinishReason, Request
from serinus.core.rng import Rng
from serinus.sched import Healing
from serinus.testing.builders import make_request
from serinus.testing.fake_runner import fake_continue, fake_pooled, fake_prompt_logprobs
from serinus.testing.tiny_engine import TinyEngine

VOCAB = 50
POOLED = [{"hidden_state": True, "pooling": "mean"}, {"hidden_state": True, "pooling": "cls", "prompt_logprobs": 0}]
BEGINNINGS = [[7] * 13 + [8] * 12, [7] * 9 + [9] * 20, [6] * 28, [5] * 24, [4, 3] * 12, []]


class Drive:
    """One engine, and the dice."""

    def __init__(self, seed: int, depth: int, *, heals: bool = False) -> None:
        self.rng = rng = Rng(seed)
        self.heals = heals
        verify = {"heals": True, "verify_steps": seed % 5 or 1, "confirms_streams": seed % 2 == 0} if heals else {}
        page_size = rng.choice([1, 2, 4])
        window = rng.choice([None, None, 3, 6])
        pages = rng.randint(40, 64) // page_size
        host = rng.choice([0, 160, 240]) // page_size
        swa = 0 if window is None else 3 + -(-window // page_size) + rng.randint(0, 30) // page_size
        swa_part = {Part.SWA: PartGeometry(pages=swa, host_pages=host, window=window)} if window else {}
        options: dict[str, Any] = {"host_pages": host, "beside": swa_part}
        self.engine = TinyEngine(
            page_size=page_size, page_count=pages + 1, context_length=48, vocab_size=VOCAB, eos_ids=(0,), depth=depth,
            max_running_requests=rng.randint(2, 6), growth_tokens=rng.choice([0, 4]),
            chunked_prefill_size=rng.choice([4, 8, 12]), auto=False, overlaps=depth == 1 and seed % 2 == 0,
            schedule_policy=rng.choice(["fcfs", "lpm", "priority"]), **options, **verify,
        )  # fmt: skip
        self.requests: dict[str, Request] = {}
        self.aborted: set[str] = set()
        self.forgotten: set[tuple[int, int]] = set()
        self.happened: Counter[str] = Counter()
        self.damaged: dict[tuple[Part, int], int] = {}
        """Pages with wrong KV, and the last step that ran before."""

    def arrive(self) -> None:
        """One more request, of a length that fits."""
        rng = self.rng
        beginning = rng.choice(BEGINNINGS)
        prompt = beginning[: max(rng.randint(0, 40), rng.randint(0, 40))] + [
            rng.randint(1, 9) for _ in range(rng.randint(1, 12))
        ]
        cache = self.engine.cache
        prompt = prompt[: min(46, (cache.page_count - 1) * cache.page_size - 1)]
        rid = f"r{len(self.requests)}"
        sampling: dict[str, Any] = rng.choice([{}, {"temperature": 1.0}, {"prompt_logprobs": 0}, *POOLED])
        request = make_request(rid, prompt, seed=len(self.requests), max_new_tokens=rng.randint(1, 14), **sampling)
        request = replace(request, stream=self.heals and rng.random() < 0.5)
        self.requests[rid] = request
        self.engine.scheduler.add(request)

    def plan(self) -> None:
        """One more plan, where there is room for one. No request of an older plan may lose its pages to it, except by a
        failed load."""
        engine = self.engine
        under_way = engine.scheduler.under_way
        if under_way == engine.settings.depth:
            return
        before = {rid for rid in self.requests if engine.works_for(rid)}
        retracted = engine.scheduler.stats().totals.retracted
        plan = engine.plan()
        if under_way and engine.scheduler.stats().totals.retracted > retracted:
            self.happened["retracted beside a plan under way"] += 1
        self._note_forgotten()
        if plan is not None and any(engine.works_for(rid) for rid in before & {work.rid for work in plan.work}):
            self.happened["chunks of one request in several plans"] += 1

    def commit(self) -> None:
        """The oldest plan ends."""
        engine = self.engine
        if not engine.scheduler.under_way:
            return
        if self.heals:
            self.find(engine.scheduler._open[0].plan)
        engine.commit()
        self._note_forgotten()
        if any(rid in self.aborted and engine.works_for(rid) for rid in self.requests):
            self.happened["aborted, and still in a later plan"] += 1

    def _note_forgotten(self) -> None:
        """Work of plans under way that was taken out of them since the last look, as its request began again."""
        steps = self.engine.scheduler._open
        forgotten = {
            (step.plan.step, index) for step in steps for index, state in enumerate(step.states) if state is None
        }
        new, self.forgotten = forgotten - self.forgotten, forgotten
        if new:
            can_fail = self.engine.mover is not None or self.heals
            assert can_fail, f"work {new} was taken out of plans, and no load can have failed"
            self.happened["began again in a plan under way"] += len(new)

    def damage(self) -> None:
        """A wild write into a page of a running request, between two steps."""
        engine = self.engine
        engine.catch_up()
        states = [state for state in engine.scheduler._batch if state.computed]
        if not states:
            return
        state = self.rng.choice(states)
        row = self.rng.choice(state.rows)
        computed = [place for place in range(row.first, row.end) if place * row.page_size < state.computed]
        if computed:
            page = int(row.pages[self.rng.choice(computed)])
            slots = slice(page * row.page_size, (page + 1) * row.page_size)
            engine.runner.content[row.part][slots] ^= np.uint64(self.rng.randint(1, 1 << 60))
            self.damaged.setdefault((row.part, page), engine.scheduler._planner._step)
            self.happened["a page was damaged"] += 1

    def find(self, plan: StepPlan) -> None:
        """What a canary does before a commit: condemn what the step may have read, and heal those that use it."""
        scheduler, touched = self.engine.scheduler, list[str]()
        for (part, page), last in list(self.damaged.items()):
            if plan.step > last:
                users = scheduler.users_of(part, page)
                touched += users
                self.engine.cache.condemn(part, np.array([page], np.int32))
                if all(scheduler.heals.kind_of(rid) is not Healing.NOTHING for rid in users):
                    del self.damaged[part, page]  # else one that has begun again on it meanwhile
        if self.rng.random() < 0.1:
            touched.append(self.rng.choice(plan.work).rid)
        for rid in touched:
            kind = scheduler.heals.kind_of(rid)
            self.happened[f"heal: {kind.name}"] += 1
            if kind is Healing.RUNNING:
                scheduler.heals.heal(rid, "found in a test", 0.0)

    def abort(self) -> None:
        """The client of one of them goes."""
        rid = self.rng.choice(list(self.requests))
        delta = self.engine.scheduler.abort(rid, "client gone")
        if delta is not None:
            self.engine.take(delta)
            self.aborted.add(rid)

    def end_a_copy(self) -> None:
        """Backups end, and one load, well or badly, now or when it must."""
        mover = self.engine.mover
        if mover is None:
            return
        for op in [op for op, copy in mover.pending.items() if copy.moves[0].kind is MoveKind.BACKUP]:
            mover.finish(op)
        if mover.pending:
            op = self.rng.choice(list(mover.pending))
            if self.rng.random() < 0.6:
                mover.fail(op)
                self.happened["a load failed"] += 1
            if self.rng.random() < 0.7:
                mover.finish(op)

    def turn(self) -> None:
        """One random event: an arrival, a plan, a commit or the like."""
        is_found = self.engine.mover is None and self.engine.settings.verify_steps == 1
        if self.heals and is_found and self.rng.random() < 0.1:
            self.damage()
        dice = self.rng.random()
        if dice < 0.12:
            self.arrive()
        elif dice < 0.15 and self.requests:
            self.abort()
        elif dice < 0.20:
            self.engine.cache.evict(self.rng.randint(1, 20))
        elif dice < 0.32:
            self.end_a_copy()
        elif dice < 0.40:
            self.engine.catch_up(self.rng.randint(1, 2))
        elif dice < 0.72:
            self.plan()
        else:
            self.commit()
        if self.rng.random() < 0.2:
            self.engine.scheduler.sanity_check()

    def finish(self) -> None:
        """No more trouble; every answer is the oracle's."""
        engine = self.engine
        for _ in range(3000):
            if engine.scheduler.idle:
                break
            while engine.scheduler.under_way < engine.settings.depth and engine.plan() is not None:
                pass
            if not engine.scheduler.under_way and not engine.scheduler.running_count:
                engine.cache.release_all_quarantined()
            self.commit()
            engine.end_copies()
        self.happened["a step was computed before its plan"] += engine.runner.followed
        self.happened["a prompt chunk was computed before its plan"] += engine.runner.chunks_followed
        for rid, request in self.requests.items():
            self._check(rid, request)
        engine.end_copies()
        while engine.cache.poll().in_flight:
            engine.end_copies()
        engine.cache.release_all_quarantined()
        engine.check_drained()

    def _check(self, rid: str, request: Request) -> None:
        engine = self.engine
        answer, wanted = engine.answers[rid], request.sampling.max_new_tokens
        cache = engine.cache
        room = min(48, (cache.page_count - 1) * cache.page_size) - len(request.prompt)
        expected = fake_continue(request, min(wanted or room, room), VOCAB, [0], engine.runner.windows)
        if rid in self.aborted:
            assert answer.finish is FinishReason.ABORT, f"{rid}: {answer}"
            assert answer.tokens == expected[: len(answer.tokens)], f"{rid}: {answer}"
            return
        assert answer.tokens == expected, f"{rid}: {answer}, expected {expected}"
        if request.sampling.prompt_logprobs is not None:
            assert answer.prompt_logprobs == fake_prompt_logprobs(request), f"{rid}: {answer}"
        if request.sampling.hidden_state:
            given = [place.hidden for place in answer.logprobs]
            assert given == [fake_pooled(request), *[b""] * (len(given) - 1)], f"{rid}: {answer}"


def drive(seed: int, depth: int, turns: int = 250, *, heals: bool = False) -> Counter[str]:
    """One seed; what happened. Raises AssertionError or InvariantError where something is wrong."""
    story = Drive(seed, depth, heals=heals)
    for _ in range(turns):
        story.turn()
    story.finish()
    return story.happened


def main() -> None:
    """Run seeds, say what happened."""
    parser = argparse.ArgumentParser(description="several plans under way")
    parser.add_argument("seeds", type=int, nargs="?", default=200)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--heals", action="store_true")
    arguments = parser.parse_args()
    happened = Counter[str]()
    for seed in range(arguments.first, arguments.first + arguments.seeds):
        try:
            happened += drive(seed, 1 + seed % 3, heals=arguments.heals)
        except Exception:
            print(f"seed {seed}, depth {1 + seed % 3}: {happened}")
            raise
    print(f"{arguments.seeds} seeds: {dict(happened)}")


if __name__ == "__main__":
    main()
