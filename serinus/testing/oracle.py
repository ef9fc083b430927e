"""What the toy model must answer, computed without pool, table or torch: an independent second writing of its rules."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from serinus.core.parts import Part
from serinus.models import ModelSpec

_U = np.uint64
_A, _B, _C = _U(0x2545F4914F6CDD1D), _U(0x632BE59BD9B4E019), _U(0xD6E8FEB86659FD93)
_ITEM_BYTES = {"float8_e4m3fn": 1, "float8_e5m2": 1, "bfloat16": 2, "float32": 4}


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The output function of splitmix64."""
    x = x + _U(0x9E3779B97F4A7C15)
    x = (x ^ (x >> _U(30))) * _U(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> _U(27))) * _U(0x94D049BB133111EB)
    return x ^ (x >> _U(31))


class ToyOracle:
    """One sequence, fed token by token; knows the right next token at every place."""

    def __init__(self, spec: ModelSpec, dtype: str = "bfloat16") -> None:
        """`dtype` is that of the engine's KV: rows of other bytes have other hashes."""
        self._spec = spec
        self._words = spec.kv_head_count * spec.head_size * _ITEM_BYTES[dtype] // 8
        halves = spec.layer_parts[0].halves
        self._lanes = np.arange(0, 2 * spec.layer_count, 3 - halves, dtype=np.uint64)
        self._chain = np.zeros(1, dtype=np.uint64)
        self._seen = np.zeros(1, dtype=np.uint64)
        self._position = 0
        self._slides = np.repeat([part is Part.SWA for part in spec.layer_parts], halves)
        self._recent: deque[np.uint64] = deque()

    def feed(self, token: int) -> None:
        """The sequence's next token."""
        position = np.array([self._position], dtype=np.uint64)
        self._chain = self._chain + _mix(np.array([token], dtype=np.uint64) * _A + position + _U(1))
        hashes = self._row_hashes(position)
        self._seen = self._seen + hashes[~self._slides].sum(keepdims=True)
        self._recent.append(hashes[self._slides].sum())
        if self._spec.window is None or len(self._recent) > self._spec.window:
            self._recent.popleft()
        self._position += 1

    @property
    def next_token(self) -> int:
        """What greedy decoding must choose now."""
        span = self._spec.vocab_size - self._spec.reserved_ids
        seen = self._seen + np.array(self._recent, dtype=np.uint64).sum()
        return self._spec.reserved_ids + int(_mix(seen)[0] >> _U(1)) % span

    def _row_hashes(self, position: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """One word for each layer's key row and value row at this position."""
        word = np.arange(self._words, dtype=np.uint64)
        number = self._lanes[:, None] * _U(self._words) + word[None, :] + _U(1)
        rows = _mix(self._chain + number * _B)
        rows[0, 0] = self._chain[0]
        return _mix(_mix(rows + (word + _U(1)) * _B).sum(axis=1) + position * _A + self._lanes * _C)


def toy_continue(spec: ModelSpec, prompt: Sequence[int], n: int, *, dtype: str = "bfloat16") -> list[int]:
    """The n tokens that greedy decoding must give after `prompt` (end-of-sequence ids are not looked at)."""
    oracle = ToyOracle(spec, dtype)
    for token in prompt:
        oracle.feed(int(token))
    answer: list[int] = []
    for _ in range(n):
        answer.append(oracle.next_token)
        oracle.feed(answer[-1])
    return answer
