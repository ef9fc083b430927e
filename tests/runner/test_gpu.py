"""Recorded steps on a GPU: bit for bit those that are queued kernel by kernel, and without a host wait of their own."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
import torch

from serinus.core.sampling import SamplingParams
from serinus.engine import LLM
from serinus.kernels import load
from serinus.models import ForwardBatch, Model, load_model, load_spec
from serinus.models.small_checkpoints import make_checkpoint
from serinus.parallel import Mesh
from serinus.parallel import comm as comm_module
from serinus.parallel.comm import TorchComm, listen
from serinus.runner import Runner
from serinus.runner.graphs import StepGraphs
from serinus.testing.direct import DirectEngine
from serinus.testing.ranked import RunnerRank
from tests.runner.replaying import converse, small_latent_model, small_model, where

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("stride", [None, 1, 3], ids=["no_canary", "full", "rotating"])
def test_a_recorded_step_changes_no_token_and_no_check(tmp_path: Path, stride: int | None, dtype: torch.dtype) -> None:
    kernels = load("cuda")
    model = small_model(tmp_path, kernels, dtype, device="cuda")
    plain, recorded = (converse(model, kernels, recorded=each, stride=stride, device="cuda") for each in (False, True))
    assert recorded.replays == 21
    assert recorded.tokens == plain.tokens
    assert recorded.checked == plain.checked
    assert not plain.violations
    assert not recorded.violations


@pytest.mark.parametrize("real_data", ["all", "partial"])
@pytest.mark.parametrize("make", [small_model, small_latent_model])
def test_a_recorded_step_finds_what_the_reference_finds(
    tmp_path: Path, make: Callable[..., Model], real_data: str
) -> None:
    kernels, ref = load("cuda"), load("cuda", "ref")
    model = make(tmp_path, kernels, torch.bfloat16, device="cuda")
    plain = load_model(load_spec(tmp_path), tmp_path, torch.bfloat16, ref, device="cuda")
    expected = converse(plain, ref, recorded=False, stride=1, flips=True, device="cuda", real_data=real_data)
    for recorded in (False, True):
        found = converse(
            model, kernels, recorded=recorded, stride=1, flips=True, device="cuda", real_data=real_data
        )  # fmt: skip
        assert len(found.violations) >= 4
        assert sorted(map(where, found.violations)) == sorted(map(where, expected.violations))


@pytest.mark.parametrize("recorded", [False, True])
def test_a_step_waits_for_no_stream(tmp_path: Path, *, recorded: bool) -> None:
    kernels = load("cuda")
    model = small_model(tmp_path, kernels, torch.bfloat16, device="cuda")
    engine = DirectEngine(model, kernels, page_size=4, page_count=80, rows=8, context=64, device="cuda")
    runner = engine.runner
    assert isinstance(runner, Runner)
    if recorded:
        runner.record((1, 2, 4))
    seqs = [engine.start([5, 6, 7, 8 + i], SamplingParams(temperature=0.0), tokens=30) for i in range(3)]
    engine.generate(seqs, 6)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        engine.step([(seq, 1) for seq in seqs])
        torch.cuda.set_sync_debug_mode("default")
    waits = [str(each.message) for each in seen if "called a synchronizing" in str(each.message)]
    assert not waits, seen


def test_graphs_of_an_earlier_engine_may_become_garbage_while_a_step_is_recorded() -> None:
    """Python collects them whenever it likes: here at once."""
    ones, earlier, unread = torch.ones(4, device="cuda"), list[object](), cast(ForwardBatch, None)

    def compute(_: ForwardBatch) -> torch.Tensor:
        earlier.clear()
        gc.set_threshold(1)
        for _ in range(1000):
            made: list[object] = []
            made.append(made)
        return ones + ones

    thresholds = gc.get_threshold()
    gc.set_threshold(10**9)  # what is made now stays in the youngest generation
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            _ = ones + ones
        around: list[object] = [graph]
        around.append(around)
        earlier.append(around)
        del around, graph
        graphs = StepGraphs("cuda", (1,))
        graphs.record(1, compute, unread)
    finally:
        gc.set_threshold(*thresholds)
    assert graphs.replay(1, unread).tolist() == [2.0] * 4


def test_an_engine_replays_its_decode_steps(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3", dtype="float32", hidden=256, heads=4, kv_heads=2, head_size=64, tokenizer=False)
    prompts = [{"prompt_token_ids": [(7 * i + j) % 500 for i in range(20 + 30 * j)]} for j in range(5)]
    params = [SamplingParams(temperature=0.6 * (j % 2), max_tokens=24, ignore_eos=True, seed=j) for j in range(5)]
    answers = []
    for disabled in (True, False):
        with LLM(
            str(tmp_path), device="cuda", dtype="bfloat16", max_total_tokens=2048, chunked_prefill_size=64,
            skip_tokenizer_init=True, disable_cuda_graph=disabled, max_running_requests=8,
        ) as llm:  # fmt: skip
            answers.append([out.outputs[0].token_ids for out in llm.generate(prompts, params, use_tqdm=False)])
    assert answers[0] == answers[1]


def test_sums_over_nccl_are_recorded_with_the_step(tmp_path: Path) -> None:
    """A group of one rank, on which NCCL runs as on any; each sum leaves its mark, so that none can be missing."""
    make_checkpoint(tmp_path, "qwen3", dtype="float32", hidden=256, heads=4, kv_heads=2, head_size=64, tokenizer=False)
    shard, mesh = load_spec(tmp_path).shards(Mesh())[0], Mesh()
    meeting = listen("127.0.0.1:0")
    comm = TorchComm(meeting, mesh, 0, device="cuda:0")
    options = comm_module._GROUPS["NCCL"].Options()
    store = comm_module._torch.PrefixStore("one", meeting.store)
    answers, sums = [], []
    for recorded in (False, True):
        comm._stage = comm_module._GROUPS["NCCL"](store, 0, 1, options) if comm._stage is None else comm._stage
        called: list[int] = []

        class Marked:
            """NCCL, then a half more: no step is right without it."""

            def __getattr__(self, name: str) -> object:
                return getattr(comm, name)

            def all_reduce(self, x: torch.Tensor, called: list[int] = called) -> torch.Tensor:
                called.append(len(x))
                return comm.all_reduce(x).mul_(1.5)

        rank = RunnerRank.make(tmp_path, shard, Marked(), torch.bfloat16, device="cuda")  # type: ignore[arg-type]
        rank.model._has_parts = True  # as of several ranks: else no block asks for a sum
        direct = DirectEngine(rank.model, load("cuda"), page_size=8, page_count=160, device="cuda")
        direct.runner = rank.runner
        if recorded:
            rank.runner.record((1, 2, 4))
        seqs = [direct.start([5, 6, 7, 8 + i], SamplingParams(temperature=0.0), tokens=30) for i in range(3)]
        direct.generate(seqs, 1)
        before = len(called)
        direct.generate(seqs, 12)
        sums.append(len(called) - before)
        answers.append([seq.output for seq in seqs])
        assert (rank.runner.graphs is not None) == recorded
        assert rank.runner.graphs is None or rank.runner.graphs.replays == 11
    comm.close()
    assert answers[0] == answers[1]
    assert sums == [2 * 2 * 11, 0], "two sums a layer; none is queued by the host in a step that is replayed"
