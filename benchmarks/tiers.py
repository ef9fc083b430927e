"""What the tiers give and cost: first token of a 2,000-token shared prefix found on the device, on the host, in files.

    python benchmarks/tiers.py [--rounds 5] [--fast] [--costs] [--folder DIR]

The 221M model (bf16, 2 threads), the whole engine but sockets. Claims, all of one run: against the cold prompt, a hit
on the device is >= 20 times as fast, on the host >= 8, in files >= 4; tiers that are on but never hit cost <= 2 %
throughput (a job of 16 requests of 256 + 64 tokens in turns on engines without tiers, with the host tier, with files
too, and with the host tier under write_back, which copies what eviction takes; every round has prompts of its own, and
the middle ratio of the rounds counts). Beside it the CPU that the threads of the tiers took, of all CPU of the job:
where a machine is busy with other things, seconds tell nothing. `--costs` measures these two alone, in less time.
Copies beside a plain memcpy of the same bytes, files beside plain writes and reads of files of the same size without
header, digest and names.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from threading import enumerate as all_threads
from time import clock_gettime, process_time, pthread_getcpuclockid, thread_time

import numpy as np
import torch
from job import OUTPUT, PROMPT, REQUESTS, serinus_run
from model import checkpoint_221m, one_model
from report import emit

from serinus.cache import Tier
from serinus.core.clock import WallClock
from serinus.core.config import ServeConfig, from_names
from serinus.core.moves import Move, MoveKind, PageOrigin
from serinus.core.parts import Part
from serinus.core.request import Request
from serinus.core.rng import Rng
from serinus.core.sampling import SamplingParams
from serinus.engine import Built, build_engine
from serinus.kernels import load
from serinus.pool import DevicePool, HostPool, Mover
from serinus.pool.storage import FileStorage
from serinus.ranks.tier_parts import pause
from serinus.selftest import EngineDriver

PREFIX, QUESTION, POOL_TOKENS = 2000, 16, 8192
GOALS = {"device": 20.0, "host": 8.0, "file": 4.0}
CLOCK = WallClock()


def built_with(path: Path, threads: int, **tiers: object) -> Built:
    settings = {
        "model_path": str(path), "max_total_tokens": POOL_TOKENS, "max_step_ms": 0, "threads": threads,
        "decode_log_interval": 0,
        "context_length": 4096, **tiers,
    }  # fmt: skip
    return build_engine(from_names(ServeConfig, settings), CLOCK)


def text(seed: int, length: int) -> list[int]:
    """A prompt that shares nothing with those of other seeds."""
    rng = Rng(seed)
    return [rng.randrange(5, 32000) for _ in range(length)]


def settle(built: Built) -> None:
    """Until no copy and no file operation is under way."""
    while built.cache.poll().in_flight:
        pause(0.0005)


def first_token_s(built: Built, prompt: list[int], rid: str) -> float:
    """Seconds from adding a request to its only token."""
    sampling = SamplingParams(temperature=0.0, max_new_tokens=1, ignore_eos=True)
    driver = EngineDriver(built)
    begin = CLOCK.now()
    driver.send(Request(rid=rid, prompt=np.array(prompt, np.int32), sampling=sampling, seed=0, arrival=begin))
    seconds = 0.0
    while True:
        if driver.turn() and not seconds:
            seconds = CLOCK.now() - begin
        if built.engine.idle:
            return seconds
        if built.engine.wait_s > 0:
            pause(0.0005)


def leave(built: Built, tier: Tier) -> None:
    """Take everything from a tier."""
    for part in built.cache.geometry.parts:
        assert built.cache.evict(1 << 30, tier, part), f"nothing to take from {tier.name}"


def first_tokens(built: Built, rounds: int) -> dict[str, float]:
    """Seconds to the first token: cold, and found on each tier. Each hit is checked against the cache's counters."""
    found: dict[str, list[float]] = {"cold": [], "device": [], "host": [], "file": []}
    stats = built.cache.stats

    def ask(kind: str, index: int) -> None:
        prefix = text(7000 + index, PREFIX)
        before = stats()
        found[kind].append(first_token_s(built, prefix + text(100 * list(found).index(kind) + index, QUESTION), kind))
        after = stats()
        on_device, loaded = after.hit_tokens - before.hit_tokens, after.loaded_tokens - before.loaded_tokens
        fetched = after.prefetched_tokens - before.prefetched_tokens
        expected = {"cold": (0, 0, 0), "device": (1, 0, 0), "host": (0, 1, 0), "file": (0, 1, 1)}[kind]
        least = PREFIX - built.pool.spec.page_size
        seen = tuple(int(count >= least) for count in (on_device, loaded, fetched))
        assert seen == expected, f"{kind}: device {on_device}, loaded {loaded}, fetched {fetched} tokens"

    for index in range(rounds):
        ask("cold", index)
        settle(built)
        ask("device", index)
        settle(built)
        leave(built, Tier.DEVICE)
        ask("host", index)
        settle(built)
        leave(built, Tier.DEVICE)
        leave(built, Tier.HOST)
        ask("file", index)
        settle(built)
    return {kind: statistics.median(seconds) for kind, seconds in found.items()}


def tier_cpu_s() -> float:
    """CPU seconds so far of all threads that copy, check and write pages."""
    names = ("serinus-mover", "serinus-storage")
    idents = [thread.ident for thread in all_threads() if thread.name.startswith(names)]
    return sum(clock_gettime(pthread_getcpuclockid(ident)) for ident in idents if ident is not None)


def job_costs(engines: dict[str, Built], rounds: int) -> dict[str, float]:
    """Throughput lost against `off`: the median over the rounds of how much longer the same job took. And the CPU that
    the threads of the tiers took for it, in ms and as a share of all CPU that it took, the best of the rounds."""

    def job(index: int) -> list[list[int]]:
        return [text(100 * index + i, PROMPT) for i in range(REQUESTS)]

    ratios: dict[str, list[float]] = {name: [] for name in engines}
    spent: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
    for index in range(rounds + 1):
        names = list(engines) if index % 2 else list(engines)[::-1]
        seconds = {}
        for name in names:
            tiers_s, all_s = tier_cpu_s(), process_time()
            run = serinus_run(engines[name], job(index), OUTPUT)
            seconds[name] = run.prefill_s + run.decode_s
            settle(engines[name])
            tiers_s, all_s = tier_cpu_s() - tiers_s, process_time() - all_s
            print(f"{index} {name}: {seconds[name]:.2f} s, tiers {tiers_s:.3f} of {all_s:.2f} s CPU", file=sys.stderr)
            spent[name].append((tiers_s, tiers_s / all_s))
        if index:  # the first round warms up
            for name in engines:
                ratios[name].append(seconds[name] / seconds["off"])
    costs = {f"{name}_cost": statistics.median(values) - 1.0 for name, values in ratios.items() if name != "off"}
    costs |= {f"{name}_cpu_ms": 1e3 * min(spent[name][1:])[0] for name in engines if name != "off"}
    return costs | {f"{name}_cpu_share": min(spent[name][1:])[1] for name in engines if name != "off"}


def best_gb_s(byte_count: int, work: Callable[[], object], rounds: int = 7) -> float:
    best = float("inf")
    for _ in range(rounds):
        begin = CLOCK.now()
        work()
        best = min(best, CLOCK.now() - begin)
    return byte_count / best / 1e9


def copies(pool: DevicePool, tokens: int) -> dict[str, float]:
    """GB/s of backups, loads and a memcpy of as many bytes, all warm and on one thread."""
    count = tokens // pool.spec.page_size
    part, layers = Part.FULL, (Part.FULL,) * pool.spec.layer_count
    host = HostPool(pool.spec, count + 1)
    host.data_PY[:] = 1
    mover = Mover({part: pool}, {part: host}, layers, CLOCK)
    pages = np.arange(1, count + 1, dtype=np.int32)
    scattered = np.random.default_rng(0).permutation(pages)
    ops = iter(range(1, 1 << 30))

    def carry(kind: MoveKind) -> None:
        op = next(ops)
        mover.submit([Move(op=op, kind=kind, part=part, source=scattered, target=pages)])
        (done,) = mover.wait([op])
        assert done.ok, done.error

    source = np.ones(count * pool.page_bytes, np.uint8)
    target = np.zeros_like(source)
    found = {
        "memcpy_gb_s": best_gb_s(source.nbytes, lambda: np.copyto(target, source)),
        "backup_gb_s": best_gb_s(source.nbytes, lambda: carry(MoveKind.BACKUP)),
        "load_gb_s": best_gb_s(source.nbytes, lambda: carry(MoveKind.LOAD)),
    }
    mover.close()
    return found


def files(pool: DevicePool, tokens: int, folder: Path) -> dict[str, float]:
    """GB/s of storing and reading pages, beside plain files of the same size; neither goes through the page cache."""
    count = tokens // pool.spec.page_size
    host = HostPool(pool.spec, count + 1)
    host.data_PY[:] = np.random.default_rng(1).integers(0, 255, host.data_PY.shape, np.uint8)
    pages = np.arange(1, count + 1, dtype=np.int32)
    ops = iter(range(1, 1 << 30))
    rounds = iter(range(1 << 20))
    byte_count = count * pool.page_bytes
    storage = FileStorage(folder / "store", host={Part.FULL: host}, namespace="bench", byte_max=None, clock=CLOCK)
    keys = [index.to_bytes(16, "big") for index in range(count)]

    def store() -> None:
        fresh = next(rounds).to_bytes(4, "big")
        storage.write(next(ops), Part.FULL, [fresh + key[4:] for key in keys], pages)
        (done,) = storage.wait()
        assert done.good == count, done.error

    def fetch() -> None:
        storage.read(next(ops), Part.FULL, keys, pages)
        (done,) = storage.wait()
        assert done.good == count, done.error

    def write_plain() -> None:
        where = folder / f"plain{next(rounds)}"
        where.mkdir()
        for page in pages:
            file = os.open(where / str(page), os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
            os.writev(file, [host.data_PY[page].data])
            os.close(file)

    def read_plain() -> None:
        where = next(folder.glob("plain*"))
        for page in pages:
            file = os.open(where / str(page), os.O_RDONLY | os.O_DIRECT)
            os.readv(file, [host.data_PY[page].data])
            os.close(file)

    found = {
        "store_gb_s": best_gb_s(byte_count, store, 4),
        "fetch_gb_s": best_gb_s(byte_count, fetch, 5),
        "plain_write_gb_s": best_gb_s(byte_count, write_plain, 4),
        "plain_read_gb_s": best_gb_s(byte_count, read_plain, 5),
    }
    storage.close()
    return found


def checks(path: Path, threads: int, folder: Path) -> dict[str, float]:
    """What verifying pages on their way to files costs of their writing, in CPU time: an engine under a canary computes
    and stores a prompt, with the check and without."""
    on = {"enable_hierarchical_cache": True, "hicache_ratio": 2.0, "hicache_storage_backend": "file"}
    canary = {"kv_canary": "raise", "kv_canary_real_data": "all"}
    built = built_with(path, threads, **on, **canary, hicache_storage_dir=str(folder / "checked"))
    assert built.tiers is not None
    assert built.tiers.storage is not None
    check = built.tiers.storage.check
    assert check is not None
    spent: list[float] = []

    def timed(part: Part, pages: np.ndarray, origin: PageOrigin | None, first: int) -> np.ndarray:
        begin = thread_time()
        try:
            return check(part, pages, origin, first)
        finally:
            spent.append(thread_time() - begin)

    first_token_s(built, text(9001, PREFIX), "warm")
    settle(built)
    built.tiers.storage.check = timed
    begin = process_time()
    first_token_s(built, text(9002, PREFIX), "checked")
    settle(built)
    whole = process_time() - begin
    byte_count = len(spent) * built.pool.page_bytes
    built.close()
    return {"check_gb_s": byte_count / sum(spent) / 1e9, "check_share_of_prompt": sum(spent) / whole}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--rounds", type=int, default=7)
    arguments.add_argument("--threads", type=int, default=2)
    arguments.add_argument("--checkpoint", default="", help="directory to use, or to make")
    arguments.add_argument("--folder", default="", help="where files go; default: a temporary folder")
    arguments.add_argument("--fast", action="store_true", help="3 rounds")
    arguments.add_argument("--costs", action="store_true", help="only what tiers cost that are never hit")
    args = arguments.parse_args()
    rounds = 3 if args.fast else args.rounds
    path = checkpoint_221m(args.checkpoint)
    with tempfile.TemporaryDirectory(dir=args.folder or None) as name:
        folder = Path(name)
        os.chmod(folder, 0o700)
        on = {"enable_hierarchical_cache": True, "hicache_ratio": 2.0}
        store = {"hicache_storage_backend": "file", "hicache_storage_prefetch_policy": "wait_complete"}
        kinds: dict[str, dict[str, object]] = {
            "off": {},
            "host": on,
            "file": {**on, **store, "hicache_storage_dir": str(folder / "kv")},
        }
        if not args.costs:
            kinds["write_back"] = {**on, "hicache_write_policy": "write_back"}
        with one_model():
            engines = {name: built_with(path, args.threads, **tiers) for name, tiers in kinds.items()}
        if args.costs:
            costs = job_costs(engines, rounds)
            emit("tiers_costs", **{name: round(value, 4) for name, value in costs.items()})
            return
        first_token_s(engines["file"], text(1, PREFIX), "warm")
        settle(engines["file"])
        seconds = first_tokens(engines["file"], rounds)
        times = {kind: seconds["cold"] / seconds[kind] for kind in GOALS}
        print(f"first tokens: {seconds}", file=sys.stderr, flush=True)
        costs = job_costs(engines, rounds)
        kernels = load("cpu")
        pool = DevicePool(engines["off"].pool.spec, kernels)
        for lane in (*pool.k, *pool.v):
            lane.fill_(1)
        speeds = copies(pool, PREFIX) | files(pool, PREFIX, folder) | checks(path, args.threads, folder)
        del engines
    emit(
        "tiers",
        **{f"{kind}_ttft_ms": round(value * 1000, 1) for kind, value in seconds.items()},
        **{f"{kind}_times": round(value, 1) for kind, value in times.items()},
        goals=GOALS,
        **{name: round(value, 4) for name, value in (costs | speeds).items()},
        prefix_mb=round(PREFIX // pool.spec.page_size * pool.page_bytes / 1e6, 1),
    )


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
