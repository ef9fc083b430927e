"""Shared memory of the simulated machine: segments by process and descriptor (pd.backends.shm.Segments)."""

from __future__ import annotations

from itertools import count

import numpy as np

from serinus.pd.backends.shm import Opened, Segments


class SharedMemory:
    """All processes of a cluster, which share one machine."""

    def __init__(self) -> None:
        self.processes: dict[int, SimSegments] = {}
        """Those that are alive, by process id."""
        self.inodes = count(100_000)
        """Never the same twice."""

    def process(self, name: str) -> SimSegments:
        """A new process, with the id that the process of this name had before: the system gives ids again."""
        process = self.processes[_pid(name)] = SimSegments(self, _pid(name))
        return process

    def kill(self, name: str) -> None:
        """Its descriptors are closed. What others have mapped, they keep."""
        self.processes.pop(_pid(name), None)


def _pid(name: str) -> int:
    return 1000 + int.from_bytes(name.encode(), "little") % 1000


class SimSegments(Segments):
    """What one process sees of them."""

    def __init__(self, machine: SharedMemory, pid: int) -> None:
        self._machine, self._pid = machine, pid
        self._own: dict[int, Opened] = {}

    @property
    def pid(self) -> int:
        return self._pid

    def create(self, byte_count: int) -> Opened:
        fd = next(fd for fd in count(3) if fd not in self._own)
        own = Opened(fd=fd, inode=next(self._machine.inodes), area=np.zeros(byte_count, np.uint8))
        self._own[fd] = own
        return own

    def close(self, fd: int) -> None:
        del self._own[fd]

    def open(self, pid: int, fd: int) -> Opened:
        """See Segments. Raises FileNotFoundError: the process is gone, or has closed it."""
        process = self._machine.processes.get(pid)
        if process is None or fd not in process._own:
            raise FileNotFoundError(f"sim: process {pid} has no segment {fd}")
        return process._own[fd]
