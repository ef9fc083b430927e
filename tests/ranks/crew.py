"""Engines of several ranks on the toy, in threads, for the tests of this room."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from serinus.core.clock import WallClock
from serinus.core.config import ServeConfig, from_names
from serinus.engine import build_engine
from serinus.engine.built import Built
from serinus.ranks.thread_ranks import ThreadRanks
from serinus.selftest import EngineDriver

__all__ = ["Crew", "config_of", "crew"]

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


class Crew(EngineDriver):
    """An engine under test with its ranks."""

    def __init__(self, built: Built, ranks: ThreadRanks) -> None:
        super().__init__(built)
        self.ranks = ranks

    def settled(self) -> list[dict[str, int]]:
        """What every rank says that it holds, once none holds anything or two seconds have passed."""
        for _ in range(40):
            if not any(count for holdings in self.line.rank_holdings for count in holdings.values()):
                break
            self.line.pump(0.05)
        return [dict(holdings) for holdings in self.line.rank_holdings]


def config_of(path: Path, **settings: Any) -> ServeConfig:
    """Of a small engine on a toy."""
    return from_names(ServeConfig, {**SETTINGS, "model_path": str(path), **settings})


@contextmanager
def crew(path: Path, **settings: Any) -> Iterator[Crew]:
    """An engine of tp_size x pp_size ranks in threads, closed afterwards."""
    config, clock = config_of(path, **settings), WallClock()
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        ranks = ThreadRanks(config, Path(folder), clock)
        built = build_engine(config, clock, ranks if ranks.mesh.size > 1 else None)
        try:
            yield Crew(built, ranks)
        finally:
            built.close()
            ranks.close()
