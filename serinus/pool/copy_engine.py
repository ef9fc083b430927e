"""Runs of bytes between a GPU and pinned memory, by its copy engines: one call of the CUDA runtime for any number.

A call for each run takes 8 us of a thread that holds the interpreter's lock for most of them; a call for all of them
takes the lock once. R = runs.
"""

from __future__ import annotations

import ctypes
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray

from serinus.kernels import current_stream

_IN_STREAM_ORDER = 1
"""cudaMemcpySrcAccessOrderStream: sources are read when the stream comes to the copy."""


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    """What the runtime calls cudaMemcpyAttributes."""

    _fields_ = (
        ("src_access_order", ctypes.c_int),
        ("src_hint", _Location),
        ("dst_hint", _Location),
        ("flags", ctypes.c_uint),
    )


@cache
def _runtime() -> ctypes.CDLL:
    """The CUDA runtime that torch has loaded."""
    return ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).split('.')[0]}")


def copy_runs(targets_R: NDArray[np.int64], sources_R: NDArray[np.int64], byte_counts_R: NDArray[np.int64]) -> None:
    """Queue copies on the current stream, which must not be the default one. Memory of the host must be pinned.

    Args:
        targets_R, sources_R: addresses; no target is part of another one or of a source.
        byte_counts_R: bytes of each run; at least 1.
    Raises:
        RuntimeError: the runtime refuses them; some may have been queued.
    Cost: about 1 us a run on the calling thread, without the interpreter's lock.
    """
    count = len(targets_R)
    if not count:
        return
    arrays = [np.ascontiguousarray(each, dtype=np.uint64) for each in (targets_R, sources_R, byte_counts_R)]
    pointers = [ctypes.c_void_p(each.ctypes.data) for each in arrays]
    attributes, first = _Attributes(src_access_order=_IN_STREAM_ORDER), ctypes.c_size_t(0)
    failed = [ctypes.byref(ctypes.c_size_t(0))] if str(torch.version.cuda).startswith("12.") else []
    code = _runtime().cudaMemcpyBatchAsync(
        *pointers, ctypes.c_size_t(count), ctypes.byref(attributes), ctypes.byref(first), ctypes.c_size_t(1), *failed,
        ctypes.c_void_p(current_stream()),
    )  # fmt: skip
    if code:
        raise RuntimeError(f"pool: {count} copies of {int(arrays[2].sum())} bytes were refused, CUDA error {code}")
