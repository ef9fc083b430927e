"""The driver of the tiny engine: random rules, from a seed (many steps a second) or from Hypothesis (which shrinks)."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from types import ModuleType
from typing import Any

import numpy as np

from serinus.cache import PartGeometry
from serinus.core.eviction import EVICTION_POLICIES
from serinus.core.parts import Part
from serinus.core.rng import Rng
from tests.cache.model import DEVICE_FULL, HOST_FULL, Shape
from tests.cache.tiers import TieredWorld

POLICIES = tuple(EVICTION_POLICIES)
WRITE_POLICIES = ("write_through", "write_through_selective", "write_back")


BESIDE_FULL: tuple[tuple[Part, ...], ...] = (
    (), (), (Part.SWA,), (Part.SWA,), (Part.LATENT,), (Part.SWA, Part.LATENT)
)  # fmt: skip
"""The parts of a cache beside FULL: each has a window, but that every other LATENT covers whole prefixes."""


def draw_shape(rng: Random) -> Shape:
    """Page sizes, parts, tiers and policies, each as often as the others; pools of a few dozen pages."""
    tiers = rng.choice(["none", "host", "storage"])
    size = rng.choice([1, 2, 16])
    full = rng.randint(6, 40)
    host = 0 if tiers == "none" else rng.choice([rng.randint(4, 12), rng.randint(10, 40), 200, 200])
    parts = {Part.FULL: PartGeometry(pages=full, host_pages=host)}
    for part in rng.choice(BESIDE_FULL):
        window = rng.choice([1, 2, 3, size + 1, 2 * size, 3 * size + rng.randrange(size)])
        whole = part is Part.LATENT and rng.random() < 0.5
        parts[part] = PartGeometry(
            pages=rng.randint(6, 40),
            host_pages=rng.choice([host, rng.randint(2, 20)]) if host else 0,
            window=None if whole else window,
        )
    return Shape(
        page_size=size,
        parts=parts,
        storage=tiers == "storage",
        policy=rng.choice(POLICIES),
        write_policy=rng.choice(WRITE_POLICIES) if host else "write_through",
    )


def arrive(world: TieredWorld, rng: Random) -> None:
    """A few symbols over an alphabet of three, often behind a beginning that is cached or that another request has."""
    repeat = max(1, world.size // 2)
    namespace, head = rng.choice(["", "", "salt"]), list[int]()
    others = world.running + world.waiting
    cached = sorted({p for where in world.seen.where.values() for p in where}) if rng.random() < 0.6 else []
    if others and rng.random() < 0.5:
        other = rng.choice(others)
        namespace, head = other.namespace, other.tokens
        head = head[: rng.choice([len(head), rng.randrange(len(head))])]
    elif cached:
        namespace, data = rng.choice(cached)
        head = np.frombuffer(data, np.int32).tolist()
    tail = [s for _ in range(rng.randint(1, 5)) for s in [rng.randrange(3)] * repeat]
    tokens = head[: 8 * repeat * rng.choice([1, 1, 2])] + tail + [2] * rng.randrange(4)
    for _ in range(rng.choice([1, 1, 2])):
        world.arrive(namespace, tokens, priority=rng.randrange(3) - 1, lazy=rng.random() < 0.5)


def _revive(world: TieredWorld, rng: Random) -> None:
    """A prompt whose beginning was stored once and is here no more asks the storage for it."""
    there = world.seen.where[HOST_FULL].keys() | world.seen.where[DEVICE_FULL].keys()
    gone = sorted(world.archive - there)
    namespace, data = rng.choice(gone or sorted(world.archive))
    world.arrive(namespace, [*np.frombuffer(data, np.int32).tolist(), 1, 2], lazy=rng.random() < 0.5)
    world.prefetch(len(world.waiting) - 1)


def _admit(world: TieredWorld, rng: Random) -> None:
    if world.storage is not None and world.prefetching() and rng.random() < 0.8:
        for _ in list(world.storage.pending)[:4]:  # as a scheduler that waits for its prefetches
            world.end_storage(0)
        world.poll()
        return
    world.admit(rng.choice([rng.randrange(6), -1, -2]), load=rng.random() < 0.8, drop=rng.random() < 0.5)


def _chunk(world: TieredWorld, rng: Random) -> None:
    advance = rng.choice(["", "first", "last", "last"])
    world.chunk(rng.randrange(6), rng.randint(1, 40), publish=rng.random() < 0.8, advance=advance)


def _end(world: TieredWorld, rng: Random) -> None:
    retract = rng.random() < 0.3
    world.end(rng.randrange(6), retract=retract, park=retract and rng.random() < 0.7)


def _hold(world: TieredWorld, rng: Random) -> None:
    part = rng.choice(list(world.shape.parts))
    world.hold(rng.randrange(6), rng.randrange(6), rng.randint(1, 4), rng.choice(["transfer", "restore"]), part)


def _evict(world: TieredWorld, rng: Random) -> None:
    pools = [pool for pool in world.shape.pools if pool[0] == "device" or not world.calm]
    world.evict(rng.choice([1, 1, 2, 3, 8]), rng.choice([DEVICE_FULL, *pools]))


def _end_storage(world: TieredWorld, rng: Random) -> None:
    good_max = rng.choice([None, None, None, 0, rng.randrange(6)])
    world.end_storage(rng.randrange(6), None if world.calm else good_max)


def _end_copy(world: TieredWorld, rng: Random) -> None:
    world.end_copy(rng.randrange(6), ok=rng.random() < 0.85 or world.calm)


def _doom_copy(world: TieredWorld, rng: Random) -> None:
    loads = world.loads_pending()
    world.doom_copy(rng.choice(loads) if loads else rng.randrange(6))


def _lose(world: TieredWorld, rng: Random) -> None:
    world.lose(rng.randrange(50))


def _sweep_out(world: TieredWorld, rng: Random) -> None:
    """What a prefetch wants to go on from leaves both tiers while the storage reads."""
    for pool in (DEVICE_FULL, HOST_FULL):
        world.evict(30, pool)


def _evict_host(world: TieredWorld, rng: Random) -> None:
    world.evict(rng.choice([4, 30]), HOST_FULL)


Ready = Callable[[TieredWorld], Any]
Act = Callable[[TieredWorld, Random], Any]

RULES: tuple[tuple[int, Ready, Act], ...] = (
    # weight, whether it can happen, what it does
    (20, lambda w: True, arrive),
    (30, lambda w: w.waiting, _admit),
    (30, lambda w: w.running, _chunk),
    (20, lambda w: w.running, lambda w, r: w.decode(r.randrange(6), r.randrange(3), advance=r.random() < 0.8)),
    (15, lambda w: w.running, _end),
    (10, lambda w: w.running, _hold),
    (8, lambda w: w.holds, lambda w, r: w.unhold(r.randrange(6))),
    (8, lambda w: True, _evict),
    (2, lambda w: True, lambda w, r: w.flush()),
    (3, lambda w: w.waiting, lambda w, r: w.look(r.randrange(6), drop=r.random() < 0.5)),
    (2, lambda w: w.waiting, lambda w, r: w.give_up(r.randrange(6))),
    (20, lambda w: w.shape.tiered, lambda w, r: w.poll()),
    (20, lambda w: w.mover.pending, _end_copy),
    (8, lambda w: w.mover.pending, _doom_copy),
    (2, lambda w: w.shape.tiered, lambda w, r: w.settle()),
    (15, lambda w: w.storage and w.waiting, lambda w, r: w.prefetch(r.randrange(6))),
    (30, lambda w: w.storage and w.archive, _revive),
    (25, lambda w: w.storage and w.storage.pending, _end_storage),
    (3, lambda w: w.storage and w.waiting, lambda w, r: w.cut(r.randrange(6))),
    (2, lambda w: w.storage and w.waiting, lambda w, r: w.abort_prefetch(r.randrange(6))),
    (1, lambda w: w.storage, _lose),
    (4, lambda w: w.storage, lambda w, r: w.crash(r.choice([None, None, None, None, "bf16", "fp8"]))),
    (6, lambda w: w.storage, _evict_host),
    (3, lambda w: w.storage and w.prefetching(), _sweep_out),
)
FAULTS = (_doom_copy, _lose, _evict_host, _sweep_out)
"""What does not happen in a calm world, where the host must have all that its write policy promises."""


def step(world: TieredWorld, rng: Random, *, transfers: bool = True) -> None:
    """One random rule of those that can happen, then all oracles."""
    ready = [rule for rule in RULES if rule[1](world) and (transfers or rule[2] is not _hold)]
    if world.calm:
        ready = [rule for rule in ready if rule[2] not in FAULTS]
    rng.choices(ready, [rule[0] for rule in ready])[0][2](world, rng)
    world.steps += 1
    world.check()


def drive(
    cache_room: ModuleType,
    chance: int | Random,
    steps: int,
    *,
    rewrite_rows: bool = True,
    shape: Shape | None = None,
    early: bool | None = None,
    after: Callable[[TieredWorld], None] | None = None,
    make: Callable[..., TieredWorld] = TieredWorld,
) -> TieredWorld:
    """One world, driven and drained. Raises what its oracles raise; `world.steps` says how many rules ran.

    `chance` is a seed, or the generator itself.
    `after` sees the world after each rule; `make` builds another world than the one of a single rank.
    """
    rng = Rng(chance) if isinstance(chance, int) else chance
    drawn, hasty = draw_shape(rng), rng.random() < 0.3
    world = make(
        cache_room,
        drawn if shape is None else shape,
        rewrite_rows=rewrite_rows,
        early=hasty if early is None else early,
    )
    transfers, world.calm = rng.random() < 0.5, rng.random() < 0.3
    for _ in range(steps):
        step(world, rng, transfers=transfers)
        if after is not None:
            after(world)
    world.drain()
    return world
