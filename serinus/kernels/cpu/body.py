"""Body: one compiled kernel, its C address, and how it is started. Knows no op.

Which threads. torch computes its linears on OpenMP threads from the libgomp in its own package, and between two of
them its workers spin. A second pool of threads (numba's layers: workqueue, tbb, or omp on the system's libgomp) has to
take the cores from those. So a kernel starts through that very libgomp: GOMP_parallel(body, arguments, threads) is the
call a compiler makes for `#pragma omp parallel`. `benchmarks/kernels.py` measures it (lines `threads`).

Spinning workers starve other processes: with two engines on two cores a step that takes 16 ms under
OMP_WAIT_POLICY=passive took 369 ms with libgomp's default. The process that starts an engine sets that (or
GOMP_SPINCOUNT=1000) in the child's environment; libgomp reads it once, when torch is loaded.

A body claims its work items from a shared counter, so it is right on any number of threads, and a slow core holds up
no other. Where torch brings no libgomp (another compiler's OpenMP), kernels run on the calling thread alone.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from numba import types
from numba.core.ccallback import CFunc
from numba.core.dispatcher import Dispatcher

from serinus.core import stamps
from serinus.core.errors import ConfigError
from serinus.kernels import canary
from serinus.kernels import fp8 as fp8_formats
from serinus.kernels import quantized as quantized_formats
from serinus.kernels.cpu import (
    blocks,
    digest,
    fp8,
    llvm,
    products,
    quantized,
    row_steps,
    scalar,
    selection,
    vector,
    watching,
)
from serinus.kernels.cpu.code_files import cache_of
from serinus.kernels.ref import fused_moe

INLINED = (
    blocks, canary, digest, fp8, llvm, products, quantized, row_steps, scalar, selection, vector, watching,
    fp8_formats, fused_moe, quantized_formats, stamps,
)  # fmt: skip
"""Modules of which bodies inline functions, or numbers."""
VERSION = zlib.crc32(b"".join(Path(str(module.__file__)).read_bytes() for module in INLINED))
"""Digest of the sources that bodies inline. The cache on the disk watches only a body's own file, so each body
closes over this number: machine code from before an edit or an upgrade is then not found, instead of run."""

_SIGNATURE = (types.voidptr,), types.void
_C_BODY = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def fields(integers: str, floats: str = "") -> type[ctypes.Structure]:
    """A structure of int64 fields, then of float64 fields; the first must be `ticket`, the shared counter."""
    names = [(name, ctypes.c_int64) for name in integers.split()] + [(name, ctypes.c_double) for name in floats.split()]
    return type("Arguments", (ctypes.Structure,), {"_fields_": names})


def address_of(words: Any) -> int:
    """Where a contiguous array of numbers lies, at a third of the cost of `ndarray.ctypes`; 0 where it is empty."""
    return ctypes.addressof(ctypes.c_byte.from_buffer(words)) if words.size else 0


def find_torch_gomp() -> Path | None:
    """The libgomp that torch itself is linked to, or None where it uses another OpenMP."""
    package = Path(torch.__file__).parent
    folders = (package / "lib", package.parent / "torch.libs")
    found = [path for folder in folders for path in sorted(folder.glob("libgomp*.so*"))]
    return found[0] if found else None


def _gomp_parallel() -> Any:
    path = find_torch_gomp()
    if path is None:
        return None
    call = ctypes.CDLL(str(path)).GOMP_parallel
    call.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    call.restype = None
    return call


_PARALLEL = _gomp_parallel()
PARALLEL_AT: int = 0 if _PARALLEL is None else ctypes.cast(_PARALLEL, ctypes.c_void_p).value or 0
"""The address of GOMP_parallel; 0 where torch brings none."""


def thread_count() -> int:
    """Threads that a kernel may use: torch's."""
    return torch.get_num_threads() if _PARALLEL is not None else 1


class Body:
    """A compiled kernel. Calling it runs it to the end; the interpreter lock is released meanwhile."""

    __slots__ = ("_compiled", "_here", "address")

    def __init__(self, compiled: Any) -> None:
        self._compiled = compiled  # owns the machine code
        self.address: int = compiled.address
        self._here = _C_BODY(self.address)

    def __call__(self, arguments: ctypes.Structure, threads: int) -> None:
        """Run on `threads` threads (1: the calling one, without any start-up cost)."""
        if threads == 1 or _PARALLEL is None:
            self._here(ctypes.addressof(arguments))
        else:
            _PARALLEL(self.address, ctypes.addressof(arguments), threads, 0)

    def alone(self, arguments: ctypes.Structure) -> Callable[[], object]:
        """What runs it on the calling thread with these arguments, which must stay: 2 us less than a call."""
        return partial(self._here, ctypes.addressof(arguments))


def compile_body(function: Callable[[Any], None]) -> Body:
    """Compile a body, or load it from the disk: beside this package, or where that is read-only in the user's cache.

    What it closes over is part of the cache's key, so no compiled function may be: each process has another one.

    Raises:
        ConfigError: neither place can be written.
    Cost: about a second, or some 20 ms from the cache.
    """
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    parts = [name for name, cell in cells.items() if isinstance(cell.cell_contents, Dispatcher)]
    assert not parts, f"kernels: {function.__name__} closes over {parts}, and would be compiled by each process"
    compiled: Any = CFunc(function, _SIGNATURE, locals={}, options={"fastmath": scalar.FAST, "error_model": "numpy"})
    try:
        compiled._cache = cache_of(function)
    except RuntimeError as error:
        raise ConfigError(
            f"kernels: no place for compiled kernels ({error}); expected a writable home, or NUMBA_CACHE_DIR"
        ) from error
    compiled.compile()
    return Body(compiled)
