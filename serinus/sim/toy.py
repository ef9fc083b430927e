"""The toy model of the world: KV bytes are a hash of the token chain, the next token is a hash of the bytes read.

Every position of a sequence has one 64-bit word for each lane; a lane is the keys or the values of one head of one
layer. A rank holds the lanes of its own layers and heads, and finds the chain so far in the KV of the position before:
what is wrong once stays wrong. `Oracle` is written from the tokens alone: no pages, no rows, no ranks.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np
from numpy.typing import NDArray

from serinus.core.rng import splitmix64

ROOT = 0x5EED
"""The chain before the first token."""

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_UNDO = ((31, pow(0x94D049BB133111EB, -1, 1 << 64)), (27, pow(0xBF58476D1CE4E5B9, -1, 1 << 64)), (30, 1))
"""How splitmix64 is turned back, the last step first: shift, then factor."""
_STEPS = frozenset(splitmix64(token + 1) for token in range(256))
"""What a token adds to a chain."""


@lru_cache(maxsize=1 << 17)
def link(before: int, token: int) -> int:
    """The chain with one more token."""
    return splitmix64(before ^ splitmix64(token + 1))


@dataclass(frozen=True, slots=True)
class Lanes:
    """The model's layers and heads, and the numbers that make each lane's bytes its own."""

    layers: int
    heads: int
    odd_L: NDArray[np.uint64]
    salt_L: NDArray[np.uint64]
    inverse_L: NDArray[np.uint64]
    halves: int
    """Rows of a position in each layer: keys and values, or one that is latent."""
    slides: tuple[bool, ...]
    """Whether each layer is of part SWA..."""
    sliding_L: NDArray[np.bool_]
    """...and each lane: it is folded over the window only."""
    window: int
    """Positions that those lanes see, the last one included; 0 = there are none."""
    weight_PL: NDArray[np.uint64]
    """Weight of each position and lane in the fold."""

    @staticmethod
    @cache
    def of(layers: int, heads: int, positions: int, slides: str = "", window: int = 0) -> Lanes:
        """Lanes of a model of this size, for sequences of up to so many positions. `slides`: F or S of each layer, or L
        of all (latent rows); empty = none of them slides."""
        halves = 1 if "L" in slides else 2
        count = layers * halves * heads
        slide = tuple(letter == "S" for letter in slides or "F" * layers)
        odd = [splitmix64(2 * lane + 1) | 1 for lane in range(count)]
        weights = [[splitmix64((p + 1) * 1009 + lane) | 1 for lane in range(count)] for p in range(positions)]
        return Lanes(
            layers=layers,
            heads=heads,
            odd_L=np.array(odd, np.uint64),
            salt_L=np.array([splitmix64(77 + lane) for lane in range(count)], np.uint64),
            inverse_L=np.array([pow(number, -1, 1 << 64) for number in odd], np.uint64),
            halves=halves,
            slides=slide,
            sliding_L=np.repeat(slide, halves * heads),
            window=window,
            weight_PL=np.array(weights, np.uint64),
        )

    def content(self, chain_T: NDArray[np.uint64], lanes: NDArray[np.intp]) -> NDArray[np.uint64]:
        """KV of some lanes for positions with these chains: [positions, lanes]."""
        words: NDArray[np.uint64] = chain_T[:, None] * self.odd_L[lanes] + self.salt_L[lanes]
        return words

    def chain(self, word: np.uint64, lane: int) -> int:
        """The chain that a word of a lane was made of."""
        return (int(word) - int(self.salt_L[lane])) * int(self.inverse_L[lane]) & _MASK


def is_linked(chain_T: NDArray[np.uint64]) -> bool:
    """Whether each of these chains is the one before it with some token more."""
    steps = (_unmixed(chain_T[1:]) ^ chain_T[:-1]).tolist()
    return all(step in _STEPS for step in steps)


def _unmixed(mixed: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """What splitmix64 gave these for."""
    word = mixed
    for shift, factor in _UNDO:
        moved = np.uint64(shift)
        word = word ^ (word >> moved) ^ (word >> (moved * np.uint64(2)))
        word = word * np.uint64(factor)
    return word - np.uint64(_GOLDEN)


def next_token(fold: int, vocab_size: int) -> int:
    """The token that follows KV with this fold."""
    return splitmix64(fold) % vocab_size


def expected_kv(lanes: Lanes, tokens: NDArray[np.int32], which: NDArray[np.intp]) -> NDArray[np.uint64]:
    """What some lanes must hold for these tokens: [positions, lanes]."""
    chain, at = np.empty(len(tokens), np.uint64), ROOT
    for index, token in enumerate(tokens.tolist()):
        at = link(at, token)
        chain[index] = at
    return lanes.content(chain, which)


class Oracle:
    """One sequence, fed token by token; knows the right next token at every place."""

    def __init__(self, lanes: Lanes, vocab_size: int) -> None:
        self._odd, self._salt = lanes.odd_L, lanes.salt_L
        self._weights = lanes.weight_PL
        self._sliding, self._window = lanes.sliding_L, lanes.window
        self._seen: deque[int] = deque()
        """What each position in the window adds to the fold through the sliding lanes."""
        self._vocab_size = vocab_size
        self._chain = ROOT
        self._position = 0
        self._fold = 0

    def feed(self, token: int) -> None:
        """The sequence's next token."""
        self._chain = link(self._chain, token)
        words = (np.uint64(self._chain) * self._odd + self._salt) * self._weights[self._position]
        self._fold ^= int(np.bitwise_xor.reduce(words))
        if self._window:
            self._seen.append(int(np.bitwise_xor.reduce(words[self._sliding])))
            if len(self._seen) > self._window:
                self._fold ^= self._seen.popleft()
        self._position += 1

    @property
    def next_token(self) -> int:
        """What must come now."""
        return next_token(self._fold, self._vocab_size)


def expected_answer(lanes: Lanes, vocab_size: int, prompt: NDArray[np.int32], count: int, stop: int) -> list[int]:
    """The answer to a prompt: `count` tokens, or fewer where `stop` comes before (it is then the last one)."""
    oracle = Oracle(lanes, vocab_size)
    for token in prompt.tolist():
        oracle.feed(token)
    answer: list[int] = []
    while len(answer) < count:
        answer.append(oracle.next_token)
        if answer[-1] == stop:
            break
        oracle.feed(answer[-1])
    return answer
