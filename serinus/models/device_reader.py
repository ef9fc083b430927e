"""DeviceReader: ranges of files to a device, by several threads through pinned memory, digested on the way.

A thread has two buffers: while the copy of one to the device is under way, on a stream of the thread's own, the next
piece is read into the other. A range is cut into pieces that any thread takes, so one large tensor keeps all of them
busy; ranges may be begun ahead of their use. A thread gives up the interpreter's lock to read a piece, to digest it,
and to wait for a buffer, nowhere else. On a CPU pieces are read to where they belong: for tests. Knows files and bytes,
nothing of tensors' names.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from serinus.kernels import CudaLibrary
from serinus.models.weight_digests import PIECE_BYTES, piece_digest

THREADS_MAX = 12
"""On a quiet machine of 16 virtual cores 4, 6, 8, 10 and 12 threads gave 12.4, 16.6, 19.9, 20.6 and 22.1 GB/s."""
_Event: Any = torch.cuda.Event
_Stream: Any = torch.cuda.Stream


@dataclass(frozen=True, slots=True)
class Reading:
    """A range that is on its way."""

    there_N: Tensor
    """uint8, on the device; filled once `wait` has returned, for what is queued on the stream of its caller."""
    pieces: Sequence[Future[tuple[int, bytes]]]
    """Of each piece the event behind its copy, 0 on a CPU, and its digest, empty where none was asked for."""
    cuda: CudaLibrary | None
    """None on a CPU."""

    def wait(self) -> list[bytes]:
        """Wait until all of it is read, and queue a wait for its copies; the digests of its pieces, in order.

        Raises OSError: the file cannot be read, or ends before the range.
        """
        done = [piece.result() for piece in self.pieces]
        if self.cuda is not None:
            stream = torch.cuda.current_stream(self.there_N.device).cuda_stream
            with self.cuda as cuda:
                for event in {event for event, _ in done}:
                    cuda.wait(stream, event)
        return [digest for _, digest in done]


class _Buffer:
    """Pinned memory for one piece."""

    def __init__(self, cuda: CudaLibrary) -> None:
        memory_N = torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True)
        self.address, self.view = memory_N.data_ptr(), memory_N.numpy().data
        self.sent = cuda.event(timed=False)
        """Passes when what was last copied from here is on the device."""


class DeviceReader:
    """The threads and the files that they read."""

    def __init__(self, device: str, threads: int | None = None) -> None:
        """`threads`: None = as many as torch has here, 12 at most. Cost: 16 MiB of pinned memory a thread."""
        self.threads = threads or max(1, min(THREADS_MAX, torch.get_num_threads()))
        self._device = torch.device(device)
        self._streams: list[Any] = []
        """Of threads that have none yet."""
        self._buffers: list[_Buffer] = []
        self._cuda: CudaLibrary | None = None
        if self._device.type == "cuda":
            self._streams = [_Stream(self._device) for _ in range(self.threads)]
            self._cuda = CudaLibrary(self._streams[0].cuda_stream)
        self._pool = ThreadPoolExecutor(self.threads, "serinus-read")
        self._own = threading.local()
        self._files: dict[Path, int] = {}

    def begin(self, file: Path, offset: int, count: int, *, digested: bool = False) -> Reading:
        """Begin to read `count` bytes of a file from `offset` on. `digested`: pieces are digested, counted from the
        offset. Raises OSError: the file cannot be opened."""
        if file not in self._files:
            self._files[file] = os.open(file, os.O_RDONLY)
        there_N = torch.empty(count, dtype=torch.uint8, device=self._device)
        opened, starts = self._files[file], range(0, count, PIECE_BYTES)
        if self._cuda is None:
            view = there_N.numpy().data
            pieces = [
                self._pool.submit(_read, opened, offset + at, view[at : at + PIECE_BYTES], digested) for at in starts
            ]
        else:
            free = _Event()  # the memory may have had another user, of which something is queued
            free.record(torch.cuda.current_stream(self._device))
            pieces = [
                self._pool.submit(self._send, self._cuda, opened, offset + at, there_N, at, free, digested)
                for at in starts
            ]
        return Reading(there_N, pieces, self._cuda)

    def close(self) -> None:
        """End the threads, once the pieces that they have taken are on the device, and close the files. What was begun
        and not waited for is lost. May be called again."""
        self._pool.shutdown(cancel_futures=True)
        while self._files:
            os.close(self._files.popitem()[1])
        if self._cuda is not None:
            with self._cuda as cuda:
                while self._buffers:
                    sent = self._buffers[-1].sent
                    cuda.synchronize(sent)
                    cuda.destroy(sent)
                    self._buffers.pop()

    def _send(
        self, cuda: CudaLibrary, file: int, offset: int, there_N: Tensor, at: int, free: Any, digested: bool
    ) -> tuple[int, bytes]:
        """Read a piece, digest it, and queue its copy to there_N[at:], behind the event `free`."""
        own, size = self._own, min(PIECE_BYTES, there_N.nbytes - at)
        with cuda:
            if not hasattr(own, "buffers"):
                own.stream, own.buffers, own.turn = self._streams.pop(), [_Buffer(cuda) for _ in range(2)], 0
                self._buffers += own.buffers
            own.turn ^= 1
            buffer, stream = own.buffers[own.turn], own.stream.cuda_stream
            if not cuda.has_passed(buffer.sent):
                cuda.synchronize(buffer.sent)
            _, digest = _read(file, offset, buffer.view[:size], digested)
            cuda.wait(stream, free.cuda_event)
            cuda.send(there_N.data_ptr() + at, buffer.address, size, stream)
            cuda.record(buffer.sent, stream)
        return buffer.sent, digest


def _read(file: int, offset: int, view: memoryview, digested: bool) -> tuple[int, bytes]:
    """Fill the view from a file, and digest it. Returns 0 (there is no event to wait for), and the digest."""
    done = 0
    while done < len(view):
        got = os.preadv(file, [view[done:]], offset + done)
        if not got:
            raise OSError(f"it ends {len(view) - done} bytes before byte {offset + len(view)}")
        done += got
    return 0, piece_digest(view) if digested else b""
