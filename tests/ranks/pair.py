"""A prefill and a decode engine of several ranks each, in threads, joined by real sockets and segments."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from serinus.core.clock import Clock
from serinus.core.config import ServeConfig
from serinus.models import load_spec
from serinus.ranks.thread_ranks import ThreadRanks
from serinus.selftest import EngineDriver, EnginePair
from serinus.testing.oracle import toy_continue
from tests.ranks.crew import SETTINGS, Crew

__all__ = ["Pair", "answers", "count", "pair", "prompts_of", "toy_answers"]

_PATIENCE_S = 60.0


def count(driver: EngineDriver, name: str) -> int:
    """A counter of one engine, all its labels together."""
    return int(sum(driver.built.metrics.by_labels(name).values()))


class Pair(EnginePair):
    """The two engines, and what all their ranks hold."""

    def turn(self) -> None:
        """Turn both engines once."""
        halves = (self.prefill, self.decode)
        self.turn_decode()
        self.turn_prefill()
        wait_s = min(half.engine.wait_s for half in halves)
        if wait_s > 0:
            channels = [channel for half in halves for channel in half.built.peers.channels]  # type: ignore[union-attr]
            self.decode.line.wait_any(channels, min(wait_s, 0.001))

    def run(self) -> None:
        """Until neither holds a request and every rank has given back what it held."""
        end = self.clock.now() + _PATIENCE_S
        while not (self.idle and self.quiet):
            held = [half.line.rank_holdings for half in (self.prefill, self.decode)]
            assert self.clock.now() < end, f"still busy: {held}"
            self.turn()

    @property
    def quiet(self) -> bool:
        """No rank holds anything, as the ranks themselves count, and no handoff is under way."""
        halves = (self.prefill, self.decode)
        counted = [n for half in halves for held in half.line.rank_holdings for n in held.values()]
        return not any(counted) and not any(self.port_of(half).machine.handoff_count for half in halves)


def prompts_of(count: int, step: int = 9) -> dict[str, list[int]]:
    """`count` prompts of a toy, each `step` tokens longer than the one before."""
    return {f"r{i}": [(7 * i + j) % 64 for j in range(3 + step * i)] for i in range(count)}


def answers(engines: Pair | Crew, prompts: Mapping[str, list[int]], tokens: int) -> dict[str, list[int]]:
    """Ask all of them at once, so many tokens each, and run until nothing is held any more."""
    for rid, prompt in prompts.items():
        engines.add(rid, prompt, tokens)
    engines.run()
    return {rid: engines.tokens(rid) for rid in prompts}


def toy_answers(path: Path, prompts: Mapping[str, list[int]], tokens: int, **more: Any) -> dict[str, list[int]]:
    """What the oracle answers to them."""
    spec = load_spec(path)
    return {rid: toy_continue(spec, prompt, tokens, **more) for rid, prompt in prompts.items()}


@contextmanager
def pair(
    path: Path, prefill: Mapping[str, Any], decode: Mapping[str, Any], backend: str = "shm", **settings: Any
) -> Iterator[Pair]:
    """`prefill`, `decode`: settings of one of the engines; closed afterwards."""
    common = {**SETTINGS, "transfer_backend": backend, "bootstrap_port": 0, **settings}
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder, ExitStack() as stack:

        def ranks(config: ServeConfig, clock: Clock) -> ThreadRanks:
            place = Path(folder) / config.role
            place.mkdir()
            starter = ThreadRanks(config, place, clock)
            stack.callback(starter.close)
            return starter

        engines = Pair(path, prefill_settings=prefill, decode_settings=decode, starter=ranks, **common)
        stack.callback(engines.close)
        yield engines
