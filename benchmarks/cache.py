"""What the cache costs: match, insert, lease, evict and sweep beside their goals and floors. One JSON line at the end.

    python benchmarks/cache.py [--fast]

Floor: what the same bytes cost in the cheapest form numpy or CPython has (a memcmp of the prompt, the copy of the new
ids, filling the sweep's arrays). One core; every figure is the median of several runs. Figures named `tiers` are those
of a cache with both parts and a host tier whose copies take no time: what the decisions cost. `growth` figures are the
ratio of two sizes: what must not grow stays near 1.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Collection, Sequence

import numpy as np

from serinus.cache import CacheGeometry, PartGeometry, PrefixCache
from serinus.core.moves import Move, MoveDone
from serinus.core.parts import PageSpan, Part

RNG = np.random.default_rng(7)


def tokens(count: int) -> np.ndarray:
    """`count` random ids."""
    return RNG.integers(0, 150_000, count, dtype=np.int32)


def device(page_count: int, page_size: int) -> PrefixCache:
    """A cache of one tier and one part."""
    return PrefixCache(CacheGeometry(page_size=page_size, parts={Part.FULL: PartGeometry(pages=page_count)}))


class NoMover:
    """Copies that are over as soon as they are asked for, and move nothing."""

    def __init__(self) -> None:
        self._ops: list[int] = []

    def submit(self, moves: Sequence[Move]) -> None:
        self._ops += sorted({move.op for move in moves})

    def poll(self) -> list[MoveDone]:
        done = [MoveDone(op=op, ok=True) for op in self._ops]
        self._ops = []
        return done

    def wait(self, ops: Collection[int]) -> list[MoveDone]:
        return self.poll()


WINDOW = 1024


def tiers(page_count: int, page_size: int, write_policy: str = "write_through", host: int = 2) -> PrefixCache:
    """A cache of two parts and two tiers, the host `host` times as large as the device."""
    windows = {Part.FULL: None, Part.SWA: WINDOW}
    parts = {
        part: PartGeometry(pages=page_count, host_pages=host * page_count, window=window)
        for part, window in windows.items()
    }
    geometry = CacheGeometry(page_size=page_size, parts=parts)
    return PrefixCache(geometry, mover=NoMover(), write_policy=write_policy)


def cost_us(work: Callable[[int], object], *, runs: int, ready: Callable[[int], object] | None = None) -> float:
    """Median microseconds of work(i) for i in range(runs); ready(i) runs before each, off the clock."""
    seconds = []
    for i in range(runs):
        if ready is not None:
            ready(i)
        begin = time.perf_counter()
        work(i)
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds) * 1e6


def joined(span: PageSpan, more: np.ndarray) -> PageSpan:
    """A row's pages, and more of the same part behind them."""
    return PageSpan(part=span.part, first=span.first, pages=np.concatenate((span.pages, more)))


def behind(span: PageSpan, low: int, high: int | None = None) -> PageSpan:
    """The pages [low, high) of a row."""
    at = None if high is None else high - span.first
    return PageSpan(part=span.part, first=low, pages=span.pages[low - span.first : at])


def publish(cache: PrefixCache, ids: np.ndarray, rid: str = "maker", chunk: int = 0) -> None:
    """Bring a whole sequence into the tree, in chunks if asked for."""
    size = cache.page_size
    match = cache.match_prefix("", ids, len(ids))
    count = (len(ids) - match.length) // size
    own = cache.allocate(rid, *[count] * len(match.spans))
    assert own is not None, "benchmark: the pool is too small"
    row = tuple(map(joined, match.spans, own))
    at, lease = match.length, match.lease
    while chunk and at < len(ids):
        end = min(len(ids), at + chunk)
        low, high = at // size, end // size
        given = tuple(behind(span, low, high) for span in row)
        cache.commit_row(cache.insert(lease, ids[at:end], given))
        at = end
    cache.finish(rid, lease, ids, row)


def long_context(runs: int, length: int = 131_072) -> dict[str, tuple[float, float, float]]:
    """Match 128k tokens over 256 nodes; insert an 8k chunk at that depth."""
    nodes, size, chunk = 256, 16, 8_192
    cache = device(1 + 4 * (length + runs * chunk) // size, size)
    ids = tokens(length + chunk)
    publish(cache, ids[:length], chunk=length // nodes)
    leases = []
    match_us = cost_us(
        lambda i: leases.append(cache.match_prefix("", ids[:length], length)), runs=runs,
        ready=lambda i: leases and cache.release(leases.pop().lease),
    )  # fmt: skip
    data = ids[:length].tobytes()
    spans = [bytes(data[i : i + len(data) // nodes]) for i in range(0, len(data), len(data) // nodes)]
    step = len(data) // nodes
    floor_match = cost_us(
        lambda i: all(ids[:length].tobytes().startswith(s, k * step) for k, s in enumerate(spans[:1]))
        and all(data.startswith(s, k * step) for k, s in enumerate(spans)), runs=runs,
    )  # fmt: skip
    cache.release(leases.pop().lease)
    held: list = []

    def row(first: int, pages: np.ndarray) -> tuple[PageSpan, ...]:
        return (PageSpan(part=Part.FULL, first=first, pages=pages),)

    def ready(i: int) -> None:
        if held:
            insertion, pages, fresh = held.pop()
            cache.commit_row(insertion)
            cache.finish("r", insertion.lease, np.concatenate((ids[:length], fresh)), row(0, pages))
        match = cache.match_prefix("", ids[:length], length)
        own = cache.allocate("r", chunk // size)
        assert own is not None, "benchmark: the pool is too small"
        held.append([match, np.concatenate((match.pages, own[0])), tokens(chunk)])

    def work(i: int) -> None:
        match, pages, fresh = held[-1]
        held[-1][0] = cache.insert(match.lease, fresh, row(length // size, pages[length // size :]))

    insert_us = cost_us(work, runs=runs, ready=ready)
    fresh = tokens(chunk)
    floor_insert = cost_us(lambda i: (fresh.tobytes(), np.arange(chunk // size).copy()), runs=runs)
    return {
        f"match_{length // 1024}k_256_nodes_us": (match_us, 300.0, floor_match),
        f"insert_8k_at_{length // 1024}k_us": (insert_us, 100.0, floor_insert),
    }


def shared_lease(runs: int) -> dict[str, tuple[float, float, float]]:
    """Lease and release under a prefix of 100 nodes that another lease keeps."""
    size = 16
    cache = device(1000, size)
    ids = tokens(100 * size)
    publish(cache, ids, chunk=size)
    busy = cache.match_prefix("", ids, len(ids))
    anchor = busy.lease.anchor

    def work(i: int) -> None:
        for _ in range(100):
            cache.release(cache.tree.lease(anchor))

    def floor(i: int) -> None:
        for _ in range(100):
            anchor.hit_count += 1

    return {"lease_release_100_nodes_us": (cost_us(work, runs=runs) / 100, 10.0, cost_us(floor, runs=runs) / 100)}


def evict_many_leaves(runs: int, leaves: int) -> dict[str, tuple[float, float, float]]:
    """Evict one page at `leaves` leaves: whole leaves, and one page at a time of long ones."""
    cache = device(leaves * 2, 16)
    for _ in range(leaves):
        publish(cache, tokens(16))
    whole = cost_us(lambda i: cache.evict(1), runs=runs)
    tail = device(leaves, 16)
    for _ in range(10):
        publish(tail, tokens(16 * (leaves // 12)))
    trim = cost_us(lambda i: tail.evict(1), runs=runs)
    row = np.zeros(1, np.int32)
    states = np.zeros(leaves, np.int64)
    floor = cost_us(lambda i: states.__setitem__(row, 0), runs=runs)
    return {f"evict_1_of_{leaves}_leaves_us": (whole, 20.0, floor), "evict_1_of_a_long_leaf_us": (trim, 20.0, floor)}


def sweep(runs: int) -> dict[str, tuple[float, float, float]]:
    """Walk a full pool of 1 M slots; million slots per second, more is better."""
    size, count = 16, 1_000_000
    cache = device(1 + count // size, size)
    for _ in range(count // 2048):
        publish(cache, tokens(2048))

    def work(i: int, unlocked: bool) -> None:
        cursor, seen = 0, 0
        while True:
            part = cache.walk(cursor, 65_536, unlocked_only=unlocked)
            seen += len(part.slots)
            cursor = part.cursor
            if not cursor:
                break
        assert seen == cache.tree.cached[Part.FULL] * size, f"benchmark: the sweep saw {seen} slots"

    slots = cache.tree.cached[Part.FULL] * size
    out = np.empty(65_536, np.int64)
    floor = cost_us(lambda i: [out.fill(i) for _ in range(3 * slots // 65_536)], runs=5)
    every = cost_us(lambda i: work(i, False), runs=5)
    loose = cost_us(lambda i: work(i, True), runs=5)
    return {
        "sweep_mslots_per_s": (slots / every, 50.0, slots / floor),
        "sweep_unlocked_mslots_per_s": (slots / loose, 50.0, slots / floor),
    }


def serve(cache: PrefixCache, i: int, ids: np.ndarray, times: dict[str, list[float]]) -> None:
    """One prompt as the scheduler does it, each step on the clock: poll, match, (evict), allocate, insert, finish."""
    now, size, rid = time.perf_counter, cache.page_size, str(i)
    t0 = now()
    cache.poll()
    t1 = now()
    match = cache.match_prefix("", ids, len(ids) - 1)
    t2 = now()
    spans, at = match.spans, match.length
    if match.load is not None:
        loaded = cache.load_back(rid, match.lease, match.load)
        if loaded is not None:
            times["load"].append(now() - t2)
            at = loaded.length
            spans = (joined(spans[0], loaded.pages), *loaded.spans[1:])
    count = -(-len(ids) // size) - len(spans[0].pages)
    short = count - cache.free()
    if short > 0:
        t3 = now()
        cache.evict(short)
        times["evict"].append(now() - t3)
    t3 = now()
    own = cache.allocate(rid, *[count] * len(spans))
    t4 = now()
    assert own is not None, "benchmark: no room after evicting"
    row, low = tuple(map(joined, spans, own)), at // size
    t5 = now()
    insertion = cache.insert(match.lease, ids[at:], tuple([behind(span, low) for span in row]))
    cache.commit_row(insertion)
    t6 = now()
    cache.finish(rid, insertion.lease, ids, row)
    t7 = now()
    spent = {"poll": t1 - t0, "match": t2 - t1, "allocate": t4 - t3, "insert": t6 - t5, "finish": t7 - t6}
    for name, seconds in spent.items():
        times[name].append(seconds)


STEPS = ("poll", "match", "load", "evict", "allocate", "insert", "finish")


def shared_prompts(requests: int, size: int, *, tiered: bool = False) -> dict[str, tuple[float, float, float]]:
    """Prompts of 2,500 tokens over 20 system prompts of 2,000: match, insert (and commit), evict a request."""
    heads = [tokens(2000) for _ in range(20)]
    prompts = [np.concatenate((heads[i % 20], tokens(500))) for i in range(requests)]
    capacity = 1 + (20 * 2000 + (requests // 2) * 512) // size
    cache = tiers(capacity, size) if tiered else device(capacity, size)
    for head in heads:
        publish(cache, head)
    times: dict[str, list[float]] = {name: [] for name in STEPS}
    for i, ids in enumerate(prompts):
        serve(cache, i, ids, times)
    median = {name: statistics.median(seconds) * 1e6 for name, seconds in times.items() if seconds}
    ids = prompts[0]
    row, states = np.arange(500 // size + 1), np.zeros(capacity, np.int64)
    floors = {
        "match": cost_us(lambda i: ids.tobytes().startswith(ids[:2000].tobytes()), runs=1000),
        "insert": cost_us(lambda i: (ids[2000:].tobytes(), states.__setitem__(row, 1)), runs=1000),
        "evict": cost_us(lambda i: states.__setitem__(row, 0), runs=1000),
    }
    goals = {} if tiered else {"match": 10.0, "insert": 60.0, "evict": 40.0}
    name = "tiers_shared" if tiered else "shared"
    return {
        f"{name}_{n}_page{size}_us": (median[n], goals.get(n, 0.0), floors.get(n, 0.0)) for n in STEPS if n in median
    }


def host_hits(runs: int) -> dict[str, tuple[float, float, float]]:
    """A 2,000-token prefix that is on the host alone: match it, load it back (the decision, not the bytes)."""
    size, count = 16, 100
    prompts = [tokens(2000) for _ in range(count)]
    cache = tiers(3 * 2000 // size, size, host=1 + count // 2)
    times: dict[str, list[float]] = {name: [] for name in STEPS}
    for _ in range(max(2, runs // count)):
        for i, ids in enumerate(prompts):
            serve(cache, i, np.concatenate((ids, tokens(10))), times)
    row, states = np.arange(2000 // size), np.zeros(10_000, np.int64)
    floor = cost_us(lambda i: (states.__setitem__(row, 1), row.copy(), states.__setitem__(row, 2)), runs=1000)
    return {f"tiers_host_hit_{n}_us": (statistics.median(times[n]) * 1e6, 0.0, floor) for n in ("match", "load")}


def growth(runs: int) -> dict[str, tuple[float, float, float]]:
    """What must not grow: inserting behind 16 and 128 k, evicting among 2,000 and 50,000 leaves; the ratio of both."""
    near, far = long_context(runs, 16_384), long_context(runs)
    few, many = evict_many_leaves(runs, 2_000), evict_many_leaves(runs, 50_000)
    insert = far["insert_8k_at_128k_us"][0] / near["insert_8k_at_16k_us"][0]
    evict = many["evict_1_of_50000_leaves_us"][0] / few["evict_1_of_2000_leaves_us"][0]
    return {"growth_insert_16k_to_128k": (insert, 1.5, 1.0), "growth_evict_2k_to_50k_leaves": (evict, 1.5, 1.0)}


def commit_id() -> str:
    """The commit the figures belong to."""
    asked = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return asked.stdout.strip() or "unknown"


def main() -> None:
    """Run all, print a table and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fast", action="store_true", help="a tenth of the runs")
    scale = 1 if parser.parse_args().fast else 10
    found: dict[str, tuple[float, float, float]] = {}
    found |= long_context(30 * scale)
    found |= shared_lease(20 * scale)
    found |= evict_many_leaves(100 * scale, 50_000)
    found |= sweep(5)
    found |= shared_prompts(400 * scale, 1)
    found |= shared_prompts(400 * scale, 16)
    found |= shared_prompts(200 * scale, 16, tiered=True)
    found |= host_hits(100 * scale)
    found |= growth(20 * scale)
    figures = {}
    print(f"{'':32}{'here':>10}{'goal':>10}{'floor':>10}")
    for name, (value, goal, floor) in found.items():
        print(f"{name:32}{value:10.2f}{goal or float('nan'):10.1f}{floor or float('nan'):10.2f}")
        met = None if not goal else (value >= goal if name.endswith("per_s") else value <= goal)
        figures[name] = {"value": round(value, 3), "goal": goal or None, "floor": round(floor, 3) or None, "met": met}
    machine = (
        f"{platform.processor() or platform.machine()}, python {platform.python_version()}, numpy {np.__version__}"
    )
    print(json.dumps({"benchmark": "cache", "commit": commit_id(), "machine": machine, "figures": figures}))


if __name__ == "__main__":
    main()
