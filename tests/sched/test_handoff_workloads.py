"""The choice of a decode engine beside the two fixed ones, over workloads in which now the one, now the other wins.

A prefill engine, a decode engine and the way between them, in virtual time: prompts are computed one by one on each,
travel one by one, and the decode engine knows what the product tells it: its own queue, what it has sent, and the
prefill engine's queue as the last KEEPALIVE said it.
"""

from __future__ import annotations

import heapq
import itertools
import math
from dataclasses import dataclass

from serinus.core.config import UpConfig
from serinus.core.rng import Rng
from serinus.sched import PrefillPace
from serinus.sched.handoff_choice import HandoffChoice

KEEPALIVE_S = 1.0
PROMPTS = 400
LENGTHS = (200, 500, 1000, 2000, 4000)
MEAN = sum(LENGTHS) / len(LENGTHS)
HERE_S = 0.0005
"""Of a prompt token at the decode engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Prompts that come by chance, `burst` at a time."""

    speed: float
    """Of the prefill engine, beside the decode engine."""
    way_s: float
    """Of a token on its way."""
    load: float
    """Seconds of our prompts that come in a second, as the prefill engine would compute them."""
    others: float
    """The same, from other decode engines."""
    burst: int
    answer_s: float
    """Time that an answer streams for: its tokens wait while a prompt is computed beside it."""


def cost(work: Workload, choice: HandoffChoice | bool, seed: int = 0) -> float:
    """Mean seconds until the first token and, where a prompt is computed beside streams, of their waiting. `choice`: or
    what is always done (True = handed over)."""
    rng, there_s = Rng(seed), HERE_S / work.speed
    here_free = there_free = way_free = said_s = now = total = 0.0
    others_s = MEAN * there_s / work.others if work.others else math.inf
    events = [(0.0, "keepalive"), (_chance(rng, others_s), "other")]
    landings: list[tuple[float, int, float]] = []
    streams: list[float] = []
    for index in range(PROMPTS):
        now += 0.0 if index % work.burst else _chance(rng, work.burst * MEAN * there_s / work.load)
        while events[0][0] <= now:
            at, kind = heapq.heappop(events)
            if kind == "other":
                there_free = max(there_free, at) + rng.choice(LENGTHS) * there_s
            else:
                said_s = max(0.0, there_free - at)
            heapq.heappush(events, (at + (_chance(rng, others_s) if kind == "other" else KEEPALIVE_S), kind))
        while landings and landings[0][0] <= now:
            _, count, late_s = heapq.heappop(landings)
            if isinstance(choice, HandoffChoice):
                choice.landed(count, late_s)
        streams = [end for end in streams if end > now]
        tokens = rng.choice(LENGTHS)
        here = PrefillPace(queue_s=max(0.0, here_free - now), token_s=HERE_S)
        there = PrefillPace(queue_s=said_s, token_s=there_s)
        goes = choice if isinstance(choice, bool) else not choice.stays(tokens, here, there, streams=bool(streams))
        if goes:
            said_s += tokens * there_s
            done = there_free = max(there_free, now) + tokens * there_s
            first = way_free = max(way_free, done) + 0.003 + tokens * work.way_s
            heapq.heappush(landings, (first, tokens, first - done))
        else:
            first = here_free = max(here_free, now) + tokens * HERE_S
            total += tokens * HERE_S * bool(streams)
        streams.append(first + work.answer_s)
        total += first - now
    return total / PROMPTS


def _chance(rng: Rng, mean_s: float) -> float:
    return -math.log(1.0 - rng.random()) * mean_s


WORKLOADS = [
    Workload(speed=speed, way_s=way_s, load=load, others=others, burst=burst, answer_s=answer_s)
    for speed, way_s, load, others, burst, answer_s in itertools.product(
        (0.5, 1.0, 3.0), (0.00002, 0.0005), (0.1, 0.5, 0.9), (0.0, 0.5), (1, 8), (0.0, 2.0)
    )
]
GAIN = UpConfig().pd.local_gain


def test_the_choice_is_at_most_a_tenth_worse_than_the_better_fixed_one_and_mostly_better_than_both() -> None:
    better = 0
    for work in WORKLOADS[::3]:
        fixed = [cost(work, way) for way in (True, False)]
        chosen = cost(work, HandoffChoice(GAIN))
        assert chosen <= 1.1 * min(fixed), f"{work}: {chosen:.3f} s, expected about {min(fixed):.3f} of {fixed}"
        better += chosen < min(fixed)
    assert better > 0.8 * len(WORKLOADS[::3])


def test_either_fixed_choice_is_far_worse_somewhere() -> None:
    """Otherwise the choice would prove nothing."""
    costs = [[cost(work, way) for way in (True, False)] for work in WORKLOADS[::7]]
    assert max(there / here for there, here in costs) > 3
    assert max(here / there for there, here in costs) > 3
