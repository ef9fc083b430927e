"""What every benchmark says beside its number: the machine, the commit, and the physical ceilings, as one JSON line."""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from serinus.core.clock import WallClock
from serinus.kernels import Kernels

__all__ = ["bandwidth", "emit", "matmul_rate", "resident_bytes"]

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


def bandwidth(kernels: Kernels, dtype: torch.dtype, rounds: int = 20) -> float:
    """Bytes per second that all threads read from memory at best: the decode ceiling.

    The better of a plain sum over 400 MB and one-row linears over weights far larger than the caches.
    """
    plain = torch.ones(100_000_000)
    layers = [kernels.pack_linear(torch.randn(6144, 1024).to(dtype), None) for _ in range(24)]
    x = torch.randn(1, 1024).to(dtype)
    best = 0.0
    for _ in range(rounds):
        begin = _CLOCK.now()
        plain.sum()
        best = max(best, plain.nbytes / (_CLOCK.now() - begin))
        begin = _CLOCK.now()
        for packed in layers:
            kernels.linear(x, packed)
        best = max(best, len(layers) * 6144 * 1024 * dtype.itemsize / (_CLOCK.now() - begin))
    return best


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
