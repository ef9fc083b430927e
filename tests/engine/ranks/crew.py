"""Engines of several ranks on the toy, in threads, for the tests of this room."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from serinus.core.clock import WallClock
from serinus.core.config import ServeConfig, from_names
from serinus.core.request import Request, TokenDelta
from serinus.core.sampling import SamplingParams
from serinus.engine import EngineCore, build_core
from serinus.engine.build import Built
from serinus.engine.ranks import RankExecutor
from serinus.testing.builders import Answer
from serinus.testing.thread_ranks import ThreadRanks

__all__ = ["Crew", "config_of", "crew", "executor_of"]

SETTINGS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "page_size": 4,
    "max_total_tokens": 256,
    "max_running_requests": 8,
    "chunked_prefill_size": 16,
    "device": "cpu",
    "decode_log_interval": 0,
    "enable_sanity_check": True,
}


class Crew:
    """An engine core under test, and the answers it gave."""

    def __init__(self, built: Built, ranks: ThreadRanks) -> None:
        self.built, self.ranks = built, ranks
        self.core: EngineCore = built.core
        self.answers: dict[str, Answer] = {}

    def add(self, rid: str, prompt: Sequence[int], count: int = 8, **sampling: Any) -> None:
        """A greedy request, unless told otherwise."""
        params = SamplingParams(**{"temperature": 0, "max_new_tokens": count, "ignore_eos": True, **sampling})
        self.core.scheduler.add(Request(rid=rid, prompt=np.asarray(prompt, np.int32), sampling=params, seed=7))

    def take(self, delta: TokenDelta | None) -> None:
        """File a delta."""
        if delta is not None:
            self.answers.setdefault(delta.rid, Answer()).take(delta)

    def turn(self) -> bool:
        """One step, or a moment of waiting for one; False = nothing will come by itself."""
        outcome = self.core.step()
        if outcome is None:
            return self.core.waited()
        for delta in outcome.deltas:
            self.take(delta)
        return True

    def run(self) -> None:
        """Until nothing is left to do."""
        while self.turn():
            pass

    def settled(self) -> list[dict[str, int]]:
        """The gauges of every rank, once all have told what the leader's has."""
        executor = executor_of(self.built)
        for _ in range(200):
            if len(set(executor.rank_counts)) == 1:
                break
            executor.pump(0.05)
        return [executor.gauges(rank) for rank in range(executor.size)]

    def tokens(self, rid: str) -> list[int]:
        """What a request was answered."""
        return self.answers[rid].tokens


def config_of(path: Path, **settings: Any) -> ServeConfig:
    """Of a small engine on a toy."""
    return from_names(ServeConfig, {**SETTINGS, "model_path": str(path), **settings})


def executor_of(built: Built) -> RankExecutor:
    """Of an engine of several ranks."""
    executor = built.core.executor
    assert isinstance(executor, RankExecutor)
    return executor


@contextmanager
def crew(path: Path, **settings: Any) -> Iterator[Crew]:
    """An engine of tp_size x pp_size ranks in threads, closed afterwards."""
    config, clock = config_of(path, **settings), WallClock()
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        ranks = ThreadRanks(config, Path(folder), clock)
        built = build_core(config, clock, ranks if ranks.mesh.size > 1 else None)
        try:
            yield Crew(built, ranks)
        finally:
            built.core.close()
