"""What an open dashboard costs: CPU time of what is done for it beside the engine's, and throughput watched and not.

    python benchmarks/dashboard.py [--rounds 24] [--seconds 1.0] [--fast]

Claim: at most 0.5 % of the engine's CPU time while one page or four watch, and nothing while none does. On the demo's
model, whose steps of few milliseconds are the worst case; 16 requests decode without a pause.

`step_thread_percent`: in one process, the CPU time that the step thread spends in the Watcher (notes of each step and
answer, a frame each half second), of the CPU time of the whole engine; `unwatched_calls`: how often it is called in the
windows without a page. `front_percent`: a server of two processes; what its front spends more in windows with so many
pages open than in those on both sides with none (what it spends for each token counted out), of its engine's CPU time.
The sum is held against the goal. `loss_percent`: throughput in the windows of the step thread, a check alone: its
spread is wider than the goal. `frame_100k_us` is the time of a frame over 100,000 pages, `event_100k_us` what the front
adds to it. Floor: one copy of the bytes of these pages. One JSON line at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
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
from serinus.testing.servers import Server

CLOCK = WallClock()
STREAMS, PROMPT, PAGES = 16, 800, 100_000
MODEL = str(Path(serinus.__file__).parent / "cli" / "demo" / "model")
HEARD = ("turn", "frame", "stepped", "answered")
"""All that an engine calls of its Watcher."""


class Decoding:
    """An engine that always has as many requests, each as long as the context allows."""

    def __init__(self) -> None:
        names = {
            "model_path": MODEL, "decode_log_interval": 0, "max_total_tokens": 40_000, "page_size": 8,
            "max_running_requests": STREAMS,
        }  # fmt: skip
        self.driver = EngineDriver(build_engine(from_names(ServeConfig, names), CLOCK))
        self.calls, self.watcher_s = 0, 0.0
        self._count = 0
        idle = self._timed(lambda: None)
        for _ in range(2000):
            idle()
        self._clock_s = self.watcher_s / self.calls
        watcher = self.driver.engine.watcher
        for name in HEARD:
            setattr(watcher, name, self._timed(getattr(watcher, name)))

    def _timed(self, job: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*words: Any) -> Any:
            began = time.thread_time()
            try:
                return job(*words)
            finally:
                self.watcher_s += time.thread_time() - began
                self.calls += 1

        return timed

    def fill(self) -> None:
        """Bring the requests up to their number."""
        scheduler = self.driver.engine.scheduler
        for _ in range(STREAMS - scheduler.running_count - scheduler.waiting_count):
            self._count += 1
            self.driver.add(f"r{self._count}", [1 + self._count % 200, *range(5, 60)], 800)

    def window(self, seconds: float, *, watched: bool) -> tuple[float, int, float]:
        """Tokens a second; calls of the Watcher; its share of the CPU time of this process."""
        engine = self.driver.engine
        if watched:  # the first frame begins to listen, as the first of many that a page asks for
            engine.watcher.frame(CLOCK.now())
        self.calls, self.watcher_s, process_s = 0, 0.0, time.process_time()
        begin, before, asked = CLOCK.now(), engine.scheduler.totals.generation_tokens, 0.0
        while (now := CLOCK.now()) - begin < seconds:
            self.fill()
            if watched and now - asked >= PERIOD_S:
                engine.watcher.frame(asked := now)
            self.driver.turn()
        rate = (engine.scheduler.totals.generation_tokens - before) / (CLOCK.now() - begin)
        watcher_s = self.watcher_s - self.calls * self._clock_s  # a look at this clock costs as much as a note
        found = rate, self.calls, watcher_s / (time.process_time() - process_s)
        if watched:  # the page is closed
            engine.watcher.turn(CLOCK.now() + 2 * WATCHED_S)
        return found


def cpu_s(pid: int) -> float:
    """CPU seconds of all threads of a process, those that have ended too: clock_getcpuclockid(3) of Linux."""
    return time.clock_gettime(~pid << 3 | 2)


@contextlib.contextmanager
def pages(url: str, count: int) -> Iterator[None]:
    """So many open pages that read what comes."""

    def read(came: threading.Event) -> None:
        with contextlib.suppress(httpx.HTTPError), client.stream("GET", f"{url}/dashboard/events") as answer:
            for _ in answer.iter_raw():
                came.set()
                if closed.is_set():
                    return

    closed = threading.Event()
    with httpx.Client(timeout=60) as client:
        events = [threading.Event() for _ in range(count)]
        readers = [threading.Thread(target=read, args=(came,)) for came in events]
        for each in readers:
            each.start()
        try:
            assert all(came.wait(60) for came in events), "benchmarks: a page has no news"
            yield
        finally:
            closed.set()
            for each in readers:
                each.join()


class Asked:
    """A server whose engine always has as many prompts to compute, with one token each: most of what its front does is
    then for the pages."""

    def __init__(self, url: str) -> None:
        self.url, self.answers = url, 0
        self._closed = threading.Event()
        self._askers = [threading.Thread(target=self._ask, args=(stream,)) for stream in range(STREAMS)]

    def _ask(self, stream: int) -> None:
        with httpx.Client(timeout=120) as client:
            for number in itertools.count():
                if self._closed.is_set():
                    return
                prompt = [1 + stream, 1 + number % 200, 1 + number // 200, *(5 + at % 200 for at in range(PROMPT))]
                body = {"input_ids": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": 1}}
                assert client.post(f"{self.url}/generate", json=body).status_code == 200
                self.answers += 1

    def __enter__(self) -> Asked:
        for each in self._askers:
            each.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._closed.set()
        for each in self._askers:
            each.join()


def front_percents(rounds: int, seconds: float) -> dict[int, list[float]]:
    """What the front spends for one page and for four, of the engine's CPU time: a figure a round."""
    words = (
        "--max-total-tokens", "40000", "--page-size", "8", "--max-running-requests", str(STREAMS), "--threads", "1",
        "--skip-tokenizer-init", "--decode-log-interval", "0",
    )  # fmt: skip
    found: dict[int, list[float]] = {1: [], 4: []}
    with Server("serve", MODEL, *words) as server, Asked(server.url) as asked:
        engine = int(httpx.get(f"{server.url}/server_info").json()["info"]["pid"])

        def window(count: int) -> tuple[float, float, int]:
            """CPU seconds of front and engine, answers."""
            with pages(server.url, count):
                answers, front_s, engine_s = asked.answers, cpu_s(server.process.pid), cpu_s(engine)
                threading.Event().wait(seconds)
                front_s, engine_s = cpu_s(server.process.pid) - front_s, cpu_s(engine) - engine_s
                return front_s, engine_s, asked.answers - answers

        window(4)
        turns = [(count, window(count)) for _ in range(rounds) for count in (0, 1, 0, 4)]
        turns.append((0, window(0)))
        for (_, before), (count, watched), (_, after) in zip(turns[::2], turns[1::2], turns[2::2], strict=False):
            an_answer = (before[0] + after[0]) / (before[2] + after[2])
            found[count].append(100 * (watched[0] - an_answer * watched[2]) / watched[1])
    return found


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
    turns = [decoding.window(arguments.seconds, watched=bool(number % 2)) for number in range(2 * rounds + 1)]
    losses = [1 - 2 * turns[i][0] / (turns[i - 1][0] + turns[i + 1][0]) for i in range(1, len(turns), 2)]
    step_thread = 100 * statistics.median(share for _, _, share in turns[1::2])
    front = {count: statistics.median(each) for count, each in front_percents(rounds, arguments.seconds).items()}
    frame, event, floor = frame_us()
    emit(
        "dashboard", rounds=rounds, step_thread_percent=round(step_thread, 3),
        front_percent={f"pages_{count}": round(each, 3) for count, each in front.items()},
        percent={f"pages_{count}": round(step_thread + each, 3) for count, each in front.items()}, goal_percent=0.5,
        unwatched_calls=sum(calls for _, calls, _ in turns[::2]),
        tokens_per_s=round(statistics.median(rate for rate, _, _ in turns[::2])),
        loss_percent=round(100 * statistics.median(losses), 2),
        loss_quartiles=[round(100 * each, 2) for each in statistics.quantiles(losses, n=4)],
        frame_100k_us=round(frame, 1), event_100k_us=round(event, 1), floor_100k_us=round(floor, 1),
    )  # fmt: skip


if __name__ == "__main__":
    main()
