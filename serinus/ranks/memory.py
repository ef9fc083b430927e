"""How much memory there is to give away, on the host and on a device. Decides nothing."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import torch

_GROUPS = (
    ("/sys/fs/cgroup", "memory.max", "memory.current", "file"),
    ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache"),
)
"""Of a container: its folder, the files with its limit and its use, and the word for page cache in its memory.stat."""


def available_bytes(device: str) -> int:
    """Bytes that can still be allocated: on cpu what the kernel says, bounded by the container's limit."""
    if device != "cpu":
        free, _total = torch.cuda.mem_get_info(device)
        return int(free)
    available = _meminfo("MemAvailable")
    return min([available, *(left for group in _GROUPS if (left := _left_in(*group)) is not None)])


def total_bytes(device: str) -> int:
    """All bytes of the machine's or the device's memory."""
    return _meminfo("MemTotal") if device == "cpu" else int(torch.cuda.mem_get_info(device)[1])


def _left_in(folder: str, limit: str, use: str, cache: str) -> int | None:
    """Bytes a container may still take, all its processes counted, page cache not; None where it has no limit."""
    home = Path(folder)
    if not (home / limit).is_file() or not (text := (home / limit).read_text().strip()).isdigit():
        return None
    stat = dict(line.split() for line in (home / "memory.stat").read_text().splitlines())
    return max(int(text) - int((home / use).read_text()) + int(stat.get(cache, 0)), 0)


def trim() -> None:
    """Hand memory that was freed while the weights were packed back to the system (glibc keeps it otherwise)."""
    if sys.platform == "linux" and hasattr(library := ctypes.CDLL(None), "malloc_trim"):
        library.malloc_trim(0)


def _meminfo(name: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"engine: /proc/meminfo has no {name}, expected Linux 3.14 or newer")
