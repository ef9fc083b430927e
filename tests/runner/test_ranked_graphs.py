"""Recorded decode steps on several ranks: the tokens of steps computed call by call, whichever stage replays."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from serinus.core.sampling import SamplingParams
from serinus.models.small_checkpoints import make_checkpoint
from serinus.parallel import Mesh
from serinus.runner import Runner
from serinus.testing.ranked import ranked_engine


def conversed(path: Path, mesh: Mesh, recorded: str) -> tuple[list[list[int]], list[int]]:
    """Tokens of three requests that begin one after the other, and what each rank has replayed. `recorded`: of all
    ranks, of the first stage alone, or of none."""
    direct, runner = ranked_engine(path, mesh, torch.float32)
    try:
        if recorded == "all":
            runner.record((1, 2, 4))
        if recorded == "first":
            runner.ranks[0].runner.record((1, 2, 4))
        params = [SamplingParams(temperature=0.7 * (i % 2)) for i in range(3)]
        seqs = [direct.start([7 * i + j for j in range(9 + 5 * i)], each, tokens=30) for i, each in enumerate(params)]
        running = []
        for seq in seqs:
            direct.step([*((each, 1) for each in running), (seq, 100)])
            running.append(seq)
            for _ in range(3):
                direct.step([(each, 1) for each in running])
        return [seq.output for seq in seqs], [replays(rank.runner) for rank in runner.ranks]
    finally:
        runner.close()


def replays(runner: Runner) -> int:
    return 0 if runner.graphs is None else runner.graphs.replays


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [Mesh(tp=2), Mesh(pp=2), Mesh(tp=2, pp=2)], ids=str)
def test_ranks_that_replay_give_the_tokens_of_ranks_that_do_not(tmp_path: Path, mesh: Mesh) -> None:
    path = make_checkpoint(tmp_path, "gemma2", dtype="float32", layers=4, tokenizer=False)
    expected, none = conversed(path, mesh, "none")
    assert none == [0] * mesh.size
    tokens, all_ranks = conversed(path, mesh, "all")
    assert tokens == expected
    assert all_ranks == [9] * mesh.size, "all steps without a prompt, of one to three requests"
    if mesh.tp == 1:
        assert conversed(path, mesh, "first") == (expected, [9, 0]), "stages decide each for itself"
