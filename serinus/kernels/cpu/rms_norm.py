"""RMS norm, alone and after a residual addition. T = tokens, E = width of the hidden state."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from serinus.kernels.checks import check_norm, check_residual
from serinus.kernels.cpu.body import VERSION, Body, compile_body, fields, thread_count
from serinus.kernels.cpu.calls import KernelCall
from serinus.kernels.cpu.row_steps import norm_row
from serinus.kernels.cpu.scalar import FAST, at, carray, fetch_add, inlined

_Arguments = fields("ticket x residual weight out rows width step wide", "eps")
_SERIAL_ELEMENTS = 1 << 16
"""Below this many elements the start of a second thread costs more than it saves."""


def rms_norm(x_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    """weight * x / sqrt(mean(x^2) + eps); see the reference."""
    x_TE = x_TE.contiguous()
    out_TE = torch.empty_like(x_TE)
    norm_call(x_TE, None, weight_E, out_TE, eps).run()
    return out_TE


def add_rms_norm(x_TE: Tensor, residual_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    """residual += x in place, then its norm; see the reference."""
    check_residual(x_TE, residual_TE)
    x_TE = x_TE.contiguous()
    out_TE = torch.empty_like(x_TE)
    norm_call(x_TE, residual_TE, weight_E, out_TE, eps).run()
    return out_TE


def warm(dtype: torch.dtype) -> None:
    """Compile, or load from the disk."""
    _body(dtype == torch.bfloat16, VERSION)


def norm_call(x: Tensor, residual: Tensor | None, weight_E: Tensor, out: Tensor, eps: float) -> KernelCall:
    """The norm of rows, as a call. Raises ValueError: the weight is not of their width."""
    check_norm(x, weight_E)
    width = x.shape[-1]
    count = x.numel()
    threads = 1 if count < _SERIAL_ELEMENTS else thread_count()
    rows = count // width
    step = max(1, rows // (threads * 4))
    residual_at = 0 if residual is None else residual.data_ptr()
    arguments = _Arguments(
        0, x.data_ptr(), residual_at, weight_E.data_ptr(), out.data_ptr(), rows, width, step,
        weight_E.dtype != x.dtype, eps,
    )  # fmt: skip
    body = _body(x.dtype == torch.bfloat16, VERSION)
    return KernelCall(body=body, arguments=arguments, threads=threads, keeps=(x, residual, weight_E, out))


@cache
def _body(bf16: bool, version: int) -> Body:
    def norm_rows(args: Any) -> None:
        if version < 0:
            return
        a = carray(args, 10, np.int64)
        rows, width, step, wide = a[5], a[6], a[7], a[8]
        eps = np.float32(carray(args, 10, np.float64)[9])
        row_bytes = width * (2 if bf16 else 4)
        kept = np.empty(width, np.float32)
        while True:
            first = fetch_add(a.ctypes.data, step)
            if first >= rows:
                break
            for row in range(first, min(first + step, rows)):
                x_at, out_at = a[1] + row * row_bytes, a[4] + row * row_bytes
                residual_at = a[2] + row * row_bytes if a[2] != 0 else 0
                if bf16:
                    norm_row(x_at, residual_at, a[3], wide != 0, out_at, kept, eps)
                else:
                    _norm_row_fp32(x_at, residual_at, a[3], out_at, kept, eps)

    return compile_body(norm_rows)


@inlined(fastmath=FAST)
def _norm_row_fp32(x_at: Any, residual_at: Any, weight_at: Any, out_at: Any, kept: Any, eps: Any) -> None:
    """row_steps.norm_row, of fp32 rows."""
    width = len(kept)
    x, out = carray(at(x_at), width, np.float32), carray(at(out_at), width, np.float32)
    weight = carray(at(weight_at), width, np.float32)
    total = np.float32(0)
    for i in range(width):
        kept[i] = x[i]
    if residual_at != 0:
        residual = carray(at(residual_at), width, np.float32)
        for i in range(width):
            kept[i] += residual[i]
            residual[i] = kept[i]
    for i in range(width):
        total += kept[i] * kept[i]
    scale = np.float32(1) / np.sqrt(total / np.float32(width) + eps)
    for i in range(width):
        out[i] = kept[i] * scale * weight[i]
