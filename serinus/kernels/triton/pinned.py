"""Small arrays of the host on their way to the device, without a wait for it."""

from __future__ import annotations

import torch
from torch import Tensor


def sent(values: Tensor, device: torch.device) -> Tensor:
    """A copy there; a GPU's comes through pinned memory that the allocator keeps until it was read."""
    if device.type != "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)
