"""Tickets: counters by which the last of several programs knows that it is the last, and puts their parts together in a
fixed order. Integers; the last program leaves zeros behind."""

from __future__ import annotations

import torch
from torch import Tensor

TICKETS = 1 << 16
"""Counters of one op and device: what needs more goes without parts."""


class Tickets:
    """The counters of one op. A captured graph keeps their address, so they never move."""

    def __init__(self) -> None:
        self._of: dict[torch.device, Tensor] = {}

    def on(self, device: torch.device) -> Tensor:
        """int32 [TICKETS], zeros between two kernels of one stream. Cost: the first time 256 KB of the device."""
        found = self._of.get(device)
        if found is None:
            found = self._of[device] = torch.zeros(TICKETS, dtype=torch.int32, device=device)
        return found
