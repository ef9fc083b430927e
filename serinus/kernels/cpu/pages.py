"""Pages out of and into the KV pools of all layers, as bytes.

Shapes: S = slots, H = KV heads, D = head size, G = pages moved, Y = bytes of one page over all layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from serinus.kernels.cpu.body import VERSION, Body, compile_body, fields, thread_count
from serinus.kernels.cpu.scalar import at, carray, fetch_add
from serinus.kernels.cpu.vector import copy_bytes
from serinus.kernels.ref.pages import check_pages

__all__ = ["gather_pages", "scatter_pages", "warm"]

_Arguments = fields("ticket lanes pages buffer lane_count page_count run_bytes outward")
_SERIAL_BYTES = 1 << 17
"""Below this many bytes the start of a second thread costs more than it saves."""


def gather_pages(layers_kv: Sequence[tuple[Tensor, Tensor]], pages_G: Tensor, page_size: int, out_GY: Tensor) -> None:
    """Copy pages out of the pools into `out_GY`; see the reference."""
    _move(layers_kv, pages_G, page_size, out_GY, outward=True)


def scatter_pages(
    layers_kv: Sequence[tuple[Tensor, Tensor]], pages_G: Tensor, page_size: int, bytes_GY: Tensor
) -> None:
    """Copy pages from `bytes_GY` into the pools; see the reference."""
    _move(layers_kv, pages_G, page_size, bytes_GY, outward=False)


def warm() -> None:
    """Compile, or load from the disk."""
    _body(VERSION)


def _move(
    layers_kv: Sequence[tuple[Tensor, Tensor]], pages_G: Tensor, page_size: int, bytes_GY: Tensor, *, outward: bool
) -> None:
    check_pages(layers_kv, pages_G, page_size, bytes_GY)
    if not bytes_GY.is_contiguous():
        raise ValueError("kernels: page buffer is strided, expected a contiguous one")
    lanes = torch.tensor([lane.data_ptr() for pair in layers_kv for lane in pair], dtype=torch.int64)
    count, lane_count = pages_G.shape[0], lanes.shape[0]
    arguments = _Arguments(
        0,
        lanes.data_ptr(),
        pages_G.data_ptr(),
        bytes_GY.data_ptr(),
        lane_count,
        count,
        bytes_GY.shape[1] // lane_count,
        int(outward),
    )
    _body(VERSION)(arguments, 1 if bytes_GY.numel() < _SERIAL_BYTES else thread_count())


@cache
def _body(version: int) -> Body:
    def move_runs(args: Any) -> None:
        if version < 0:
            return
        a = carray(args, 8, np.int64)
        lane_count, count, run = a[4], a[5], a[6]
        lanes = carray(at(a[1]), lane_count, np.int64)
        pages = carray(at(a[2]), count, np.int64)
        while True:
            g = fetch_add(a.ctypes.data, 1)
            if g >= count:
                break
            for i in range(lane_count):
                inside = lanes[i] + pages[g] * run
                outside = a[3] + (g * lane_count + i) * run
                if a[7] != 0:
                    copy_bytes(outside, inside, run)
                else:
                    copy_bytes(inside, outside, run)

    return compile_body(move_runs)
