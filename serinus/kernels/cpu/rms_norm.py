"""RMS norm, alone and after a residual addition. T = tokens, E = width of the hidden state."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from serinus.kernels.checks import check_norm, check_residual
from serinus.kernels.cpu.body import VERSION, Body, compile_body, fields, thread_count
from serinus.kernels.cpu.scalar import at, carray, fetch_add, narrow, widen

__all__ = ["add_rms_norm", "rms_norm", "warm"]

_Arguments = fields("ticket x residual weight out rows width step", "eps")
_SERIAL_ELEMENTS = 1 << 16
"""Below this many elements the start of a second thread costs more than it saves."""


def rms_norm(x_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    """weight * x / sqrt(mean(x^2) + eps); see the reference."""
    x_TE = x_TE.contiguous()
    out_TE = torch.empty_like(x_TE)
    _run(x_TE, None, weight_E, out_TE, eps)
    return out_TE


def add_rms_norm(x_TE: Tensor, residual_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    """residual += x in place, then its norm; see the reference."""
    check_residual(x_TE, residual_TE)
    x_TE = x_TE.contiguous()
    out_TE = torch.empty_like(x_TE)
    _run(x_TE, residual_TE, weight_E, out_TE, eps)
    return out_TE


def warm(dtype: torch.dtype) -> None:
    """Compile, or load from the disk."""
    for has_residual in (False, True):
        _body(dtype == torch.bfloat16, has_residual, False, VERSION)


def _run(x: Tensor, residual: Tensor | None, weight_E: Tensor, out: Tensor, eps: float) -> None:
    check_norm(x, weight_E)
    width = x.shape[-1]
    wide = weight_E.dtype != x.dtype
    body = _body(x.dtype == torch.bfloat16, residual is not None, wide, VERSION)
    count = x.numel()
    threads = 1 if count < _SERIAL_ELEMENTS else thread_count()
    rows = count // width
    step = max(1, rows // (threads * 4))
    residual_at = 0 if residual is None else residual.data_ptr()
    arguments = _Arguments(0, x.data_ptr(), residual_at, weight_E.data_ptr(), out.data_ptr(), rows, width, step, eps)
    body(arguments, threads)


@cache
def _body(bf16: bool, has_residual: bool, wide: bool, version: int) -> Body:
    """`wide`: the weight is fp32, and the product is rounded once."""

    def norm_rows(args: Any) -> None:
        if version < 0:
            return
        a = carray(args, 9, np.int64)
        rows, width, step = a[5], a[6], a[7]
        eps = np.float32(carray(args, 9, np.float64)[8])
        item_bytes = 2 if bf16 else 4
        item = np.uint16 if bf16 else np.float32
        weight = carray(at(a[3]), width, np.float32 if wide else item)
        kept = np.empty(width, np.float32)
        while True:
            first = fetch_add(a.ctypes.data, step)
            if first >= rows:
                break
            for row in range(first, min(first + step, rows)):
                x = carray(at(a[1] + row * width * item_bytes), width, item)
                out = carray(at(a[4] + row * width * item_bytes), width, item)
                residual = carray(at(a[2] + row * width * item_bytes), width, item)
                total = np.float32(0)
                for i in range(width):
                    if bf16:
                        value = widen(x[i])
                        if has_residual:
                            rounded = narrow(value + widen(residual[i]))
                            residual[i] = rounded
                            value = widen(rounded)
                    else:
                        value = x[i]
                        if has_residual:
                            value += residual[i]
                            residual[i] = value
                    kept[i] = value
                    total += value * value
                scale = np.float32(1) / np.sqrt(total / np.float32(width) + eps)
                for i in range(width):
                    if wide:
                        out[i] = narrow(kept[i] * scale * weight[i])
                    elif bf16:
                        out[i] = narrow(widen(narrow(kept[i] * scale)) * widen(weight[i]))
                    else:
                        out[i] = kept[i] * scale * weight[i]

    return compile_body(norm_rows)
