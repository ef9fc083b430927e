"""Random cases of the Triton column's other ops of a layer beside the reference: norms, linears, gates, and what lies
between projection and attention."""

from __future__ import annotations

import random
from dataclasses import replace

import torch
from torch import Tensor

from serinus.core.stamps import digest_coefficients
from serinus.kernels import E2M1_TWICE, FP8_FORMATS, ExpertGate, Gate, PackedExperts, QuantizedWeight, WrittenRows
from serinus.kernels.triton.fused_moe import ExpertCut, run_experts
from serinus.kernels.triton.linear import WeightCut, cut_of, multiply_rows
from serinus.kernels.triton.quantized import round_rows, round_spans
from serinus.kernels.triton.quantized_moe import widened_stack
from serinus.kernels.triton.tickets import Tickets
from serinus.models.quantized import to_fp8

from .triton_columns import columns, dtype_of, far_apart, page_first

__all__ = [
    "experts",
    "gates",
    "latent_rope_store",
    "linears",
    "norms",
    "qk_rope_store",
    "quantized_experts",
    "quantized_linears",
    "rounded_rows",
    "rows_of_linears",
]


def drawn(generator: torch.Generator, device: str, dtype: torch.dtype, *shape: int, scale: float = 1.0) -> Tensor:
    """Normal numbers of that dtype there."""
    return (torch.randn(shape, generator=generator) * scale).to(dtype).to(device)


def norms(seed: int, device: str) -> str:
    """Norms with weights of the dtype and of fp32, after a residual addition too."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    ref, fast = columns(device, "rms_norm", "add_rms_norm")
    dtype, width, rows = dtype_of(rng, device), rng.choice((1, 24, 64, 100, 1024)), rng.choice((0, 1, 5))
    x, residual = (drawn(generator, device, dtype, rows, width, scale=3.0) for _ in range(2))
    weight = drawn(generator, device, rng.choice((dtype, torch.float32)), width)
    other = residual.clone()
    wrong = far_apart("norm", fast.rms_norm(x, weight, 1e-5), ref.rms_norm(x, weight, 1e-5))
    found, expected = fast.add_rms_norm(x, residual, weight, 1e-5), ref.add_rms_norm(x, other, weight, 1e-5)
    return wrong + far_apart("norm of the sum", found, expected) + far_apart("residual", residual, other)


def gates(seed: int, device: str) -> str:
    """Both activations, of a few rows."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    ref, fast = columns(device, "silu_mul", "gelu_mul")
    x = drawn(generator, device, dtype_of(rng, device), rng.choice((1, 7)), 2 * rng.choice((3, 64, 1500)), scale=4.0)
    return "".join(
        far_apart(op, getattr(fast, op)(x), getattr(ref, op)(x)) for op in ("silu_mul", "gelu_mul")
    )  # fmt: skip


def experts(seed: int, device: str) -> str:
    """The routed experts of a mixture: few rows and many, experts that nothing hits, biases, both activations."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    ref, fast = columns(device, "fused_moe")
    dtype, gate = dtype_of(rng, device), rng.choice(("silu", "swiglu_oai"))
    count, width, inner = rng.choice((3, 8, 20)), rng.choice((32, 72)), rng.choice((24, 64))
    tokens, chosen = rng.choice((1, 5, 90)), rng.choice((1, 2, 3))
    x = drawn(generator, device, dtype, tokens, width)
    ids = torch.stack([torch.randperm(count, generator=generator)[:chosen] for _ in range(tokens)]).to(device)
    weights = torch.rand((tokens, chosen), generator=generator).to(device)
    has_bias, is_part = rng.random() < 0.5, rng.random() < 0.4
    if is_part:
        count -= 1  # the last one is none of these
    packed = PackedExperts(
        is_part=is_part,
        gate_up=drawn(generator, device, dtype, count, 2 * inner, width, scale=0.3),
        down=drawn(generator, device, dtype, count, width, inner, scale=0.3),
        gate_up_bias=drawn(generator, device, dtype, count, 2 * inner) if has_bias else None,
        down_bias=drawn(generator, device, dtype, count, width) if has_bias else None,
    )
    activation: ExpertGate = "silu" if gate == "silu" else "swiglu_oai"
    inputs = x, weights, ids, packed, activation
    expected = ref.fused_moe(*inputs)
    rows = rng.choice((16, 64))
    cuts = [
        ExpertCut(rows=rows, outputs=outputs, inner=32, stages=2, bulk=rng.random() < 0.5, together=rng.choice((0, 3)))
        for outputs in rng.choices((16, 32), k=2)
    ]
    cut = run_experts(*inputs, (cuts[0], cuts[1]))
    wrong = far_apart(f"{tokens} x {chosen} of {count}", fast.fused_moe(*inputs), expected)
    return wrong + far_apart(f"{tokens} x {chosen} of {count} by {cuts}", cut, expected)


def quantized_experts(seed: int, device: str) -> str:
    """The same by integers of 4 and 8 bits, FP8 and MXFP4, in groups or with one scale, zero points or none."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    ref, fast = columns(device, "fused_moe", "pack_experts")
    dtype, form = dtype_of(rng, device), ("mxfp4", "int4", "int8", "fp8")[seed % 4]
    count, width, inner = rng.choice((3, 8)), rng.choice((64, 160, 288)), rng.choice((32, 96, 256))
    group = 32 if form == "mxfp4" else rng.choice((32, 128, 512))
    has_zeros = form.startswith("int") and rng.random() < 0.5

    def drawn_weight(outs: int, ins: int) -> QuantizedWeight:
        half, groups = 8 if form == "int4" else 128, -(-ins // group)
        values = torch.randint(-half, half, (outs, ins), generator=generator)
        scales = torch.randn((outs, groups), generator=generator) * 0.3 / half
        if form == "fp8":
            values = torch.where((values == 127) | (values == -1), 126, values)
            scales = scales / 3
        if form == "mxfp4":
            values = values.sign() * torch.tensor(E2M1_TWICE)[values.abs() % 8]
            least = -2 if seed % 8 == 4 and dtype != torch.float16 else -8  # scales above 2 have a way of their own
            scales = 2.0 ** torch.randint(least, least + 4, (outs, groups), generator=generator)
        return QuantizedWeight(
            bits=4 if form == "int4" else 8, group=group if groups > 1 else ins, e4m3=form == "fp8",
            e2m1=form == "mxfp4", values_OI=values.to(torch.int8).to(device), scales_OG=scales.to(device),
            zeros_OG=torch.randint(-8, 9, (outs, groups), generator=generator).to(torch.int8).to(device)
            if has_zeros and rng.random() < 0.8 else None,
        )  # fmt: skip

    def put_together(*biases: Tensor | None) -> tuple[PackedExperts, PackedExperts]:
        some = [(drawn_weight(2 * inner, width), drawn_weight(width, inner)) for _ in range(count)]
        return fast.pack_experts(some, *biases), ref.pack_experts(some, *biases)

    biases = [drawn(generator, device, torch.float32, count, outs) for outs in (2 * inner, width)]
    mine, theirs = put_together(*(biases if rng.random() < 0.5 else (None, None)))
    tokens, chosen, others = rng.choice((1, 5, 90)), rng.choice((1, 2)), rng.choice((0, 1))
    mine, theirs = (replace(each, is_part=others > 0) for each in (mine, theirs))
    x = drawn(generator, device, dtype, tokens, width)
    ids = torch.stack([torch.randperm(count + others, generator=generator)[:chosen] for _ in range(tokens)]).to(device)
    weights = torch.rand((tokens, chosen), generator=generator).to(device)
    gate: ExpertGate = rng.choice(("silu", "swiglu_oai"))
    expected = ref.fused_moe(x, weights, ids, theirs, gate)
    what = f"{tokens} x {chosen} of {count} in {form}, {width} and {inner} in groups of {group}"
    wrong = far_apart(what, fast.fused_moe(x, weights, ids, mine, gate), expected)
    for is_wide in (False, True):
        cut = ExpertCut(rows=rng.choice((16, 64)), outputs=rng.choice((16, 32)), inner=32, widened=is_wide)
        wrong += far_apart(f"{what} by {cut}", run_experts(x, weights, ids, mine, gate, (cut, cut)), expected)
    assert mine.rows is not None, "integers in no order of the column's own"
    wide = widened_stack(mine.gate_up, mine.rows.gate_up, range(1, count), 2 * inner, x)
    plain = torch.stack([gate_up.dequantized().to(dtype) for gate_up, _ in theirs.quantized[1:]])
    return wrong + ("" if torch.equal(wide, plain) else f" {what}, written out")


def rows_of_linears(seed: int, device: str) -> str:
    """The kernel of few rows, however the weight is cut, with bias and gate; twice to the bit."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    ref, _ = columns(device, "linear")
    dtype, gate = dtype_of(rng, device), rng.choice((None, None, "silu", "gelu"))
    parts = 1 if gate else rng.choice((1, 2, 4))
    cut = WeightCut(
        outputs=rng.choice((16, 32)), inner=32, parts=parts, stages=2, swapped=rng.random() < 0.5,
        bulk=rng.random() < 0.5,
    )  # fmt: skip
    rows, inner, outs = rng.choice((1, 3, 16, 20)), 128 * rng.choice((1, 2)), 192
    return _product(generator, device, dtype, (rows, inner, outs), gate, cut, has_bias=rng.random() < 0.5, ref=ref)


def _product(
    generator: torch.Generator, device: str, dtype: torch.dtype, sizes: tuple[int, int, int], gate: Gate | None,
    cut: WeightCut, *, has_bias: bool, ref: object,
) -> str:  # fmt: skip
    rows, inner, outs = sizes
    x, weight = drawn(generator, device, dtype, rows, inner), drawn(generator, device, dtype, outs, inner, scale=0.1)
    bias = drawn(generator, device, dtype, outs) if has_bias else None
    packed = ref.pack_linear(weight, bias)  # type: ignore[attr-defined]
    tickets = Tickets().on(x.device)
    found, again = (multiply_rows(x, packed, cut, gate, tickets) for _ in range(2))
    expected = ref.linear(x, packed)  # type: ignore[attr-defined]
    if gate is not None:
        expected = getattr(ref, f"{gate}_mul")(expected)
    wrong = far_apart(f"{sizes} of {dtype} with gate {gate} by {cut}", found, expected)
    return (
        wrong
        + ("" if torch.equal(found, again) else " other bits the second time")
        + ("" if not tickets.any() else " tickets")
    )


def linears(seed: int, device: str) -> str:
    """Linears as models call them: the table's cuts on a GPU (shapes of an 8B model), small ones elsewhere."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    ref, fast = columns(device, "linear", "norm_linear")
    dtype, rows = dtype_of(rng, device), rng.choice((1, 2, 16, 17, 33, 64, 65))
    out_size, inner = rng.choice(((96, 64), (40, 24)))
    if device == "cuda":
        out_size, inner = rng.choice(((6144, 4096), (4096, 4096), (4096, 12288), (24576, 4096), (151936, 1024)))
    gate: Gate | None = rng.choice((None, "silu", "gelu")) if out_size < 100_000 else None
    x, residual = (drawn(generator, device, dtype, rows, inner) for _ in range(2))
    weight, norm = drawn(generator, device, dtype, out_size, inner, scale=0.02), drawn(generator, device, dtype, inner)
    bias = drawn(generator, device, dtype, out_size) if rng.random() < 0.3 else None
    mine, theirs = fast.pack_linear(weight, bias), ref.pack_linear(weight, bias)
    what = f"linear of {rows} rows, {cut_of(rows, out_size, inner, dtype, is_gated=False)}"
    wrong = far_apart(what, fast.linear(x, mine), ref.linear(x, theirs))
    other = residual.clone()
    found = fast.norm_linear(x, residual, norm, 1e-6, mine, gate)
    wrong += far_apart(f"normed {gate} {what}", found, ref.norm_linear(x, other, norm, 1e-6, theirs, gate))
    stream = drawn(generator, device, dtype, rows, out_size)
    expected = stream.float() + ref.linear(
        x.float(), ref.pack_linear(weight.float(), None if bias is None else bias.float())
    )
    added = fast.add_linear(x, mine, stream)
    if device == "cuda" and rows > 64 and bias is None and dtype is not torch.float32 and added is not None:
        wrong += f" {what} has not joined the stream"
    return wrong + far_apart(f"joined {what}", stream if added is None else stream + added, expected.to(dtype))


def quantized_linears(seed: int, device: str) -> str:
    """Integers of 4 and 8 bits and FP8, groups or one scale, zero points or none, odd sizes, behind norm and gate."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    ref, fast = columns(device, "linear", "norm_linear", "pack_linear")
    dtype, bits, rows = dtype_of(rng, device), (4, 8, 8)[seed % 3], rng.choice((1, 3, 16, 70))
    out_size, inner = rng.choice(((64, 128), (70, 96), (130, 33), (96, 320)))
    group = rng.choice((32, 64, inner))
    groups = -(-inner // group)
    half, is_fp8 = 1 << bits - 1, seed % 3 == 2
    values = torch.randint(-half, half, (out_size, inner), generator=generator)
    if is_fp8:  # bytes, 127 and -1 of them no numbers
        values, half = torch.where((values == 127) | (values == -1), 126, values), 448
    weight = QuantizedWeight(
        bits=bits, group=group, e4m3=is_fp8, values_OI=values.to(torch.int8).to(device),
        scales_OG=(torch.randn((out_size, groups), generator=generator) * 0.1 / half).to(device),
        zeros_OG=torch.randint(-8, 9, (out_size, groups), generator=generator).to(torch.int8).to(device)
        if rng.random() < 0.5 and not is_fp8 else None,
    )  # fmt: skip
    x, norm = drawn(generator, device, dtype, rows, inner), drawn(generator, device, dtype, inner)
    bias = drawn(generator, device, dtype, out_size) if rng.random() < 0.5 else None
    mine, theirs = fast.pack_linear(weight, bias), ref.pack_linear(weight, bias)
    what = f"{rows} rows by {'FP8' if is_fp8 else f'{bits} bits'} of {out_size} x {inner} in groups of {group}"
    wrong = far_apart(what, fast.linear(x, mine), ref.linear(x, theirs))
    gate: Gate | None = rng.choice((None, "silu"))
    found = fast.norm_linear(None, x, norm, 1e-6, mine, gate)
    return wrong + far_apart(f"normed {gate} {what}", found, ref.norm_linear(None, x, norm, 1e-6, theirs, gate))


def rounded_rows(seed: int, device: str) -> str:
    """Rows in FP8 and their scales; on a GPU the product of many rows by FP8, too, which is that of rounded rows."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    _, fast = columns(device, "linear", "pack_linear")
    dtype, rows, inner = dtype_of(rng, device), rng.choice((1, 5)), rng.choice((16, 100, 4096, 5000))
    x = drawn(generator, device, dtype, rows, inner) * rng.choice((1e-3, 1.0, 300.0))
    x[0] *= rng.choice((0.0, 1.0))
    found, scales = round_rows(x)
    expected = x.float().abs().amax(-1) / 448
    expected[expected == 0] = 1.0
    wrong = far_apart("scales", scales / expected, torch.ones_like(scales))
    wrong += far_apart("rows", found, (x.float() / scales[:, None]).to(torch.float8_e4m3fn))
    x = drawn(generator, device, dtype, rows, 128 * rng.choice((1, 9)))
    found, scales = round_spans(x)
    spans = x.float().view(rows, -1, 128)
    wrong += far_apart("scales of spans", scales[:rows], spans.abs().amax(-1) / 448)
    wrong += far_apart("spans", found[:rows], (spans / scales[:rows, :, None]).to(torch.float8_e4m3fn).view(x.shape))
    if device != "cuda":
        return wrong
    out_size, inner = rng.choice(((96, 128), (256, 1152), (512, 128), (4096, 4096), (6144, 4096), (4096, 12288)))
    x = drawn(generator, device, torch.bfloat16, rng.choice((128, 201, 1000)), inner)
    weight = to_fp8(drawn(generator, device, torch.bfloat16, out_size, inner, scale=0.02))
    bias = drawn(generator, device, torch.bfloat16, out_size) if rng.random() < 0.5 else None
    rounded, scales = round_rows(x)
    meant = (rounded.float() * scales[:, None]) @ weight.dequantized().T + (0.0 if bias is None else bias.float())
    found = fast.linear(x, fast.pack_linear(weight, bias))
    wrong += far_apart(f"many rows of {list(x.shape)} by FP8", found.float(), meant, 8e-3)
    if out_size % 128:
        return wrong
    grid = torch.rand((out_size // 128, inner // 128), generator=generator).to(device) * 0.02 + 1e-3
    weight = replace(weight, group=128, scales_OG=grid.repeat_interleave(128, 0))
    has_blocks = inner % 512 == 0
    is_rounded = has_blocks or inner == 128  # one span: the scale of its row
    rounded, scales = round_spans(x)
    widened = rounded[: len(x)].float().view(len(x), -1, 128) * scales[: len(x), :, None]
    meant = (widened.view(x.shape) if is_rounded else x.float()) @ weight.dequantized().T
    meant += 0.0 if bias is None else bias.float()
    packed = fast.pack_linear(weight, bias)
    if packed.rows is None or (packed.rows.blocks is not None) != has_blocks:
        wrong += f" blocks of {[out_size, inner]} are {'not ' * has_blocks}multiplied with"
    return wrong + far_apart(f"{list(x.shape)} by FP8 in blocks", fast.linear(x, packed).float(), meant, 8e-3)


def qk_rope_store(seed: int, device: str) -> str:
    """What is stored, what goes to attention, and the digests of what was stored."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    ref, fast = columns(device, "qk_rope_store")
    dtype, kv_heads, size = dtype_of(rng, device), rng.choice((1, 2, 3, 4, 8)), rng.choice((16, 24, 64, 80, 128))
    heads, tokens = kv_heads * rng.choice((1, 4, 7)), rng.choice((1, 5))
    page = rng.choice((1, 2, 4))
    slot_count = (2 * tokens + 4) * page
    angle = torch.rand(50, size // 2, generator=generator) * 6
    weights = drawn(generator, device, rng.choice((dtype, torch.float32)), 2, size)
    norm = rng.random() < 0.7
    slots = (torch.randperm(slot_count - 1, generator=generator)[:tokens] + 1).to(device)
    if tokens > 1:
        slots[0] = 0
    stored = rng.choice((dtype, *FP8_FORMATS))
    factors = digest_coefficients([1], range(kv_heads), size * stored.itemsize // 2, 2, partial=rng.random() < 0.3)
    qkv = drawn(generator, device, dtype, tokens, (heads + 2 * kv_heads) * size) * rng.choice((1.0, 300.0))
    inputs = (
        qkv, angle.cos().to(device), angle.sin().to(device),
        torch.randint(0, 50, (tokens,), generator=generator).to(device), weights[0] if norm else None,
        weights[1] if norm else None, 1e-6,
    )  # fmt: skip
    outputs = []
    for ops in (fast, ref):
        k, v = (torch.zeros(slot_count, kv_heads, size, dtype=stored, device=device) for _ in range(2))
        if ops is fast:
            k, v = page_first(rng, (k, v), page)
        q = torch.empty(tokens, heads, size, dtype=dtype, device=device)
        sums = torch.full((tokens, 2), 5, dtype=torch.int64, device=device)
        written = WrittenRows(coefficients_22W=torch.from_numpy(factors)[0].to(device), sums_T2=sums)
        ops.qk_rope_store(*inputs, k, v, slots, q, written)
        outputs.append((q, k, v, sums))
    (q, k, v, sums), (q_, k_, v_, _) = outputs
    # Digests are of what this column stored: rounding may differ by a bit from the reference's.
    stored = ref.canary_digest([(k, v)], slots, torch.from_numpy(factors).to(device))
    real = slots > 0
    wrong = far_apart("q", q, q_) + far_apart("k", k.reshape(k_.shape), k_) + far_apart("v", v.reshape(v_.shape), v_)
    expected = ((stored & 0xFFFFFFFF) + 5 & 0xFFFFFFFF) | (stored >> 32 << 32)
    return wrong + ("" if torch.equal(sums[real], expected[real]) else " digests")


def latent_rope_store(seed: int, device: str) -> str:
    """What is stored of latent rows, what goes to attention, and the digests of what was stored."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    ref, fast = columns(device, "latent_rope_store")
    dtype, heads, tokens = dtype_of(rng, device), rng.choice((1, 6, 16, 20)), rng.choice((1, 5))
    rank, rotated, plain = rng.choice(((32, 16, 24), (40, 6, 8), (512, 64, 128)))
    page, row = rng.choice((1, 2, 4)), rank + rotated
    slot_count = (2 * tokens + 4) * page
    angle = torch.rand(50, rotated // 2, generator=generator) * 6
    slots = (torch.randperm(slot_count - 1, generator=generator)[:tokens] + 1).to(device)
    kind = rng.choice((dtype, *FP8_FORMATS))
    factors = digest_coefficients([1], [0], row * kind.itemsize // 2, 2, partial=rng.random() < 0.3, halves=1)
    mixed = drawn(generator, device, dtype, tokens, 10 + row)
    queries = drawn(generator, device, dtype, tokens, heads, plain + rotated)
    inputs = (
        mixed[:, 10:], drawn(generator, device, rng.choice((dtype, torch.float32)), rank), 1e-6,
        angle.cos().to(device), angle.sin().to(device), torch.randint(0, 50, (tokens,), generator=generator).to(device),
    )  # fmt: skip
    outputs = []
    for ops in (fast, ref):
        pool = torch.zeros(slot_count, 1, row, dtype=kind, device=device)
        if ops is fast:
            (pool,) = page_first(rng, [pool], page)
        q = queries.clone()
        sums = torch.full((tokens, 2), 5, dtype=torch.int64, device=device)
        written = WrittenRows(coefficients_22W=torch.from_numpy(factors)[0].to(device), sums_T2=sums)
        ops.latent_rope_store(*inputs[:3], q, *inputs[3:], pool, slots, written)
        outputs.append((q, pool, sums))
    (q, pool, sums), (q_, pool_, _) = outputs
    stored = ref.canary_digest([(pool,)], slots, torch.from_numpy(factors).to(device))
    expected = ((stored & 0xFFFFFFFF) + 5 & 0xFFFFFFFF) | (stored >> 32 << 32)
    wrong = far_apart("q", q, q_) + far_apart("rows", pool.reshape(pool_.shape), pool_)
    return wrong + ("" if torch.equal(sums, expected) else " digests")
