"""What every benchmark says beside its number: the machine, the commit, and the physical ceilings, as one JSON line."""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from serinus.core.clock import WallClock
from serinus.kernels import Kernels
from serinus.kernels.cpu.body import Body, compile_body, fields, thread_count
from serinus.kernels.cpu.scalar import at, carray, fetch_add

__all__ = ["bandwidth", "emit", "matmul_rate", "mean_error", "resident_bytes"]

_CLOCK = WallClock()


def emit(name: str, **values: Any) -> None:
    """Print the result line."""
    print(json.dumps({"benchmark": name, **values, "machine": _machine(), "commit": _commit()}), flush=True)


def best_ms(job: Callable[[], object], repeat: int, clock: Callable[[], float] = time.perf_counter) -> float:
    """The best of `repeat` runs, after one that is not counted: what the code costs where nobody disturbs it."""
    job()
    best = math.inf
    for _ in range(repeat):
        begin = clock()
        job()
        best = min(best, clock() - begin)
    return best * 1e3


def mean_error(draws: Sequence[float]) -> tuple[float, float]:
    """The mean of several draws, and its standard error."""
    return statistics.fmean(draws), statistics.stdev(draws) / len(draws) ** 0.5


def bandwidth(kernels: Kernels, dtype: torch.dtype, rounds: int = 20) -> float:
    """Bytes per second that all threads read from memory at best: the decode ceiling.

    The best of three, each over as many bytes as the weights of a small model, far more than most caches: a plain sum,
    one-row linears, and a compiled loop whose threads take 1 MB at a time and add it up (torch gives each thread one
    half, and the slower one ends it).
    """
    plain = torch.ones(100_000_000)
    layers = [kernels.pack_linear(torch.randn(6144, 1024).to(dtype), None) for _ in range(24)]
    x = torch.randn(1, 1024).to(dtype)

    def linears() -> None:
        for packed in layers:
            kernels.linear(x, packed)

    jobs = (
        (plain.nbytes, plain.sum),
        (len(layers) * 6144 * 1024 * dtype.itemsize, linears),
        (plain.nbytes, lambda: _read(plain)),
    )
    best = 0.0
    for _ in range(rounds):
        for byte_count, job in jobs:
            begin = _CLOCK.now()
            job()
            best = max(best, byte_count / (_CLOCK.now() - begin))
    return best


_Arguments = fields("ticket words count total")
_PIECE_WORDS = 1 << 17


def _read(tensor: torch.Tensor) -> None:
    _reader()(_Arguments(0, tensor.data_ptr(), tensor.nbytes // 8, 0), thread_count())


@cache
def _reader() -> Body:
    def add_up(args: Any) -> None:
        a = carray(args, 4, np.int64)
        words = carray(at(a[1]), a[2], np.int64)
        while True:
            first = fetch_add(a.ctypes.data, 1) * _PIECE_WORDS
            if first >= a[2]:
                break
            total = np.int64(0)
            for i in range(first, min(first + _PIECE_WORDS, a[2])):
                total += words[i]
            fetch_add(a.ctypes.data + 24, total)  # used, so that it is computed

    return compile_body(add_up)


def matmul_rate(kernels: Kernels, dtype: torch.dtype, rounds: int = 20) -> float:
    """FLOP per second of a large linear: the prefill ceiling."""
    packed = kernels.pack_linear(torch.randn(6144, 1024).to(dtype), None)
    x = torch.randn(2048, 1024).to(dtype)
    best = 0.0
    for _ in range(rounds):
        begin = _CLOCK.now()
        kernels.linear(x, packed)
        best = max(best, 2 * 2048 * 6144 * 1024 / (_CLOCK.now() - begin))
    return best


def resident_bytes() -> int:
    """Memory of this process that is in RAM now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _machine() -> dict[str, Any]:
    names = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _commit() -> str:
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return found.stdout.strip() or "unknown"
