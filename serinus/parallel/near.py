"""NearStage: the sums of ranks that share a machine, through memory they all map instead of through sockets.

A sum of a few kilobytes takes gloo some 200 us on a machine of two cores, twice per layer; here it takes a copy, a flag
and a look at the flags of the others. Each rank writes its part into its own slot and then the number of the round into
its flag; a rank that sees that number in every flag may read all slots. Two sets of slots take turns: before a rank
writes into a set again it has seen every flag of the round between, so no rank reads that set any more.

A rank that abandons a step says so beside its flag, for all that wait for its next one; they abandon the step too. The
ranks are then at the round of its last flag, or one further. Before the next step each that left waits for all, and
goes on from the last of these rounds.

A rank that is killed writes no flag; but the kernel releases the lock that it held on its byte of the file, and a rank
that has waited for a while looks at that lock.

This needs stores to be seen in the order in which they are made: x86-64 promises it, others do not (`possible`).
"""

from __future__ import annotations

import fcntl
import mmap
import os
import platform
import struct
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Final

import torch
from torch import Tensor

from serinus.core.clock import Clock
from serinus.core.errors import PeerGone, StepAbandoned

_FOLDER: Final = Path("/dev/shm")
_LINE: Final = 64
"""Bytes of each rank's words: one cache line."""
_WORDS: Final = _LINE // 8
_FLAG, _LEFT, _LEFT_AT, _BEGUN = range(4)
"""A rank's words: its last round; the last step that it abandoned, and after which round; twice the step that it began,
and 1 once it goes on from the same round as the others."""
_SLOT_BYTES: Final = 1 << 20
"""Larger tensors take several rounds."""
_SPINS: Final = 200
"""Looks at a flag before others may have the core."""
_EAGER_S: Final = 0.002
"""Time spent looking before it is looked now and then."""
_NAP_S: Final = 0.0002


class NearFile:
    """The memory of one stage: made and named by slice 0, mapped by all, without a name once all have it."""

    def __init__(self, file: int, path: Path, index: int, size: int) -> None:
        """Take over an open file. Raises OSError: it cannot be locked or mapped."""
        self.path = path
        self._file = file
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, _lock(index))
        self.memory = mmap.mmap(file, _bytes(size))

    @staticmethod
    def possible() -> bool:
        """Whether this machine orders its stores, and has memory with names."""
        return platform.machine() in ("x86_64", "AMD64") and sys.platform == "linux" and _FOLDER.is_dir()

    @staticmethod
    def make(size: int) -> NearFile | None:
        """New memory for `size` ranks, all zeros; None where there is no room for it."""
        try:
            file, name = tempfile.mkstemp(prefix="serinus-ranks-", dir=_FOLDER)
        except OSError:
            return None
        try:
            os.posix_fallocate(file, 0, _bytes(size))  # a hole would be a SIGBUS later
            return NearFile(file, Path(name), 0, size)
        except OSError:
            os.close(file)
            os.unlink(name)
            return None

    @staticmethod
    def find(name: str, index: int, size: int) -> NearFile | None:
        """What slice 0 made; None where this is another machine. A name is too random to be met by chance."""
        path = _FOLDER / Path(name).name
        try:
            file = os.open(path, os.O_RDWR)
        except OSError:
            return None
        try:
            return NearFile(file, path, index, size)
        except (OSError, ValueError):
            os.close(file)
            return None

    def alive(self, index: int) -> bool:
        """Whether the process of a rank is there: it holds its byte."""
        found = fcntl.fcntl(self._file, fcntl.F_OFD_GETLK, _lock(index))
        return bool(struct.unpack_from("h", found)[0] != fcntl.F_UNLCK)

    def close(self) -> None:
        """Release the lock of the byte; the mapped memory stays as long as a tensor uses it."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)


def _lock(index: int) -> bytes:
    """A lock of one byte, that of a rank (struct flock)."""
    return struct.pack("hhqqixxxx", fcntl.F_WRLCK, os.SEEK_SET, index, 1, 0)


def _lengths(total: int, most: int) -> list[int]:
    """Lengths of the parts that `total` elements are cut into, `most` each but the last."""
    return [min(most, total - at) for at in range(0, total, most)]


def _bytes(size: int) -> int:
    return size * _LINE + 2 * size * _SLOT_BYTES


class NearStage:
    """One rank's end of its stage. Contracts of the calls: Comm; all ranks make them in the same order."""

    def __init__(
        self, file: NearFile, index: int, size: int, clock: Clock, timeout_s: float, check: Callable[[], None] | None
    ) -> None:
        self.waited_s = 0.0
        self._file = file
        self._index = index
        self._others = [i for i in range(size) if i != index]
        self._words = memoryview(file.memory)[: size * _LINE].cast("q")
        self._own = index * _WORDS
        slots = torch.frombuffer(file.memory, dtype=torch.uint8, offset=size * _LINE).view(2, size, _SLOT_BYTES)
        self._sets = tuple(tuple(slot.unbind(0)) for slot in slots.unbind(0))
        self._clock = clock
        self._timeout_s = timeout_s
        self._check = check
        self._round = 0
        """Number of the last exchange; in this rank's flag, with all its bits inverted once the rank is closed."""
        self._step = -1
        self._has_left = False
        self._closed = False

    def begin(self, step: int) -> None:
        """The rounds of this step follow; see Comm. Cost: one store, but after a step that was abandoned."""
        words, own, left = self._words, self._own, self._step
        self._step = step
        if self._has_left:
            words[own + _BEGUN] = 2 * step
            self._await_all(_BEGUN, 2 * step)
            lines = range(0, len(words), _WORDS)
            self._round = max(words[line + _LEFT_AT] for line in lines if words[line + _LEFT] == left)
            words[own + _FLAG] = self._round
            self._has_left = False
            words[own + _BEGUN] = 2 * step + 1
            self._await_all(_BEGUN, 2 * step + 1)  # what it said of this step stays until all have read it
        words[own + _BEGUN] = 2 * step + 1

    def abandon(self) -> None:
        """Make no more rounds in this step; ranks that wait for one get StepAbandoned."""
        self._has_left = True
        self._words[self._own + _LEFT_AT] = self._round
        self._words[self._own + _LEFT] = self._step

    def all_reduce(self, x: Tensor) -> Tensor:
        for part in self._parts(x):
            first, second, *more = self._exchange(part)
            torch.add(first, second, out=part)
            for slot in more:
                part += slot
        return x

    def broadcast(self, x: Tensor) -> Tensor:
        for part in self._parts(x):
            part.copy_(self._exchange(part)[0])
        return x

    def gather_last(self, x: Tensor) -> Tensor | None:
        x = x.contiguous()
        found = x.new_empty((len(self._others) + 1, x.numel())) if self._index == 0 else None
        at = 0
        for part in self._parts(x):
            slots = self._exchange(part)
            if found is not None:
                for row, slot in zip(found, slots, strict=True):
                    row[at : at + len(part)] = slot
            at += len(part)
        return None if found is None else found.view(-1, *x.shape).movedim(0, -2).flatten(-2)

    def close(self) -> None:
        """Fail every rank that waits for more of this one, now or later; what this rank wrote may still be read."""
        if not self._closed:
            self._closed = True
            self._words[self._own + _FLAG] = ~self._round
            self._file.close()

    def _parts(self, x: Tensor) -> tuple[Tensor, ...]:
        return torch.split_with_sizes(x.view(-1), _lengths(x.numel(), _SLOT_BYTES // x.element_size()))

    def _exchange(self, part: Tensor) -> list[Tensor]:
        """The parts of all ranks in this round, by rank; valid until the next round."""
        if self._closed:
            raise PeerGone("parallel: this rank has left its stage, expected no more of it")
        slots = [slot[: part.nbytes].view(part.dtype) for slot in self._sets[self._round % 2]]
        slots[self._index].copy_(part)
        self._round += 1
        self._words[self._own + _FLAG] = self._round
        self._await_all(_FLAG, self._round)
        return slots

    def _await_all(self, word: int, wanted: int) -> None:
        for other in self._others:
            self._await(other, word, wanted)

    def _await(self, other: int, word: int, wanted: int) -> None:
        words, line = self._words, other * _WORDS
        at = line + word
        for _ in range(_SPINS):
            if words[at] >= wanted:
                return
        began = self._clock.now()
        spent_s = 0.0
        while words[at] < wanted:
            flag = words[line + _FLAG]
            if word == _FLAG and (flag >= wanted or ~flag >= wanted):
                return  # it came, or it left after this round
            if word == _FLAG and words[line + _LEFT] == self._step:
                raise StepAbandoned(f"parallel: slice {other} of this stage has abandoned this step")
            late = spent_s > _EAGER_S
            if flag < 0 or spent_s > self._timeout_s or (late and not self._file.alive(other)):
                raise PeerGone(f"parallel: slice {other} of this stage left or does not come, expected all of them")
            if not late:
                os.sched_yield()
            else:
                if self._check is not None:
                    self._check()
                Event().wait(_NAP_S)
            spent_s = self._clock.now() - began
        self.waited_s += spent_s
