"""Random cases of the Triton column's attention beside the reference: any mix of sequences with one, few and many
queries, windows, caps, head sizes and groups, and what is digested of their KV."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from serinus.core.stamps import digest_coefficients
from serinus.kernels import FP8_FORMATS, AttentionBatch, LatentHeads, LayerDigest, Tiling, find_chunks, packed_sums
from serinus.kernels.fp8 import stored_as
from serinus.kernels.packed import PackedFactors
from serinus.kernels.triton import chunk_attention, contiguous_attention
from serinus.kernels.triton.flash_attention import flash_attention
from serinus.kernels.triton.latent_attention import expanded_groups

from .conftest import make_paged
from .triton_columns import columns, dtype_of, far_apart, page_first

__all__ = ["latent_attention", "latent_heads", "long_chunks", "paged_attention", "watched_attention", "watched_batch"]

TILING = Tiling(block=16, warps=4, stages=1, stretches=2)
"""Small: the few tokens of a case are several blocks of several stretches."""


def watched_attention(seed: int, device: str) -> str:
    """Attention that digests what it reads, beside attention and digest of the reference."""
    ref, fast = columns(device, "pack_factors", "watched_attention")
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    page, heads, group, size, layers = rng.choice((4, 16)), rng.choice((1, 2)), rng.choice((1, 4)), 32, 2
    contexts = [rng.randint(1, 90) for _ in range(rng.randint(1, 3))]
    pages = [-(-context // page) for context in contexts]
    order = (torch.randperm(sum(pages), generator=generator) + 1).split(pages)
    table = torch.zeros((len(contexts) + 1, 96), dtype=torch.int32)
    for row, (mine, context) in enumerate(zip(order, contexts, strict=True), 1):
        table[row, :context] = (mine[:, None] * page + torch.arange(page)).reshape(-1)[:context].int()
    dtype = torch.bfloat16 if device == "cuda" else torch.float16  # of which Triton's interpreter makes products
    slot_count = (sum(pages) + 1) * page
    kv = [
        tuple(torch.randn((slot_count, heads, size), generator=generator).to(dtype).to(device) for _ in range(2))
        for _ in range(layers)
    ]
    stride = rng.choice((1, 2, 3))
    batch = len(contexts)
    reads = torch.tensor(
        [[*range(batch)], [*range(1, batch + 1)], [0] * batch, [c - 1 for c in contexts], [stride] * batch, [0] * batch]
    )
    columns_7B, entries, *_ = ref.canary_due(reads.numpy(), page)
    if columns_7B.shape[1] != batch:
        return ""  # every sequence stands in its place
    due, table = torch.from_numpy(columns_7B).to(device), table.to(device)
    factors = torch.from_numpy(digest_coefficients(range(layers), range(heads), size, 2, partial=False)).to(device)
    q = torch.randn((batch, heads * group, size), generator=generator).to(dtype).to(device)
    attention = AttentionBatch(
        rows_B=reads[1].to(device),
        q_starts_B1=torch.arange(batch + 1, device=device),
        context_B=torch.tensor(contexts, device=device),
    )
    slots = ref.canary_plan(table, due, entries, page_size=page, slot_count=slot_count)[0]
    whole, stood_in = (torch.zeros((1, 2, 2, entries), dtype=torch.int32, device=device) for _ in range(2))
    wrong = ""
    laid = page_first(rng, [half for pair in kv for half in pair], page)
    for layer, (k, v) in enumerate(kv):
        inputs = (q, *laid[2 * layer : 2 * layer + 2], table, attention, 0.25)
        given = {"due_7B": due, "page_size": page}
        digest = LayerDigest(factors=fast.pack_factors(factors[layer], heads), sums_P22E=whole, **given)
        found = fast.watched_attention(*inputs, digest, TILING)
        plain = fast.watched_attention(*inputs, None, TILING)
        digest = LayerDigest(factors=ref.pack_factors(factors[layer], heads), sums_P22E=stood_in, **given)
        expected = ref.watched_attention(q, k, v, *inputs[3:], digest)
        if not torch.allclose(found.float(), expected.float(), atol=0.03):
            wrong += f" attention of layer {layer} by {float((found.float() - expected.float()).abs().max()):.3f}"
        if not torch.equal(found, plain):
            wrong += f" layer {layer} watched and not watched"
    for name, sums in (("triton", whole), ("ref", stood_in)):
        if not torch.equal(packed_sums(sums)[slots > 0], ref.canary_digest(kv, slots, factors)[slots > 0]):
            wrong += f" digests of {name}"
    return wrong


def batch_on(batch: AttentionBatch, device: str) -> AttentionBatch:
    """The same batch there."""
    moved = (each.to(device) for each in (batch.rows_B, batch.q_starts_B1, batch.context_B))
    rows_B, q_starts_B1, context_B = moved
    return AttentionBatch(rows_B=rows_B, q_starts_B1=q_starts_B1, context_B=context_B, is_watched=True)


def with_chunks(batch: AttentionBatch, device: str) -> AttentionBatch:
    """The same batch there, as a host knows it."""
    chunks = find_chunks(
        batch.q_starts_B1.numpy(), batch.context_B.numpy(), lambda words: torch.from_numpy(words).to(device)
    )
    return replace(batch_on(batch, device), chunks=chunks)


def drawn(rng: random.Random, seed: int, device: str, kind: str) -> tuple[tuple[Any, ...], dict[str, Any], int]:
    """Arguments of the op, window and cap, and the page size, of a batch of decodes, of a chunk or of both."""
    size, heads, group = rng.choice((16, 32, 64)), rng.choice((1, 2)), rng.choice((1, 3, 4, 8))
    if device == "cuda":
        size, group = rng.choice((16, 64, 80, 96, 128, 256)), rng.choice((1, 3, 4, 7, 16))
    page, long = rng.choice((1, 4, 16)), 2500 if device == "cuda" else 90
    count = 130 if device == "cuda" and rng.random() < 0.3 else rng.randint(1, 4)  # of many each program is one warp
    few = [(1, rng.randint(1, long)) for _ in range(count)]
    many = [(n, n + rng.randint(0, long)) for n in rng.sample((2, 7, 12, 33, 140), 1 if device == "cpu" else 2)]
    sequences = {"decode": few, "chunk": many, "mixed": few + many}[kind]
    rng.shuffle(sequences)
    dtype = dtype_of(rng, device)
    paged = make_paged(
        seed=seed, sequences=sequences, heads=heads * group, kv_heads=heads, head_size=size, page_size=page, dtype=dtype
    )
    stored = rng.choice((dtype, dtype, *FP8_FORMATS))
    pools = (stored_as(pool, stored) for pool in (paged.k_pool, paged.v_pool))
    tensors = (each.to(device) for each in (paged.q, *pools, paged.table))
    given: dict[str, Any] = {"window": rng.choice((None, None, 5, 20, 300)), "softcap": rng.choice((None, None, 1.5))}
    given["sinks_N"] = torch.randn(heads * group).to(device) if rng.random() < 0.5 else None
    return (*tensors, batch_on(paged.batch, device), size**-0.5), given, page


def paged_attention(seed: int, device: str) -> str:
    """Attention of one random batch, twice: the second time to the bit."""
    rng = random.Random(seed)
    ref, fast = columns(device, "paged_attention")
    inputs, given, page = drawn(rng, seed, device, ("decode", "chunk", "mixed")[seed % 3])
    laid = (inputs[0], *page_first(rng, inputs[1:3], page), *inputs[3:])
    found = fast.paged_attention(*laid, **given)
    wrong = far_apart("attention", found, ref.paged_attention(*inputs, **given))
    return wrong + ("" if torch.equal(found, fast.paged_attention(*laid, **given)) else " other bits the second time")


def long_chunks(seed: int, device: str) -> str:
    """Chunks over keys and values that are copied out of their pages, all heads at once and some after the other; by
    FlashAttention 3 too, where it is installed."""
    rng = random.Random(seed)
    ref, fast = columns(device, "paged_attention")
    size, heads, group = rng.choice((64, 128)), rng.choice((1, 2)), rng.choice((1, 3, 4))
    dtype = torch.float16 if device == "cpu" else rng.choice((torch.float16, torch.bfloat16))
    sequences = [(n, n + rng.randint(0, 200)) for n in (40, 1, 70, 5)[: rng.randint(1, 4)]]
    rng.shuffle(sequences)
    page = rng.choice((1, 4, 16))
    paged = make_paged(
        seed=seed, sequences=sequences, heads=heads * group, kv_heads=heads, head_size=size, page_size=page, dtype=dtype
    )
    stored = rng.choice((dtype, *FP8_FORMATS))
    pools = page_first(rng, [stored_as(pool, stored).to(device) for pool in (paged.k_pool, paged.v_pool)], page)
    inputs = paged.q.to(device), *pools, paged.table.to(device), with_chunks(paged.batch, device), size**-0.5
    expected, wrong = ref.paged_attention(*inputs), ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunk_attention, "_PAIRS", 32 * group)
        patch.setattr(chunk_attention, "_FLASH_PAIRS", 32 * group)
        room = contiguous_attention._KEYS
        ways = flash_attention, lambda device: None
        for keys, flash in itertools.product((room, 1), ways if flash_attention(inputs[0].device) else ways[:1]):
            patch.setattr(contiguous_attention, "_KEYS", keys)
            patch.setattr(chunk_attention, "flash_attention", flash)
            found = fast.paged_attention(*inputs)
            wrong += far_apart("attention", found, expected)
            wrong += "" if torch.equal(found, fast.paged_attention(*inputs)) else " other bits the second time"
    return wrong


def due_of(rng: random.Random, inputs: tuple[Any, ...], window: int | None, page: int) -> tuple[Tensor, int]:
    """Columns of a plan, one or two sets, over positions before the first query of each sequence; and the entries."""
    batch = inputs[4]
    starts, contexts, rows = batch.q_starts_B1.tolist(), batch.context_B.tolist(), batch.rows_B.tolist()
    sets: list[list[list[int]]] = [[], []]
    entries = 0
    for b, row in enumerate(rows):
        first_query = contexts[b] - (starts[b + 1] - starts[b])
        low = rng.choice((0, 0, rng.randrange(first_query + 1)))
        if window is not None:
            low = max(0, first_query - window + 1 - rng.choice((0, 9)))
        middle = rng.randrange(low // page, first_query // page + 1) * page if rng.random() < 0.5 else 0
        for columns_of, (begin, end) in zip(sets, ((max(low, middle), first_query), (low, middle)), strict=True):
            stride = rng.choice((1, 2, 3))
            pages = max(0, -(-(-(-end // page) - begin // page) // stride)) if end > begin else 0
            columns_of.append([b, row, begin, end if pages else begin, begin // page, stride, entries])
            entries += pages * page
    both = sets[0] if rng.random() < 0.5 else sets[0] + sets[1]
    return torch.tensor(both).T.contiguous(), entries


def watched_batch(seed: int, device: str) -> str:
    """Attention that digests: what is due of any batch, by factors that come plain or packed, or of first bytes."""
    rng = random.Random(seed)
    ref, fast = columns(device, "pack_factors", "watched_attention")
    inputs, given, page = drawn(rng, seed, device, ("decode", "chunk", "mixed")[seed % 3])
    pool = inputs[1]
    due, entries = due_of(rng, inputs, given["window"], page)
    lanes, heads = pool.shape[2] * pool.element_size() // 2, pool.shape[1]
    partial = rng.random() < 0.2
    factors = torch.from_numpy(digest_coefficients([3], range(heads), lanes, 2, partial=partial))[0].to(device)
    start = torch.randint(-9, 9, (1, 2, 2, entries), dtype=torch.int32, generator=torch.Generator().manual_seed(seed))
    digest = LayerDigest(
        factors=ref.pack_factors(factors, heads) if not partial else _plain(factors), due_7B=due.to(device),
        sums_P22E=start.to(device), page_size=page,
    )  # fmt: skip
    stood_in = replace(digest, sums_P22E=digest.sums_P22E.clone())
    laid = (inputs[0], *page_first(rng, inputs[1:3], page), *inputs[3:])
    found = fast.watched_attention(*laid, digest, None, **given)
    wrong = far_apart("watched attention", found, ref.watched_attention(*inputs, stood_in, None, **given))
    if not torch.equal(packed_sums(digest.sums_P22E), packed_sums(stood_in.sums_P22E)):
        wrong += " digests"
    return wrong


def latent_attention(seed: int, device: str) -> str:
    """Attention over latent rows of one random batch, with digests and without, twice to the bit."""
    rng = random.Random(seed)
    ref, fast = columns(device, "latent_attention")
    value, rest, heads = *rng.choice(((32, 16), (40, 8), (48, 0))), rng.choice((1, 4, 6, 20))
    if device == "cuda":
        value, rest, heads = *rng.choice(((512, 64), (256, 32), (32, 16))), rng.choice((1, 8, 16, 40, 128))
    page, long = rng.choice((1, 4, 16)), 2500 if device == "cuda" else 90
    few = [(1, rng.randint(1, long)) for _ in range(rng.randint(1, 4))]
    many = [(n, n + rng.randint(0, long)) for n in rng.sample((2, 7, 33, 70), 1 if device == "cpu" else 2)]
    sequences = {"decode": few, "chunk": many, "mixed": few + many}[("decode", "chunk", "mixed")[seed % 3]]
    rng.shuffle(sequences)
    paged = make_paged(
        seed=seed, sequences=sequences, heads=heads, kv_heads=1, head_size=value + rest, page_size=page,
        dtype=dtype_of(rng, device),
    )  # fmt: skip
    q, pool, table = (each.to(device) for each in (paged.q, paged.k_pool, paged.table))
    pool = stored_as(pool, rng.choice((pool.dtype, *FP8_FORMATS)))
    inputs = (q, pool, value, table, batch_on(paged.batch, device), (value + rest) ** -0.5)
    due, entries = due_of(rng, (q, pool, pool, table, inputs[4]), None, page)
    lanes = pool.shape[2] * pool.element_size() // 2
    partial = rng.random() < 0.2
    factors = torch.from_numpy(digest_coefficients([3], [0], lanes, 2, partial=partial, halves=1))[0].to(device)
    digest = LayerDigest(
        factors=_plain(factors), due_7B=due.to(device), page_size=page,
        sums_P22E=torch.full((1, 2, 2, entries), 7, dtype=torch.int32, device=device),
    )  # fmt: skip
    stood_in = replace(digest, sums_P22E=digest.sums_P22E.clone())
    (laid,) = page_first(rng, [pool], page)
    found = fast.latent_attention(q, laid, *inputs[2:], digest)
    wrong = far_apart(f"latent attention of {heads} heads", found, ref.latent_attention(*inputs, stood_in))
    if not torch.equal(digest.sums_P22E, stood_in.sums_P22E):
        wrong += " digests"
    return wrong + (
        "" if torch.equal(found, fast.latent_attention(q, laid, *inputs[2:])) else " other bits without digests"
    )


def latent_heads(seed: int, device: str) -> str:
    """The same with what heads make of latents, beside decodes and short chunks, all heads at once and some after the
    other, twice to the bit; of no chunk whose keys are made queries come into the space of rows."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    ref, fast = columns(device, "latent_attention")
    rank, rotated, plain, value = rng.choice(((32, 16, 12, 10), (40, 8, 16, 24), (36, 4, 8, 16)))
    heads, page, long = rng.choice((1, 3, 6)), rng.choice((1, 4, 16)), 90
    if device == "cuda":
        rank, rotated, plain, value = rng.choice(((512, 64, 128, 128), (256, 32, 24, 20), (64, 16, 24, 20)))
        heads, long = rng.choice((1, 8, 16, 128)), 2500
    sequences = [(n, n + rng.randint(0, long)) for n in (40, 1, 1, 150, 33, 2, 1)[: rng.randint(1, 7)]]
    rng.shuffle(sequences)
    dtype = dtype_of(rng, device)
    paged = make_paged(
        seed=seed, sequences=sequences, heads=heads, kv_heads=1, head_size=rank + rotated, page_size=page, dtype=dtype
    )
    (laid,) = page_first(rng, [stored_as(paged.k_pool, rng.choice((dtype, *FP8_FORMATS))).to(device)], page)
    table = F.pad(paged.table, (0, rng.choice((0, 200)))).to(device)
    brought: list[int] = []

    class Told(LatentHeads):
        def absorb(self, q_TNX: Tensor, out_TNR: Tensor) -> None:
            brought.append(len(q_TNX))
            super().absorb(q_TNX, out_TNR)

    def drawn_here(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator) * rank**-0.5).to(dtype).to(device)

    made = Told(key_NPR=drawn_here(heads, plain, rank), value_NRV=drawn_here(heads, rank, value))
    q = drawn_here(len(paged.q), heads + 1, plain + rotated)[:, 1:] * rank**0.5
    expected = ref.latent_attention(q, laid, rank, table, batch_on(paged.batch, device), 0.1, None, made)
    brought.clear()
    inputs = q, laid, rank, table, with_chunks(paged.batch, device), 0.1, None, made
    found = fast.latent_attention(*inputs)
    wrong = far_apart(f"attention of {heads} heads that make keys", found, expected)
    groups = expanded_groups(inputs[4], rank + rotated, table.shape[1], made)
    if sum(brought) != len(q) - sum(len(range(*group.tokens.indices(len(q)))) for group in groups):
        wrong += f" {brought} queries in the space of rows of {sequences}"
    kept, contiguous_attention._KEYS = contiguous_attention._KEYS, 1
    few, contiguous_attention._KEYS = fast.latent_attention(*inputs), kept
    wrong += far_apart("one head after the other", few, expected)
    return wrong + ("" if torch.equal(found, fast.latent_attention(*inputs)) else " other bits the second time")


def _plain(factors_22W: Tensor) -> PackedFactors:
    return PackedFactors(factors=factors_22W, bias=None, plain_22W=factors_22W)
