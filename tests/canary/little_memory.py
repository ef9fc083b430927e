"""A workload in little memory: requests share beginnings, are handed over or not, and their pages come and go."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serinus.cache import Tier
from serinus.core.rng import Rng
from serinus.pool import DevicePool
from serinus.selftest import EngineDriver, EnginePair, make_canary_toy
from serinus.testing.oracle import toy_continue

from .account import accounts_of

__all__ = ["TIERS", "alike", "alike_page", "answer_all", "flip", "flip_host", "flip_page", "shift"]

PAGE, STRIDE, TOKENS = 4, 4, 28


Damage = Callable[[EngineDriver, Rng], None]
TIERS = {
    "enable_hierarchical_cache": True, "hicache_ratio": 3.0, "hicache_write_policy": "write_back",
}  # fmt: skip


def answer_all(
    folder: Path, *, damage: Sequence[Damage] = (), seed: int = 3, stride: int = STRIDE, storms: bool = False,
    begun: Callable[[EnginePair], None] = lambda pair: None, **settings: Any,
) -> Counter[str]:  # fmt: skip
    """Prompts that share beginnings, some computed here and some elsewhere, in little memory; how pages left rows.
    `damage`: what happens now and then. `storms`: all that is cached is evicted now and then, and requests are healed
    that nothing is wrong with. `begun`: is told of the engines before the first prompt. No answer that ends well is
    wrong."""
    left: Counter[str] = Counter()
    pair = EnginePair(
        make_canary_toy(folder / "toy", "both"), page_size=PAGE, max_total_tokens=128, max_running_requests=4,
        chunked_prefill_size=16, kv_canary="heal", kv_canary_real_data="all", kv_canary_coverage=f"rotating:{stride}",
        kv_canary_stats_interval=0, kv_canary_retire_max=1_000_000, kv_canary_heals_max=100, **settings,
    )  # fmt: skip
    prompts: dict[str, list[int]] = {}
    with closing(pair), accounts_of((pair.prefill, pair.decode), left) as accounts:

        def turn() -> None:
            pair.turn_prefill()
            pair.turn_decode()
            for account in accounts:
                account.check_all()

        for driver in (pair.prefill, pair.decode):
            admission = driver.engine.scheduler._planner._admission
            admission._settings = replace(admission._settings, growth_tokens=0)  # so that some are retracted
        begun(pair)
        rng = Rng(seed)
        shared = [[rng.randrange(5, 512) for _ in range(length)] for length in (9, 13, 22)]
        for number in range(24):
            head = [] if number % 4 == 0 else shared[number % 3]
            prompt = [*head, *(rng.randrange(5, 512) for _ in range(rng.randrange(1, 20)))]
            prompts[f"r{number}"] = prompt
            pair.add(f"r{number}", prompt, TOKENS, remote=number % 2 == 0)
            for _ in range(rng.randrange(1, 9)):
                turn()
            if damage:
                rng.choice(damage)(rng.choice((pair.prefill, pair.decode)), rng)
            if storms:
                storm(rng.choice((pair.prefill, pair.decode)), rng)
        while not pair.idle:
            turn()
        left["retracted"] = pair.decode.engine.scheduler.totals.retracted
        for driver in (pair.prefill, pair.decode):
            assert driver.engine.canary is not None
            left["found"] += driver.engine.canary.violations.total
        for rid, prompt in prompts.items():
            got, right = pair.tokens(rid), toy_continue(pair.decode.built.spec, prompt, TOKENS)
            last = pair.deltas[rid][-1]
            assert got == right[: len(got)], f"{rid} has {got}, expected {right}"
            assert len(got) == TOKENS or last.error_status == 500, f"{rid} ended early: {last}"
            left["failed"] += len(got) < TOKENS
    return left


def _pool(driver: EngineDriver, rng: Rng) -> DevicePool:
    return rng.choice([pool for pool in driver.built.pools.values() if pool.page_bytes])


def shift(driver: EngineDriver, rng: Rng) -> None:
    """One page of a pool lies over another one too."""
    pool = _pool(driver, rng)
    one, other = (np.array([rng.randrange(1, pool.spec.page_count)]) for _ in range(2))
    pool.write_pages(other, pool.read_pages(one))


def alike(driver: EngineDriver, rng: Rng) -> None:
    """The same, and their positions are the same by their stamps."""
    pool = _pool(driver, rng)
    alike_page(pool, rng.choice(np.flatnonzero(_firsts(pool) > 0).tolist() or [1]), rng)


def alike_page(pool: DevicePool, page: int, rng: Rng) -> None:
    """Another page of the same positions, by its stamps, lies over this one too."""
    firsts = _firsts(pool)
    one = rng.choice(np.flatnonzero(firsts == firsts[page]).tolist())
    pool.write_pages(np.array([page]), pool.read_pages(np.array([one])))


def _firsts(pool: DevicePool) -> NDArray[np.int64]:
    """The position of each page's first slot."""
    assert pool.stamps_LS4 is not None
    return pool.stamps_LS4[0, :: pool.spec.page_size, 1].numpy()


def flip(driver: EngineDriver, rng: Rng) -> None:
    """A bit of a page of the device, of KV or of a stamp, is another one."""
    pool = _pool(driver, rng)
    flip_page(pool, rng.randrange(1, pool.spec.page_count), rng)


def flip_page(pool: DevicePool, page: int, rng: Rng) -> None:
    """A bit of this page is another one."""
    data = pool.read_pages(np.array([page]))
    data[0, rng.randrange(pool.page_bytes)] ^= 1 << rng.randrange(8)
    pool.write_pages(np.array([page]), data)


def flip_host(driver: EngineDriver, rng: Rng) -> None:
    """A bit of a page of the host tier is another one."""
    assert driver.built.tiers is not None
    pool = rng.choice([pool for pool in driver.built.tiers.host.values() if pool.page_bytes])
    pool.data_PY[rng.randrange(1, pool.page_count), rng.randrange(pool.page_bytes)] ^= 1 << rng.randrange(8)


def storm(driver: EngineDriver, rng: Rng) -> None:
    """All that is cached goes to the host, or is gone; or a request is healed."""
    if rng.random() < 0.5:
        for part in driver.built.pools:
            driver.built.cache.evict(1 << 20, Tier.DEVICE, part)
    running = [rid for rid, state in driver.engine.scheduler._states.items() if state.running]
    if running and rng.random() < 0.5:
        driver.engine.scheduler.heals.heal(rng.choice(running), "for nothing", driver.built.clock.now())
