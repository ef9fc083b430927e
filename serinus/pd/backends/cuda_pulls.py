"""Pulls and sums of pages on streams of a GPU, in slots that are used again and again: what a job needs of memory and
events is made once. Made anew for each job it cost the host 0.9 ms, four times what the device took.

G = pages of a job, K = sums of a page, N = words of a job.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from threading import Lock
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from serinus.kernels import CudaLibrary

__all__ = ["DevicePull", "DevicePulls", "Mark", "PageJob"]

_WORDS_MIN: Final = 4096
"""Of a slot, 32 KB: a pull of 1,365 pages."""


class PageJob(Protocol):
    """What is done with pages of some lanes (kernels/triton/pull_pages.py)."""

    sums: int
    """Sums of each page."""

    def check(self, pages_G: NDArray[np.int32], source_pages_G: NDArray[np.int32] | None) -> None:
        """Raise ValueError where a page lies outside."""

    def word_count(self, page_count: int) -> int:
        """Words of the job of so many pages."""

    def fill(
        self, words_N: NDArray[np.int64], pages_G: NDArray[np.int32], seed: int,
        source_pages_G: NDArray[np.int32] | None,
    ) -> None:  # fmt: skip
        """Write a job. Its sums come first, zeros yet."""

    def launch(self, words_N: Tensor, page_count: int, stream: int) -> None:
        """Queue it; the words are on the device."""


class Mark:
    """What was queued on a stream at one moment."""

    def __init__(self, cuda: CudaLibrary, stream: int) -> None:
        self._cuda = cuda
        with cuda:
            self._mark = None if cuda.is_idle(stream) else cuda.mark(stream)

    @property
    def event(self) -> int:
        """Of an event; 0 = all of it had run already."""
        return 0 if self._mark is None else self._mark.event

    def has_passed(self) -> bool:
        """Whether all of it has run. Never waits."""
        with self._cuda as cuda:
            return not self.event or cuda.has_passed(self.event)


class _Slot:
    """Memory and events of one job at a time."""

    def __init__(self, cuda: CudaLibrary, there_N: Tensor, here_N: Tensor) -> None:
        """Words on the device and in pinned memory of the host."""
        self._cuda = cuda
        self.there_N, self.here_N = there_N, here_N.numpy()
        self.there, self.here = there_N.data_ptr(), here_N.data_ptr()
        self.sent, self.read = cuda.event(timed=False), cuda.event(timed=False)
        self.begin, self.end = cuda.event(timed=True), cuda.event(timed=True)
        self.job: PageJob | None = None
        """Kept until the device has done with it."""

    def __del__(self) -> None:
        """The memory goes when nothing on the device reads or writes it."""
        with self._cuda as cuda:
            for event in (self.sent, self.end, self.read, self.begin):
                cuda.synchronize(event)
                cuda.destroy(event)


class DevicePull:
    """A job that is queued, and its sums, which are on the host when it is done."""

    def __init__(self, cuda: CudaLibrary, slot: _Slot, idle: deque[_Slot], sum_count: int) -> None:
        self._cuda, self._idle, self._sum_count = cuda, idle, sum_count
        self._slot: _Slot | None = slot
        self._sums, self._seconds = b"", 0.0

    def done(self) -> bool:
        """Whether nothing of it is read or written any more. Never waits."""
        if self._slot is None:
            return True
        with self._cuda as cuda:
            return cuda.has_passed(self._slot.read)

    def sums(self) -> bytes:
        """Little-endian, K of each page. Waits until it is done, and gives the slot back."""
        slot = self._slot
        if slot is not None:
            with self._cuda as cuda:
                cuda.synchronize(slot.read)
                self._seconds = cuda.seconds(slot.begin, slot.end)
            self._sums = slot.here_N[: self._sum_count].astype("<i8").tobytes()
            self._give_back()
        return self._sums

    @property
    def seconds(self) -> float:
        """From its begin to its end on the device. Waits until it is done."""
        self.sums()
        return self._seconds

    def _give_back(self) -> None:
        slot, self._slot = self._slot, None
        if slot is not None:
            self._idle.append(slot)

    def __del__(self) -> None:
        """The slot of a job whose sums were not read; it is not used again before the job has run."""
        self._give_back()


class DevicePulls:
    """Queues jobs on streams of one device. Several threads may."""

    def __init__(
        self, cuda: CudaLibrary, allocate: Callable[[int], tuple[Tensor, Tensor]], model: Callable[[], int], ids: int,
        reads: int,
    ) -> None:  # fmt: skip
        """
        Args:
            allocate: so many words on the device, which nothing queued yet reads or writes but on stream `ids`, and in
                pinned memory of the host.
            model: the stream that the model's steps are queued on now.
            ids: the stream that jobs go to the device by, beside what the other streams do: between kernels of one
                stream a copy would idle the multiprocessors, and another process would get its turn.
            reads: the stream that sums come back by, in the order of the jobs.
        """
        self._cuda, self._allocate, self._model, self._ids, self._reads = cuda, allocate, model, ids, reads
        self._idle: deque[_Slot] = deque()
        """Given back; those at the left end may be under way yet."""
        self._failed: list[_Slot] = []
        """Of jobs that were queued in part: nothing tells when the device has done with them."""
        self._lock = Lock()

    def mark(self) -> Mark:
        """What is queued for the model now."""
        return Mark(self._cuda, self._model())

    def is_idle(self) -> bool:
        """Whether all that was queued for the model has run. Never waits."""
        with self._cuda as cuda:
            return cuda.is_idle(self._model())

    def begin(
        self, job: PageJob, stream: int, pages_G: NDArray[np.int32], seed: int,
        source_pages_G: NDArray[np.int32] | None = None, *, behind: Mark | None = None,
    ) -> DevicePull:  # fmt: skip
        """Queue a job on a stream, behind a mark, and beside what else is queued for the model. Waits for nothing.

        Raises ValueError: a page lies outside; nothing was queued.
        """
        job.check(pages_G, source_pages_G)
        count, word_count = len(pages_G), job.word_count(len(pages_G))
        with self._cuda as cuda:
            slot = self._take(cuda, word_count)
            slot.job = job
            job.fill(slot.here_N[:word_count], pages_G, seed, source_pages_G)
            self._failed.append(slot)
            if behind is not None and behind.event:
                cuda.wait(stream, behind.event)
            cuda.record(slot.begin, stream)
            cuda.send(slot.there, slot.here, 8 * word_count, self._ids)
            cuda.record(slot.sent, self._ids)
            cuda.wait(stream, slot.sent)
            job.launch(slot.there_N, count, stream)
            cuda.record(slot.end, stream)
            cuda.wait(self._reads, slot.end)
            cuda.fetch(slot.here, slot.there, 8 * count * job.sums, self._reads)
            cuda.record(slot.read, self._reads)
            self._failed.remove(slot)
        return DevicePull(cuda, slot, self._idle, count * job.sums)

    def _take(self, cuda: CudaLibrary, word_count: int) -> _Slot:
        """A slot that the device has done with, the last used first. One that is too small goes."""
        with self._lock:
            for _ in range(len(self._idle)):
                slot = self._idle.pop()
                if not cuda.has_passed(slot.read):
                    self._idle.appendleft(slot)
                elif len(slot.here_N) >= word_count:
                    return slot
        size = max(_WORDS_MIN, 1 << (word_count - 1).bit_length())
        return _Slot(cuda, *self._allocate(size))
