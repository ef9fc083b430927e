"""A seeded driver for world.py: what Hypothesis does, without shrinking, many steps a second."""

from __future__ import annotations

from types import ModuleType

import numpy as np

from serinus.core.rng import Rng
from tests.cache.world import World

ACTIONS = (
    *("arrive", "arrive", "admit", "admit", "admit", "chunk", "chunk", "chunk", "decode", "decode"),
    *("end", "end", "hold", "hold", "unhold", "evict", "evict", "flush"),
)


def arrive(world: World, rng: Rng) -> None:
    """A few symbols over an alphabet of three, often behind a beginning that is cached or that another request has."""
    repeat = max(1, world.size // 2)
    namespace, head = rng.choice(["", "", "salt"]), list[int]()
    others = world.running + world.waiting
    if others and rng.random() < 0.5:
        other = rng.choice(others)
        namespace, head = other.namespace, other.tokens
        head = head[: rng.choice([len(head), rng.randrange(len(head))])]
    elif world.resident and rng.random() < 0.6:
        namespace, data = rng.choice(sorted(world.resident))
        head = np.frombuffer(data, np.int32).tolist()
    tail = [s for _ in range(rng.randint(1, 5)) for s in [rng.randrange(3)] * repeat]
    tokens = head[: 8 * repeat] + tail + [2] * rng.randrange(4)
    for _ in range(rng.choice([1, 1, 2])):
        world.arrive(namespace, tokens)


def step(world: World, rng: Rng, *, transfers: bool) -> None:
    """One random rule, then all oracles."""
    action = rng.choice(ACTIONS)
    which = rng.randrange(6)
    if action == "arrive":
        arrive(world, rng)
    elif action == "admit" and world.waiting:
        world.admit(rng.choice([which, -1, -2]))
    elif action == "chunk" and world.running:
        world.chunk(which, rng.randint(1, 40), publish=rng.random() < 0.8)
    elif action == "decode" and world.running:
        world.decode(which, rng.randrange(3))
    elif action == "end" and world.running and rng.random() < 0.8:
        world.end(which, retract=rng.random() < 0.3)
    elif action == "hold" and transfers and world.running and rng.random() < 0.4:
        world.hold(which, rng.randrange(6), rng.randint(1, 4), rng.choice(["transfer", "restore"]))
    elif action == "unhold" and world.holds:
        world.unhold(which)
    elif action == "evict" and rng.random() < 0.4:
        world.evict(rng.choice([1, 1, 2, 3, 8]))
    elif action == "flush" and rng.random() < 0.1:
        world.flush()
    else:
        return
    world.check()


def drive(cache_room: ModuleType, seed: int, steps: int, *, rewrite_rows: bool = True) -> World:
    """One world from one seed, driven and drained. Raises what its oracles raise."""
    rng = Rng(seed)
    world = World(
        cache_room,
        page_size=rng.choice([1, 2, 16]),
        page_count=rng.randint(6, 40),
        policy=rng.choice(["lru", "lfu", "fifo"]),
        rewrite_rows=rewrite_rows,
    )
    transfers = rng.random() < 0.5
    for _ in range(steps):
        step(world, rng, transfers=transfers)
    world.drain()
    return world
