"""A compiled kernel that is kept, by the driver's own call: some us of the host. Triton takes 70 us in each call to
find it, and 50 to hand it to the driver."""

from __future__ import annotations

import ctypes
from threading import Lock
from typing import Any

from serinus.kernels.cuda_library import CudaFunction


class KeptKernel:
    """For kernels of which nothing is specialized on the value or the alignment of an argument."""

    def __init__(self, compiled: Any, *types: Any) -> None:
        """`compiled`: what a first call by Triton gave; kept too, the driver's function goes with it. `types`: those of
        ctypes of the arguments that are no constants. Raises AssertionError: it wants memory of its own, which is not
        given here."""
        metadata = compiled.metadata
        scratch = getattr(metadata, "global_scratch_size", 0), getattr(metadata, "profile_scratch_size", 0)
        assert scratch == (0, 0), f"kernels: {metadata.name} wants {scratch} bytes of memory of its own, expected none"
        self._compiled = compiled
        self._function = CudaFunction(compiled.function, 32 * int(metadata.num_warps), int(metadata.shared))
        self._values = [each() for each in types]
        none = ctypes.c_uint64()  # memory of its own, as Triton's launcher passes it behind the arguments
        places = [*map(ctypes.addressof, self._values), ctypes.addressof(none), ctypes.addressof(none)]
        self._places, self._none, self._lock = (ctypes.c_void_p * len(places))(*places), none, Lock()

    def launch(self, grid: tuple[int, int, int], stream: int, *values: int) -> None:
        """Queue it with these arguments, addresses or numbers. Raises CudaFailed: the driver refuses it."""
        with self._lock:
            for place, value in zip(self._values, values, strict=True):
                place.value = value
            self._function.launch(grid, stream, self._places)
