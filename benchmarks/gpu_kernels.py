"""Every op of the Triton column on a GPU, at the shapes of a Qwen3-8B model in bf16: one JSON line an op, with the time
that its bytes or its products need on this card beside it.

    python -m benchmarks.gpu_kernels      (from the top of the repository; needs a GPU with 40 GB)

The bytes of an op are those it must read and write once, over the rate of a large copy; its products, over the rate of
a large matrix product. Times are of captured graphs over inputs that do not fit into the caches where the op's own do
not, without the host.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from benchmarks.canary_gpu import best_us, copy_rate, replay_us
from serinus.core.stamps import digest_coefficients
from serinus.kernels import (
    AttentionBatch,
    Kernels,
    LayerDigest,
    PackedLinear,
    RowSampling,
    WrittenRows,
    find_chunks,
    load,
)

LAYERS, WIDTH, INNER, HEADS, KV_HEADS, SIZE, VOCAB = 36, 4096, 12288, 32, 8, 128, 151936
PAGE, EPS, DTYPE = 16, 1e-6, torch.bfloat16
COPIES = 4
"""Weights and layers of KV that take turns: more than the second cache holds."""
CALLS = 16
"""Of one op in a graph, at least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceiling:
    """What this card does."""

    copy_gb_s: float
    """Bytes read and written a second by a large copy."""
    product_tflops: float
    """Of a large product of bf16 matrices."""

    def us(self, byte_count: float, operations: float = 0.0) -> float:
        """The least time of so many bytes and operations."""
        return max(byte_count / self.copy_gb_s / 1e3, operations / self.product_tflops / 1e6)


def normal(*shape: int, scale: float = 1.0) -> Tensor:
    """Random numbers on the device."""
    return torch.empty(shape, dtype=DTYPE, device="cuda").normal_(0, scale)


class Bench:
    """Prints a line an op."""

    def __init__(self, ops: Kernels, ceiling: Ceiling) -> None:
        self.ops, self.ceiling = ops, ceiling
        self.card = torch.cuda.get_device_name()

    def line(
        self, op: str, case: str, jobs: Sequence[Callable[[], object]], byte_count: float, flops: float = 0.0
    ) -> float:
        """Time of one of these jobs, which take turns; so many of them that the start of a graph costs nothing."""
        turns = -(-CALLS // len(jobs))

        def all_jobs() -> None:
            for job in [*jobs] * turns:
                job()

        spent, floor = replay_us(all_jobs) / len(jobs) / turns, self.ceiling.us(byte_count, flops)
        self.say(op, case, {"us": round(spent, 2), "floor_us": round(floor, 2), "ratio": round(spent / floor, 2)})
        return spent

    def say(self, op: str, case: str, values: dict[str, object]) -> None:
        """One line."""
        ceiling = {"copy_gb_s": self.ceiling.copy_gb_s, "product_tflops": self.ceiling.product_tflops}
        line = {"benchmark": "gpu_kernels", "op": op, "case": case, **values, **ceiling, "card": self.card}
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()


def ceiling_of_card() -> Ceiling:
    """Measured now."""
    a, b = normal(8192, 8192), normal(8192, 8192)
    spent = best_us(lambda: a @ b, 5, 4)
    return Ceiling(copy_gb_s=round(copy_rate(5), 1), product_tflops=round(2 * 8192**3 / spent / 1e6, 1))


def batch_of(counts: Sequence[int], contexts: Sequence[int]) -> tuple[AttentionBatch, Tensor, int]:
    """Sequences on shuffled pages: the batch, req_to_token, and the slots of the pool."""
    pages = [-(-context // PAGE) for context in contexts]
    order = (torch.randperm(sum(pages)) + 1).split(pages)
    table = torch.zeros((len(counts) + 1, 40960), dtype=torch.int32)
    for row, (mine, context) in enumerate(zip(order, contexts, strict=True), 1):
        table[row, :context] = (mine[:, None] * PAGE + torch.arange(PAGE)).reshape(-1)[:context].int()
    starts = torch.tensor([0, *counts]).cumsum(0)
    batch = AttentionBatch(
        rows_B=torch.arange(1, len(counts) + 1).cuda(),
        q_starts_B1=starts.cuda(),
        context_B=torch.tensor(contexts).cuda(),
        chunks=find_chunks(starts.numpy(), np.array(contexts), lambda words: torch.from_numpy(words).cuda()),
    )
    return batch, table.cuda(), (sum(pages) + 1) * PAGE


def attention(
    bench: Bench, case: str, counts: Sequence[int], contexts: Sequence[int], *, watched: bool = False
) -> float:
    """paged_attention of a batch; `watched`: with all of it digested."""
    batch, table, slot_count = batch_of(counts, contexts)
    layers = [(normal(slot_count, KV_HEADS, SIZE), normal(slot_count, KV_HEADS, SIZE)) for _ in range(COPIES)]
    q = normal(sum(counts), HEADS, SIZE)
    kv_bytes = sum(contexts) * 2 * KV_HEADS * SIZE * 2
    pairs = sum(n * c - n * (n - 1) // 2 for n, c in zip(counts, contexts, strict=True))
    arguments = [(q, k, v, table, batch, SIZE**-0.5) for k, v in layers]
    moved, flops = kv_bytes + 2 * q.nbytes, 4 * pairs * HEADS * SIZE
    if not watched:
        return bench.line(
            "paged_attention", case, [lambda a=a: bench.ops.paged_attention(*a) for a in arguments], moved, flops
        )
    factors = torch.from_numpy(digest_coefficients(range(1), range(KV_HEADS), SIZE, 2, partial=False))[0].cuda()
    reads = [
        [0] * len(counts),
        [*range(1, len(counts) + 1)],
        [0] * len(counts),
        [c - 1 for c in contexts],
        [1] * len(counts),
        [0] * len(counts),
    ]
    due, entries, *_ = bench.ops.canary_due(torch.tensor(reads).numpy(), PAGE)
    digest = LayerDigest(
        factors=bench.ops.pack_factors(factors, KV_HEADS), due_7B=torch.from_numpy(due).cuda(),
        sums_P22E=torch.zeros((1, 2, 2, entries), dtype=torch.int32, device="cuda"), page_size=PAGE,
    )  # fmt: skip
    jobs = [lambda a=a: bench.ops.watched_attention(*a, digest) for a in arguments]
    return bench.line("watched_attention", case + ", all digested", jobs, moved, flops)


def linears(bench: Bench, rows: int) -> float:
    """The five of a model; returns the time of a whole step's."""
    x, total = {WIDTH: normal(rows, WIDTH), INNER: normal(rows, INNER), HEADS * SIZE: normal(rows, HEADS * SIZE)}, 0.0
    shapes = (
        ("qkv", (HEADS + 2 * KV_HEADS) * SIZE, WIDTH), ("output", WIDTH, HEADS * SIZE),
        ("gate and up", 2 * INNER, WIDTH), ("down", WIDTH, INNER), ("head", VOCAB, WIDTH),
    )  # fmt: skip
    for name, outs, inner in shapes:
        copies = 1 if outs == VOCAB else COPIES
        packed = [bench.ops.pack_linear(normal(outs, inner, scale=0.02), None) for _ in range(copies)]
        gated = getattr(bench.ops.linear, "gated", None) if name == "gate and up" else None

        def job(each: PackedLinear, inner: int = inner, gated: Callable[..., object] | None = gated) -> None:
            if gated is None or gated(x[inner], each, "silu") is None:
                out = bench.ops.linear(x[inner], each)
                if gated is not None:
                    bench.ops.silu_mul(out)

        moved = 2 * (outs * inner + rows * (inner + (outs // 2 if gated else outs)))
        jobs = [lambda each=each: job(each) for each in packed]  # type: ignore[misc]
        spent = bench.line("linear", f"{name}, {rows} rows", jobs, moved, 2 * rows * outs * inner)
        plain = [lambda each=each, inner=inner: torch.nn.functional.linear(x[inner], each.weight) for each in packed]
        if rows <= 64:
            bench.line("cuBLAS", f"{name}, {rows} rows, without the gate", plain, moved, 2 * rows * outs * inner)
        total += spent * (1 if outs == VOCAB else LAYERS)
    return total


def small_ops(bench: Bench, rows: int) -> float:
    """Norms, gates, and between projection and attention; returns the time of a whole step's."""
    ops = bench.ops
    x, residual, weight = normal(rows, WIDTH), normal(rows, WIDTH), normal(WIDTH)
    total = 2 * LAYERS * bench.line(
        "add_rms_norm", f"{rows} rows", [lambda: ops.add_rms_norm(x, residual, weight, EPS)], 4 * x.nbytes
    )  # fmt: skip
    gate_up = normal(rows, 2 * INNER)
    bench.line("silu_mul", f"{rows} rows", [lambda: ops.silu_mul(gate_up)], 1.5 * gate_up.nbytes)
    qkv, q = normal(rows, (HEADS + 2 * KV_HEADS) * SIZE), normal(rows, HEADS, SIZE)
    k, v = (normal(2 * rows + 16, KV_HEADS, SIZE) for _ in range(2))
    cos, sin = torch.rand(2, 40960, SIZE // 2, device="cuda")
    positions, slots = torch.arange(rows, device="cuda"), torch.randperm(2 * rows, device="cuda")[:rows] + 1
    norm = normal(SIZE)
    factors = torch.from_numpy(digest_coefficients(range(1), range(KV_HEADS), SIZE, 2, partial=False))[0].cuda()
    written = WrittenRows(coefficients_22W=factors, sums_T2=torch.zeros(rows, 2, dtype=torch.int64, device="cuda"))
    arguments = (qkv, cos, sin, positions, norm, norm, EPS, k, v, slots, q)
    total += LAYERS * bench.line(
        "qk_rope_store", f"{rows} rows", [lambda: ops.qk_rope_store(*arguments)], 2 * qkv.nbytes
    )
    bench.line(
        "qk_rope_store", f"{rows} rows, digested", [lambda: ops.qk_rope_store(*arguments, written)], 2 * qkv.nbytes
    )  # fmt: skip
    return total


def sampling(bench: Bench, rows: int) -> None:
    """choose_tokens as it is called: with the host's part and the copy out."""
    logits = normal(rows, VOCAB, scale=3.0)
    for name, given in (
        ("greedy", {"temperature": 0.0}), ("temperature", {"temperature": 0.8}),
        ("top_p", {"temperature": 0.8, "top_p": 0.95}),
        ("top_k and top_p", {"temperature": 0.8, "top_k": 50, "top_p": 0.95}),
    ):  # fmt: skip
        specs = [RowSampling(seed=i, position=7, **given) for i in range(rows)]
        bench.ops.choose_tokens(logits, specs)
        begin, calls = time.perf_counter(), 10
        for _ in range(calls):
            bench.ops.choose_tokens(logits, specs).tolist()
        spent = (time.perf_counter() - begin) / calls * 1e6
        floor = bench.ceiling.us(logits.nbytes)
        bench.say(
            "choose_tokens", f"{name}, {rows} rows, with the host", {"us": round(spent, 1), "floor_us": round(floor, 1)}
        )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 16, 64, 256])
    args = parser.parse_args()
    torch.manual_seed(1)
    bench = Bench(load("cuda"), ceiling_of_card())
    bench.say("columns", bench.ops.summary(), {})
    for rows in args.rows:
        context = 600 if rows > 64 else 1100
        spent = linears(bench, rows) + small_ops(bench, rows)
        spent += LAYERS * attention(bench, f"{rows} x 1 behind {context}", [1] * rows, [context] * rows)
        attention(bench, f"{rows} x 1 behind {context}", [1] * rows, [context] * rows, watched=True)
        bench.say("sum of the ops of a decode step", f"{rows} rows", {"us": round(spent, 1)})
        sampling(bench, rows)
        torch.cuda.empty_cache()
    attention(bench, "64 uneven: 63 x 500, one of 32,000", [1] * 64, [500] * 63 + [32000])
    attention(bench, "1 x 8,192", [8192], [8192])
    attention(bench, "8 x 1,024", [1024] * 8, [1024] * 8)
    attention(bench, "4 x 2,048 behind 6,144", [2048] * 4, [8192] * 4)
    attention(bench, "1 x 2,048 beside 63 x 1 behind 1,100", [2048] + [1] * 63, [2048] + [1100] * 63)
    small_ops(bench, 8192)


if __name__ == "__main__":
    main()
