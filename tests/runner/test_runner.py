"""A plan goes in, a result comes out: rows, chunks, log-probabilities of prompts, hooks, refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from serinus.core.errors import InvariantError
from serinus.core.parts import Part
from serinus.core.plan import StepPlan, StepResult, TableWrite
from serinus.core.sampling import SamplingParams
from serinus.kernels import load
from serinus.kernels.cpu.scalar import host_has
from serinus.models import ForwardBatch, NullHook, compose_hooks, load_model, load_spec
from serinus.models.small_checkpoints import make_checkpoint, make_toy
from serinus.parallel.comm import SoloComm
from serinus.pool import DevicePool, PoolSpec, RequestTable
from serinus.runner import Behind, Runner
from serinus.testing.direct import DirectEngine
from serinus.testing.oracle import toy_continue

KERNELS = load("cpu")
GREEDY = SamplingParams(temperature=0.0)
SAME_IN_ANY_BATCH = (torch.float32, *(() if host_has("amx-bf16") else (torch.bfloat16,)))
"""Types in which a row's bits do not depend on its batch: with AMX, oneDNN's bf16 sums depend on the number of rows."""


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("qwen3"), "qwen3", tied=True)


def direct(path: Path, dtype: torch.dtype = torch.float32) -> DirectEngine:
    return DirectEngine(load_model(load_spec(path), path, dtype, KERNELS), KERNELS, page_size=4, page_count=300)


def toy(path: Path) -> DirectEngine:
    return direct(make_toy(path, tokenizer=False), torch.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", SAME_IN_ANY_BATCH)
def test_a_seeded_request_draws_the_same_tokens_alone_and_in_a_crowd(small: Path, dtype: torch.dtype) -> None:
    params = SamplingParams(temperature=1.0, top_p=0.95)
    prompt = [9, 8, 7, 6, 5]
    alone_engine = direct(small, dtype)
    alone = alone_engine.generate([alone_engine.start(prompt, params, seed=42)], 24)[0]
    crowd = direct(small, dtype)
    others = [crowd.start([i, i + 1, 30], SamplingParams(temperature=0.7 * (i % 3)), seed=i) for i in range(10)]
    mine = crowd.start(prompt, params, seed=42)
    for other in others:
        crowd.step([(other, 2)])
    while len(mine.output) < 24:
        crowd.step([(other, 2) for other in others[:5]] + [(mine, 2)] + [(other, 1) for other in others[5:]])
    assert mine.output == alone


@pytest.mark.slow
def test_prompt_logprobs_do_not_depend_on_chunks_and_agree_with_the_logits(small: Path) -> None:
    prompt = list(range(60, 160))
    params = SamplingParams(temperature=0.0, prompt_logprobs=3, logprobs=1)
    answers = []
    for chunk in (1000, 7, 1):
        engine = direct(small)
        seq = engine.start(prompt, params, tokens=4)
        engine.generate([seq], 2, chunk=chunk)
        answers.append([lp for r in seq.results for lp in r.prompt_logprobs])
    assert [len(a) for a in answers] == [99] * 3
    for one, other in zip(answers[0], answers[1], strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert len(one.top_ids) == 3
    assert [lp.logprob for lp in answers[2]] == pytest.approx([lp.logprob for lp in answers[0]], abs=1e-4)
    assert all(lp.top_logprobs[0] >= (lp.logprob or 0.0) - 1e-6 for lp in answers[0])


@pytest.mark.slow
def test_asking_for_prompt_logprobs_does_not_change_the_answer(small: Path) -> None:
    outputs = []
    for asked in (None, 0):
        engine = direct(small)
        seqs = [
            engine.start([4, 5, 6, 7, 8], SamplingParams(temperature=0.0, prompt_logprobs=asked)),
            engine.start([9, 10, 11], GREEDY),
        ]
        engine.step([(seqs[0], 3), (seqs[1], 3)])
        outputs.append([*engine.generate(seqs[:1], 6), seqs[1].output])
    assert outputs[0] == outputs[1]


def test_more_rows_than_one_pass_of_logits_are_all_sampled(tmp_path: Path) -> None:
    path = make_toy(tmp_path, tokenizer=False)
    spec = load_spec(path)
    model = load_model(spec, path, torch.bfloat16, KERNELS)
    engine = DirectEngine(model, KERNELS, page_size=2, page_count=1000, rows=301, context=8)
    seqs = [engine.start([i], GREEDY, tokens=3) for i in range(300)]
    engine.step([(seq, 1) for seq in seqs])
    assert [seq.output for seq in seqs] == [toy_continue(spec, [i], 1) for i in range(300)]


def test_an_empty_plan_only_writes_the_table(tmp_path: Path) -> None:
    engine = toy(tmp_path)
    assert engine.runner.run(StepPlan(step=3, work=())).seqs == ()


class Diary(NullHook):
    """A hook that notes which layers held KV of the batch when it was called."""

    def can_replay(self, room: int) -> bool:
        return False  # it acts between layers

    def __init__(self, notes: list[tuple[str, list[bool]]], name: str = "") -> None:
        self.notes = notes
        self.name = name
        self.pool: DevicePool | None = None
        self._slots = torch.zeros(0, dtype=torch.int64)

    def before(self, batch: ForwardBatch) -> None:
        self._slots = batch.slots_T
        self._note("before")

    def before_layer(self, layer_index: int) -> None:
        self._note(f"layer {layer_index}")

    def writes(self, layer_index: int) -> None:
        """Nothing that is stored is digested for it."""

    def reads(self, layer_index: int, attention: object) -> None:
        """Nothing is digested for a diary."""

    def after(self, batch: ForwardBatch) -> None:
        self._note("after")

    def _note(self, when: str) -> None:
        lanes = [] if self.pool is None else self.pool.k
        self.notes.append((self.name + when, [bool((k[self._slots] != 0).any()) for k in lanes]))


STATIONS = [
    ("before", [False, False]),
    ("layer 0", [False, False]),
    ("layer 1", [True, False]),
    ("after", [True, True]),
]


@pytest.mark.slow
def test_the_hook_stands_before_each_layers_first_write_and_after_the_last(small: Path) -> None:
    diary = Diary([])
    spec = load_spec(small)
    model = load_model(spec, small, torch.float32, KERNELS)
    engine = DirectEngine(model, KERNELS, page_count=16, hook=diary)
    diary.pool = engine.pool
    seq = engine.start([1, 2, 3, 4], GREEDY)
    engine.step([(seq, 2)])  # a chunk that samples nothing
    engine.step([(seq, 2)])
    assert diary.notes == STATIONS * 2


def test_the_toy_calls_its_hook_at_the_same_places(tmp_path: Path) -> None:
    diary = Diary([])
    path = make_toy(tmp_path, tokenizer=False, layers=2)
    engine = DirectEngine(load_model(load_spec(path), path, torch.bfloat16, KERNELS), KERNELS, hook=diary)
    diary.pool = engine.pool
    engine.step([(engine.start([1, 2, 3], GREEDY), 3)])
    assert diary.notes == STATIONS


def test_composed_hooks_nest(tmp_path: Path) -> None:
    notes: list[tuple[str, list[bool]]] = []
    gate, canary = Diary(notes, "gate "), Diary(notes, "canary ")
    path = make_toy(tmp_path, tokenizer=False, layers=1)
    model = load_model(load_spec(path), path, torch.bfloat16, KERNELS)
    engine = DirectEngine(model, KERNELS, hook=compose_hooks([gate, canary]))
    engine.step([(engine.start([1], GREEDY), 1)])
    order = ["gate before", "canary before", "gate layer 0", "canary layer 0", "canary after", "gate after"]
    assert [name for name, _ in notes] == order
    assert compose_hooks([gate]) is gate
    assert isinstance(compose_hooks([]), NullHook)


def test_a_pool_of_another_shape_than_the_models_is_refused(tmp_path: Path) -> None:
    spec = load_spec(make_toy(tmp_path, tokenizer=False))
    model = load_model(spec, tmp_path, torch.bfloat16, KERNELS)
    good = {"layer_count": 3, "kv_head_count": 1, "head_size": 8, "page_size": 4, "page_count": 4}
    for change in ({"layer_count": 2}, {"dtype": torch.float32}):
        pool = DevicePool(PoolSpec(**{**good, "dtype": torch.bfloat16, **change}), KERNELS)  # type: ignore[arg-type]
        with pytest.raises(InvariantError, match=r"expected 3 layers, torch\.bfloat16"):
            Runner(model, {Part.FULL: pool}, {Part.FULL: RequestTable(4, 16)}, KERNELS)


def test_row_tables_that_were_made_for_inference_are_written_between_steps_too(tmp_path: Path) -> None:
    with torch.inference_mode():
        engine = toy(tmp_path)
        runner = Runner(engine.model, engine.pools, engine.tables, KERNELS)
    runner.write_tables([TableWrite(row=1, start=2, slots=np.array([7, 9], np.int64))])
    assert engine.tables[Part.FULL].table[1, :5].tolist() == [0, 0, 7, 9, 0]


def sliding(path: Path) -> DirectEngine:
    return direct(make_toy(path, tokenizer=False, window=6, layer_types="SFS"), torch.bfloat16)


def test_each_part_needs_its_pool_its_table_and_its_slots(tmp_path: Path) -> None:
    engine = sliding(tmp_path)
    full = {Part.FULL: engine.pool}
    with pytest.raises(InvariantError, match="pools of FULL and tables of FULL, SWA, expected both of FULL, SWA"):
        Runner(engine.model, full, engine.tables, KERNELS)
    seq = engine.start([1, 2, 3], GREEDY)
    seq.others.clear()
    with pytest.raises(InvariantError, match="without a SWA slot for each token"):
        engine.step([(seq, 3)])


def test_a_table_write_of_a_part_the_model_has_not_is_refused(tmp_path: Path) -> None:
    engine = toy(tmp_path)
    write = TableWrite(row=1, start=0, slots=np.ones(1, np.int64), part=Part.SWA)
    with pytest.raises(InvariantError, match="table write of part SWA, expected FULL"):
        engine.runner.run(StepPlan(step=1, work=(), table_writes=(write,)))


def test_the_layers_of_both_parts_keep_their_order(tmp_path: Path) -> None:
    engine = sliding(tmp_path)
    seq = engine.start(list(range(20)), GREEDY, tokens=30)
    answer = engine.generate([seq], 25, chunk=7)[0]
    assert answer == toy_continue(engine.model.spec, list(range(20)), 25)
    assert [len(engine.pools[part].layers) for part in (Part.FULL, Part.SWA)] == [1, 2]


def test_table_rows_are_rewritten_before_the_step_reads_them(tmp_path: Path) -> None:
    """What sched does after a duplicate was freed: same KV, other slots, in the plan that first uses them."""
    engine = toy(tmp_path)
    seq = engine.start([3, 1, 4, 1, 5, 9, 2, 6], GREEDY, tokens=8)
    engine.step([(seq, 8)])
    k_and_v = [lane for pair in engine.pool.layers for lane in pair]
    fresh = engine.start([0], GREEDY, tokens=15).slots[:8]
    for lane in k_and_v:
        lane[torch.from_numpy(fresh)] = lane[torch.from_numpy(seq.slots[:8])]
        lane[torch.from_numpy(seq.slots[:8])] = 0
    seq.slots = np.concatenate([fresh, seq.slots[8:]])
    engine.rewrite(seq)
    engine.step([(seq, 1)])
    assert seq.output == toy_continue(engine.model.spec, seq.prompt.tolist(), 2)


class Noted:
    """A runner, and the plans that it ran."""

    def __init__(self, runner: Any) -> None:
        self.runner, self.plans = runner, list[StepPlan]()

    def run(self, plan: StepPlan) -> StepResult | None:
        self.plans.append(plan)
        found: StepResult | None = self.runner.run(plan)
        return found


def test_a_step_goes_on_behind_those_of_another_one_that_have_tokens_and_computes_chunks_beside(tmp_path: Path) -> None:
    """In another order, and behind one that has no token yet: tokens that are not known mean nothing."""
    engine, early = (toy(tmp_path / name) for name in ("waits", "early"))
    engine.runner = noted = Noted(engine.runner)
    long, one, two = (engine.start(prompt, GREEDY) for prompt in (list(range(30, 42)), [5, 6, 7], [9, 8, 7, 6]))
    engine.step([(long, 4), (one, 3), (two, 4)])
    engine.step([(two, 1), (one, 1), (long, 8)])
    first, second = noted.plans
    unknown = [replace(work, tokens=np.zeros_like(work.tokens)) for work in second.work[:2]]
    runner = early.runner
    assert isinstance(runner, Runner)
    flight = runner.launch(first)
    behind = Behind(flight=flight, follows_B=np.array([2, 1]))
    ahead = runner.launch(replace(second, work=(*unknown, second.work[2])), behind)
    found = [runner.read(each) for each in (flight, ahead)]
    assert [[seq.token for seq in each.seqs] for each in found if each is not None] == [
        [None, one.output[0], two.output[0]], [two.output[1], one.output[1], long.output[0]],
    ]  # fmt: skip
    with pytest.raises(InvariantError, match=r"goes on behind \[0\] of step 1, which has tokens of \[1, 2\]"):
        flight.places(np.array([0]))


class Counted(SoloComm):
    """Notes the numbers of the steps that were begun."""

    def __init__(self, *, can_abandon: bool = True) -> None:
        super().__init__()
        self.can_abandon = can_abandon
        self.begun: list[int] = []

    def begin(self, step: int) -> None:
        self.begun.append(step)


def with_comm(engine: DirectEngine, comm: SoloComm, hook: NullHook | None = None) -> Runner:
    return Runner(engine.model, engine.pools, engine.tables, KERNELS, comm=comm, hook=hook)


def test_passes_are_counted_on_though_the_steps_of_plans_begin_anew_after_a_warm_up(tmp_path: Path) -> None:
    """A rank that has left a step waits for those that have begun the next one, by its number."""
    engine, comm = toy(tmp_path), Counted()
    engine.runner = with_comm(engine, comm)
    for _ in range(2):
        engine._step = 0
        engine.generate([engine.start([1, 2, 3], GREEDY)], 3)
    assert comm.begun == list(range(1, 7))


def test_ranks_that_cannot_leave_a_step_together_end_and_say_why(tmp_path: Path) -> None:
    class Hungry(NullHook):
        def can_replay(self, room: int) -> bool:
            return False  # it acts between layers

        def before_layer(self, layer_index: int) -> None:
            torch.empty(1 << 60, dtype=torch.uint8)

    engine = toy(tmp_path)
    engine.runner = with_comm(engine, Counted(can_abandon=False), Hungry())
    with pytest.raises(MemoryError, match="no memory for a step of 3 tokens in 1 requests") as found:
        engine.step([(engine.start([1, 2, 3], GREEDY), 3)])
    assert "Ranks that exchange over NCCL, or from machine to machine, cannot leave a step together" in str(found.value)
