"""StepGraphs: decode steps recorded once for each of some batch sizes, and replayed.

A decode step is hundreds of launches, which cost the host more time than the device needs for them; a CUDA graph is
one. A step is replayed on the smallest size that holds it, its batch filled up with padding: sequences of one token on
row 0, which is stored to slot 0. On a CPU, where nothing is gained by it, a recorded step is the function itself: the
same padding and buffers, for tests.
"""

from __future__ import annotations

import gc
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch

from serinus.models import ForwardBatch

_SIZES: Final = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
Compute = Callable[[ForwardBatch], torch.Tensor]


def batch_sizes(most: int) -> tuple[int, ...]:
    """Sizes that are recorded, up to `most` sequences."""
    return (*(size for size in _SIZES if size < most), most) if most <= _SIZES[-1] else _SIZES


class StepGraphs:
    """One recorded step of each size. They share memory: only what the latest replay returned may be read."""

    def __init__(self, device: str, sizes: tuple[int, ...]) -> None:
        self.sizes = sizes
        """Sequences of each recorded step, ascending."""
        self.replays = 0
        """Steps replayed so far."""
        self._is_cuda = device != "cpu"
        self._pool: Any = torch.cuda.graph_pool_handle() if self._is_cuda else None
        self._recorded: dict[int, Compute] = {}
        self._graphs: list[Any] = []

    def size_of(self, count: int) -> int | None:
        """The size on which a step of so many sequences is replayed; None = it is larger than all."""
        at = bisect_left(self.sizes, count)
        return self.sizes[at] if at < len(self.sizes) else None

    def record(self, size: int, compute: Compute, batch: ForwardBatch) -> None:
        """Record the step of a size. `compute` has run on such a batch before: what is compiled or allocated at first
        use is there. The tensors of all batches of the size lie where those of this one lie.

        Cost: some 20 ms; device memory for what the step allocates, once for all sizes (so begin with the largest).
        """
        if not self._is_cuda:
            self._recorded[size] = compute
            return
        graph = torch.cuda.CUDAGraph()
        with _no_collection(), torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            out = compute(batch)

        def replay(_: ForwardBatch) -> torch.Tensor:
            graph.replay()
            return out

        self._recorded[size] = replay
        self._graphs.append(graph)

    def replay(self, size: int, batch: ForwardBatch) -> torch.Tensor:
        """Queue the step; what it returned when it was recorded, with new values."""
        self.replays += 1
        return self._recorded[size](batch)

    def close(self) -> None:
        """Forget what is recorded; nothing is replayed any more. NCCL ends a communicator once no graph names it, and
        CUDA destroys one that is running when it has ended. May be called again."""
        for graph in self._graphs:
            graph.reset()
        self._graphs.clear()
        self._recorded.clear()


@contextmanager
def _no_collection() -> Iterator[None]:
    """Garbage is collected later: an earlier engine's graphs may be in it, and CUDA ends a recording within which one
    is destroyed."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
