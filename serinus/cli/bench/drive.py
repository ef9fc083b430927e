"""Sends the prompts at their times, never more at once than allowed, and collects what came back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

from serinus.cli.bench.transport import RequestTrace, Target, trace_request
from serinus.core.clock import Clock
from serinus.core.rng import Rng


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How fast, how many at once."""

    request_rate: float = inf
    """Requests per second, with exponential gaps (a Poisson process); inf = all at once."""
    max_concurrency: int | None = None
    """Requests in flight at most."""
    seed: int = 42
    """Seed of the random gaps."""

    def starts(self, count: int) -> list[float]:
        """When each request is due, in seconds from the start."""
        if self.request_rate == inf:
            return [0.0] * count
        rng = Rng(self.seed)
        due, times = 0.0, []
        for _ in range(count):
            times.append(due)
            due += rng.expovariate(self.request_rate)
        return times


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRun:
    """The result of one benchmark: a trace for each request."""

    traces: tuple[RequestTrace, ...]
    """In the order of the prompts."""
    seconds: float
    """From the first request to the end of the last answer."""


async def drive(
    target: Target,
    path: str,
    bodies: Sequence[bytes],
    load: Load,
    clock: Clock,
    finished: Callable[[int], None],
) -> BenchRun:
    """Send every body to `path` as `load` says. `finished(i)` is called when answer i is there."""
    gate = asyncio.Semaphore(load.max_concurrency or len(bodies))
    begin = clock.now()

    async def one(index: int) -> RequestTrace:
        async with gate:
            result = await trace_request(target, "POST", path, bodies[index], clock)
        finished(index)
        return result

    tasks: list[asyncio.Task[RequestTrace]] = []
    for index, due in enumerate(load.starts(len(bodies))):
        wait = begin + due - clock.now()
        if wait > 0:
            await asyncio.sleep(wait)
        tasks.append(asyncio.create_task(one(index)))
    traces = tuple(await asyncio.gather(*tasks))
    return BenchRun(traces=traces, seconds=max(result.ended for result in traces) - begin)
