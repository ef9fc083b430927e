"""Chance as an argument: seeded, splittable, the same on every machine."""

from __future__ import annotations

import random

MASK64 = (1 << 64) - 1


def splitmix64(x: int) -> int:
    """One step of splitmix64 (Steele, Lea and Flood, 2014): a bijection on 64-bit words that mixes well."""
    x = (x + 0x9E3779B97F4A7C15) & MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK64
    return x ^ (x >> 31)


def choice_seed(seed: int, choice: int) -> int:
    """The seed of one of the `n` answers to a prompt: the request's own for the first, others made of it.

    One rule for HTTP and for `LLM`, so that the same seed gives the same answers. Mixed before the choice is added:
    the second answer of seed 7 is none of those of seed 8.
    """
    return seed if choice == 0 else splitmix64((splitmix64(seed & MASK64) + choice) & MASK64) >> 1


class Rng(random.Random):
    """A seeded generator; `split` gives an independent one, so that parts do not disturb each other."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.seed_value = seed

    def split(self, name: str) -> Rng:
        """An independent generator for the part called `name`; the same name gives the same one."""
        state = splitmix64(self.seed_value & MASK64)
        for byte in name.encode():
            state = splitmix64(state ^ byte)
        return Rng(state)
