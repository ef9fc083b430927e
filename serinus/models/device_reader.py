"""DeviceReader: ranges of files to a device, by several threads through pinned memory, digested on the way.

A thread has two buffers: while the copy of one to the device is under way, on a stream of the thread's own, the next
piece is read into the other. A range is cut into pieces that any thread takes, so one large tensor keeps all of them
busy; ranges may be begun ahead of their use. On a CPU nothing is pinned and a copy is a copy: for tests. Knows files
and bytes, nothing of tensors' names.
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

from serinus.models.weight_digests import PIECE_BYTES, piece_digest

THREADS_MAX = 8
"""More read slower: on 16 cores 1, 8, 12 and 16 threads with pieces of 4 MiB gave 4.9, 16.9, 11.2 and 9.8 GB/s."""


_Event: Any = torch.cuda.Event
_Stream: Any = torch.cuda.Stream


@dataclass(frozen=True, slots=True)
class Reading:
    """A range that is on its way."""

    there_N: Tensor
    """uint8, on the device; filled once `wait` has returned, for what is queued on the stream of its caller."""
    pieces: Sequence[Future[tuple[Any, bytes]]]
    """Of each piece the event behind its copy, None on a CPU, and its digest, empty where none was asked for."""

    def wait(self) -> list[bytes]:
        """Wait until all of it is read, and queue a wait for its copies; the digests of its pieces, in order.

        Raises OSError: the file cannot be read, or ends before the range.
        """
        done = [piece.result() for piece in self.pieces]
        for event, _ in done:
            if event is not None:
                torch.cuda.current_stream().wait_event(event)
        return [digest for _, digest in done]


class DeviceReader:
    """The threads and the files that they read."""

    def __init__(self, device: str, threads: int | None = None) -> None:
        """`threads`: None = as many as torch has here, 8 at most. Cost: 16 MiB of pinned memory a thread."""
        self.threads = threads or max(1, min(THREADS_MAX, torch.get_num_threads()))
        self._device = device
        self._index = None if device == "cpu" else torch.device(device).index
        if device != "cpu" and self._index is None:
            self._index = torch.cuda.current_device()
        self._pool = ThreadPoolExecutor(self.threads, "serinus-read")
        self._own = threading.local()
        self._files: dict[Path, int] = {}

    def begin(self, file: Path, offset: int, count: int, *, digested: bool = False) -> Reading:
        """Begin to read `count` bytes of a file from `offset` on. `digested`: pieces are digested, counted from the
        offset. Raises OSError: the file cannot be opened."""
        if file not in self._files:
            self._files[file] = os.open(file, os.O_RDONLY)
        there_N = torch.empty(count, dtype=torch.uint8, device=self._device)
        free = None
        if self._device != "cpu":  # the memory may have had another user, of which something is queued
            free = _Event()
            free.record()
        pieces = [
            self._pool.submit(
                self._piece, self._files[file], offset + at, there_N[at : at + PIECE_BYTES], free, digested
            )
            for at in range(0, count, PIECE_BYTES)
        ]
        return Reading(there_N, pieces)

    def close(self) -> None:
        """End the threads, once what was begun is done, and close the files. May be called again."""
        self._pool.shutdown(cancel_futures=True)
        while self._files:
            os.close(self._files.popitem()[1])

    def _piece(self, file: int, offset: int, there_N: Tensor, free: Any, digested: bool) -> tuple[Any, bytes]:
        with torch.inference_mode():  # a mode of each thread
            buffer_N, at = self._buffer()
            read_N = buffer_N[: len(there_N)]
            view, done = read_N.numpy().data, 0
            while done < len(view):
                got = os.preadv(file, [view[done:]], offset + done)
                if not got:
                    raise OSError(f"it ends {len(view) - done} bytes before byte {offset + len(view)}")
                done += got
            digest = piece_digest(view) if digested else b""
            if self._device == "cpu":
                there_N.copy_(read_N)
                return None, digest
            stream = self._own.stream
            with torch.cuda.stream(stream):
                stream.wait_event(free)
                there_N.copy_(read_N, non_blocking=True)
                event = _Event()
                event.record()
            self._own.used[at] = event
            return event, digest

    def _buffer(self) -> tuple[Tensor, int]:
        """A buffer of this thread that may be filled, its last copy being done, and which of the two it is."""
        own, pinned = self._own, self._device != "cpu"
        if not hasattr(own, "buffers"):
            if pinned:
                torch.cuda.set_device(self._index)
                own.stream = _Stream()
            own.buffers = [torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
            own.used, own.turn = [None, None], 0
        own.turn ^= 1
        if own.used[own.turn] is not None:
            own.used[own.turn].synchronize()
        return own.buffers[own.turn], own.turn
