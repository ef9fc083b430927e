"""A plan goes in, a result comes out: rows, chunks, log-probabilities of prompts, hooks, refusals."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from serinus.core.errors import InvariantError
from serinus.core.plan import StepPlan
from serinus.core.sampling import SamplingParams
from serinus.kernels import load
from serinus.models import ForwardBatch, load_model, load_spec
from serinus.pool import DevicePool, PoolSpec, RequestTable
from serinus.runner import Runner
from serinus.testing.checkpoints import make_checkpoint, make_toy
from serinus.testing.direct import DirectEngine
from serinus.testing.oracle import toy_continue

KERNELS = load("cpu")
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("qwen3"), "qwen3", tied=True)


def direct(path: Path, dtype: torch.dtype = torch.float32) -> DirectEngine:
    return DirectEngine(load_model(load_spec(path), path, dtype, KERNELS), KERNELS, page_size=4, page_count=300)


def toy(path: Path) -> DirectEngine:
    return direct(make_toy(path, tokenizer=False), torch.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
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


class Diary:
    """A hook that notes what it saw of the pool."""

    def __init__(self) -> None:
        self.notes: list[tuple[str, bool]] = []
        self.pool: DevicePool | None = None

    def before(self, batch: ForwardBatch) -> None:
        self._note("before", batch)

    def after(self, batch: ForwardBatch) -> None:
        self._note("after", batch)

    def _note(self, when: str, batch: ForwardBatch) -> None:
        assert self.pool is not None
        self.notes.append((when, bool((self.pool.k[-1][batch.slots_T] != 0).any())))


@pytest.mark.slow
def test_the_hook_stands_before_the_first_and_after_the_last_write(small: Path) -> None:
    diary = Diary()
    spec = load_spec(small)
    model = load_model(spec, small, torch.float32, KERNELS)
    engine = DirectEngine(model, KERNELS, page_count=16, hook=diary)
    diary.pool = engine.pool
    seq = engine.start([1, 2, 3, 4], GREEDY)
    engine.step([(seq, 2)])  # a chunk that samples nothing
    engine.step([(seq, 2)])
    assert diary.notes == [("before", False), ("after", True)] * 2


def test_a_pool_of_another_shape_than_the_models_is_refused(tmp_path: Path) -> None:
    spec = load_spec(make_toy(tmp_path, tokenizer=False))
    model = load_model(spec, tmp_path, torch.bfloat16, KERNELS)
    good = {"layer_count": 3, "kv_head_count": 1, "head_size": 8, "page_size": 4, "page_count": 4}
    for change in ({"layer_count": 2}, {"dtype": torch.float32}):
        pool = DevicePool(PoolSpec(**{**good, "dtype": torch.bfloat16, **change}), KERNELS)  # type: ignore[arg-type]
        with pytest.raises(InvariantError, match=r"expected 3 layers, torch\.bfloat16"):
            Runner(model, pool, RequestTable(4, 16), KERNELS)


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
