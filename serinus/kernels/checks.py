"""What each op asks of its arguments: one check per contract, called by the op in every column.

Only page ids are read (they are on the host); of other tensors only shape, dtype and strides, so no check waits for a
device. What no check can see without such a wait (slots, positions) is said in the op's file of `ref/`.

Shapes: as in the op's file of `ref/`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from serinus.core.stamps import PARTIAL_LANES
from serinus.kernels.batch import AttentionBatch
from serinus.kernels.contracts import LatentHeads, LayerDigest, LayersKv, PoolLane, WrittenRows
from serinus.kernels.fp8 import FP8_FORMATS
from serinus.kernels.packed import PackedExperts
from serinus.kernels.pool_rows import is_laid_out, row_elements
from serinus.kernels.quantized import QuantizedWeight


def check_page_digests(
    data_PY: NDArray[np.uint8], pages_G: NDArray[np.int64], page_size: int, row_bytes: int, coefficients_L22W: Tensor
) -> None:
    """Raise ValueError where pages, rows and coefficients do not fit the buffer."""
    layers, halves, sums, width = coefficients_L22W.shape
    sound = data_PY.dtype == np.uint8 and data_PY.strides[1] == 1 and row_bytes % 2 == 0 and width <= row_bytes // 2
    if halves > 2 or sums != 2 or not sound or layers * halves * page_size * row_bytes > data_PY.shape[1]:
        raise ValueError(
            f"kernels: pages {data_PY.dtype} {data_PY.shape} of {page_size} slots, rows of {row_bytes} bytes and"
            f" coefficients {tuple(coefficients_L22W.shape)}, expected uint8 and [L, 2, 2, W] that fit"
        )
    if coefficients_L22W.device.type != "cpu" or not coefficients_L22W.is_contiguous():
        raise ValueError(f"kernels: coefficients on {coefficients_L22W.device}, expected contiguous ones on the CPU")
    _check_inside("pages", pages_G, len(data_PY))


def check_norm(x_TE: Tensor, weight_E: Tensor) -> None:
    """Raise ValueError where the weight has not the width of x, or a dtype other than that of x or fp32."""
    width = x_TE.shape[-1]
    if weight_E.shape != (width,) or weight_E.dtype not in (x_TE.dtype, torch.float32):
        raise ValueError(
            f"kernels: norm weight {weight_E.dtype} {tuple(weight_E.shape)}, expected {x_TE.dtype} ({width},)"
        )


def check_residual(x_TE: Tensor, residual_TE: Tensor) -> None:
    """Raise ValueError where the residual is strided, or has not the shape and dtype of x."""
    if x_TE.shape != residual_TE.shape or not residual_TE.is_contiguous() or residual_TE.dtype != x_TE.dtype:
        raise ValueError(
            f"kernels: residual {residual_TE.dtype} {tuple(residual_TE.shape)}, expected {x_TE.dtype} "
            f"{tuple(x_TE.shape)}, contiguous"
        )


def check_gate(op: str, gate_up_T2F: Tensor) -> None:
    """Raise ValueError, naming the op, where gate and up have not one width."""
    width = gate_up_T2F.shape[-1]
    if width % 2:
        raise ValueError(f"kernels: {op} got width {width}, expected an even one (gate and up)")


def check_pack_linear(weight: Tensor | QuantizedWeight, bias_O: Tensor | None) -> tuple[Tensor, QuantizedWeight | None]:
    """The weight, or its integers, and the quantized weight. Raises ValueError where weight and bias disagree."""
    quantized = weight if isinstance(weight, QuantizedWeight) else None
    weight_OI = weight.values_OI if isinstance(weight, QuantizedWeight) else weight
    if weight_OI.dim() != 2:
        raise ValueError(f"kernels: linear weight of shape {tuple(weight_OI.shape)}, expected [out, in]")
    if bias_O is not None and bias_O.shape != weight_OI.shape[:1]:
        raise ValueError(f"kernels: bias of shape {tuple(bias_O.shape)}, expected ({weight_OI.shape[0]},)")
    return weight_OI, quantized


Expert = tuple[QuantizedWeight, QuantizedWeight]
"""Of a quantized expert gate and up projections as one, [2F, E], and the down projection, [E, F]."""


def check_experts(experts: Iterable[Expert]) -> Iterator[Expert]:
    """The same, one after the other. Raises ValueError where one is unlike the first, or its projections do not fit."""
    first: tuple[object, ...] = ()
    for number, (gate_up, down) in enumerate(experts):
        form = tuple(
            (tuple(each.values_OI.shape), each.bits, each.group, each.e2m1, each.e4m3) for each in (gate_up, down)
        )
        first = first or form
        if form != first or tuple(gate_up.values_OI.shape) != (2 * down.in_size, down.out_size):
            raise ValueError(
                f"kernels: expert {number} has gate and up, and down of shape, bits, group, E2M1 and E4M3 {form}, the"
                f" first one {first}, expected the same of all, [2F, E] and [E, F]"
            )
        yield gate_up, down


def check_fused_moe(x_TE: Tensor, weights_TK: Tensor, ids_TK: Tensor, packed: PackedExperts) -> None:
    """Raise ValueError where tokens, choices and experts disagree, or a stack is strided."""
    count, inner, width = packed.shape
    is_plain = packed.sizes is None
    if x_TE.shape != (len(ids_TK), width) or (is_plain and packed.gate_up.shape != (count, 2 * inner, width)):
        raise ValueError(
            f"kernels: fused_moe got x {tuple(x_TE.shape)} of {len(ids_TK)} choices, gate_up"
            f" {tuple(packed.gate_up.shape)}, down {tuple(packed.down.shape)}, expected [T, E], [X, 2F, E], [X, E, F]"
        )
    biases = [(bias, like) for bias, like in ((packed.gate_up_bias, 2 * inner), (packed.down_bias, width))]
    if any(bias is not None and bias.shape != (count, like) for bias, like in biases):
        raise ValueError(f"kernels: fused_moe got biases unlike {count} experts of {2 * inner} and {width} outputs")
    if weights_TK.shape != ids_TK.shape or weights_TK.dtype != torch.float32 or ids_TK.dtype != torch.int64:
        raise ValueError(
            f"kernels: fused_moe got weights {weights_TK.dtype} {tuple(weights_TK.shape)} and ids {ids_TK.dtype}"
            f" {tuple(ids_TK.shape)}, expected float32 and int64 [T, K]"
        )
    given = [bias for bias, _ in biases if bias is not None]
    stacks, dtype = ([packed.gate_up, packed.down, *given], x_TE.dtype) if is_plain else (given, torch.float32)
    if any(stack.dtype != dtype or not stack.is_contiguous() for stack in stacks):
        raise ValueError(
            f"kernels: fused_moe got stacks of {sorted({str(stack.dtype) for stack in stacks})} for x of {x_TE.dtype},"
            " expected the same, contiguous, or of quantized experts biases of float32"
        )


def check_qk_rope_store(
    qkv_TX: Tensor, cos_PF: Tensor, sin_PF: Tensor, positions_T: Tensor, q_norm_D: Tensor | None,
    k_norm_D: Tensor | None, k_pool_SHD: Tensor, v_pool_SHD: Tensor, slots_T: Tensor, q_out_TND: Tensor,
    written: WrittenRows | None = None,
) -> None:  # fmt: skip
    """Raise ValueError where shapes or dtypes disagree, a tensor is strided, or other rows are digested."""
    tokens, width = qkv_TX.shape
    _, heads, size = q_out_TND.shape
    kv_heads = k_pool_SHD.shape[-2]
    if width != (heads + 2 * kv_heads) * size or k_pool_SHD.shape[-1] != size:
        raise ValueError(
            f"kernels: qkv of width {width} does not hold {heads} query and 2 x {kv_heads} KV heads of {size}"
        )
    if k_pool_SHD.shape != v_pool_SHD.shape:
        raise ValueError(f"kernels: pools differ: k {tuple(k_pool_SHD.shape)}, v {tuple(v_pool_SHD.shape)}")
    if not (tokens == q_out_TND.shape[0] == positions_T.shape[0] == slots_T.shape[0]):
        raise ValueError(
            f"kernels: {tokens} rows of qkv, {q_out_TND.shape[0]} of q_out, {positions_T.shape[0]} positions, "
            f"{slots_T.shape[0]} slots; expected as many of each"
        )
    if cos_PF.shape != sin_PF.shape or cos_PF.shape[1] * 2 != size:
        raise ValueError(
            f"kernels: rope tables {tuple(cos_PF.shape)} and {tuple(sin_PF.shape)}, expected [positions, {size // 2}]"
        )
    dtypes = {qkv_TX.dtype, k_pool_SHD.dtype, v_pool_SHD.dtype, q_out_TND.dtype}
    if (
        not _are_typed(qkv_TX, q_out_TND, k_pool_SHD, v_pool_SHD)
        or cos_PF.dtype != torch.float32
        or sin_PF.dtype != torch.float32
    ):
        raise ValueError(
            f"kernels: qkv, pools and q_out of {sorted(map(str, dtypes))}, rope tables of {cos_PF.dtype}; "
            "expected one dtype (pools may be FP8), and torch.float32"
        )
    if positions_T.dtype != torch.int64 or slots_T.dtype != torch.int64:
        raise ValueError(f"kernels: positions {positions_T.dtype}, slots {slots_T.dtype}; expected torch.int64")
    norms = [norm for norm in (q_norm_D, k_norm_D) if norm is not None]
    for norm in norms:
        if norm.shape != (size,) or norm.dtype != norms[0].dtype or norm.dtype not in (qkv_TX.dtype, torch.float32):
            raise ValueError(
                f"kernels: head norms {[(str(norm.dtype), tuple(norm.shape)) for norm in norms]}, expected one dtype, "
                f"{qkv_TX.dtype} or torch.float32, and ({size},)"
            )
    tensors = (qkv_TX, cos_PF, sin_PF, positions_T, slots_T, q_out_TND)
    if not all(tensor.is_contiguous() for tensor in tensors) or not _are_laid_out(k_pool_SHD, v_pool_SHD):
        raise ValueError(
            "kernels: qk_rope_store got a strided tensor, expected contiguous ones (pools may be page first)"
        )
    if written is not None:
        _check_written(k_pool_SHD, tokens, written)


def check_latent_rope_store(
    rows_TW: Tensor, norm_R: Tensor, queries_TNQ: Tensor, cos_PF: Tensor, sin_PF: Tensor, positions_T: Tensor,
    pool_S1W: Tensor, slots_T: Tensor, written: WrittenRows | None,
) -> None:  # fmt: skip
    """Raise ValueError where shapes or dtypes disagree, a tensor is strided, or other rows are digested."""
    (tokens, width), (_, _, size), rank = rows_TW.shape, queries_TNQ.shape, len(norm_R)
    rotated = width - rank
    shapes = {
        "pool": (pool_S1W.shape[-2:], (1, width)), "queries": (queries_TNQ.shape[:1], (tokens,)),
        "positions": (positions_T.shape, (tokens,)), "slots": (slots_T.shape, (tokens,)),
        "cos": (cos_PF.shape[1:], (rotated // 2,)), "sin": (sin_PF.shape, cos_PF.shape),
        "what rotates": ((rotated % 2, rotated > 0, size >= rotated), (0, 1, 1)),
    }  # fmt: skip
    wrong = [
        f"{name} {tuple(found)}, not {tuple(wanted)}" for name, (found, wanted) in shapes.items() if found != wanted
    ]
    if wrong:
        raise ValueError(f"kernels: rows {tuple(rows_TW.shape)} of a latent of {rank}: {'; '.join(wrong)}")
    dtypes = {rows_TW.dtype, queries_TNQ.dtype, pool_S1W.dtype}
    is_typed = _are_typed(rows_TW, queries_TNQ, pool_S1W, pool_S1W)
    is_whole = {positions_T.dtype, slots_T.dtype} == {torch.int64} and {cos_PF.dtype, sin_PF.dtype} == {torch.float32}
    if not is_typed or not is_whole or norm_R.dtype not in (rows_TW.dtype, torch.float32):
        raise ValueError(
            f"kernels: rows, queries and pool of {sorted(map(str, dtypes))}, norm of {norm_R.dtype}; expected "
            "one dtype (the pool may be FP8), torch.int64 positions and slots, torch.float32 tables"
        )
    tensors = (norm_R, cos_PF, sin_PF, positions_T, slots_T)
    is_dense = rows_TW.stride(1) == queries_TNQ.stride(2) == 1 and is_laid_out(pool_S1W)
    if not is_dense or not all(each.is_contiguous() for each in tensors):
        raise ValueError("kernels: latent_rope_store got a strided tensor, expected contiguous ones")
    if written is not None:
        _check_written(pool_S1W, tokens, written, halves=1)


def _check_written(k_pool_SHD: Tensor, tokens: int, written: WrittenRows, halves: int = 2) -> None:
    """Once for each shape: a watch hands out the same for as long as batches are alike."""
    shape = tokens, k_pool_SHD.shape
    if shape in written.kept:
        return
    factors, sums = written.coefficients_22W, written.sums_T2
    _check_coefficients(k_pool_SHD, factors, (halves, 2))
    is_whole = sums.is_contiguous() and factors.is_contiguous()
    if sums.shape != (tokens, 2) or sums.dtype != torch.int64 or not is_whole:
        raise ValueError(
            f"kernels: sums {sums.dtype} {tuple(sums.shape)} of {tokens} rows that are stored, expected int64 "
            f"({tokens}, 2), contiguous as the coefficients"
        )
    written.kept[shape] = ()


def check_paged_attention(
    q_TND: Tensor,
    k_pool_SHD: Tensor,
    v_pool_SHD: Tensor,
    req_to_token_RC: Tensor,
    batch: AttentionBatch,
    window: int | None = None,
    softcap: float | None = None,
    sinks_N: Tensor | None = None,
) -> None:
    """Raise ValueError: shapes or dtypes disagree, a pool or the table is strided, window or cap is too small, or sinks
    are not one fp32 number of each query head."""
    heads, size = q_TND.shape[1], q_TND.shape[2]
    kv_heads = k_pool_SHD.shape[-2]
    if k_pool_SHD.shape != v_pool_SHD.shape or k_pool_SHD.shape[-1] != size:
        raise ValueError(
            f"kernels: pools k {tuple(k_pool_SHD.shape)}, v {tuple(v_pool_SHD.shape)}; expected equal, heads of {size}"
        )
    if heads % kv_heads:
        raise ValueError(f"kernels: {heads} query heads over {kv_heads} KV heads; expected a multiple")
    if batch.q_starts_B1.shape[0] != batch.rows_B.shape[0] + 1 or batch.context_B.shape != batch.rows_B.shape:
        raise ValueError(
            f"kernels: batch of {batch.rows_B.shape[0]} rows, {batch.q_starts_B1.shape[0]} offsets, "
            f"{batch.context_B.shape[0]} contexts; expected B, B + 1, B"
        )
    if not _are_typed(q_TND, q_TND, k_pool_SHD, v_pool_SHD) or req_to_token_RC.dtype != torch.int32:
        raise ValueError(
            f"kernels: q {q_TND.dtype}, pools {k_pool_SHD.dtype} and {v_pool_SHD.dtype}, req_to_token "
            f"{req_to_token_RC.dtype}; expected one dtype (pools may be FP8), and torch.int32"
        )
    if not _are_laid_out(k_pool_SHD, v_pool_SHD) or not req_to_token_RC.is_contiguous():
        raise ValueError("kernels: a pool or req_to_token is strided, expected contiguous ones, or page first")
    if (window is not None and window < 1) or (softcap is not None and not softcap > 0):
        raise ValueError(f"kernels: window {window}, softcap {softcap}; expected None, or at least 1 and above 0")
    if sinks_N is not None and (sinks_N.shape != (heads,) or sinks_N.dtype != torch.float32):
        raise ValueError(f"kernels: sinks {sinks_N.dtype} {tuple(sinks_N.shape)}, expected torch.float32 ({heads},)")


def check_latent_attention(
    q_TNX: Tensor, pool_S1W: Tensor, value_size: int, req_to_token_RC: Tensor, batch: AttentionBatch,
    digest: LayerDigest | None, heads: LatentHeads | None,
) -> None:  # fmt: skip
    """Raise ValueError: as check_paged_attention, or the rows hold no such value, or heads or the digest are of
    others."""
    width = pool_S1W.shape[-1]
    if heads is not None:
        (count, plain, rank), values = heads.key_NPR.shape, tuple(heads.value_NRV.shape[:2])
        if (rank, *values) != (value_size, count, rank) or q_TNX.shape[1:] != (count, plain + width - rank):
            raise ValueError(
                f"kernels: queries {tuple(q_TNX.shape)}, keys {tuple(heads.key_NPR.shape)} and values of {values} of "
                f"latents of {value_size} in rows of {width}; expected those of the same heads"
            )
        q_TNX = q_TNX[:, :, :1].expand(-1, -1, width)
    check_paged_attention(q_TNX, pool_S1W, pool_S1W, req_to_token_RC, batch)
    if pool_S1W.shape[-2] != 1 or not 0 < value_size <= pool_S1W.shape[-1]:
        raise ValueError(
            f"kernels: a pool {tuple(pool_S1W.shape)} of values of {value_size}, expected one row a slot with them"
        )
    if digest is not None:
        check_layer_digest(pool_S1W, batch, digest, halves=1)


def check_pack_factors(coefficients_22W: Tensor, kv_heads: int) -> None:
    """Raise ValueError where these are not the coefficients of one layer of so many heads."""
    shape = tuple(coefficients_22W.shape)
    if len(shape) != 3 or shape[:2] != (2, 2) or shape[2] % kv_heads or coefficients_22W.dtype != torch.int32:
        raise ValueError(
            f"kernels: digest coefficients {coefficients_22W.dtype} {shape} of {kv_heads} heads, expected int32 "
            "[2, 2, lanes of all heads]"
        )


def check_watched_attention(
    q_BND: Tensor,
    k_pool_SHD: Tensor,
    v_pool_SHD: Tensor,
    req_to_token_RC: Tensor,
    batch: AttentionBatch,
    digest: LayerDigest | None,
    window: int | None,
    softcap: float | None,
    sinks_N: Tensor | None,
) -> None:
    """Raise ValueError: as check_paged_attention, or the digest is of others."""
    check_paged_attention(q_BND, k_pool_SHD, v_pool_SHD, req_to_token_RC, batch, window, softcap, sinks_N)
    if digest is not None:
        check_layer_digest(k_pool_SHD, batch, digest)


def check_layer_digest(k_pool_SHD: Tensor, batch: AttentionBatch, digest: LayerDigest, halves: int = 2) -> None:
    """Raise ValueError: it is of another batch, or of other rows than those of the pool. Once for each shape."""
    due, sums, count = digest.due_7B, digest.sums_P22E, batch.sequence_count
    shape = count, k_pool_SHD.shape
    if shape in digest.kept:
        return
    shapes = (7, count), (7, 2 * count)
    if tuple(due.shape) not in shapes or due.dtype != torch.int64 or not due.is_contiguous():
        raise ValueError(f"kernels: due {due.dtype} {tuple(due.shape)}, expected int64 (7, {count}), contiguous")
    is_shaped = sums.dim() == 4 and len(sums) > 0 and sums.shape[1:3] == (2, 2)
    if not is_shaped or sums.dtype != torch.int32 or not sums.is_contiguous() or digest.page_size < 1:
        raise ValueError(
            f"kernels: sums {sums.dtype} {tuple(sums.shape)} over pages of {digest.page_size}, expected int32 "
            "[P, 2, 2, E], contiguous, and at least 1"
        )
    _check_coefficients(k_pool_SHD, digest.factors.plain_22W, (halves, 2))
    digest.kept[shape] = ()


def check_pages(
    layers_kv: LayersKv,
    pages_G: NDArray[np.integer[Any]],
    page_size: int,
    bytes_RY: Tensor,
    rows_G: NDArray[np.integer[Any]] | None = None,
) -> None:
    """Raise ValueError where sizes disagree, or a page or a row lies outside of its pool or buffer."""
    k_pool = layers_kv[0][0]
    page_bytes = page_size * math.prod(k_pool.shape[1:]) * k_pool.element_size() * sum(map(len, layers_kv))
    count = len(pages_G)
    rows = count if rows_G is None else bytes_RY.shape[0]
    if bytes_RY.dtype != torch.uint8 or tuple(bytes_RY.shape) != (rows, page_bytes):
        raise ValueError(
            f"kernels: page buffer {bytes_RY.dtype} {tuple(bytes_RY.shape)}, expected uint8 ({rows}, {page_bytes})"
        )
    if rows and bytes_RY.stride(1) != 1:
        raise ValueError("kernels: page buffer's rows are strided, expected contiguous ones")
    if not all(half.is_contiguous() for pair in layers_kv for half in pair):
        raise ValueError("kernels: pools of which pages are moved are strided, expected contiguous ones")
    if k_pool.shape[0] % page_size:
        raise ValueError(f"kernels: {k_pool.shape[0]} slots are no whole number of pages of {page_size}")
    _check_inside("pages", pages_G, k_pool.shape[0] // page_size)
    if rows_G is not None:
        if len(rows_G) != count:
            raise ValueError(f"kernels: {len(rows_G)} rows for {count} pages, expected as many")
        _check_inside("rows", rows_G, rows)


def check_hashed(lanes: Sequence[Tensor], pages_G: NDArray[np.int64], rows_GY: NDArray[np.uint8] | None) -> int:
    """Raise ValueError where sizes disagree, or a page lies outside. Returns the bytes of a page over all lanes."""
    width, page_count = sum(lane.shape[1] for lane in lanes), lanes[0].shape[0]
    if rows_GY is not None and (rows_GY.dtype != np.uint8 or rows_GY.shape != (len(pages_G), width)):
        raise ValueError(
            f"kernels: page buffer {rows_GY.dtype} {rows_GY.shape}, expected uint8 ({len(pages_G)}, {width})"
        )
    if rows_GY is not None and rows_GY.strides[1] != 1:
        raise ValueError("kernels: page buffer's rows are strided, expected contiguous ones")
    _check_inside("pages", pages_G, page_count)
    return width


def check_pull_lanes(lanes: Sequence[PoolLane], sources: Sequence[PoolLane], sums: Sequence[int]) -> None:
    """Raise ValueError where lanes of the two sides differ in size, or a lane is in no sum."""
    expected = [lane.sizes[1:] for lane in lanes]
    for name, side in (("pages", lanes), ("source pages", sources or lanes)):
        sizes = [lane.sizes[1:] for lane in side]
        wide = all(each and not each[-1] % 8 and lane.steps[-1] == 1 for each, lane in zip(sizes, side, strict=True))
        if sizes != expected or not wide:
            raise ValueError(f"kernels: lanes of {name} are {sizes} bytes, expected equal sizes, rows multiples of 8")
    if sums and (min(sums) < 1 or sum(sums) != len(lanes)):
        raise ValueError(f"kernels: sums over {list(sums)} of {len(lanes)} lanes, expected each lane in one of them")


def check_pull_pages(
    pages_G: NDArray[np.integer[Any]], page_count: int, source_pages_G: NDArray[np.integer[Any]] | None,
    source_page_count: int | None,
) -> None:  # fmt: skip
    """Raise ValueError where a page lies outside of its pool, or there are other numbers of them; without sources
    `source_page_count` is None. Cost: some us, whatever the lanes."""
    expected = None if source_page_count is None else len(pages_G)
    found = None if source_pages_G is None else len(source_pages_G)
    if found != expected:
        raise ValueError(f"kernels: {found} source pages, expected {expected}")
    for name, ids_G, count in (("pages", pages_G, page_count), ("source pages", source_pages_G, source_page_count)):
        if ids_G is not None and len(ids_G) and ids_G.astype(np.uint64).max() >= count:  # below 0 is above all
            raise ValueError(f"kernels: {name} {ids_G.min()} .. {ids_G.max()}, expected 0 .. {(count or 0) - 1}")


def check_mask(logits_BV: Tensor, rows: Sequence[int], words_RW: NDArray[np.int32]) -> None:
    """Raise ValueError where the words are not a bit for each id, for each of these rows."""
    check_logits(logits_BV)
    count, vocab = logits_BV.shape
    fits = words_RW.dtype == np.int32 and words_RW.shape == (len(rows), (vocab + 31) // 32)
    if not fits or (rows and not 0 <= min(rows) <= max(rows) < count):
        raise ValueError(
            f"kernels: a mask {words_RW.dtype} {words_RW.shape} for rows {list(rows)[:8]} of logits {(count, vocab)},"
            f" expected int32 [{len(rows)}, {(vocab + 31) // 32}] for rows from 0 to {count - 1}"
        )


def check_logits(logits_BV: Tensor, *counts: int, chosen: Sequence[int] = ()) -> None:
    """Raise ValueError where logits are no matrix of floats with a vocabulary, one of `counts` is not their rows, or a
    chosen id is none of theirs."""
    shape = tuple(logits_BV.shape)
    if (
        len(shape) != 2
        or not logits_BV.is_floating_point()
        or not shape[1]
        or any(count != shape[0] for count in counts)
    ):
        raise ValueError(
            f"kernels: logits {logits_BV.dtype} {shape} for {' and '.join(map(str, counts))} rows, expected floats "
            "[rows, vocabulary]"
        )
    if chosen and not 0 <= min(chosen) <= max(chosen) < shape[1]:
        raise ValueError(f"kernels: ids {min(chosen)} .. {max(chosen)} are chosen, expected 0 .. {shape[1] - 1}")


def check_digest(layers_kv: LayersKv, coefficients_L22W: Tensor) -> None:
    """Raise ValueError where the coefficients are not those of these pools."""
    _check_coefficients(layers_kv[0][0], coefficients_L22W, (len(layers_kv), len(layers_kv[0]), 2))


def _check_coefficients(pool: Tensor, coefficients: Tensor, shape: tuple[int, ...]) -> None:
    """`shape`: expected of them, less W. Asked for each layer of a step: no tensor is made."""
    whole = row_elements(pool) * pool.element_size() // 2
    found = tuple(coefficients.shape)
    # partial: of head 0, which may be less than 16 bytes
    is_wide = found[-1] == whole or 1 <= found[-1] <= min(whole, PARTIAL_LANES)
    if found[:-1] != shape or not is_wide or coefficients.dtype != torch.int32:
        raise ValueError(f"kernels: digest coefficients {coefficients.dtype} {found}, expected int32 {(*shape, whole)}")


def _are_typed(one: Tensor, other: Tensor, k_pool: Tensor, v_pool: Tensor) -> bool:
    """Whether tensors and pools are of one dtype, or both pools of one FP8 type."""
    pools = {k_pool.dtype, v_pool.dtype}
    return one.dtype == other.dtype and len(pools) == 1 and (pools == {one.dtype} or not pools.isdisjoint(FP8_FORMATS))


def _are_laid_out(k_pool: Tensor, v_pool: Tensor) -> bool:
    return is_laid_out(k_pool) and is_laid_out(v_pool) and k_pool.stride() == v_pool.stride()


def _check_inside(what: str, ids_G: NDArray[np.integer[Any]], count: int) -> None:
    if len(ids_G) and not 0 <= ids_G.min() <= ids_G.max() < count:
        raise ValueError(f"kernels: {what} {ids_G.min()} .. {ids_G.max()}, expected 0 .. {count - 1}")
