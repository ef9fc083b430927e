"""Small arrays of the host on their way to the device, without a wait for it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


def sent(values: Tensor, device: torch.device) -> Tensor:
    """A copy there; a GPU's comes through pinned memory that the allocator keeps until it was read."""
    if device.type != "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


@contextmanager
def read_in_place(values: Tensor, device: torch.device) -> Iterator[Tensor]:
    """The values for kernels that are started inside, which read a few of them: from pinned memory of the host, with no
    copy to the device. Where pages leave, such a copy would queue behind all that are on their way in."""
    if device.type != "cuda" or values.device == device:
        yield values.to(device)
        return
    pinned = values.pin_memory()
    yield pinned
    read = torch.cuda.Event()  # type: ignore[no-untyped-call]
    read.record(torch.cuda.current_stream(device))
    with _LOCK:
        while _LENT and _LENT[0][0].query():
            _LENT.popleft()
        _LENT.append((read, pinned))


_LENT: deque[tuple[Any, Tensor]] = deque()
"""Values that kernels read in place, with the event behind these."""
_LOCK = threading.Lock()
