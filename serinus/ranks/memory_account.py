"""MemoryAccount: what the memory of a GPU was taken for, told in the log and to clients. Nothing on a CPU."""

from __future__ import annotations

import torch

from serinus.core.log import get_logger
from serinus.ranks.memory import available_bytes, total_bytes

_log = get_logger("engine")


class MemoryAccount:
    """Bytes of one rank's device by what they hold, in the order in which they were taken."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._last = 0
        self.bytes: dict[str, int] = {}
        """Weights, KV, tables, canary, graphs, and what is kept free for the largest step."""

    @property
    def own_bytes(self) -> int:
        """What this process holds of the device by torch; that of others, and of CUDA itself, not counted."""
        return 0 if self._device == "cpu" else torch.cuda.memory_reserved()

    def mark(self, name: str) -> None:
        """What tensors were made since the last mark is called `name`."""
        if self._device != "cpu":
            now = torch.cuda.memory_allocated()
            self.bytes[name], self._last = max(now - self._last, 0), now

    def put(self, name: str, count: int) -> None:
        """So many bytes are `name`, as another way to measure found."""
        if self._device != "cpu":
            self.bytes[name] = count

    def tell(self) -> None:
        """A line of the log: where all of the memory is."""
        if self._device == "cpu":
            return
        free, total = available_bytes(self._device), total_bytes(self._device)
        taken = sum(count for name, count in self.bytes.items() if name != "largest step")
        self.bytes["CUDA and other processes"] = max(total - free - taken, 0)
        self.bytes["free"] = max(free - self.bytes.get("largest step", 0), 0)
        shown = ", ".join(f"{name} {count / 1e9:.2f}" for name, count in self.bytes.items())
        _log.info("memory of %s, %.2f GB: %s", self._device, total / 1e9, shown)
