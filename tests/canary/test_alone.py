"""What brings copies may itself be at fault: a request that is healed from one and reads wrong KV again is computed of
its tokens alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from serinus.core.rng import Rng
from serinus.pool import DevicePool
from serinus.selftest import make_canary_toy
from serinus.testing.oracle import toy_continue
from tests.cells import diagonal

from .adversary_worlds import Tiered

ANSWER = 6


@pytest.fixture
def world(tmp_path: Path) -> Iterator[Callable[[str, str], Tiered]]:
    """Makes engines with a host tier and files, in mode heal."""
    made: list[Tiered] = []

    def make(shape: str, coverage: str) -> Tiered:
        made.append(Tiered(make_canary_toy(tmp_path / shape, shape), tmp_path / "files", "heal", coverage))
        return made[-1]

    yield make
    for each in made:
        each.close()


def break_loads(pool: DevicePool) -> Callable[[], None]:
    """From now on one bit of each page is wrong that comes into the pool. Returns what mends it."""

    def damaged(original: Callable[..., Any], pages: Any, *rest: Any, **more: Any) -> Any:
        found = original(pages, *rest, **more)
        rows = pool.layers[-1][0].view(torch.uint8).reshape(pool.spec.page_count, -1)
        rows[torch.as_tensor(pages).long(), 1] ^= 4
        return found

    pool.copy_in = partial(damaged, pool.copy_in)  # type: ignore[method-assign]
    return lambda: pool.__dict__.pop("copy_in")


def answers(world: Tiered, prompts: list[list[int]]) -> None:
    """Ask all at once; each answer must be right."""
    rids = [world.ask(prompt, ANSWER, stream=False) for prompt in prompts]
    for _ in range(2000):
        world.turn()
        if world.idle and all(world.finish(rid) is not None for rid in rids):
            break
    for rid, prompt in zip(rids, prompts, strict=True):
        assert world.tokens(rid) == toy_continue(world.spec, prompt, ANSWER), f"{rid} ended {world.finish(rid)}"


@pytest.mark.parametrize(("shape", "coverage"), diagonal(["full", "both", "latent"], ["full", "rotating:4"]))
def test_a_mover_that_damages_all_it_loads_costs_no_answer(
    world: Callable[[str, str], Tiered], shape: str, coverage: str
) -> None:
    engine, rng = world(shape, coverage), Rng(3)
    shared = [rng.randrange(5, engine.spec.vocab_size) for _ in range(26)]
    prompts = [[*shared, at] for at in (7, 8, 9)]
    answers(engine, prompts)
    engine.shelve(1)
    mends = [break_loads(pool) for pool in engine._built.pools.values() if pool.page_bytes]
    answers(engine, [[*prompt, 11] for prompt in prompts])
    healed = engine._built.metrics.by_labels("kv_canary_heals")
    engine.shelve(1)
    answers(engine, [[*prompt, 12] for prompt in prompts])
    for mend in mends:
        mend()
    assert engine.told, "nothing was damaged"
    assert sum(healed.values()) >= 2, "no request was healed twice"
    found = engine.told
    engine.shelve(1)
    answers(engine, [[*prompt, 13] for prompt in prompts])
    assert engine.told == found, "something wrong was cached"


def test_one_computed_alone_publishes_what_it_computed_when_it_ends(world: Callable[[str, str], Tiered]) -> None:
    engine, rng = world("full", "full"), Rng(4)
    prompt = [rng.randrange(5, engine.spec.vocab_size) for _ in range(26)]
    answers(engine, [prompt])
    engine.shelve(1)
    (mend,) = [break_loads(pool) for pool in engine._built.pools.values() if pool.page_bytes]
    rid, looked = engine.ask([*prompt, 11], ANSWER, stream=False), 0
    while engine.finish(rid) is None:
        engine.turn()
        state = engine._built.engine.scheduler._states.get(rid)
        if state is not None and len(state.heals) == 2 and state.computed:
            assert state.published == 0, "the tree's pages, which others have loaded, may take the place of its own"
            looked += 1
    assert looked, "it was not seen as it ran alone"
    mend()
    usage = engine.usage(rid)
    assert usage is not None
    assert usage.kv_integrity is not None
    assert usage.kv_integrity.heals == 2
    assert usage.kv_integrity.sources["computed"] == usage.kv_integrity.horizon, "some of its KV was a copy"
    again = engine.ask([*prompt, 11, 12], ANSWER, stream=False)
    while engine.finish(again) is None:
        engine.turn()
    usage = engine.usage(again)
    assert usage is not None
    assert usage.cached_tokens == {"device": 24}
