"""Inbox: what one step sends to the device, gathered in one buffer and sent in one copy."""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from serinus.kernels import carry_words

_LINE: Final = 16
"""Words from one array to the next at least: kernels see addresses of whole 128 bytes, whatever lies before."""
_KEPT: Final = 1024
"""Tensors that are kept from step to step."""


class Inbox:
    """Pinned words on the host and as many on the device. On a CPU both are one memory, and nothing is sent.

    inbox.begin()
    tensor = inbox.put(values)          for each array: what it is on the device, once it is sent
    inbox.send()                        before the first kernel that reads one

    Arrays of the same sizes in the same order are the same tensors as in an earlier step: a captured step finds its
    input, and what a kernel's caller noted of a tensor is true of it again.
    """

    def __init__(self, device: str, words: int = 1 << 20) -> None:
        self._device = device
        self._is_far = device != "cpu"
        self._host_W = torch.empty(words, dtype=torch.int64, pin_memory=self._is_far)
        self._words_W = self._host_W.numpy()
        self._there_W = torch.empty(words, dtype=torch.int64, device=device) if self._is_far else self._host_W
        self._sent = torch.cuda.Event() if self._is_far else None  # type: ignore[no-untyped-call]
        self._used = 0
        self._made: dict[tuple[int, ...], torch.Tensor] = {}
        """Tensors there, by where they begin and their shape."""

    def begin(self) -> None:
        """A new step; tensors of the one before mean nothing any more. Waits until the last copy is out."""
        if self._sent is not None:
            self._sent.synchronize()
        self._used = 0

    def put(self, values: NDArray[np.int64]) -> torch.Tensor:
        """The tensor that will have these values, of their shape. What does not fit is copied by itself, at once."""
        begin, end = self._used, self._used + values.size
        if end > len(self._words_W):
            return torch.from_numpy(np.ascontiguousarray(values)).to(self._device)
        self._words_W[begin:end] = values.reshape(-1)
        self._used = -(-end // _LINE) * _LINE
        made = self._made.get(key := (begin, *values.shape))
        if made is None:
            if len(self._made) >= _KEPT:
                self._made.clear()
            made = self._made[key] = self._there_W[begin:end].view(values.shape)
        return made

    def send(self) -> None:
        """Queue the copy of all that was put. No wait."""
        if self._sent is not None and self._used:
            carry_words(self._there_W[: self._used], self._host_W[: self._used])
            self._sent.record()
