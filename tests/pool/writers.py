"""A process with children that write pages until they are killed: `python -m tests.pool.writers`.

A line `FOLDER SEED` on stdin starts a child; it says `SEED pid PID`, then `SEED stored INDEX` for every page that is
stored, and `SEED all`.
The imports are paid once. Also what the tests know about the pages: their bytes follow from their key.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from serinus.core.clock import WallClock
from serinus.core.parts import Part
from serinus.pool import HostPool, PoolSpec
from serinus.pool.storage import FileStorage

SPEC = PoolSpec(layer_count=2, kv_head_count=2, head_size=32, page_size=64, page_count=2, dtype=torch.float32)
"""64 KiB a page: large enough that a kill finds one half written."""
NAMESPACE = "model at revision, fp32"
KEY_COUNT = 150


def key_of(index: int, seed: int = 0) -> bytes:
    return seed.to_bytes(8, "big") + index.to_bytes(8, "big")


def bytes_of(key: bytes, size: int = SPEC.page_bytes) -> NDArray[np.uint8]:
    return np.frombuffer(np.random.default_rng(list(key)).bytes(size), np.uint8)


def storage_of(folder: Path | str, host: HostPool, **more: object) -> FileStorage:
    settings = {"namespace": NAMESPACE, "byte_max": None, **more}
    return FileStorage(folder, host={Part.FULL: host}, clock=WallClock(), **settings)  # type: ignore[arg-type]


def _write(folder: str, seed: int) -> None:
    host = HostPool(SPEC, KEY_COUNT + 1)
    storage = storage_of(folder, host)
    for index in range(KEY_COUNT):
        key = key_of(index, seed)
        host.data_PY[index + 1] = bytes_of(key)
        storage.write(index + 1, Part.FULL, [key], np.array([index + 1], np.int32))
        for done in storage.poll():
            os.write(1, f"{seed} stored {done.op - 1}\n".encode())
    for done in storage.wait():
        os.write(1, f"{seed} stored {done.op - 1}\n".encode())
    os.write(1, f"{seed} all\n".encode())
    storage.close()


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        folder, seed = line.split()
        pid = os.fork()
        if not pid:
            _write(folder, int(seed))
            os._exit(0)
        os.write(1, f"{seed} pid {pid}\n".encode())


if __name__ == "__main__":
    main()
