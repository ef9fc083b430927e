"""A fault a second for minutes: how much is still answered, and whether anything is wrong, lost or leaked.

    python -m tests.canary.soak --minutes 30 --seed 1

Two pairs of a prefill and a decode engine, both with host tiers and files, get the same prompts in turns of some
seconds. One is left alone; in the memory, tables and files of the other, or in what moves its pages, a thread causes a
fault each second (adversary_sites.py), which knows nothing of the canary. Mode heal, `rotating:16`, streams and others.
A fault of what moves pages spoils one copy of pages; with `--copies 0` all, until the next fault comes.

Printed: tokens a second of both, and their ratio by the CPU time of the engines' thread too (the thread that causes
faults takes its own share of the machine); violations (a wrong slot is one for each of its stamps and each reader),
the slots and owners that they are of, and in how many steps one of these was found at most: nothing is found for ever.
Of each wrong answer its receipt and the faults before it. Exit code 1: an answer that ended well is wrong, a request
has no end, a page or a lease is held when all is done, pages are missing, or the pair that is struck has less than
`--share` of the other's tokens.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from serinus.cache import Tier
from serinus.canary import Violation
from serinus.core.request import FinishReason
from serinus.core.rng import Rng
from serinus.ranks.tier_parts import pause
from serinus.selftest import make_canary_toy
from serinus.testing.oracle import toy_continue

from .account import Account, accounts_of
from .adversary import BLIND
from .adversary_sites import SITES, Act
from .adversary_worlds import Pair

__all__ = ["soak"]

_COVERAGE = "rotating:16"
_SETTINGS = {
    "max_total_tokens": 2048, "max_running_requests": 8, "chunked_prefill_size": 64, "kv_canary_retire_max": 1_000_000,
    "kv_canary_sweep_interval": 50,
}  # fmt: skip
_WORLDS = {"pair", "tiers"}
_NAMES = [name for name in SITES if _WORLDS & set(SITES[name].worlds)]
_SEEN = [name for name in _NAMES if (name, _COVERAGE) not in BLIND]
"""Where a fault of all copies is found too."""
_FLYING = 8
_NEW_TOKENS = 24
_ENDS_WELL = (FinishReason.LENGTH, FinishReason.STOP)


class Load:
    """Prompts of one pair of engines, and what came of them."""

    def __init__(self, toy: Path, home: Path, seed: int) -> None:
        self.world = Pair(toy, home, "heal", _COVERAGE, **_SETTINGS, **_tiers(home))
        self.tokens = self.answers = self.wrong = self.failed = self.streamed = 0
        self.seconds = self.cpu_s = 0.0
        self._rng = Rng(seed)
        self._shared = [self._text(self._rng.choice((9, 40, 90, 150))) for _ in range(24)]
        self._flying: dict[str, tuple[list[int], bool]] = {}
        self.accounts: list[Account] = []
        self.mistakes: list[str] = []
        """Of each wrong answer, what is known of it."""
        self.places: dict[tuple[int, str, int, str], set[int]] = {}
        """By engine, part, slot and owner what was found wrong, and the steps in which it was."""
        for engine, driver in enumerate((self.world.pair.prefill, self.world.pair.decode)):
            assert driver.engine.canary is not None
            driver.engine.canary.listeners.append(partial(self._hear, engine))

    def run(self, seconds: float) -> None:
        """Answer prompts for so long."""
        begun, cpu_s = time.monotonic(), time.thread_time()
        while time.monotonic() - begun < seconds:
            while len(self._flying) < _FLYING:
                self._ask()
            self._turn()
        self.seconds += time.monotonic() - begun
        self.cpu_s += time.thread_time() - cpu_s

    def drain(self) -> None:
        """Answer what is under way. Raises AssertionError: some request has no end."""
        for _ in range(20_000):
            if not self._flying and self.world.idle:
                return
            self._turn()
        raise AssertionError(f"lost: {len(self._flying)} requests have no end, {self.world.idle=}")

    def check(self) -> None:
        """Nothing is held and no page is missing. Raises AssertionError, InvariantError."""
        world = self.world
        for driver in (world.pair.decode, world.pair.prefill):
            cache = driver.built.cache
            for _ in range(2_000):
                world.turn()
                if not cache.poll().in_flight:
                    break
                pause(0.001)
            driver.engine.scheduler.sanity_check()
            assert cache.stats().held_pages == 0, f"leaked: {cache.stats().held_pages} pages are held"
            cache.reset()
            for (tier, part), ledger in cache.ledgers.items():
                counts = ledger.counts()
                whole = counts.free + counts.retired
                assert whole == ledger.page_count - 1, f"leaked: {tier.name} {part.name} has {counts}"
            assert Tier.DEVICE in {tier for tier, _ in cache.ledgers}

    def _hear(self, engine: int, finding: object) -> None:
        if isinstance(finding, Violation):
            place = engine, finding.part.name, finding.slot, finding.owner
            self.places.setdefault(place, set()).add(finding.step)

    def _ask(self) -> None:
        rng = self._rng
        prompt = [*rng.choice(self._shared), *self._text(rng.randrange(1, 9))]
        stream = rng.random() < 0.5
        self._flying[self.world.ask(prompt, _NEW_TOKENS, stream=stream)] = prompt, stream

    def _turn(self) -> None:
        world = self.world
        world.turn()
        for account in self.accounts:
            account.check_all()
        for rid in [rid for rid in self._flying if world.finish(rid) is not None]:
            prompt, stream = self._flying.pop(rid)
            got, right = world.tokens(rid), toy_continue(world.spec, prompt, _NEW_TOKENS)
            if world.finish(rid) in _ENDS_WELL:
                self.answers += 1
                self.tokens += len(got)
                self.wrong += got != right
                if got != right:
                    at = next((i for i, (one, other) in enumerate(zip(got, right, strict=False)) if one != other), -1)
                    usage = world.pair.deltas[rid][-1].usage
                    self.mistakes.append(
                        f"{time.monotonic():.1f}: {rid} ({stream=}, prompt of {len(prompt)}): token {at} of {len(got)}"
                        f" is the first wrong one, {got[at : at + 2]} for {right[at : at + 2]}; {usage}"
                    )
            else:
                self.failed += 1
                self.streamed += stream and got != right[: len(got)]
            del world.pair.deltas[rid]

    def _text(self, count: int) -> list[int]:
        return [self._rng.randrange(5, 512) for _ in range(count)]


class Strikes:
    """A thread that causes a fault each second while it is let."""

    def __init__(self, load: Load, sites: Sequence[str], seed: int, every_s: float, copies: int) -> None:
        """`copies`: as Targets has it."""
        self.count = 0
        self.cpu_s = 0.0
        """What its thread took: with one lock of the interpreter, the engines stand still meanwhile."""
        self.by_site = dict.fromkeys(sites, 0)
        self.latest: deque[str] = deque(maxlen=12)
        self._load, self._rng, self._every_s, self._copies = load, Rng(seed), every_s, copies
        self._act: Act | None = None
        self._may, self._ends = threading.Event(), threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._guarded)

    def __enter__(self) -> Strikes:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._may.set()
        self._ends.set()
        self._thread.join()
        self.pause()
        if self._error is not None:
            raise self._error

    def go(self) -> None:
        """Let faults come from now on."""
        self._may.set()

    def pause(self) -> None:
        """They may not, and what one of them does to copies ends."""
        self._may.clear()
        act, self._act = self._act, None
        if act is not None:
            act.end()

    def _guarded(self) -> None:
        try:
            self._run()
        except BaseException as error:  # told by the thread that waits for this one
            self._error = error

    def _run(self) -> None:
        while not self._ends.wait(self._every_s):
            self._may.wait()
            if self._ends.is_set():
                return
            name = self._rng.choice(tuple(self.by_site))
            act = SITES[name].draw(replace(self._load.world.targets(), copies=self._copies), self._rng)
            if act is None:
                continue
            earlier, self._act = self._act, act
            if earlier is not None:
                earlier.end()
            begun = time.monotonic()
            act.strike()
            self.latest.append(f"{begun:.1f} to {time.monotonic():.1f} {name}")
            self.count, self.cpu_s = self.count + 1, time.thread_time()
            self.by_site[name] += 1


def soak(
    home: Path, minutes: float, seed: int, turn_s: float, every_s: float, say: Callable[[str], None], *,
    sites: Sequence[str] = (), copies: int = 1, account: bool = False,
) -> float:  # fmt: skip
    """The struck pair's share of the other's tokens a second; no sites: all of which nothing wrong may come. Raises
    AssertionError, InvariantError: see `Load`."""
    sites = sites or (_NAMES if copies else _SEEN)
    toy = make_canary_toy(home / "toy", "both")
    calm = Load(toy, home / "calm", seed)
    calm.run(1.0)  # its shared memory is there before the other's
    struck = Load(toy, home / "struck", seed)
    struck.run(1.0)
    for load in (calm, struck):
        load.tokens, load.seconds, load.cpu_s = 0, 0.0, 0.0
    until, told, shown = time.monotonic() + 60 * minutes, time.monotonic(), 0
    with ExitStack() as stack:
        strikes = stack.enter_context(Strikes(struck, sites, seed, every_s, copies))
        if account:
            drivers = struck.world.pair.prefill, struck.world.pair.decode
            struck.accounts = stack.enter_context(accounts_of(drivers, Counter()))
        while time.monotonic() < until:
            calm.run(turn_s)
            strikes.go()
            struck.run(turn_s)
            strikes.pause()
            for mistake in struck.mistakes[shown:]:
                say(f"WRONG at {mistake}; faults: {'; '.join(strikes.latest)}")
            shown = len(struck.mistakes)
            if time.monotonic() - told >= 30:
                told = time.monotonic()
                say(_line(calm, struck, strikes))
    for load in (calm, struck):
        load.drain()
        load.check()
    say(_line(calm, struck, strikes))
    say(", ".join(f"{name} {count}" for name, count in strikes.by_site.items()))
    for load in (calm, struck):
        load.world.close()
    assert not calm.wrong + calm.failed + calm.world.told, "something was found where no fault was caused"
    assert not struck.wrong, f"{struck.wrong} wrong answers"
    return struck.tokens / struck.seconds / (calm.tokens / calm.seconds)


def _line(calm: Load, struck: Load, strikes: Strikes) -> str:
    rates = [load.tokens / max(load.seconds, 1e-9) for load in (calm, struck)]
    by_cpu = [load.tokens / max(load.cpu_s, 1e-9) for load in (calm, struck)]
    most = max(map(len, struck.places.values()), default=0)
    return (
        f"{calm.seconds + struck.seconds:.0f} s: {rates[0]:.0f} tokens/s without faults, {rates[1]:.0f} with"
        f" ({rates[1] / max(rates[0], 1e-9):.0%}; by CPU time of the engines' thread"
        f" {by_cpu[1] / max(by_cpu[0], 1e-9):.0%}; the thread that strikes took {strikes.cpu_s / struck.seconds:.0%} of"
        f" the time); {strikes.count} faults, {struck.world.told} violations"
        f" of {len(struck.places)} slots and owners, each in {most} steps at most;"
        f" {struck.answers} answers, {struck.wrong} wrong, {struck.failed} ended with an error"
        f" ({struck.streamed} after wrong tokens of a stream)"
    )


def _tiers(home: Path) -> dict[str, dict[str, object]]:
    """Each engine has a folder of its own."""
    tiers: dict[str, object] = {
        "enable_hierarchical_cache": True, "hicache_ratio": 2.0, "hicache_write_policy": "write_through",
        "hicache_storage_backend": "file", "hicache_storage_prefetch_policy": "wait_complete",
    }  # fmt: skip
    return {f"{role}_settings": {**tiers, "hicache_storage_dir": str(home / role)} for role in ("prefill", "decode")}


def main() -> int:
    """1: something is wrong, lost or leaked, or too little was answered."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--every-s", type=float, default=1.0, help="from fault to fault, while they come")
    parser.add_argument("--turn-s", type=float, default=5.0, help="how long each pair has the machine at a time")
    parser.add_argument("--share", type=float, default=0.8)
    parser.add_argument("--site", choices=tuple(_NAMES), action="append", help="these alone")
    parser.add_argument("--copies", type=int, default=1, help="that a fault of a mover spoils; 0 = all until the next")
    parser.add_argument("--account", action="store_true", help="hold horizons against account.py; slower")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as home:
        share = soak(
            Path(home), options.minutes, options.seed, options.turn_s, options.every_s,
            lambda line: print(line, flush=True), sites=options.site or (), copies=options.copies,
            account=options.account,
        )  # fmt: skip
    print(f"share {share:.2f}, expected {options.share}: {'ok' if share >= options.share else 'TOO LITTLE'}")
    return int(share < options.share)


if __name__ == "__main__":
    sys.exit(main())
