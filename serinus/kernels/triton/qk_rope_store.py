"""From the qkv projection to attention in one pass: norms, rotation, the write into the KV pool, and the digests of
what is written, made of the values in registers; see the reference.

A program has some heads of one token, all of q, of k or of v. T = tokens, N = query heads, H = KV heads, D = head size,
P = positions, S = slots.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from serinus.kernels.checks import check_qk_rope_store
from serinus.kernels.contracts import WrittenRows
from serinus.kernels.fp8 import FP8_FORMATS
from serinus.kernels.pool_rows import page_gap, slot_count
from serinus.kernels.triton.dependent import EARLY, dependent, wait_for_earlier
from serinus.kernels.triton.pool_rows import row_starts
from serinus.kernels.triton.rms_norm import normed

_HEADS, _ROWS_ALONE = 4, 16
"""Heads of one program, where both numbers of heads are multiples of it; of up to so many tokens each has its own, by
which a decode step of one request on an H100 takes 5.93 ms where it took 5.97."""


def format_of(dtype: torch.dtype) -> tuple[int, int, int]:
    """Bits of the mantissa, the bias, and the largest number as bits of fp32, of an FP8 type; zeros of another."""
    form = FP8_FORMATS.get(dtype)
    if form is None:
        return 0, 0, 0
    return form.mantissa, form.bias, int(torch.tensor(form.largest).view(torch.int32))


def qk_rope_store(
    qkv_TX: Tensor, cos_PF: Tensor, sin_PF: Tensor, positions_T: Tensor, q_norm_D: Tensor | None,
    k_norm_D: Tensor | None, eps: float, k_pool_SHD: Tensor, v_pool_SHD: Tensor, slots_T: Tensor, q_out_TND: Tensor,
    written: WrittenRows | None = None,
) -> None:  # fmt: skip
    """Norm and rotate q and k; store k and v, and add the digests of both. Slots outside of the pool are left alone.
    Cost: one read of qkv, one write of as much; no host wait."""
    check_qk_rope_store(
        qkv_TX, cos_PF, sin_PF, positions_T, q_norm_D, k_norm_D, k_pool_SHD, v_pool_SHD, slots_T, q_out_TND,
        written,
    )  # fmt: skip
    tokens, heads, size = q_out_TND.shape
    kv_heads = k_pool_SHD.shape[-2]
    page_slots, gap = page_gap(k_pool_SHD)
    mantissa, bias, largest = format_of(k_pool_SHD.dtype)
    if not tokens:
        return
    each = 1 if tokens <= _ROWS_ALONE else math.gcd(heads, kv_heads, _HEADS)
    norms = [norm_D for norm_D in (q_norm_D, k_norm_D) if norm_D is not None] or [qkv_TX]
    sums, factors, width = q_out_TND, q_out_TND, 0
    if written is not None:
        factors, width = written.coefficients_22W, written.coefficients_22W.shape[-1]
        sums = written.sums_T2.view(torch.int32)
    _rope_store[(tokens, (heads + 2 * kv_heads) // each)](
        qkv_TX, cos_PF, sin_PF, positions_T, slots_T, norms[0], norms[-1], k_pool_SHD, v_pool_SHD, q_out_TND, factors,
        sums, slot_count(k_pool_SHD), gap, eps,
        HEADS=heads, KV_HEADS=kv_heads, SIZE=size, HALF=triton.next_power_of_2(size // 2), EACH=each,
        Q_NORM=q_norm_D is not None, K_NORM=k_norm_D is not None,
        IN_FP32=norms[0].dtype != qkv_TX.dtype, WIDTH=width, SLOTS=page_slots,
        MANTISSA=mantissa, BIAS=bias, LARGEST=largest, num_warps=1, **dependent(qkv_TX.device),
    )  # fmt: skip


_jit: Any = triton.jit


@_jit
def _rope_store(
    qkv, cos, sin, positions, slots, q_norm, k_norm, k_pool, v_pool, q_out, factors, sums, slot_count, gap, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, SIZE: tl.constexpr, HALF: tl.constexpr, EACH: tl.constexpr,
    Q_NORM: tl.constexpr, K_NORM: tl.constexpr, IN_FP32: tl.constexpr, WIDTH: tl.constexpr,
    SLOTS: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, LARGEST: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    t, head = tl.program_id(0).to(tl.int64), tl.program_id(1) * EACH
    h, f = tl.arange(0, EACH), tl.arange(0, HALF)
    inside = (f < SIZE // 2)[None, :]
    at = t * ((HEADS + 2 * KV_HEADS) * SIZE) + (head + h)[:, None] * SIZE + f[None, :]
    slot = tl.load(slots + t, cache_modifier=EARLY)
    place = tl.load(positions + t, cache_modifier=EARLY) * (SIZE // 2) + f
    cos_1F = tl.load(cos + place, mask=f < SIZE // 2, other=0.0)[None, :]
    sin_1F = tl.load(sin + place, mask=f < SIZE // 2, other=0.0)[None, :]
    low_weight, high_weight = cos_1F, sin_1F  # not used without norms
    if Q_NORM or K_NORM:
        norm = q_norm
        if head >= HEADS:
            norm = k_norm
        low_weight = tl.load(norm + f, mask=f < SIZE // 2, other=0.0)[None, :]
        high_weight = tl.load(norm + SIZE // 2 + f, mask=f < SIZE // 2, other=0.0)[None, :]
    wait_for_earlier(DEPENDENT)
    low, high = tl.load(qkv + at, mask=inside, other=0.0), tl.load(qkv + at + SIZE // 2, mask=inside, other=0.0)
    if head < HEADS + KV_HEADS:
        if head < HEADS:
            low, high = _turned(low, high, low_weight, high_weight, cos_1F, sin_1F, eps, SIZE, Q_NORM, IN_FP32)
            spot = q_out + t * (HEADS * SIZE) + (head + h)[:, None] * SIZE + f[None, :]
            tl.store(spot, low, mask=inside)
            tl.store(spot + SIZE // 2, high, mask=inside)
        else:
            low, high = _turned(low, high, low_weight, high_weight, cos_1F, sin_1F, eps, SIZE, K_NORM, IN_FP32)
            _keep(
                k_pool, low, high, slot, factors, sums, slot_count, gap, t, head - HEADS, 0, h, f,
                KV_HEADS, SIZE, WIDTH, SLOTS, MANTISSA, BIAS, LARGEST,
            )  # fmt: skip
    else:
        head -= HEADS + KV_HEADS
        _keep(
            v_pool, low, high, slot, factors, sums, slot_count, gap, t, head, 1, h, f,
            KV_HEADS, SIZE, WIDTH, SLOTS, MANTISSA, BIAS, LARGEST,
        )  # fmt: skip


@_jit
def _turned(
    low, high, low_weight, high_weight, cos_1F, sin_1F, eps,
    SIZE: tl.constexpr, NORM: tl.constexpr, IN_FP32: tl.constexpr,
):  # fmt: skip
    """Both halves of heads, normed and rotated."""
    dtype: tl.constexpr = low.dtype
    low, high = low.to(tl.float32), high.to(tl.float32)
    if NORM:
        total = (tl.sum(low * low, 1) + tl.sum(high * high, 1))[:, None]
        low = normed(low, low_weight, total, eps, SIZE, IN_FP32, dtype).to(tl.float32)
        high = normed(high, high_weight, total, eps, SIZE, IN_FP32, dtype).to(tl.float32)
    return (low * cos_1F - high * sin_1F).to(dtype), (high * cos_1F + low * sin_1F).to(dtype)


@_jit
def _keep(
    pool, low, high, slot, factors, sums, slot_count, gap, t, head, half, h, f,
    KV_HEADS: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, SLOTS: tl.constexpr, MANTISSA: tl.constexpr,
    BIAS: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """Rows of heads go to their slot, and what they add to the digest of their token to the sums."""
    if MANTISSA:
        low, high = in_fp8(low, pool, MANTISSA, BIAS, LARGEST), in_fp8(high, pool, MANTISSA, BIAS, LARGEST)
    inside = (f < SIZE // 2)[None, :]
    stored = (f < tl.where((slot >= 0) & (slot < slot_count), SIZE // 2, 0))[None, :]
    element = (head + h)[:, None] * SIZE + f[None, :]
    if WIDTH:  # before the stores, which no load may overtake
        mine = factors + half * 2 * WIDTH
        for which in tl.static_range(2):
            coefficients = mine + which * WIDTH
            found = weighed(low, coefficients, element, inside, WIDTH)
            found += weighed(high, coefficients, element + SIZE // 2, inside, WIDTH)
            total = add_sum(tl.ravel(found)) & 0xFFFFFFFF
            tl.atomic_add(
                sums + (t * 2 + half) * 2 + which, total.to(tl.uint32).to(tl.int32, bitcast=True), sem="relaxed"
            )
    spot = pool + row_starts(slot, gap, KV_HEADS * SIZE, SLOTS) + element
    tl.store(spot, low, mask=stored)
    tl.store(spot + SIZE // 2, high, mask=stored)


@_jit
def in_fp8(values, pool, MANTISSA: tl.constexpr, BIAS: tl.constexpr, LARGEST: tl.constexpr):
    """As elements of an FP8 pool (kernels/fp8.py), by their bits: Triton's interpreter rounds otherwise than a GPU."""
    SHIFT: tl.constexpr = 23 - MANTISSA
    MAGIC: tl.constexpr = (127 + 24 - BIAS - MANTISSA) << 23  # a number whose last bit is worth the least of FP8
    word = values.to(tl.float32).to(tl.int32, bitcast=True)
    size = word & 0x7FFFFFFF
    bounded = tl.minimum(size, LARGEST)
    near = (bounded + ((1 << (SHIFT - 1)) - 1) + ((bounded >> SHIFT) & 1)) >> SHIFT
    moved = bounded.to(tl.float32, bitcast=True) + tl.full(bounded.shape, MAGIC, tl.int32).to(tl.float32, bitcast=True)
    small = moved.to(tl.int32, bitcast=True) - MAGIC
    found = tl.where(bounded < ((128 - BIAS) << 23), small, near - ((127 - BIAS) << MANTISSA))
    found = tl.where(size > 0x7F800000, 0x7F, found) | ((word >> 24) & 0x80)
    return found.to(tl.uint8).to(pool.dtype.element_ty, bitcast=True)


@_jit
def add_sum(found):
    """The sum in 64 bits, to be cut: how wide a reduction of 32-bit numbers is differs in the interpreter."""
    return tl.sum(found.to(tl.uint64), 0)


@_jit
def weighed(values, coefficients, element, inside, WIDTH: tl.constexpr):
    """Lanes of 16 bits times their coefficients, modulo 2**32; one of 32 bits is two lanes, one of 8 is half of one."""
    if values.dtype.primitive_bitwidth == 32:
        words = values.to(tl.uint32, bitcast=True)
        one = tl.load(coefficients + 2 * element, mask=inside & (2 * element < WIDTH), other=0)
        other = tl.load(coefficients + 2 * element + 1, mask=inside & (2 * element + 1 < WIDTH), other=0)
        found = (words & 0xFFFF) * one.to(tl.uint32, bitcast=True) + (words >> 16) * other.to(tl.uint32, bitcast=True)
    elif values.dtype.primitive_bitwidth == 8:
        one = tl.load(coefficients + element // 2, mask=inside & (element // 2 < WIDTH), other=0)
        word = values.to(tl.uint8, bitcast=True).to(tl.uint32) << (element % 2 * 8).to(tl.uint32)
        found = word * one.to(tl.uint32, bitcast=True)
    else:
        one = tl.load(coefficients + element, mask=inside & (element < WIDTH), other=0)
        found = values.to(tl.uint16, bitcast=True).to(tl.uint32) * one.to(tl.uint32, bitcast=True)
    return found
