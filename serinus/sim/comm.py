"""Tensors between the simulated ranks of one engine: folds from stage to stage, and from all slices to the first one.

All ranks are in one thread, so a rank that waited would wait for ever: a rank obeys a step only when its inputs are
there (`has_inputs`), and the leader's own rank, which obeys as it sends the header, lets the others go first (`wait`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch

from serinus.parallel import Mesh
from serinus.parallel.comm import StagePeers


class RankTensors:
    """What is on its way between the ranks of one engine."""

    def __init__(self, mesh: Mesh, *, wait: Callable[[Callable[[], bool]], None], came: Callable[[int], None]) -> None:
        """
        Args:
            wait: lets other ranks obey until this holds.
            came: a rank has one more input.
        """
        self.mesh = mesh
        self.wait, self.came = wait, came
        self.inflow: list[deque[torch.Tensor]] = [deque() for _ in range(mesh.size)]
        """For each rank, from the stage before."""
        self.shares: list[deque[torch.Tensor]] = [deque() for _ in range(mesh.tp)]
        """From each slice of the last stage but the first, for the first."""

    def has_inputs(self, rank: int, steps: int, samples: int) -> bool:
        """Whether a rank could run so many steps, of which some sample, without waiting."""
        mesh = self.mesh
        if mesh.pp_rank(rank) and len(self.inflow[rank]) < steps:
            return False
        return rank != mesh.result_rank or all(len(share) >= samples for share in self.shares[1:])


class SimComm:
    """One rank's end (parallel.comm.Comm): what the simulated model uses of it."""

    def __init__(self, tensors: RankTensors, rank: int) -> None:
        self.mesh = tensors.mesh
        self.rank = rank
        self.waited_s = 0.0
        self.peers: StagePeers | None = None
        self._tensors = tensors

    can_abandon = False
    """No allocation fails in the simulation."""

    def begin(self, step: int) -> None:
        """No step is abandoned: there is nothing to wait for."""

    def abandon(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Raises ValueError: no allocation fails here."""
        raise ValueError("sim: a step is abandoned, expected none")

    def send(self, x: torch.Tensor) -> None:
        target = self.rank + self.mesh.tp
        self._tensors.inflow[target].append(x.clone())
        self._tensors.came(target)

    def recv(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """What the stage before sent. Raises ValueError: it has another shape."""
        box = self._tensors.inflow[self.rank]
        self._tensors.wait(lambda: bool(box))
        found = box.popleft()
        if tuple(found.shape) != tuple(shape) or found.dtype != dtype:
            raise ValueError(f"sim: rank {self.rank} got {tuple(found.shape)} of the stage before, expected {shape}")
        return found

    def gather_last(self, x: torch.Tensor) -> torch.Tensor | None:
        if self.mesh.tp == 1:
            return x
        tensors, slice_ = self._tensors, self.mesh.tp_rank(self.rank)
        if slice_:
            tensors.shares[slice_].append(x.clone())
            tensors.came(self.mesh.result_rank)
            return None
        boxes = tensors.shares[1:]
        tensors.wait(lambda: all(boxes))
        return torch.cat([x, *(box.popleft() for box in boxes)], dim=1)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Raises ValueError: the simulated model sums nothing over the ranks of a stage."""
        raise ValueError("sim: an all_reduce, expected none")

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Raises ValueError: there are several slices, of which the simulated ones have nothing to tell each other."""
        if self.mesh.tp > 1:
            raise ValueError("sim: a broadcast to several slices, expected one")
        return x

    def smallest(self, values: Sequence[int]) -> tuple[int, ...]:
        """All ranks are built alike: the values."""
        return tuple(values)

    def close(self) -> None:
        """The process ended; what was sent is gone with it."""
