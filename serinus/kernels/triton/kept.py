"""Compiled kernels that are started without Triton, which takes 70 us of the host in each call to find one, and 50 to
hand it to the driver. The driver's own call takes some us."""

from __future__ import annotations

import ctypes
from threading import Lock
from typing import Any

import torch

from serinus.kernels.cuda_library import CudaFunction

_TYPES = {"i32": ctypes.c_int32, "i64": ctypes.c_int64}


def keep(compiled: Any, device: torch.device) -> KeptKernel | None:
    """What a call by Triton has compiled, and started on this thread. None: not for a GPU (the interpreter, a machine
    without one). Raises AssertionError: the kernel is not the same for all arguments, or wants memory of its own, which
    is not given here."""
    if compiled is None:
        return None
    source, metadata = compiled.src, compiled.metadata
    constant = [name for name, kind in source.signature.items() if kind == "constexpr"]
    declared = [each.name for each in source.fn.params if each.is_constexpr]
    scratch = getattr(metadata, "global_scratch_size", 0), getattr(metadata, "profile_scratch_size", 0)
    assert constant == declared, f"kernels: {metadata.name} has constants {constant}, expected {declared}"
    assert not any(source.attrs.values()), f"kernels: {metadata.name} is specialized, {source.attrs}, expected nothing"
    assert scratch == (0, 0), f"kernels: {metadata.name} wants {scratch} bytes of memory of its own, expected none"
    kinds = [kind for kind in source.signature.values() if kind != "constexpr"]
    types = [ctypes.c_uint64 if kind.startswith("*") else _TYPES[kind] for kind in kinds]
    return KeptKernel(compiled, types) if device.type == "cuda" else None


class KeptKernel:
    """A kernel for any arguments of its types, and any thread."""

    def __init__(self, compiled: Any, types: list[Any]) -> None:
        """`compiled`: kept too, as the driver's function goes with it."""
        metadata = compiled.metadata
        self._compiled = compiled
        self._function = CudaFunction(compiled.function, 32 * int(metadata.num_warps), int(metadata.shared))
        self._values = [each() for each in types]
        none = ctypes.c_uint64()  # memory of its own, as Triton's launcher passes it behind the arguments
        places = [*map(ctypes.addressof, self._values), ctypes.addressof(none), ctypes.addressof(none)]
        self._places, self._none, self._lock = (ctypes.c_void_p * len(places))(*places), none, Lock()

    def launch(self, grid: tuple[int, int, int], stream: int, *values: int) -> None:
        """Queue it with these arguments: numbers, and addresses as the device has them (of pinned memory, too: they are
        those of the host). Raises CudaFailed: the driver refuses it."""
        with self._lock:
            for place, value in zip(self._values, values, strict=True):
                place.value = value
            self._function.launch(grid, stream, self._places)
