"""From the qkv projection to attention in one pass: per-head norm, rotary embedding, write into the KV pool.

Shapes: T = tokens of this step, N = query heads, H = KV heads, D = head size, F = D / 2, P = positions, S = slots.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from serinus.kernels.checks import check_qk_rope_store
from serinus.kernels.contracts import WrittenRows
from serinus.kernels.cpu.body import VERSION, Body, compile_body, fields, thread_count
from serinus.kernels.cpu.calls import KernelCall
from serinus.kernels.cpu.digest import add_packed, digest_row
from serinus.kernels.cpu.fp8 import BF16, bytes_of, kind_of, to_fp8
from serinus.kernels.cpu.scalar import at, carray, fetch_add, narrow, widen
from serinus.kernels.cpu.vector import copy_bytes

_Arguments = fields(
    "ticket qkv cos sin positions q_norm k_norm k_pool v_pool slots q_out tokens heads kv_heads position_count "
    "slot_count step bad coefficients sums lanes",
    "eps",
)
_FIELDS = len(_Arguments._fields_)
_SERIAL_ELEMENTS = 1 << 15
"""Below this many elements of qkv the start of a second thread costs more than it saves."""


def qk_rope_store(
    qkv_TX: Tensor, cos_PF: Tensor, sin_PF: Tensor, positions_T: Tensor, q_norm_D: Tensor | None,
    k_norm_D: Tensor | None, eps: float, k_pool_SHD: Tensor, v_pool_SHD: Tensor, slots_T: Tensor, q_out_TND: Tensor,
    written: WrittenRows | None = None,
) -> None:  # fmt: skip
    """Split qkv; norm and rotate q and k; write q out, k and v to their slots; see the reference. Rows are digested
    where they were computed, in memory of the thread, and then copied into the pool.

    Raises:
        ValueError: shapes disagree, or a position or a slot lies outside of its table (that token is not written).
    """
    call = store_call(
        qkv_TX, cos_PF, sin_PF, positions_T, q_norm_D, k_norm_D, eps, k_pool_SHD, v_pool_SHD, slots_T, q_out_TND,
        written,
    )  # fmt: skip
    refused = call.run()
    if refused:
        refuse_token(refused, positions_T, slots_T, len(cos_PF), len(k_pool_SHD))


def refuse_token(refused: int, positions_T: Tensor, slots_T: Tensor, position_count: int, slot_count: int) -> None:
    """Raise ValueError for what a call has refused."""
    raise ValueError(
        f"kernels: a position or a slot of token {refused - 1} is out of range: position "
        f"{int(positions_T[refused - 1])}, expected below {position_count}; slot "
        f"{int(slots_T[refused - 1])}, expected below {slot_count}"
    )


def store_call(
    qkv_TX: Tensor, cos_PF: Tensor, sin_PF: Tensor, positions_T: Tensor, q_norm_D: Tensor | None,
    k_norm_D: Tensor | None, eps: float, k_pool_SHD: Tensor, v_pool_SHD: Tensor, slots_T: Tensor, q_out_TND: Tensor,
    written: WrittenRows | None,
) -> KernelCall:  # fmt: skip
    """The op as a call; it refuses with 1 + a token. Raises ValueError: shapes disagree."""
    check_qk_rope_store(
        qkv_TX, cos_PF, sin_PF, positions_T, q_norm_D, k_norm_D, k_pool_SHD, v_pool_SHD, slots_T, q_out_TND,
        written,
    )  # fmt: skip
    norm = k_norm_D if q_norm_D is None else q_norm_D
    wide = norm is not None and norm.dtype != qkv_TX.dtype
    tokens, width = qkv_TX.shape
    slot_count, kv_heads, size = k_pool_SHD.shape
    threads = 1 if tokens * width < _SERIAL_ELEMENTS else thread_count()
    arguments = _Arguments(
        0, qkv_TX.data_ptr(), cos_PF.data_ptr(), sin_PF.data_ptr(), positions_T.data_ptr(),
        0 if q_norm_D is None else q_norm_D.data_ptr(), 0 if k_norm_D is None else k_norm_D.data_ptr(),
        k_pool_SHD.data_ptr(), v_pool_SHD.data_ptr(), slots_T.data_ptr(), q_out_TND.data_ptr(), tokens,
        q_out_TND.shape[1], kv_heads, cos_PF.shape[0], slot_count, max(1, tokens // (threads * 4)), 0,
        *((0, 0, 0) if written is None else _digest_fields(written)), eps,
    )  # fmt: skip
    keeps = (qkv_TX, cos_PF, sin_PF, positions_T, q_norm_D, k_norm_D, k_pool_SHD, v_pool_SHD, slots_T, q_out_TND)
    return KernelCall(
        body=_body(size, qkv_TX.dtype == torch.bfloat16, wide, kind_of(k_pool_SHD.dtype), VERSION), arguments=arguments,
        threads=threads, refusal="bad", keeps=(*keeps, written),
    )  # fmt: skip


def _digest_fields(written: WrittenRows) -> tuple[int, int, int]:
    factors_22W = written.coefficients_22W
    return factors_22W.data_ptr(), written.sums_T2.data_ptr(), factors_22W.shape[-1]


def warm(head_size: int, dtype: torch.dtype) -> None:
    """Compile, or load from the disk."""
    _body(head_size, dtype == torch.bfloat16, False, kind_of(dtype), VERSION)


@cache
def _body(size: int, bf16: bool, wide: bool, kind: int, version: int) -> Body:
    """`wide`: norm weights are fp32, and their product is rounded once; `kind`: of the pools."""
    half = size // 2
    item_bytes = 2 if bf16 else 4
    is_fp8, pool_bytes = kind > BF16, bytes_of(kind)

    def turn_tokens(args: Any) -> None:
        if version < 0:
            return
        a = carray(args, _FIELDS, np.int64)
        tokens, heads, kv_heads, step = a[11], a[12], a[13], a[16]
        eps = np.float32(carray(args, _FIELDS, np.float64)[_FIELDS - 1])
        item = np.uint16 if bf16 else np.float32
        width = (heads + 2 * kv_heads) * size
        positions = carray(at(a[4]), tokens, np.int64)
        slots = carray(at(a[9]), tokens, np.int64)
        kept = np.empty(size, np.float32)
        keys = np.empty(kv_heads * size, item)
        value_bytes, row_bytes = kv_heads * size * item_bytes, kv_heads * size * pool_bytes
        rounded = np.empty((2, kv_heads * size), np.uint8)
        while True:
            first = fetch_add(a.ctypes.data, step)
            if first >= tokens:
                break
            for t in range(first, min(first + step, tokens)):
                if positions[t] < 0 or positions[t] >= a[14] or slots[t] < 0 or slots[t] >= a[15]:
                    a[17] = t + 1
                    continue
                cos = carray(at(a[2] + positions[t] * (half * 4)), half, np.float32)
                sin = carray(at(a[3] + positions[t] * (half * 4)), half, np.float32)
                for n in range(heads + kv_heads):
                    source = carray(at(a[1] + (t * width + n * size) * item_bytes), size, item)
                    norm_at = a[5] if n < heads else a[6]
                    total = np.float32(0)
                    for i in range(size):
                        value = widen(source[i]) if bf16 else source[i]
                        kept[i] = value
                        total += value * value
                    if norm_at != 0:
                        norm = carray(at(norm_at), size, np.float32 if wide else item)
                        scale = np.float32(1) / np.sqrt(total / np.float32(size) + eps)
                        for i in range(size):
                            if wide:
                                kept[i] = widen(narrow(kept[i] * scale * norm[i]))
                            elif bf16:
                                kept[i] = widen(narrow(widen(narrow(kept[i] * scale)) * widen(norm[i])))
                            else:
                                kept[i] = kept[i] * scale * norm[i]
                    if n < heads:
                        out = carray(at(a[10] + (t * heads + n) * size * item_bytes), size, item)
                    else:
                        out = carray(at(keys.ctypes.data + (n - heads) * size * item_bytes), size, item)
                    for i in range(half):
                        low, high = kept[i], kept[half + i]
                        turned_low = low * cos[i] - high * sin[i]
                        turned_high = high * cos[i] + low * sin[i]
                        out[i] = narrow(turned_low) if bf16 else turned_low
                        out[half + i] = narrow(turned_high) if bf16 else turned_high
                keys_at, values_at = np.int64(keys.ctypes.data), a[1] + (t + 1) * width * item_bytes - value_bytes
                if is_fp8:
                    values = carray(at(values_at), kv_heads * size, item)
                    for i in range(kv_heads * size):
                        rounded[0, i] = to_fp8(widen(keys[i]) if bf16 else keys[i], kind)
                        rounded[1, i] = to_fp8(widen(values[i]) if bf16 else values[i], kind)
                    keys_at = np.int64(rounded.ctypes.data)
                    values_at = keys_at + row_bytes
                if a[19] != 0:
                    sums = carray(at(a[19]), tokens * 2, np.int64)
                    for kv in range(2):
                        factors = a[18] + kv * a[20] * 8
                        row = values_at if kv else keys_at
                        found = digest_row(row, factors, factors + a[20] * 4, a[20])
                        sums[t * 2 + kv] = add_packed(sums[t * 2 + kv], found)
                copy_bytes(a[7] + slots[t] * row_bytes, keys_at, row_bytes)
                copy_bytes(a[8] + slots[t] * row_bytes, values_at, row_bytes)

    return compile_body(turn_tokens)
