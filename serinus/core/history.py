"""TokenHistory: which tokens a sequence has and how often it generated each, as penalties look at it. One token a step
is added; nothing is counted twice. Knows no request."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_LEAST = 64


class TokenHistory:
    """The tokens of one sequence: a bit for each that was seen, a count for each that was generated."""

    __slots__ = ("_count", "_ids", "_places", "_seen", "_times")

    def __init__(self, prompt: NDArray[np.int32]) -> None:
        """Of a sequence that is only its prompt yet. Cost: one pass over it, a bit for each id up to the largest."""
        flags = np.zeros(int(prompt.max()) + 1 if len(prompt) else 0, np.bool_)
        flags[prompt] = True
        self._seen = np.packbits(flags, bitorder="little")
        self._ids, self._times = np.zeros(_LEAST, np.int32), np.zeros(_LEAST, np.float32)
        self._places: dict[int, int] = {}
        self._count = 0

    @classmethod
    def of(cls, seen: NDArray[np.uint8], ids: NDArray[np.int32], times: NDArray[np.float32]) -> TokenHistory:
        """What three arrays say, as they came from another rank. It shares them, and takes no more tokens: raises
        ValueError where ids and times are not of one length."""
        if len(ids) != len(times):
            raise ValueError(f"history: {len(ids)} generated ids, {len(times)} counts, expected as many")
        history = cls.__new__(cls)
        history._seen, history._ids, history._times = seen, ids, times
        history._places, history._count = {}, len(ids)
        return history

    @property
    def seen(self) -> NDArray[np.uint8]:
        """Bit i % 8 of byte i // 8: token i is in prompt or output. Ids behind the last byte were not seen."""
        return self._seen

    @property
    def output_ids(self) -> NDArray[np.int32]:
        """The different tokens that were generated."""
        return self._ids[: self._count]

    @property
    def output_times(self) -> NDArray[np.float32]:
        """How often each of `output_ids` was generated."""
        return self._times[: self._count]

    def add(self, token: int) -> None:
        """One more generated token. Changes the arrays that were handed out before."""
        byte = token >> 3
        if byte >= len(self._seen):
            self._seen = _grown(self._seen, byte + 1)
        self._seen[byte] |= 1 << (token & 7)
        place = self._places.setdefault(token, self._count)
        if place == self._count:
            if place == len(self._ids):
                self._ids, self._times = _grown(self._ids, place + 1), _grown(self._times, place + 1)
            self._ids[place] = token
            self._count = place + 1
        self._times[place] += 1.0


def _grown(array: NDArray[Any], least: int) -> NDArray[Any]:
    """The same with room for more: at least `least`, and half as much again."""
    grown = np.zeros(max(least, len(array) + len(array) // 2), array.dtype)
    grown[: len(array)] = array
    return grown
