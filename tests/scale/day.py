"""A day's traffic against the planner: engines take 90 s to start, drain before they leave, and cost while they live.

    python -m tests.scale.day [--seeds N]

Requests come by a curve with a night, two humps and sudden waves; in the morning their prompts are long, in the evening
their answers. A request takes a slot of a decode engine, waits for prefill, and decodes. Prints one JSON line a seed.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import random
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

from serinus.scale import Bounds, Decision, Memory, RoleSeen, ScalePace, Seen, plan

DAY_S = 86_400
LOOK_S = 5
START_S = 90
SLOTS = 32
"""Requests that a decode engine has room for."""
PREFILL_TOKENS_S = 8000.0
DECODE_TOKENS_S = 25.0
"""Of one request at a time."""
BOUNDS = Bounds(low=1, high=24)


@dataclass
class Engine:
    """One engine: when it is ready, what it holds."""

    ready_s: float
    running: int = 0
    draining: bool = False


@dataclass
class Figures:
    """What a day came to."""

    seed: int
    requests: int = 0
    answered: int = 0
    engine_hours: float = 0.0
    ideal_hours: float = 0.0
    peak_hours: float = 0.0
    """What as many engines as the busiest moment needs would have cost all day."""
    wait_p50_s: float = 0.0
    wait_p99_s: float = 0.0
    queue_max: int = 0
    changes: int = 0
    regrets: int = 0
    """Engines that were taken away and wanted again within ten minutes, in turns of this kind."""
    most_prefill: int = 0
    most_decode: int = 0


@dataclass
class Role:
    """The engines of one role, and what they cost."""

    engines: list[Engine] = field(default_factory=lambda: [Engine(ready_s=0.0)])
    last: tuple[float, int] = (-math.inf, 0)

    def staying(self) -> list[Engine]:
        """Those that are not being drained."""
        return [engine for engine in self.engines if not engine.draining]

    def ready(self, now: float) -> list[Engine]:
        """Those that take requests."""
        return [engine for engine in self.staying() if engine.ready_s <= now]

    def become(self, count: int, now: float, figures: Figures) -> None:
        """Add engines that will be ready later, or drain the least loaded."""
        change = count - len(self.staying())
        if not change:
            return
        figures.changes += 1
        if change > 0 > self.last[1] and now - self.last[0] < 600:
            figures.regrets += 1
        self.last = (now, change)
        self.engines += [Engine(ready_s=now + START_S) for _ in range(change)]
        for engine in sorted(self.staying(), key=lambda each: (each.ready_s <= now, each.running))[: max(0, -change)]:
            engine.draining = True


def rate(now: float, waves: list[tuple[float, float]]) -> float:
    """Requests a second: little at night, humps at 11 and 20 o'clock, waves of five minutes."""
    hour = now / 3600
    calm = 0.15 + 2.0 * math.exp(-((hour - 11) ** 2) / 8) + 2.6 * math.exp(-((hour - 20) ** 2) / 5)
    return calm * next((factor for begin, factor in waves if begin <= now < begin + 300), 1.0)


def lengths(now: float, rng: random.Random) -> tuple[float, float]:
    """Tokens of prompt and answer: documents in the morning, talk in the evening."""
    morning = 1 / (1 + math.exp((now / 3600 - 15) / 1.2))
    prompt = (400 + 3200 * morning) * rng.expovariate(1.0)
    answer = (150 + 450 * (1 - morning)) * rng.expovariate(1.0)
    return 16 + prompt, 8 + answer


def poisson(mean: float, rng: random.Random) -> int:
    """A number of arrivals."""
    limit, product, count = math.exp(-mean), rng.random(), 0
    while product > limit:
        product *= rng.random()
        count += 1
    return count


@dataclass
class Day:
    """The state of the simulation."""

    rng: random.Random
    figures: Figures
    prefill: Role = field(default_factory=Role)
    decode: Role = field(default_factory=Role)
    queue: deque[tuple[float, float, float]] = field(default_factory=deque)
    """(came at, prompt, answer): no decode engine has room."""
    prompts: deque[list[float]] = field(default_factory=deque)
    """[tokens left, answer, index of the owner, came at], of those that have a slot."""
    owners: dict[int, Engine] = field(default_factory=dict)
    ends: list[tuple[float, int]] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    busy: float = 0.0
    count: int = 0

    def second(self, now: float, waves: list[tuple[float, float]]) -> tuple[float, float]:
        """One second passes. The work that came: prompt tokens, and slot-seconds of decoding."""
        came = [0.0, 0.0]
        for _ in range(poisson(rate(now, waves), self.rng)):
            prompt, answer = lengths(now, self.rng)
            came[0] += prompt
            came[1] += answer / DECODE_TOKENS_S
            self.queue.append((now, prompt, answer))
            self.figures.requests += 1
        while self.ends and self.ends[0][0] <= now:
            self.owners.pop(heapq.heappop(self.ends)[1]).running -= 1
            self.figures.answered += 1
        takers = self.decode.ready(now)
        while self.queue and takers:
            owner = min(takers, key=lambda each: each.running)
            if owner.running >= SLOTS:
                break
            at, prompt, answer = self.queue.popleft()
            owner.running += 1
            self.count += 1
            self.owners[self.count] = owner
            self.prompts.append([prompt, answer, self.count, at])
        self._prefill(now)
        for role in (self.prefill, self.decode):
            role.engines = [each for each in role.engines if not each.draining or each.running]
            self.figures.engine_hours += len(role.engines) / 3600
        return came[0], came[1]

    def _prefill(self, now: float) -> None:
        engines = len(self.prefill.ready(now))
        power = engines * PREFILL_TOKENS_S
        left = power
        while self.prompts and left > 0:
            first = self.prompts[0]
            done = min(left, first[0])
            first[0] -= done
            left -= done
            if first[0] <= 0:
                self.prompts.popleft()
                self.waits.append(now - first[3])
                heapq.heappush(self.ends, (now + first[1] / DECODE_TOKENS_S, int(first[2])))
        self.busy += 1 - left / power if power else 0.0

    def seen(self, now: float) -> Seen:
        """What a router would tell."""
        ready = self.decode.ready(now)
        usage = sum(each.running for each in ready) / (SLOTS * len(ready)) if ready else 0.0
        busy, self.busy = self.busy / LOOK_S, 0.0
        queue = max(0, len(self.prompts) - len(self.prefill.ready(now)))
        return Seen(
            at_s=now,
            prefill=RoleSeen(
                wanted=len(self.prefill.staying()), ready=len(self.prefill.ready(now)), queue_reqs=queue, busy=busy
            ),
            decode=RoleSeen(
                wanted=len(self.decode.staying()),
                ready=len(ready),
                running_reqs=sum(each.running for each in ready),
                queue_reqs=len(self.queue),
                usage=usage,
            ),
        )


def run_day(
    seed: int, *, pace: ScalePace | None = None, seconds: int = DAY_S, planner: Callable[..., Decision] = plan
) -> Figures:
    """One day from a seed."""
    rng = random.Random(seed)
    waves = sorted((rng.uniform(0, seconds), rng.uniform(1.5, 3.0)) for _ in range(6))
    figures = Figures(seed=seed)
    day, memory = Day(rng=rng, figures=figures), Memory()
    minute, peak = [0.0, 0.0], [1, 1]
    for now in range(seconds + 1200):
        came = day.second(float(now), waves if now < seconds else [(0.0, 0.0), (now, 0.0)])
        minute = [minute[0] + came[0], minute[1] + came[1]]
        figures.queue_max = max(figures.queue_max, len(day.queue) + len(day.prompts))
        if now % 60 == 59:
            needed = [max(1, math.ceil(minute[0] / 60 / PREFILL_TOKENS_S)), max(1, math.ceil(minute[1] / 60 / SLOTS))]
            figures.ideal_hours += sum(needed) / 60
            peak = [max(peak[0], needed[0]), max(peak[1], needed[1])]
            minute = [0.0, 0.0]
        if now % LOOK_S == 0:
            made = planner(day.seen(float(now)), memory, prefill=BOUNDS, decode=BOUNDS, pace=pace or ScalePace())
            memory = made.memory
            day.prefill.become(made.prefill, float(now), figures)
            day.decode.become(made.decode, float(now), figures)
            figures.most_prefill = max(figures.most_prefill, made.prefill)
            figures.most_decode = max(figures.most_decode, made.decode)
    figures.peak_hours = sum(peak) * (seconds + 1200) / 3600
    waits = sorted(day.waits) or [0.0]
    figures.wait_p50_s, figures.wait_p99_s = waits[len(waits) // 2], waits[len(waits) * 99 // 100]
    return figures


def main(words: list[str]) -> int:
    """Print the figures of some days."""
    parser = argparse.ArgumentParser(prog="python -m tests.scale.day", description="Days of traffic, planned for.")
    parser.add_argument("--seeds", type=int, default=5, help="days (default: 5)")
    for seed in range(parser.parse_args(words).seeds):
        figures = asdict(run_day(seed))
        print(json.dumps({k: round(v, 2) if isinstance(v, float) else v for k, v in figures.items()}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
