"""A prefill and a decode engine of several ranks each, in threads, joined by real sockets and segments."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from serinus.core.clock import WallClock
from serinus.core.request import Request, TokenDelta
from serinus.core.sampling import SamplingParams
from serinus.engine import build_core
from serinus.engine.build import Built
from serinus.engine.handoffs import make_handoffs
from serinus.engine.ranks import RankExecutor
from serinus.engine.roles import Handoffs
from serinus.testing.builders import Answer
from serinus.testing.thread_ranks import ThreadRanks
from serinus.wire import wait_any
from tests.engine.ranks.crew import config_of

__all__ = ["Half", "Pair", "pair"]

_PATIENCE_S = 60.0


class Half:
    """One of the two engines."""

    def __init__(self, built: Built, handoffs: Handoffs, address: str, ranks: ThreadRanks, clock: WallClock) -> None:
        self.built, self.handoffs, self.address, self.ranks = built, handoffs, address, ranks
        self.core = built.core
        self._clock = clock
        self.core.leaving = lambda rid: handoffs.aborted(rid, clock.now())
        self.core.ungranted = handoffs.ungranted

    def turn(self) -> list[TokenDelta]:
        """What the loop does in one."""
        deltas = list(self.handoffs.turn(self._clock.now(), self.core.turns))
        outcome = self.core.step()
        if outcome is not None:
            deltas.extend(outcome.deltas)
            self.handoffs.computed(outcome.chunks, self._clock.now())
        return deltas

    def gauges(self) -> list[dict[str, int]]:
        """Of every rank, as the ranks themselves count."""
        executor = self.core.executor
        if not isinstance(executor, RankExecutor):
            return []
        return [dict(executor.gauges(rank)) for rank in range(executor.size)]

    def count(self, name: str) -> int:
        """A counter, all its labels together."""
        return int(sum(self.built.metrics._values[name].values()))


class Pair:
    """Both engines, turned by one thread, and what clients got of the decode engine."""

    def __init__(self, prefill: Half, decode: Half, clock: WallClock) -> None:
        self.prefill, self.decode = prefill, decode
        self.answers: dict[str, Answer] = {}
        self._clock = clock

    def add(self, rid: str, prompt: Sequence[int], count: int = 8, **sampling: Any) -> None:
        """A greedy request of a client, for the prefill engine to help with."""
        params = SamplingParams(**{"temperature": 0, "max_new_tokens": count, "ignore_eos": True, **sampling})
        tokens = np.asarray(prompt, np.int32)
        self.decode.handoffs.admit(
            Request(rid=rid, prompt=tokens, sampling=params, seed=7, prefill_address=self.prefill.address)
        )

    def abort(self, rid: str) -> None:
        """The client left."""
        self.decode.handoffs.aborted(rid, self._clock.now())
        self._keep([self.decode.core.scheduler.abort(rid, "test")])

    def turn(self) -> None:
        """Both engines once."""
        self._keep(self.decode.turn())
        self._keep(self.prefill.turn())
        halves = (self.prefill, self.decode)
        channels = [c for half in halves for c in (*half.handoffs.channels, *half.core.executor.channels)]
        wait_any(channels, min(half.handoffs.wait_s(0.001) for half in halves))

    def run(self) -> None:
        """Until neither holds a request and every rank has heard of it."""
        end = self._clock.now() + _PATIENCE_S
        while not (self.prefill.core.scheduler.idle and self.decode.core.scheduler.idle and self.quiet):
            assert self._clock.now() < end, f"still busy: {self.prefill.gauges()} {self.decode.gauges()}"
            self.turn()

    @property
    def quiet(self) -> bool:
        """Nothing is counted on any rank, and no handoff is under way."""
        counted = [n for half in (self.prefill, self.decode) for gauges in half.gauges() for n in gauges.values()]
        ports: Any = (self.prefill.handoffs, self.decode.handoffs)
        return not any(counted) and not any(role._port.machine.handoff_count for role in ports)

    def tokens(self, rid: str) -> list[int]:
        """What a request was answered."""
        return self.answers[rid].tokens

    def _keep(self, deltas: Sequence[TokenDelta | None]) -> None:
        for delta in deltas:
            if delta is not None:
                self.answers.setdefault(delta.rid, Answer()).take(delta)


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
            built = build_core(config, clock, ranks if ranks.mesh.size > 1 else None)
            stack.callback(built.core.close)
            handoffs, address = make_handoffs(built, 1 + len(halves), clock)
            stack.callback(handoffs.close)
            halves.append(Half(built, handoffs, address, ranks, clock))
        yield Pair(halves[0], halves[1], clock)
