"""Each CPU kernel beside what the machine allows: bytes / measured bandwidth, or operations / measured matmul rate.

    python benchmarks/kernels.py [--threads 2] [--repeat 15]

The shapes are those of one step of a Qwen3 model of 12 layers, hidden size 1024, 16 query and 8 KV heads of 128, MLP
3072: every op as often as the step calls it. Ends in one JSON line.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from report import best_ms

from serinus.kernels import FP8_FORMATS, AttentionBatch, Kernels, RowSampling, load, warm

LAYERS, HIDDEN, HEADS, KV_HEADS, SIZE, MLP, VOCAB = 12, 1024, 16, 8, 128, 3072, 32000
PAGE, CONTEXT = 16, 300
BF16 = torch.bfloat16


def measure_bandwidth(repeat: int) -> float:
    """GB/s of reading memory that no cache holds."""
    data = torch.ones(1 << 26)
    return data.numel() * 4 / best_ms(data.sum, repeat) / 1e6


def measure_matmul(kernels: Kernels, repeat: int) -> float:
    """GFLOP/s of packed bf16 linears over 2048 tokens."""
    x = torch.randn(2048, HIDDEN).to(BF16)
    packed = kernels.pack_linear(torch.randn(MLP * 2, HIDDEN).to(BF16), None)
    return 2 * x.shape[0] * HIDDEN * MLP * 2 / best_ms(lambda: kernels.linear(x, packed), repeat) / 1e6


class Bench:
    """Measures jobs against floors and prints a line for each."""

    def __init__(self, kernels: Kernels, repeat: int) -> None:
        self.repeat = repeat
        self.gb_s = measure_bandwidth(repeat)
        self.gflop_s = measure_matmul(kernels, repeat)
        self.rows: list[dict[str, Any]] = []
        print(f"memory {self.gb_s:.1f} GB/s, bf16 matmul {self.gflop_s:.0f} GFLOP/s")

    def row(self, name: str, job: Callable[[], object], *, bytes_moved: float = 0, flops: float = 0) -> float:
        return self.note(name, best_ms(job, self.repeat), bytes_moved=bytes_moved, flops=flops)

    def note(self, name: str, spent: float, *, bytes_moved: float = 0, flops: float = 0) -> float:
        floor = max(bytes_moved / self.gb_s, flops / self.gflop_s) / 1e6
        part = f"floor {floor:9.3f} ms  {100 * floor / spent:4.0f} %" if floor else ""
        print(f"{name:58s} {spent:9.3f} ms  {part}")
        self.rows.append({"name": name, "ms": round(spent, 4), "floor_ms": round(floor, 4)})
        return spent


def make_kv(sequences: int, context: int) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], torch.Tensor]:
    """Pools of all layers, and a table of `sequences` rows over scattered pages."""
    per_sequence = -(-context // PAGE)
    slots = (sequences * per_sequence + 1) * PAGE
    layers = [
        (torch.randn(slots, KV_HEADS, SIZE).to(BF16), torch.randn(slots, KV_HEADS, SIZE).to(BF16))
        for _ in range(LAYERS)
    ]
    pages = (torch.randperm(sequences * per_sequence) + 1).view(sequences, per_sequence)
    table = torch.zeros(sequences + 1, per_sequence * PAGE, dtype=torch.int32)
    table[1:] = (pages[:, :, None] * PAGE + torch.arange(PAGE)).view(sequences, -1).int()
    return layers, table


def make_batch(queries: int, contexts: list[int]) -> AttentionBatch:
    count = len(contexts)
    return AttentionBatch(
        rows_B=torch.arange(1, count + 1),
        q_starts_B1=torch.arange(count + 1) * queries,
        context_B=torch.tensor(contexts),
    )


def bench_decode(bench: Bench, kernels: Kernels, sequences: int) -> None:
    layers, table = make_kv(sequences, CONTEXT)
    batch = make_batch(1, [CONTEXT] * sequences)
    q = torch.randn(sequences, HEADS, SIZE).to(BF16)
    weights = [kernels.pack_linear(torch.randn(MLP * 2, HIDDEN).to(BF16), None) for _ in range(LAYERS)]
    x = torch.randn(sequences, HIDDEN).to(BF16)

    def attend() -> None:
        for k, v in layers:
            kernels.paged_attention(q, k, v, table, batch, SIZE**-0.5)

    def multiply() -> None:
        for weight in weights:
            kernels.linear(x, weight)

    def multiply_by_onednn() -> None:
        for weight in weights:
            torch.ops.mkldnn._linear_pointwise(x, weight.weight, None, "none", [], "")

    def alternate() -> None:
        for weight, (k, v) in zip(weights, layers, strict=True):
            kernels.linear(x, weight)
            kernels.paged_attention(q, k, v, table, batch, SIZE**-0.5)

    kv_bytes = LAYERS * sequences * CONTEXT * KV_HEADS * SIZE * 2 * 2
    weight_bytes = LAYERS * MLP * 2 * HIDDEN * 2
    label = f"{sequences} x {CONTEXT} tokens, 12 layers"
    attention_ms = bench.row(f"decode attention, {label}", attend, bytes_moved=kv_bytes)
    flops = LAYERS * MLP * 2 * HIDDEN * 2 * sequences
    linear_ms = bench.row(
        f"linear 1024 x 6144, {sequences} tokens, 12 layers", multiply, bytes_moved=weight_bytes, flops=flops
    )
    bench.row("  oneDNN on the same packed weights", multiply_by_onednn, bytes_moved=weight_bytes, flops=flops)
    both_ms = bench.row(f"threads: both in turn, {sequences} tokens", alternate, bytes_moved=kv_bytes + weight_bytes)
    print(f"{'threads: in turn, over the sum of both alone':58s} {both_ms / (attention_ms + linear_ms):9.3f}")


def bench_prefill(bench: Bench, kernels: Kernels, sequences: int, queries: int, context: int) -> None:
    layers, table = make_kv(sequences, context)
    batch = make_batch(queries, [context] * sequences)
    q = torch.randn(sequences * queries, HEADS, SIZE).to(BF16)
    k, v = layers[0]
    seen = queries * (context - queries) + queries * (queries + 1) / 2
    bench.row(
        f"prefill attention, {sequences} x {queries} of {context} tokens",
        lambda: kernels.paged_attention(q, k, v, table, batch, SIZE**-0.5),
        flops=4 * sequences * seen * HEADS * SIZE,
    )
    q_BNTD = q.view(sequences, queries, HEADS, SIZE).transpose(1, 2)
    kv = torch.randn(sequences, KV_HEADS, context, SIZE).to(BF16)
    bench.row(
        "  torch flash attention on K and V already gathered",
        lambda: F.scaled_dot_product_attention(q_BNTD, kv, kv, enable_gqa=True, is_causal=queries == context),
        flops=4 * sequences * seen * HEADS * SIZE,
    )


def bench_window(bench: Bench, kernels: Kernels, context: int, window: int) -> None:
    """What a window leaves of a long context: floors count the window's keys alone. Then the cost of a cap."""
    layers, table = make_kv(4, context)
    for name, queries in (("decode", 1), ("prefill", 512)):
        batch = make_batch(queries, [context] * 4)
        q = torch.randn(4 * queries, HEADS, SIZE).to(BF16)
        k, v = layers[0]
        for seen, cap in ((None, None), (window, None), (window, 50.0)):
            keys = min(seen or context, context)
            label = f"{'all' if seen is None else f'window {seen}'}{'' if cap is None else ', capped'}"
            bench.row(
                f"{name} attention, 4 x {queries} of {context}, {label}",
                partial(kernels.paged_attention, q, k, v, table, batch, SIZE**-0.5, seen, cap),
                bytes_moved=4 * (keys + queries - 1) * KV_HEADS * SIZE * 4,
                flops=4 * 4 * queries * keys * HEADS * SIZE if queries > 1 else 0,
            )


def bench_fp8(bench: Bench, kernels: Kernels, context: int) -> None:
    """A long context in bf16 and in FP8, in turns: half the bytes, read and widened in registers."""
    (bf16, *_), table = make_kv(4, context)
    batch = make_batch(1, [context] * 4)
    q = torch.randn(4, HEADS, SIZE).to(BF16)
    pools = [tuple(pool.to(kind) for pool in bf16) for kind in (BF16, *FP8_FORMATS)]
    jobs = [partial(kernels.paged_attention, q, *kv, table, batch, SIZE**-0.5) for kv in pools]
    best = [float("inf")] * len(jobs)
    for _ in range(bench.repeat):
        best = [min(known, best_ms(job, 3)) for known, job in zip(best, jobs, strict=True)]
    for (k, _), spent in zip(pools, best, strict=True):
        kind = str(k.dtype).removeprefix("torch.")
        bytes_moved = 8 * context * KV_HEADS * SIZE * k.element_size()
        bench.note(f"decode attention, 4 x {context} tokens in {kind}", spent, bytes_moved=bytes_moved)


def bench_elementwise(bench: Bench, kernels: Kernels, tokens: int) -> None:
    x, residual = torch.randn(tokens, HIDDEN).to(BF16), torch.randn(tokens, HIDDEN).to(BF16)
    weight = torch.randn(HIDDEN).to(BF16)
    gate_up = torch.randn(tokens, MLP * 2).to(BF16)
    qkv = torch.randn(tokens, (HEADS + 2 * KV_HEADS) * SIZE).to(BF16)
    angle = torch.rand(4096, SIZE // 2)
    cos, sin, norm = angle.cos(), angle.sin(), torch.randn(SIZE).to(BF16)
    pools = torch.zeros(2, tokens + PAGE, KV_HEADS, SIZE).to(BF16)
    q = torch.empty(tokens, HEADS, SIZE).to(BF16)
    positions, slots = torch.arange(tokens) % 4096, torch.arange(tokens) + PAGE

    def per_layer(job: Callable[[], object]) -> Callable[[], None]:
        def layers() -> None:
            for _ in range(LAYERS):
                job()

        return layers

    moved = LAYERS * tokens * 2
    bench.row(
        f"add_rms_norm, {tokens} tokens, 12 layers",
        per_layer(lambda: kernels.add_rms_norm(x, residual, weight, 1e-6)),
        bytes_moved=moved * HIDDEN * 4,
    )
    bench.row(
        f"silu_mul, {tokens} tokens, 12 layers",
        per_layer(lambda: kernels.silu_mul(gate_up)),
        bytes_moved=moved * MLP * 3,
    )
    bench.row(
        f"gelu_mul, {tokens} tokens, 12 layers",
        per_layer(lambda: kernels.gelu_mul(gate_up)),
        bytes_moved=moved * MLP * 3,
    )
    bench.row(
        f"qk_rope_store, {tokens} tokens, 12 layers",
        per_layer(
            lambda: kernels.qk_rope_store(qkv, cos, sin, positions, norm, norm, 1e-6, pools[0], pools[1], slots, q)
        ),
        bytes_moved=moved * (HEADS + 2 * KV_HEADS) * SIZE * 2,
    )


def bench_pages(bench: Bench, kernels: Kernels) -> None:
    layers, _ = make_kv(8, 2048)
    pages = torch.randperm(8 * 128)[:125].numpy() + 1
    out = torch.zeros(125, PAGE * LAYERS * KV_HEADS * SIZE * 4, dtype=torch.uint8)
    bench.row(
        "gather 125 pages of 16 tokens (2,000 tokens)",
        lambda: kernels.gather_pages(layers, pages, PAGE, out),
        bytes_moved=2 * out.numel(),
    )
    bench.row("scatter them", lambda: kernels.scatter_pages(layers, pages, PAGE, out), bytes_moved=2 * out.numel())


def commit_of_this_tree() -> str:
    root = Path(__file__).parent
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=15)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    start = time.perf_counter()
    kernels = load("cpu")
    warm(kernels)
    warm_s = time.perf_counter() - start
    print(f"load and warm {warm_s:.2f} s")
    bench = Bench(kernels, arguments.repeat)
    for sequences in (16, 1):
        bench_decode(bench, kernels, sequences)
    for sequences, queries, context in ((8, 256, 256), (1, 1024, 1024), (1, 2048, 2048), (1, 512, 2048)):
        bench_prefill(bench, kernels, sequences, queries, context)
    bench_window(bench, kernels, 8192, 512)
    bench_fp8(bench, kernels, 8192)
    for tokens in (1, 16, 2048):
        bench_elementwise(bench, kernels, tokens)
    head = kernels.pack_linear(torch.randn(VOCAB, HIDDEN).to(BF16), None)
    for rows in (1, 16):
        x = torch.randn(rows, HIDDEN).to(BF16)
        bench.row(
            f"linear 1024 x {VOCAB}, {rows} tokens",
            partial(kernels.linear, x, head),
            bytes_moved=VOCAB * HIDDEN * 2,
            flops=VOCAB * HIDDEN * 2 * rows,
        )
    drawn = [RowSampling(seed=i, position=i) for i in range(16)]
    logits = torch.randn(16, VOCAB).to(BF16)
    bench.row(f"draws from 16 x {VOCAB} logits", partial(kernels.choose_tokens, logits, drawn), bytes_moved=32 * VOCAB)
    bench_pages(bench, kernels)
    machine = {"cpu": platform.processor() or platform.machine(), "threads": arguments.threads}
    print(
        json.dumps(
            {
                "benchmark": "kernels",
                "machine": machine,
                "commit": commit_of_this_tree(),
                "warm_s": round(warm_s, 2),
                "bandwidth_gb_s": round(bench.gb_s, 1),
                "matmul_gflop_s": round(bench.gflop_s),
                "rows": bench.rows,
            }
        )
    )


if __name__ == "__main__":
    main()
