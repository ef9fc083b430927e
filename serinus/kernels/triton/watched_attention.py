"""Paged attention that digests the KV it reads; see the reference for what it means.

Sequences with one query are digested by `decode_attention` as it reads them. What that does not read is digested
beside, from the rows that the same table names: what is due of sequences with several queries, and below windows; and
the second set of columns, where there is one. KV of 32 bits, heads whose size is no power of 2 and digests of a row's
first bytes are always digested beside.

B = sequences, N = query heads, H = KV heads, D = head size, S = slots, R, C = rows and columns of req_to_token,
E = slots digested, W = 16-bit lanes digested of a row of one half.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from serinus.kernels.batch import AttentionBatch
from serinus.kernels.checks import check_pack_factors, check_watched_attention
from serinus.kernels.contracts import LayerDigest, Tiling, WatchedAttention
from serinus.kernels.packed import PackedFactors
from serinus.kernels.pool_rows import page_gap, row_elements, slot_count
from serinus.kernels.triton.chunk_attention import attend_many
from serinus.kernels.triton.decode_attention import PLANE_COLUMNS, attend_one, load_slots
from serinus.kernels.triton.pool_rows import row_starts
from serinus.kernels.triton.tickets import Tickets

_HEAD_SIZE_MAX = 512
"""Up to which the sums of fp32 are exact: 512 * 255 * 128 < 2**24."""
_BESIDE_SPLITS, _BESIDE_PROGRAMS = 16, 2048
"""Programs of one column at least; and of all, where columns are few."""
_BESIDE_SLOTS = 16
_BESIDE_LANES = 256


def pack_factors(coefficients_22W: Tensor, kv_heads: int) -> PackedFactors:
    """Cut coefficients into byte planes. Raises ValueError: heads are too large for exact sums."""
    check_pack_factors(coefficients_22W, kv_heads)
    lanes = coefficients_22W.shape[-1]
    size = lanes // kv_heads
    if size > _HEAD_SIZE_MAX:
        raise ValueError(f"kernels: heads of {size}, expected at most {_HEAD_SIZE_MAX}")
    left = coefficients_22W.long().view(2, 2, kv_heads, size).permute(0, 2, 3, 1) & 0xFFFFFFFF  # half, head, D, sum
    planes = torch.empty((2, kv_heads, size, PLANE_COLUMNS), dtype=torch.float16, device=left.device)
    for place in range(4):
        digit = ((left & 0xFF) + 128) % 256 - 128
        left = (left - digit) >> 8
        planes[..., place::4] = digit.half()
    return PackedFactors(factors=planes, bias=None, plain_22W=coefficients_22W)


def new_watched_attention() -> WatchedAttention:
    """The op, with tickets of its own, and with the planes of factors that came plain: made at their first use, and
    kept as long as the op."""
    tickets, planes = Tickets(), _Planes()

    def watched_attention(
        q_BND: Tensor,
        k_pool_SHD: Tensor,
        v_pool_SHD: Tensor,
        req_to_token_RC: Tensor,
        batch: AttentionBatch,
        scale: float,
        digest: LayerDigest | None = None,
        tiling: Tiling | None = None,
        window: int | None = None,
        softcap: float | None = None,
        sinks_N: Tensor | None = None,
    ) -> Tensor:
        """`paged_attention`; with a digest that of what is due is added to its sums.

        Cost: one read of the KV that attention reads, and one of what is digested beside; no host wait.
        """
        check_watched_attention(q_BND, k_pool_SHD, v_pool_SHD, req_to_token_RC, batch, digest, window, softcap, sinks_N)
        q_TND = q_BND.contiguous()
        out_TND = torch.empty_like(q_TND)
        inputs = q_TND, k_pool_SHD, v_pool_SHD, req_to_token_RC, batch, scale, window, softcap, sinks_N, out_TND
        count, tokens, counts = batch.sequence_count, len(q_TND), tickets.on(q_TND.device)
        packed = None if digest is None else planes.of(digest.factors, k_pool_SHD)
        if tokens != count:
            attend_many(*inputs)
        if count > 1 or tokens == 1:
            attend_one(*inputs, counts, tiling, packed, digest if packed else None)
        if digest is not None:
            sets = digest.due_7B.shape[1] // count
            if packed is None or sets > 1 or window is not None or tokens != count:
                pools = k_pool_SHD, v_pool_SHD
                digest_beside(pools, req_to_token_RC, batch, digest, is_read=packed is not None, window=window)
        return out_TND

    return watched_attention


class _Planes:
    """Factors as planes, by where the plain ones lie."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, tuple[int, ...]], PackedFactors] = {}

    def of(self, factors: PackedFactors, pool_SHD: Tensor) -> PackedFactors | None:
        """The same as planes; None: the kernel that reads KV cannot digest such rows."""
        heads, size = pool_SHD.shape[-2:]
        plain = factors.plain_22W
        each = pool_SHD.element_size()
        whole = plain.shape[-1] == heads * size * each // 2 and each <= 2
        if not whole or size < 16 or size & (size - 1) or size > _HEAD_SIZE_MAX:
            return None
        if factors.factors.dtype is torch.float16:
            return factors
        key = plain.data_ptr(), tuple(plain.shape)
        found = self._kept.get(key)
        if found is None:
            found = self._kept[key] = pack_factors(plain, heads)  # holds the plain ones: their address stays theirs
            torch.zeros(1, device=plain.device)  # any kernel: attention reads factors early (dependent.py)
        return found


def digest_beside(
    halves_SHD: tuple[Tensor, ...], req_to_token_RC: Tensor, batch: AttentionBatch, digest: LayerDigest, *,
    is_read: bool, window: int | None,
) -> None:  # fmt: skip
    """What is due of these pools (k and v, or latent rows) and was not digested by attention. `is_read`: attention did
    so where there is one query."""
    factors_22W, sums_P22E, columns = digest.factors.plain_22W.contiguous(), digest.sums_P22E, digest.due_7B.shape[1]
    pool_SHD = halves_SHD[0]
    width, each = factors_22W.shape[-1], pool_SHD.element_size()
    page_slots, gap = page_gap(pool_SHD)
    splits = max(_BESIDE_SPLITS, _BESIDE_PROGRAMS // (columns * len(halves_SHD)))
    _beside[(columns, len(halves_SHD), min(splits, _BESIDE_PROGRAMS // 8))](
        pool_SHD.view(torch.int16), halves_SHD[-1].view(torch.int16), req_to_token_RC, req_to_token_RC.stride(0),
        batch.rows_B, batch.q_starts_B1, batch.context_B, factors_22W, digest.due_7B, sums_P22E, sums_P22E.shape[-1],
        window or 0, slot_count(pool_SHD), gap * each // 2, batch.sequence_count, columns, width, digest.page_size,
        IS_READ=is_read, WINDOWED=window is not None, ROWS=_BESIDE_SLOTS,
        WIDTH=min(_BESIDE_LANES, triton.next_power_of_2(width)), LANES=row_elements(pool_SHD) * each // 2,
        SLOTS=page_slots,
    )  # fmt: skip


_jit: Any = triton.jit


@_jit(do_not_specialize=["entries", "batch", "due_columns"])
def _beside(
    k, v, table, columns, rows, starts, contexts, factors, due, sums, entries, window, slot_count, gap_lanes,
    batch, due_columns, width, page_size,
    IS_READ: tl.constexpr, WINDOWED: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    LANES: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    column, half = tl.program_id(0), tl.program_id(1)
    b = column % batch
    low, high = tl.load(due + 2 * due_columns + column), tl.load(due + 3 * due_columns + column)
    first, stride = tl.load(due + 4 * due_columns + column), tl.load(due + 5 * due_columns + column)
    entry = tl.load(due + 6 * due_columns + column)
    if IS_READ:
        is_one = tl.load(starts + b + 1) - tl.load(starts + b) == 1
        lowest = tl.load(contexts + b) * 0
        if WINDOWED:
            lowest = tl.maximum(tl.load(contexts + b) - window, 0)
        high = tl.where((column < batch) & is_one, tl.minimum(high, lowest), high)
    stride = tl.maximum(stride, 1)
    pages = tl.maximum(tl.cdiv(tl.cdiv(high, page_size) - first, stride), 0)
    total = tl.where(low < high, pages * page_size, 0)
    pool = k
    if half == 1:
        pool = v
    row, w = table + tl.load(rows + b) * columns, tl.arange(0, WIDTH)
    for at in range(tl.program_id(2) * ROWS, total, tl.num_programs(2) * ROWS):
        e = at + tl.arange(0, ROWS)
        t = (first + e // page_size * stride) * page_size + e % page_size
        live = (e < total) & (t >= low) & (t < high)
        slot = load_slots(row, tl.where(live, t, low), slot_count)
        at_E1 = row_starts(slot, gap_lanes, LANES, SLOTS)[:, None]
        one = tl.zeros((ROWS, WIDTH), tl.uint32)
        other = tl.zeros((ROWS, WIDTH), tl.uint32)
        for lane in range(0, width, WIDTH):
            inside = lane + w < width
            words = tl.load(pool + at_E1 + (lane + w)[None, :], mask=inside[None, :], other=0).to(tl.int32) & 0xFFFF
            words = words.to(tl.uint32, bitcast=True)
            mine = factors + half * 2 * width + lane + w
            one += words * tl.load(mine, mask=inside, other=0).to(tl.uint32, bitcast=True)[None, :]
            other += words * tl.load(mine + width, mask=inside, other=0).to(tl.uint32, bitcast=True)[None, :]
        spot = sums + half * 2 * entries + entry + e
        # Sums in 64 bits, then cut: how wide a reduction of 32-bit numbers is differs in the interpreter.
        one_sum = (tl.sum(one.to(tl.uint64), 1) & 0xFFFFFFFF).to(tl.uint32).to(tl.int32, bitcast=True)
        other_sum = (tl.sum(other.to(tl.uint64), 1) & 0xFFFFFFFF).to(tl.uint32).to(tl.int32, bitcast=True)
        tl.atomic_add(spot, one_sum, mask=live, sem="relaxed")
        tl.atomic_add(spot + entries, other_sum, mask=live, sem="relaxed")
