"""What an open dashboard costs an engine: throughput watched and not, in turns; and the time of one frame.

    python benchmarks/dashboard.py [--rounds 24] [--seconds 1.0] [--fast]

Claim: at most 0.5 % of the throughput while watched, and nothing while not. 16 requests decode without a pause on the
demo's model, whose steps of few milliseconds are the worst case; each half second of a watched window asks for a
frame, as a front does. Contexts grow, and steps with them: a watched window is held against those on both sides.
`frame_100k_us` is the time of a frame over 100,000 pages, `event_100k_us` what the front adds to it, in its own
process. Floor: one copy of the bytes of these pages. One JSON line at the end.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import numpy as np
from report import best_ms, emit

import serinus
from serinus.cache import CacheGeometry, PartGeometry, PrefixCache
from serinus.core.clock import WallClock
from serinus.core.config import ServeConfig, from_names
from serinus.core.metrics import Metrics
from serinus.core.parts import Part
from serinus.engine.build import build_engine
from serinus.engine.inspect import EngineFacts
from serinus.engine.roles import NoHandoffs
from serinus.engine.step_metrics import StepMetrics
from serinus.engine.watcher import WATCHED_S, Watcher
from serinus.front.dashboard import PERIOD_S
from serinus.front.frames import FrameEncoder
from serinus.sched import SchedSettings, Scheduler
from serinus.selftest.driver import EngineDriver

CLOCK = WallClock()
STREAMS, PAGES = 16, 100_000


class Decoding:
    """An engine that always has as many requests, each as long as the context allows."""

    def __init__(self) -> None:
        names = {
            "model_path": str(Path(serinus.__file__).parent / "cli" / "demo" / "model"), "decode_log_interval": 0,
            "max_total_tokens": 40_000, "page_size": 8, "max_running_requests": STREAMS,
        }  # fmt: skip
        self.driver = EngineDriver(build_engine(from_names(ServeConfig, names), CLOCK))
        self._count = 0

    def fill(self) -> None:
        """Bring the requests up to their number."""
        scheduler = self.driver.engine.scheduler
        for _ in range(STREAMS - scheduler.running_count - scheduler.waiting_count):
            self._count += 1
            self.driver.add(f"r{self._count}", [1 + self._count % 200, *range(5, 60)], 800)

    def window(self, seconds: float, *, watched: bool) -> float:
        """Tokens a second."""
        engine = self.driver.engine
        begin, before, asked = CLOCK.now(), engine.scheduler.totals.generation_tokens, 0.0
        while (now := CLOCK.now()) - begin < seconds:
            self.fill()
            if watched and now - asked >= PERIOD_S:
                engine.watcher.frame(asked := now)
            self.driver.turn()
        rate = (engine.scheduler.totals.generation_tokens - before) / (CLOCK.now() - begin)
        if watched:  # the page is closed
            engine.watcher.turn(CLOCK.now() + 2 * WATCHED_S)
        return rate


def frame_us() -> tuple[float, float, float]:
    """Of one frame over many pages, of its event where a hundredth changed, and of the copy alone."""
    cache = PrefixCache(CacheGeometry(page_size=8, parts={Part.FULL: PartGeometry(pages=PAGES + 1)}))
    cache.keep_times(CLOCK)
    settings = SchedSettings(page_size=8, context_length=64, rows=5, vocab_size=99, max_running_requests=4)
    scheduler = Scheduler(settings, cache)
    watcher = Watcher(
        scheduler=scheduler, cache=cache, handoffs=NoHandoffs(scheduler), canary=None, facts=EngineFacts(),
        metrics=StepMetrics(Metrics("e", "unified"), 0.0, every_steps=0),
    )  # fmt: skip
    pool = cache.pools.device[Part.FULL]
    encoder, turn = FrameEncoder({}), 0
    frames = []
    for turn in range(2):
        pool.sweep.seen_P[turn * 100 : PAGES : 100] = CLOCK.now() + 10 * turn
        frames.append(watcher.frame(CLOCK.now()))

    def event() -> None:
        nonlocal turn
        turn += 1
        encoder.take(frames[turn % 2], 0.0, 8)

    copied = np.zeros(5 * (PAGES + 1), np.uint8)
    costs = (best_ms(lambda: watcher.frame(CLOCK.now()), 50), best_ms(event, 50), best_ms(copied.tobytes, 50))
    return costs[0] * 1e3, costs[1] * 1e3, costs[2] * 1e3


def main() -> None:
    """Measure, print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--fast", action="store_true", help="two rounds")
    arguments = parser.parse_args()
    decoding = Decoding()
    decoding.window(arguments.seconds, watched=True)
    rounds = 2 if arguments.fast else arguments.rounds
    rates = [decoding.window(arguments.seconds, watched=bool(number % 2)) for number in range(2 * rounds + 1)]
    losses = [1 - 2 * rates[i] / (rates[i - 1] + rates[i + 1]) for i in range(1, len(rates), 2)]
    frame, event, floor = frame_us()
    emit(
        "dashboard", tokens_per_s=round(statistics.median(rates[::2])), rounds=len(losses),
        loss_percent=round(100 * statistics.median(losses), 2),
        loss_quartiles=[round(100 * each, 2) for each in statistics.quantiles(losses, n=4)] if len(losses) > 1 else [],
        goal_percent=0.5, frame_100k_us=round(frame, 1), event_100k_us=round(event, 1), floor_100k_us=round(floor, 1),
        frame_share_percent=round(1e-6 * frame / PERIOD_S * 100, 3),
    )  # fmt: skip


if __name__ == "__main__":
    main()
