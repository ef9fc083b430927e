"""Small arrays of the host on their way to the device, without a wait for it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def sent(values: Tensor, device: torch.device) -> Tensor:
    """A copy there; a GPU's comes through pinned memory that the allocator keeps until it was read."""
    if device.type != "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


@contextmanager
def read_in_place(values_N: NDArray[np.int64], device: torch.device) -> Iterator[Tensor]:
    """The values, in their order and perhaps with others behind, for kernels that are started inside, which read a few
    of them: from pinned memory of the host, with no copy to the device. Where pages leave, such a copy would queue
    behind all that are on their way in."""
    if device.type != "cuda":
        yield torch.from_numpy(values_N)
        return
    words = _lent(values_N.size)
    words.here_N[: values_N.size] = values_N.reshape(-1)
    yield words.pinned_N
    words.read.record(torch.cuda.current_stream(device))
    with _LOCK:
        _LENT.append(words)


class _Words:
    """Pinned memory that kernels read in place."""

    def __init__(self, size: int) -> None:
        self.pinned_N = torch.empty(size, dtype=torch.int64, pin_memory=True)
        self.here_N = self.pinned_N.numpy()
        self.read: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        """Behind the last kernel that does."""


def _lent(size: int) -> _Words:
    """For so many values; no kernel reads them any more."""
    with _LOCK:
        while _LENT and _LENT[0].read.query():
            words = _LENT.popleft()
            if len(words.here_N) >= size:
                return words
    return _Words(max(_SIZE_MIN, 1 << (size - 1).bit_length()))


_SIZE_MIN = 512
_LENT: deque[_Words] = deque()
"""In the order in which kernels were started."""
_LOCK = threading.Lock()
