"""Recorded decode steps: the same tokens, the same KV checks, whatever the padding."""

from __future__ import annotations

import subprocess
import sys
import weakref
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch

from serinus.kernels import load
from serinus.models import ForwardBatch, Model
from serinus.runner import Runner
from serinus.runner.graphs import Compute, StepGraphs, batch_sizes
from serinus.runner.inbox import Inbox
from serinus.testing.direct import DirectEngine
from tests.runner.replaying import converse, small_model

KERNELS = load("cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return small_model(tmp_path_factory.mktemp("model"), KERNELS, torch.float32)


def test_sizes_end_with_the_largest_batch() -> None:
    assert batch_sizes(40) == (1, 2, 4, 8, 12, 16, 24, 32, 40)
    assert batch_sizes(1) == (1,)
    assert batch_sizes(64)[-2:] == (48, 64)
    assert batch_sizes(4096)[-1] == 256


def test_a_step_takes_the_smallest_size_that_holds_it() -> None:
    graphs = StepGraphs("cpu", batch_sizes(24))
    assert [graphs.size_of(count) for count in (1, 3, 12, 13, 24, 25)] == [1, 4, 12, 16, 24, None]


def test_a_recorded_step_holds_nothing_once_it_is_forgotten() -> None:
    graphs, weight = StepGraphs("cpu", (1,)), torch.ones(1)
    graphs.record(1, weight.mul, cast(ForwardBatch, None))
    known = weakref.ref(weight)
    del weight
    assert known() is not None
    graphs.close()
    graphs.close()
    assert known() is None


def test_a_recording_that_fails_leaves_no_step_behind(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[StepGraphs] = []
    record = StepGraphs.record

    def failing(graphs: StepGraphs, size: int, compute: Compute, batch: ForwardBatch) -> None:
        if graphs in made:
            raise RuntimeError("no memory")
        made.append(graphs)
        record(graphs, size, compute, batch)

    monkeypatch.setattr(StepGraphs, "record", failing)
    runner = DirectEngine(model, KERNELS, page_size=4, page_count=80, rows=8, context=64).runner
    assert isinstance(runner, Runner)
    with pytest.raises(RuntimeError, match="no memory"):
        runner.record((1, 2))
    assert [graphs._recorded for graphs in made] == [{}]
    assert runner.graphs is None


def test_arrays_of_the_same_sizes_are_the_same_tensors_as_in_the_step_before() -> None:
    inbox = Inbox("cpu", 100)
    seen = []
    for step in range(2):
        inbox.begin()
        found = [inbox.put(np.arange(size, dtype=np.int64) + step) for size in (3, 20)]
        inbox.send()
        assert [each.tolist() for each in found] == [[*range(step, size + step)] for size in (3, 20)]
        seen.append(found)
    assert all(late is early for early, late in zip(*seen, strict=True))
    assert inbox.put(np.arange(4, dtype=np.int64)).data_ptr() not in [each.data_ptr() for each in seen[0]]
    assert inbox.put(np.arange(90, dtype=np.int64)).tolist() == [*range(90)], "what does not fit goes by itself"


@pytest.mark.slow
@pytest.mark.parametrize("stride", [None, 1, 3], ids=["no_canary", "full", "rotating"])
def test_a_recorded_step_changes_no_token_and_no_check(model: Model, stride: int | None) -> None:
    plain, recorded = (converse(model, KERNELS, recorded=each, stride=stride) for each in (False, True))
    assert recorded.replays == 21, "all steps without a prompt, of one to three requests"
    assert recorded.tokens == plain.tokens
    assert recorded.checked == plain.checked
    assert not plain.violations
    assert not recorded.violations


@pytest.mark.slow
@pytest.mark.parametrize("real_data", ["all", "partial"])
def test_a_recorded_step_finds_what_the_other_finds(model: Model, real_data: str) -> None:
    plain, recorded = (
        converse(model, KERNELS, recorded=each, stride=1, flips=True, real_data=real_data) for each in (False, True)
    )
    assert len(plain.violations) >= 4
    assert recorded.violations == plain.violations


@pytest.mark.proof
def test_the_watch_of_a_gpu_finds_what_the_reference_finds_recorded_or_not() -> None:
    command = ["env", "TRITON_INTERPRET=1", sys.executable, "-m", "tests.runner.replaying", "triton"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
