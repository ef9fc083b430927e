"""The gated activations of the MLP, SiLU and GELU. T = tokens, F = width of the MLP."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from serinus.kernels.checks import check_gate
from serinus.kernels.cpu.body import VERSION, Body, compile_body, fields, thread_count
from serinus.kernels.cpu.row_steps import gate_row, gate_value
from serinus.kernels.cpu.scalar import at, carray, fetch_add

_Arguments = fields("ticket gate_up out rows width step")
_SERIAL_ELEMENTS = 1 << 14
"""Below this many elements of output the start of a second thread costs more than it saves."""


def silu_mul(gate_up_T2F: Tensor) -> Tensor:
    """silu(gate) * up; see the reference."""
    return gate(gate_up_T2F, "silu_mul", gelu=False)


def gate(gate_up_T2F: Tensor, op: str, *, gelu: bool) -> Tensor:
    """silu_mul, or gelu_mul with `gelu`. Raises ValueError, naming `op`: the width is odd."""
    check_gate(op, gate_up_T2F)
    width = gate_up_T2F.shape[-1] // 2
    gate_up_T2F = gate_up_T2F.contiguous()
    out_TF = gate_up_T2F.new_empty((*gate_up_T2F.shape[:-1], width))
    count = out_TF.numel()
    threads = 1 if count < _SERIAL_ELEMENTS else thread_count()
    rows = count // width
    step = max(1, rows // (threads * 4))
    arguments = _Arguments(0, gate_up_T2F.data_ptr(), out_TF.data_ptr(), rows, width, step)
    _body(gate_up_T2F.dtype == torch.bfloat16, gelu, VERSION)(arguments, threads)
    return out_TF


def warm(dtype: torch.dtype) -> None:
    """Compile, or load from the disk."""
    _body(dtype == torch.bfloat16, False, VERSION)


@cache
def _body(bf16: bool, gelu: bool, version: int) -> Body:
    def gate_rows(args: Any) -> None:
        if version < 0:
            return
        a = carray(args, 6, np.int64)
        rows, width, step = a[3], a[4], a[5]
        item = np.uint16 if bf16 else np.float32
        item_bytes = 2 if bf16 else 4
        while True:
            first = fetch_add(a.ctypes.data, step)
            if first >= rows:
                break
            for row in range(first, min(first + step, rows)):
                gates = carray(at(a[1] + row * width * 2 * item_bytes), width, item)
                ups = carray(at(a[1] + (row * 2 + 1) * width * item_bytes), width, item)
                out_at = a[2] + row * width * item_bytes
                if bf16:
                    gate_row(gates, ups, out_at, gelu)
                else:
                    out = carray(at(out_at), width, item)
                    for i in range(width):
                        out[i] = gate_value(gates[i], ups[i], gelu)

    return compile_body(gate_rows)
