"""A prefill and a decode engine of several ranks each, in threads, joined by real sockets and segments."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from serinus.core.clock import WallClock
from serinus.core.request import Request
from serinus.core.sampling import SamplingParams
from serinus.engine import build_engine
from serinus.engine.build import Built
from serinus.testing.driver import EngineDriver
from serinus.testing.thread_ranks import ThreadRanks
from serinus.wire import wait_any
from tests.ranks.crew import config_of

__all__ = ["Half", "Pair", "pair"]

_PATIENCE_S = 60.0


class Half(EngineDriver):
    """One of the two engines."""

    def __init__(self, built: Built, ranks: ThreadRanks) -> None:
        super().__init__(built)
        self.ranks, self.address = ranks, built.pd_address

    def holdings(self) -> list[dict[str, int]]:
        """Of every rank, as the ranks themselves count."""
        return [dict(holdings) for holdings in self.line.rank_holdings]

    def count(self, name: str) -> int:
        """A counter, all its labels together."""
        return int(sum(self.built.metrics.by_labels(name).values()))


class Pair:
    """Both engines, turned by one thread."""

    def __init__(self, prefill: Half, decode: Half, clock: WallClock) -> None:
        self.prefill, self.decode = prefill, decode
        self.answers = decode.answers
        self._clock = clock

    def add(self, rid: str, prompt: Sequence[int], count: int = 8, **sampling: Any) -> None:
        """A greedy request of a client, for the prefill engine to help with."""
        params = SamplingParams(**{"temperature": 0, "max_new_tokens": count, "ignore_eos": True, **sampling})
        tokens = np.asarray(prompt, np.int32)
        self.decode.send(Request(rid=rid, prompt=tokens, sampling=params, seed=7, prefill_address=self.prefill.address))
        self.decode.turn()

    def abort(self, rid: str) -> None:
        """The client of a request left."""
        self.decode.abort(rid)
        self.decode.turn()

    def turn(self) -> None:
        """Turn both engines once."""
        halves = (self.prefill, self.decode)
        self.decode.turn()
        self.prefill.turn()
        wait_s = min(half.engine.wait_s for half in halves)
        if wait_s > 0:
            channels = [c for half in halves for c in (*half.built.peers.channels, *half.line.channels)]  # type: ignore[union-attr]
            wait_any(channels, min(wait_s, 0.001))

    def run(self) -> None:
        """Until neither holds a request and every rank has given back what it held."""
        end = self._clock.now() + _PATIENCE_S
        while not (self.prefill.engine.idle and self.decode.engine.idle and self.quiet):
            assert self._clock.now() < end, f"still busy: {self.prefill.holdings()} {self.decode.holdings()}"
            self.turn()

    @property
    def quiet(self) -> bool:
        """No rank holds anything, and no handoff is under way."""
        counted = [n for half in (self.prefill, self.decode) for held in half.holdings() for n in held.values()]
        ports: Any = (self.prefill.engine.handoffs, self.decode.engine.handoffs)
        return not any(counted) and not any(role.port.machine.handoff_count for role in ports)

    def tokens(self, rid: str) -> list[int]:
        """What a request was answered."""
        return self.decode.tokens(rid)


@contextmanager
def pair(
    path: Path, prefill: Mapping[str, Any], decode: Mapping[str, Any], backend: str = "shm", **settings: Any
) -> Iterator[Pair]:
    """`prefill`, `decode`: settings of one of the engines; closed afterwards."""
    clock = WallClock()
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder, ExitStack() as stack:
        halves = []
        for name, own in (("prefill", prefill), ("decode", decode)):
            common = {"mode": name, "transfer_backend": backend, "min_remote_tokens": 1, "bootstrap_port": 0}
            config = config_of(path, **{**common, **settings, **own})
            place = Path(folder) / name
            place.mkdir()
            ranks = ThreadRanks(config, place, clock)
            built = build_engine(config, clock, ranks if ranks.mesh.size > 1 else None)
            stack.callback(built.close)
            halves.append(Half(built, ranks))
        yield Pair(halves[0], halves[1], clock)
