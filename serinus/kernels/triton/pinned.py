"""Small arrays of the host on their way to the device, without a wait for it."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor


def sent(values: Tensor, device: torch.device) -> Tensor:
    """A copy there; a GPU's comes through pinned memory that the allocator keeps until it was read."""
    if device.type != "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


def sent_ahead(values: Tensor, device: torch.device) -> Tensor:
    """The same by a stream of its own: beside what is queued on the current one, which waits for it. Between kernels
    of one stream a copy would idle the multiprocessors, and another process would get its turn."""
    if device.type != "cuda":
        return values.to(device)
    ahead, now = _ahead(device), torch.cuda.current_stream(device)
    with torch.cuda.stream(ahead):
        there = sent(values, device)
    now.wait_stream(ahead)
    there.record_stream(now)
    return there


@lru_cache(maxsize=8)
def _ahead(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
