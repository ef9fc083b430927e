"""The Triton kernels at the shapes of models, in bf16: what is compiled to hold registers and spills to a bound.
Nothing is computed: tensors are not even filled, and products of torch between the kernels are empty."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from serinus.core.stamps import digest_coefficients
from serinus.kernels import (
    FP8_FORMATS,
    AttentionBatch,
    Gate,
    Kernels,
    LatentHeads,
    LayerDigest,
    PackedExperts,
    QuantizedWeight,
    RowSampling,
    WrittenRows,
    find_chunks,
    load,
)
from serinus.kernels.triton.linear import pack_linear
from serinus.kernels.triton.peer_exchange import PeerExchange
from serinus.kernels.triton.peer_words import exchange_memory
from serinus.kernels.triton.quantized import round_rows, round_spans

from .triton_host_cases import pulled

__all__ = ["NoProducts", "call_all", "call_pulls", "call_quantized"]

PAGE = 16
_ATEN = torch.ops.aten
_PRODUCTS = {_ATEN.mm, _ATEN.bmm, _ATEN.addmm, _ATEN.baddbmm}


class NoProducts(TorchDispatchMode):
    """Products are memory that was not touched: on a CPU without bf16 instructions those of a chunk take minutes."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func.overloadpacket not in _PRODUCTS:
            return func(*args, **given)
        *_, left, right = args
        return given["out"] if "out" in given else left.new_empty((*left.shape[:-1], right.shape[-1]))


def blank(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Memory that was not touched."""
    return torch.empty(shape, dtype=dtype)


def page_first(kv_heads: int, size: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    """Keys and values of one of three layers."""
    pages = blank(16, 3, 2, PAGE, kv_heads, size, dtype=dtype)
    return pages[:, 1, 0], pages[:, 1, 1]


def batches_of(tokens: int, sequences: int) -> list[AttentionBatch]:
    """So many sequences of any length; of chunks also as a host knows them."""
    starts, contexts = torch.arange(sequences + 1) * (tokens // sequences), torch.full((sequences,), tokens)
    batch = AttentionBatch(
        rows_B=torch.ones(sequences, dtype=torch.int64), q_starts_B1=starts, context_B=contexts
    )  # fmt: skip
    chunks = find_chunks(starts.numpy(), contexts.numpy(), torch.from_numpy)
    return [batch] if chunks is None else [batch, replace(batch, chunks=chunks)]


def attend(
    ops: Kernels, tokens: int, sequences: int, heads: int, kv_heads: int, size: int, kv: torch.dtype = torch.bfloat16,
    **given: Any,
) -> None:  # fmt: skip
    """A decode step or a chunk, with the window, cap or sinks that are given. Decodes with digests too."""
    k_pool, v_pool = page_first(kv_heads, size, kv)
    table = torch.zeros((sequences + 1, 40960), dtype=torch.int32)
    for batch in batches_of(tokens, sequences):
        inputs = (blank(tokens, heads, size), k_pool, v_pool, table, batch, size**-0.5)
        ops.paged_attention(*inputs, **given)
    if tokens == sequences:
        factors = torch.from_numpy(digest_coefficients([0], range(kv_heads), size, kv.itemsize, partial=False))[0]
        digest = LayerDigest(
            factors=ops.pack_factors(factors, kv_heads), due_7B=torch.zeros((7, sequences), dtype=torch.int64),
            sums_P22E=torch.zeros((1, 2, 2, 64), dtype=torch.int32), page_size=PAGE,
        )  # fmt: skip
        ops.watched_attention(*inputs, digest, None, **given)


def attend_latent(ops: Kernels, tokens: int, sequences: int, heads: int, kv: torch.dtype = torch.bfloat16) -> None:
    """A decode step or a chunk of DeepSeek-V2-Lite or V3, by their heads."""
    table = torch.zeros((sequences + 1, 40960), dtype=torch.int32)
    pool = page_first(1, 576, kv)[0]
    queries, slots, cos = blank(tokens, heads, 192), torch.zeros(tokens, dtype=torch.int64), torch.empty(40960, 32)
    made = LatentHeads(key_NPR=blank(heads, 128, 512), value_NRV=blank(heads, 512, 128))
    for batch in batches_of(tokens, sequences):
        ops.latent_attention(queries, pool, 512, table, batch, 0.1, None, made)
    factors = torch.from_numpy(digest_coefficients([0], [0], 576 * kv.itemsize // 2, 2, partial=False, halves=1))[0]
    written = WrittenRows(coefficients_22W=factors, sums_T2=torch.zeros((tokens, 2), dtype=torch.int64))
    rows = blank(tokens, 2112)[:, -576:]
    ops.latent_rope_store(rows, blank(512), 1e-6, queries, cos, cos, slots, pool, slots, written)


def multiply(ops: Kernels, rows: int) -> None:
    """The linears of Qwen3-8B."""
    shapes: tuple[tuple[int, int, Gate | None], ...] = (
        (6144, 4096, None), (4096, 4096, None), (24576, 4096, "silu"), (4096, 12288, None), (151_936, 4096, None),
    )  # fmt: skip
    for outs, inner, gate in shapes:
        packed = ops.pack_linear(blank(outs, inner), None)
        ops.norm_linear(None, blank(rows, inner), blank(inner), 1e-6, packed, gate)


def mix(ops: Kernels, rows: int) -> None:
    """The experts of Qwen3-30B-A3B."""
    experts = PackedExperts(gate_up=blank(128, 1536, 2048), down=blank(128, 2048, 768))
    ids = torch.zeros((rows, 8), dtype=torch.int64)
    ops.fused_moe(blank(rows, 2048), torch.ones(rows, 8), ids, experts, "silu")


def multiply_quantized(ops: Kernels, rows: int) -> None:
    """12288 x 4096, by 8 bits with a scale of each output, by 4 bits with one of 128 inputs, and by FP8 with either."""
    outs, inner = 12288, 4096
    for bits, group, e4m3 in ((8, inner, False), (4, 128, False), (8, inner, True), (8, 128, True)):
        values, scales = blank(outs, inner, dtype=torch.int8), blank(outs, inner // group, dtype=torch.float32)
        weight = QuantizedWeight(bits=bits, group=group, values_OI=values, scales_OG=scales, e4m3=e4m3)
        ops.linear(blank(rows, inner), ops.pack_linear(weight, None))


def mix_quantized(ops: Kernels, rows: int) -> None:
    """The experts of Qwen3-30B-A3B by 8 bits and FP8 with a scale of each output or of blocks, by 4 bits with one of
    128 inputs, and those of gpt-oss-20b in MXFP4. Four of them, as packing computes."""
    for width, inner, bits, group, form in (
        (2048, 768, 8, 0, ""), (2048, 768, 4, 128, ""), (2048, 768, 8, 0, "e4m3"), (2048, 768, 8, 128, "e4m3"),
        (2880, 2880, 8, 32, "e2m1"),
    ):  # fmt: skip
        both = []
        for outs, ins in ((2 * inner, width), (width, inner)):
            scales = torch.ones(outs, ins // group if group else 1)
            both.append(QuantizedWeight(
                bits=bits, group=group or ins, values_OI=torch.zeros((outs, ins), dtype=torch.int8), scales_OG=scales,
                e4m3=form == "e4m3", e2m1=form == "e2m1",
            ))  # fmt: skip
        packed = ops.pack_experts([(both[0], both[1])] * 4, None, None)
        ids = torch.zeros((rows, 4), dtype=torch.int64)
        ops.fused_moe(blank(rows, width), torch.ones(rows, 4), ids, packed, "swiglu_oai" if form == "e2m1" else "silu")


def call_quantized() -> None:
    """Linears and experts by weights of 8 and 4 bits, of one row and of some."""
    ops = load("cpu", "triton")
    for rows in (1, 16, 64):
        multiply_quantized(ops, rows)
        mix_quantized(ops, rows)


def call_all() -> None:
    """Call the ops of a step with the sizes of Qwen3-8B, of Gemma 2 9B and of gpt-oss."""
    ops = load("cpu", "triton")
    for sequences in (1, 16, 64):
        attend(ops, sequences, sequences, 32, 8, 128)
        multiply(ops, sequences)
        mix(ops, sequences)
        multiply_quantized(ops, sequences)
        mix_quantized(ops, sequences)
    attend(ops, 256, 256, 32, 8, 128)
    multiply_quantized(ops, 8192)
    round_rows(blank(8192, 4096))
    round_spans(blank(8192, 4096))
    mix_quantized(ops, 8192)
    mix(ops, 8192)
    attend(ops, 16, 16, 16, 8, 256, window=4096, softcap=50.0)
    sinks = torch.zeros(64)
    attend(ops, 16, 16, 64, 8, 64, window=128, sinks_N=sinks)
    attend(ops, 8192, 1, 64, 8, 64, sinks_N=sinks)
    for heads in (16, 128):
        attend_latent(ops, 16, 16, heads)
        attend_latent(ops, 8192, 1, heads)
    attend(ops, 8192, 1, 32, 8, 128)
    attend(ops, 4096, 2, 16, 8, 256, window=4096, softcap=50.0)
    call_pulls()
    call_exchange()
    for kv in FP8_FORMATS:
        for sequences in (16, 64):
            attend(ops, sequences, sequences, 32, 8, 128, kv)
        attend(ops, 16, 16, 16, 8, 256, kv, window=4096, softcap=50.0)
        attend(ops, 16, 16, 64, 8, 64, kv, window=128, sinks_N=sinks)
        attend(ops, 8192, 1, 32, 8, 128, kv)
        attend_latent(ops, 16, 16, 128, kv)
        attend_latent(ops, 8192, 1, 16, kv)
        attend(ops, 4096, 2, 16, 8, 256, kv, window=4096, softcap=50.0)
    for kv in (torch.bfloat16, *FP8_FORMATS):
        store(ops, kv)
    rows = [RowSampling(seed=1, position=1, temperature=0.7, top_k=50, top_p=0.9)] * 4
    ops.choose_tokens(torch.zeros((4, 151_936), dtype=torch.bfloat16), rows)


def call_exchange() -> None:
    """Output and down of Qwen3-8B by two ranks, which end with a sum, and what else these exchange."""
    memory = exchange_memory("cpu")
    exchange = PeerExchange(memory, [memory.data_ptr()] * 2, 0, 1.0)
    for rows in (1, 16, 64):
        for inner in (2048, 6144):
            assert exchange.linear_all_reduce(blank(rows, inner), pack_linear(blank(4096, inner), None)) is not None
        exchange.all_reduce(blank(rows, 4096))
        exchange.gather_last(blank(rows, 75_968))
        exchange.broadcast(blank(rows, 4096))


def call_pulls() -> None:
    """Whole pages, and heads of every layer between engines of one and of two ranks; and sums of both."""
    pages = np.arange(3)
    one, two = (blank(16, 72, PAGE, row, dtype=torch.uint8) for row in (2048, 1024))
    for own, source in ((one, one), (one[..., 1024:], two), (two, one[..., :1024])):
        pulled([own], pages, 1, [source], pages)
        pulled([own], pages, 1, (), None)


def store(ops: Kernels, kv: torch.dtype) -> None:
    """Rows of 16 tokens with their digests."""
    (k_pool, v_pool), slots = page_first(8, 128, kv), torch.arange(16)
    factors = torch.from_numpy(digest_coefficients([0], range(8), 128, kv.itemsize, partial=False))[0]
    written = WrittenRows(coefficients_22W=factors, sums_T2=torch.zeros((16, 2), dtype=torch.int64))
    cos = torch.empty(40960, 64)
    rope = (
        blank(16, 6144),
        cos,
        cos,
        slots,
        blank(128),
        blank(128),
        1e-6,
        k_pool,
        v_pool,
        slots,
        blank(16, 32, 128),
        written,
    )
    ops.qk_rope_store(*rope)
