"""Pages out of and into the KV pools of all layers, as bytes.

Shapes: S = slots, H = KV heads, D = head size, G = pages moved, R = rows of the byte buffer, Y = bytes of one page
over all layers given.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from serinus.kernels.checks import check_pages
from serinus.kernels.contracts import LayersKv
from serinus.kernels.cpu.body import VERSION, Body, compile_body, fields, thread_count
from serinus.kernels.cpu.scalar import at, carray, fetch_add
from serinus.kernels.cpu.vector import copy_bytes

_Arguments = fields("ticket lanes pages rows buffer row_bytes lane_count page_count run_bytes outward")
_FIELDS = 10
_SERIAL_BYTES = 1 << 17
"""Below this many bytes the start of a second thread costs more than it saves."""


def gather_pages(
    layers_kv: LayersKv,
    pages_G: NDArray[np.integer[Any]],
    page_size: int,
    out_RY: Tensor,
    rows_G: NDArray[np.integer[Any]] | None = None,
) -> None:
    """Copy pages out of the pools into `out_RY`; see the reference. With `rows_G` on the calling thread alone."""
    _move(layers_kv, pages_G, page_size, out_RY, rows_G, outward=True)


def scatter_pages(
    layers_kv: LayersKv,
    pages_G: NDArray[np.integer[Any]],
    page_size: int,
    bytes_RY: Tensor,
    rows_G: NDArray[np.integer[Any]] | None = None,
) -> None:
    """Copy pages from `bytes_RY` into the pools; see the reference. With `rows_G` on the calling thread alone."""
    _move(layers_kv, pages_G, page_size, bytes_RY, rows_G, outward=False)


def warm() -> None:
    """Compile, or load from the disk."""
    _body(VERSION)


def _move(
    layers_kv: LayersKv,
    pages_G: NDArray[np.integer[Any]],
    page_size: int,
    bytes_RY: Tensor,
    rows_G: NDArray[np.integer[Any]] | None,
    *,
    outward: bool,
) -> None:
    check_pages(layers_kv, pages_G, page_size, bytes_RY, rows_G)
    lanes = np.array([lane.data_ptr() for pair in layers_kv for lane in pair], dtype=np.int64)
    pages = np.ascontiguousarray(pages_G, dtype=np.int64)
    rows = None if rows_G is None else np.ascontiguousarray(rows_G, dtype=np.int64)
    count, lane_count = len(pages), len(lanes)
    # A caller that names rows copies beside a running step, from a thread of its own: a second team of OpenMP threads
    # would take the cores from the step's.
    alone = rows_G is not None or bytes_RY.numel() < _SERIAL_BYTES
    arguments = _Arguments(
        0, lanes.ctypes.data, pages.ctypes.data, 0 if rows is None else rows.ctypes.data, bytes_RY.data_ptr(),
        bytes_RY.stride(0), lane_count, count, bytes_RY.shape[1] // lane_count, int(outward),
    )  # fmt: skip
    _body(VERSION)(arguments, 1 if alone else thread_count())


@cache
def _body(version: int) -> Body:
    def move_runs(args: Any) -> None:
        if version < 0:
            return
        a = carray(args, _FIELDS, np.int64)
        lane_count, count, run = a[6], a[7], a[8]
        lanes = carray(at(a[1]), lane_count, np.int64)
        pages = carray(at(a[2]), count, np.int64)
        while True:
            g = fetch_add(a.ctypes.data, 1)
            if g >= count:
                break
            row = g
            if a[3] != 0:
                row = carray(at(a[3]), count, np.int64)[g]
            for i in range(lane_count):
                inside = lanes[i] + pages[g] * run
                outside = a[4] + row * a[5] + i * run
                if a[9] != 0:
                    copy_bytes(outside, inside, run)
                else:
                    copy_bytes(inside, outside, run)

    return compile_body(move_runs)
