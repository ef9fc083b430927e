"""The Triton kernels of models beside Llama's on a GPU: experts, quantized weights, latent rows, sinks; one JSON line
an op, with the time that its bytes or its products need on this card beside it.

    python -m benchmarks.gpu_models [PART ...]      (from the top of the repository; needs a GPU with 16 GB)

PART: experts (Qwen3-30B-A3B: 8 of 128 experts of 768 over 2048, chosen at random), quantized_experts (the same, and
gpt-oss-20b in MXFP4), quantized (4096 x 12288 and 12288 x
4096, int8 and fp8 with a scale of each output, fp8 in blocks of 128 x 128, int4 with a scale of 128 inputs, beside
bf16), latent (DeepSeek-V2-Lite and V3: 16
and 128 heads over rows of 512 + 64), sinks (gpt-oss: 64/8 heads of 64). Times as in gpu_kernels.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch

from benchmarks.gpu_kernels import COPIES, PAGE, Bench, batch_of, ceiling_of_card, normal
from serinus.core.stamps import digest_coefficients
from serinus.kernels import E2M1_TWICE, LatentHeads, LayerDigest, PackedExperts, QuantizedWeight, load
from serinus.kernels.packed import PackedFactors

__all__ = ["PARTS", "chosen_experts", "expert_stacks", "quantized"]

COUNT, CHOSEN, WIDTH, INNER = 128, 8, 2048, 768
GROUP = 128
FORMS = ("int8", "int4", "fp8", "fp8 in blocks")
RANK, ROTATED, PLAIN, VALUE = 512, 64, 128, 128


def expert_stacks() -> PackedExperts:
    """1.2 GB of experts."""
    return PackedExperts(
        gate_up=normal(COUNT, 2 * INNER, WIDTH, scale=0.02), down=normal(COUNT, WIDTH, INNER, scale=0.02)
    )


def chosen_experts(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and ids of the experts of each row."""
    weights, ids = torch.rand(rows, COUNT, device="cuda").topk(CHOSEN)
    return weights, ids


def experts(bench: Bench) -> None:
    """Decode steps and a prompt; each job has experts of its own."""
    packed = expert_stacks()
    for rows in (1, 16, 64, 256, 8192):
        x = normal(rows, WIDTH)
        choices = [chosen_experts(rows) for _ in range(COPIES)]
        hit = sum(len(set(ids.flatten().tolist())) for _, ids in choices) / COPIES
        jobs = [partial(bench.ops.fused_moe, x, *each, packed, "silu") for each in choices]
        moved = hit * 3 * WIDTH * INNER * 2 + 4 * rows * WIDTH
        flops = 6 * rows * CHOSEN * WIDTH * INNER
        bench.line("fused_moe", f"{rows} rows, {hit:.0f} experts hit", jobs, moved, flops)


def quantized_experts(bench: Bench) -> None:
    """The same by FORMS, and of gpt-oss-20b (4 of 32 experts of 2,880 over 2,880) in MXFP4 beside bf16."""
    for count, chosen, width, inner, forms in (
        (COUNT, CHOSEN, WIDTH, INNER, FORMS), (32, 4, 2880, 2880, ("bf16", "mxfp4")),
    ):  # fmt: skip
        for form in forms:
            packed = PackedExperts(
                gate_up=normal(count, 2 * inner, width, scale=0.02), down=normal(count, width, inner, scale=0.02)
            ) if form == "bf16" else bench.ops.pack_experts(
                [(quantized(2 * inner, width, form), quantized(width, inner, form)) for _ in range(count)], None, None
            )  # fmt: skip
            each = packed.gate_up[0].nbytes + packed.down[0].nbytes
            for rows in (1, 16, 64, 256, 2048, 8192):
                x = normal(rows, width)
                choices = [torch.rand(rows, count, device="cuda").topk(chosen) for _ in range(COPIES)]
                hit = sum(len(set(ids.flatten().tolist())) for _, ids in choices) / COPIES
                jobs = [partial(bench.ops.fused_moe, x, weights, ids, packed, "silu") for weights, ids in choices]
                case = f"{form}, {rows} rows, {hit:.0f} of {count} experts hit"
                flops = 6 * rows * chosen * width * inner
                bench.line("fused_moe", case, jobs, hit * each + 4 * rows * width, flops)
            del packed


def quantized(outs: int, inner: int, form: str) -> QuantizedWeight:
    """Random integers or floats of one of FORMS, or of MXFP4."""
    group = {"int8": inner, "fp8": inner, "mxfp4": 32}.get(form, GROUP)
    bits = 4 if form == "int4" else 8
    values = torch.randint(-(1 << bits - 1), 1 << bits - 1, (outs, inner), device="cuda", dtype=torch.int8)
    scales = torch.rand((outs, inner // group), device="cuda") * 0.01
    if form == "fp8 in blocks":
        scales = scales[::GROUP].repeat_interleave(GROUP, 0)
    if form.startswith("fp8"):
        values = torch.randn((outs, inner), device="cuda").to(torch.float8_e4m3fn).view(torch.int8)
    if form == "mxfp4":
        values = values.sign() * torch.tensor(E2M1_TWICE, device="cuda", dtype=torch.int8)[(values & 7).long()]
        scales = torch.full_like(scales, 2.0**-8)
    return QuantizedWeight(
        bits=bits, group=group, values_OI=values, scales_OG=scales, e4m3=form.startswith("fp8"),
        rounds_rows=form.startswith("fp8"), e2m1=form == "mxfp4",
    )  # fmt: skip


def quantized_linears(bench: Bench) -> None:
    """Beside cuBLAS in bf16, and what this engine does there."""
    for outs, inner in ((12288, 4096), (4096, 12288)):
        plain = [bench.ops.pack_linear(normal(outs, inner, scale=0.02), None) for _ in range(COPIES)]
        packed = {
            form: [bench.ops.pack_linear(quantized(outs, inner, form), None) for _ in range(2 * COPIES)]
            for form in FORMS
        }
        for rows in (1, 16, 64, 128, 256, 8192):
            x = normal(rows, inner)
            flops, streams = 2 * rows * outs * inner, 2 * rows * (outs + inner)
            for name, weights in (("bf16", plain), *packed.items()):
                each = weights[0]
                tables = 0 if each.rows is None or each.rows.scales is None else each.rows.scales.nbytes
                jobs = [partial(bench.ops.linear, x, each) for each in weights]
                bench.line(
                    f"linear {name}",
                    f"{rows} rows of {outs} x {inner}",
                    jobs,
                    each.weight.nbytes + tables + streams,
                    flops,
                )


def latent(bench: Bench) -> None:
    """Decode steps, with digests too, and prompts: what queries, keys and values take to be made is counted."""
    row = RANK + ROTATED
    for heads in (16, 128):
        made = LatentHeads(key_NPR=normal(heads, PLAIN, RANK, scale=0.04), value_NRV=normal(heads, RANK, VALUE))
        for counts, contexts in (
            ([1], [1100]), ([1], [16000]), ([1] * 16, [1100] * 16), ([1] * 64, [1100] * 64), ([8192], [8192]),
            ([1024] * 8, [1024] * 8), ([256], [8192]),
        ):  # fmt: skip
            batch, table, slots = batch_of(counts, contexts)
            layers = [normal(slots, 1, row) for _ in range(COPIES)]
            q = normal(sum(counts), heads, PLAIN + ROTATED)
            pairs = sum(n * c - n * (n - 1) // 2 for n, c in zip(counts, contexts, strict=True))
            moved = sum(contexts) * row * 2 + q.nbytes * (1 + VALUE / (PLAIN + ROTATED)) + 2 * made.key_NPR.nbytes
            case = f"{len(counts)} x {counts[0]} behind {contexts[0]}, {heads} heads"
            over_rows = sum(counts) * RANK * (PLAIN + VALUE) + pairs * (row + RANK)
            over_keys = sum(contexts) * RANK * (PLAIN + VALUE) + pairs * (PLAIN + ROTATED + VALUE)
            flops = 2 * heads * min(over_rows, over_keys)
            factors = torch.from_numpy(digest_coefficients([0], [0], row, 2, partial=False, halves=1))[0].cuda()
            names = list(range(len(counts)))
            reads = torch.tensor([names, [n + 1 for n in names], [0] * len(names), contexts, [1] * len(names), names])
            reads[3] -= torch.tensor(counts)
            due, entries, *_ = bench.ops.canary_due(reads.numpy(), PAGE)
            for watched in (False, True)[: 1 + (counts[0] == 1)]:
                digest = LayerDigest(
                    factors=PackedFactors(factors=factors, bias=None, plain_22W=factors), page_size=PAGE,
                    due_7B=torch.from_numpy(due).cuda(),
                    sums_P22E=torch.zeros((1, 2, 2, entries), dtype=torch.int32, device="cuda"),
                ) if watched else None  # fmt: skip
                jobs = [
                    partial(bench.ops.latent_attention, q, each, RANK, table, batch, 0.1, digest, made)
                    for each in layers
                ]
                bench.line("latent_attention", case + ", digested" * watched, jobs, moved, flops)


def sinks(bench: Bench) -> None:
    """With a window of 128 too, as every other layer of gpt-oss has it."""
    heads, kv_heads, size = 64, 8, 64
    values = torch.zeros(heads, device="cuda")
    for rows in (1, 16, 64):
        batch, table, slots = batch_of([1] * rows, [1100] * rows)
        layers = [(normal(slots, kv_heads, size), normal(slots, kv_heads, size)) for _ in range(COPIES)]
        q = normal(rows, heads, size)
        for window in (None, 128):
            moved = rows * min(1100, window or 1100) * 2 * kv_heads * size * 2 + 2 * q.nbytes
            for name, given in (("without", None), ("with", values)):
                jobs = [
                    partial(bench.ops.paged_attention, q, *each, table, batch, size**-0.5, window, None, given)
                    for each in layers
                ]
                bench.line("paged_attention", f"{rows} x 1 behind 1,100, window {window}, {name} sinks", jobs, moved)


PARTS: dict[str, Callable[[Bench], None]] = {
    "experts": experts, "quantized_experts": quantized_experts, "quantized": quantized_linears, "latent": latent,
    "sinks": sinks,
}  # fmt: skip


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    chosen = parser.parse_args().parts or list(PARTS)
    torch.manual_seed(1)
    bench = Bench(load("cuda"), ceiling_of_card())
    for name in chosen:
        PARTS[name](bench)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
