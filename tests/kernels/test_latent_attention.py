"""Attention over latent rows: the reference against plain sums, column cpu against the reference, with digests."""

from __future__ import annotations

import pytest
import torch

from serinus.core.stamps import digest_coefficients
from serinus.kernels import FP8_FORMATS, AttentionBatch, Kernels, LatentHeads, LayerDigest, WrittenRows
from serinus.kernels.fp8 import stored_as
from serinus.kernels.packed import PackedFactors

PAGE, WIDTH, VALUE, HEADS = 4, 24, 16, 6
LENGTHS, FRESH = (9, 1, 30), (1, 1, 13)
SCALE = 0.3


def case(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, AttentionBatch]:
    """Queries, a pool, a table and a batch: a decoding sequence, one of a single token and a chunk behind a prefix."""
    chance = torch.Generator().manual_seed(3)
    pool = torch.randn((60 * PAGE, 1, WIDTH), generator=chance).to(dtype)
    slots = torch.randperm(59, generator=chance)[:, None] * PAGE + PAGE + torch.arange(PAGE)
    table = torch.zeros((4, 40), dtype=torch.int32)
    for row, length in enumerate(LENGTHS, 1):
        table[row, :length] = slots[10 * row : 10 * row + 10].flatten()[:length]
    batch = AttentionBatch(
        rows_B=torch.tensor([1, 2, 3]), q_starts_B1=torch.tensor([0, *FRESH]).cumsum(0), context_B=torch.tensor(LENGTHS)
    )
    return torch.randn((sum(FRESH), HEADS, WIDTH), generator=chance).to(dtype), pool, table, batch


def by_hand(q: torch.Tensor, pool: torch.Tensor, table: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
    """One token and head at a time."""
    out = torch.empty((len(q), HEADS, VALUE), dtype=torch.float64)
    for b, (row, context) in enumerate(zip(batch.rows_B.tolist(), batch.context_B.tolist(), strict=True)):
        begin, end = batch.q_starts_B1[b : b + 2].tolist()
        for t in range(begin, end):
            rows = pool[table[row, : context - (end - 1 - t)].long(), 0].double()
            for head in range(HEADS):
                out[t, head] = ((rows @ q[t, head].double()) * SCALE).softmax(0) @ rows[:, :VALUE]
    return out


@pytest.mark.parametrize(("dtype", "apart"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_a_token_sums_the_values_in_the_rows_that_it_sees(either: Kernels, dtype: torch.dtype, apart: float) -> None:
    q, pool, table, batch = case(dtype)
    found = either.latent_attention(q, pool, VALUE, table, batch, SCALE)
    assert (found.shape, found.dtype) == ((len(q), HEADS, VALUE), dtype)
    assert float((found.double() - by_hand(q, pool, table, batch)).abs().max()) < apart


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", FP8_FORMATS)
def test_rows_of_one_byte_are_what_they_stand_for(either: Kernels, kind: torch.dtype, dtype: torch.dtype) -> None:
    q, pool, table, batch = case(dtype)
    narrow = stored_as(pool, kind)
    found = either.latent_attention(q, narrow, VALUE, table, batch, SCALE)
    assert torch.equal(found, either.latent_attention(q, narrow.to(dtype), VALUE, table, batch, SCALE))
    assert float((found - either.latent_attention(q, pool, VALUE, table, batch, SCALE)).abs().max()) > 0.01


def test_a_chunk_that_goes_in_pieces_is_the_same(cpu: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    q, pool, table, batch = case(torch.float32)
    whole = cpu.latent_attention(q, pool, VALUE, table, batch, SCALE)
    monkeypatch.setattr("serinus.kernels.cpu.latent_attention._SCORES", 100)
    assert torch.allclose(cpu.latent_attention(q, pool, VALUE, table, batch, SCALE), whole, atol=1e-6)


def heads_of(dtype: torch.dtype, plain: int, value: int) -> LatentHeads:
    chance = torch.Generator().manual_seed(7)
    key_NPR, value_NRV = (
        torch.randn(shape, generator=chance).to(dtype) for shape in ((HEADS, plain, VALUE), (HEADS, VALUE, value))
    )
    return LatentHeads(key_NPR=key_NPR / 4, value_NRV=value_NRV / 4)


def queries_of(dtype: torch.dtype, tokens: int, plain: int) -> torch.Tensor:
    """As heads make them."""
    chance = torch.Generator().manual_seed(8)
    return torch.randn((tokens, HEADS, plain + WIDTH - VALUE), generator=chance).to(dtype)


@pytest.mark.parametrize(("plain", "value"), [(3, 2), (2, 7), (4, 12)])
@pytest.mark.parametrize(("dtype", "apart"), [(torch.float32, 1e-5), (torch.bfloat16, 6e-2)])
def test_heads_that_make_keys_and_values_of_rows_say_what_those_say_that_attend_over_rows(
    ref: Kernels,
    cpu: Kernels,
    dtype: torch.dtype,
    apart: float,
    plain: int,
    value: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of the longest chunk alone keys are made, and of all heads at once or of one after the other. The latents that
    heads sum up, and the values that these make, are those by hand."""
    absorbed, pool, table, batch = case(dtype)
    heads, q = heads_of(dtype, plain, value), queries_of(dtype, len(absorbed), plain)
    absorbed[:, :, :VALUE] = torch.einsum("tnp,npr->tnr", q[:, :, :plain], heads.key_NPR)
    absorbed[:, :, VALUE:] = q[:, :, plain:]
    wanted = torch.einsum("tnr,nrv->tnv", by_hand(absorbed, pool, table, batch), heads.value_NRV.double())
    assert [heads.pays(count, WIDTH) for count in FRESH] == [False, False, True]
    for room in (1 << 20, 1):
        monkeypatch.setattr("serinus.kernels.cpu.latent_attention._KEYS", room)
        for ops in (ref, cpu):
            found = ops.latent_attention(q, pool, VALUE, table, batch, SCALE, None, heads)
            assert (found.shape, found.dtype) == ((len(q), HEADS, value), dtype)
            assert float((found.double() - wanted).abs().max()) < apart
    brought: list[int] = []

    class Told(LatentHeads):
        def in_rows(self, q_TNX: torch.Tensor) -> torch.Tensor:
            brought.append(len(q_TNX))
            return super().in_rows(q_TNX)

    told = Told(key_NPR=heads.key_NPR, value_NRV=heads.value_NRV)
    cpu.latent_attention(q, pool, VALUE, table, batch, SCALE, None, told)
    alone = cpu.latent_attention(q[:2], pool, VALUE, table, batch.part(0, 2), SCALE, None, told)
    assert brought == [1, 1, 2], "queries of the chunk come into no space of rows; those of decodes do at once"
    assert torch.allclose(alone, found[:2], atol=apart)


def test_queries_of_other_heads_are_refused(either: Kernels) -> None:
    absorbed, pool, table, batch = case(torch.float32)
    heads, q = heads_of(torch.float32, 3, 2), queries_of(torch.float32, len(absorbed), 3)
    for queries, value_size in ((q[:, :, 1:], VALUE), (q[:, 1:], VALUE), (q, VALUE - 1)):
        with pytest.raises(ValueError, match="expected those of the same heads"):
            either.latent_attention(queries, pool, value_size, table, batch, SCALE, None, heads)


def test_what_is_due_is_digested_of_the_rows_that_were_gathered(either: Kernels) -> None:
    q, pool, table, batch = case(torch.bfloat16)
    factors = torch.from_numpy(digest_coefficients([0], [0], WIDTH, 2, partial=False, halves=1))[0]
    # Of the chunk the prefix before it: pages 0 to 4, positions 0 to 16, entries 0 to 19.
    due = torch.zeros((7, 3), dtype=torch.int64)
    due[:, 2] = torch.tensor([0, 3, 0, 17, 0, 1, 0])
    sums = torch.zeros((1, 2, 2, 20), dtype=torch.int32)
    digest = LayerDigest(
        factors=PackedFactors(factors=factors, bias=None, plain_22W=factors), due_7B=due, sums_P22E=sums, page_size=PAGE
    )
    heads, q = heads_of(torch.bfloat16, 3, 2), queries_of(torch.bfloat16, len(q), 3)
    with_it = either.latent_attention(q, pool, VALUE, table, batch, SCALE, digest, heads)
    assert torch.equal(with_it, either.latent_attention(q, pool, VALUE, table, batch, SCALE, None, heads))
    wanted = either.canary_digest([(pool,)], table[3, :17].long(), factors[None])[:, 0]
    low, high = (sums[0, 0, i, :17].long() & 0xFFFFFFFF for i in range(2))
    assert torch.equal(low | high << 32, wanted)
    assert not sums[0, 1].any()
    assert not sums[0, :, :, 17:].any()


def test_rows_out_of_the_pool_and_values_wider_than_a_row_are_refused(cpu: Kernels) -> None:
    q, pool, table, batch = case(torch.float32)
    with pytest.raises(ValueError, match="expected one row a slot with them"):
        cpu.latent_attention(q, pool, WIDTH + 1, table, batch, SCALE)
    table[3, 5] = len(pool)
    with pytest.raises(ValueError, match="row 3 of req_to_token holds a slot out of"):
        cpu.latent_attention(q, pool, VALUE, table, batch, SCALE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [None, *FP8_FORMATS])
def test_a_row_is_normed_rotated_stored_and_digested_and_queries_are_rotated(
    ref: Kernels, cpu: Kernels, dtype: torch.dtype, kind: torch.dtype | None
) -> None:
    """By hand for one element, and column cpu to the bit of the digests of what it stored."""
    chance = torch.Generator().manual_seed(5)
    mixed = torch.randn((3, 7 + WIDTH), generator=chance).to(dtype)
    queries = torch.randn((3, HEADS, 5 + WIDTH - VALUE), generator=chance).to(dtype)
    norm, angle = torch.rand(VALUE, generator=chance).to(dtype), torch.rand(9, 4, generator=chance)
    positions, slots = torch.tensor([8, 0, 3]), torch.tensor([5, 2, 9])
    stored, apart = kind or dtype, {None: 0.02, torch.float8_e4m3fn: 0.14, torch.float8_e5m2: 0.27}[kind]
    factors = torch.from_numpy(digest_coefficients([1], [0], WIDTH * stored.itemsize // 2, 2, partial=False, halves=1))
    pools, outs = [], []
    for ops in (ref, cpu):
        pool, q = torch.zeros((12, 1, WIDTH), dtype=stored), queries.clone()
        written = WrittenRows(coefficients_22W=factors[0], sums_T2=torch.zeros((3, 2), dtype=torch.int64))
        ops.latent_rope_store(mixed[:, 7:], norm, 1e-6, q, angle.cos(), angle.sin(), positions, pool, slots, written)
        assert torch.equal(written.sums_T2, ref.canary_digest([(pool,)], slots, factors))
        pools.append(pool.float())
        outs.append(q)
    assert torch.allclose(*pools, atol=apart)
    assert torch.equal(outs[0], outs[1])
    row, turn = mixed[0, 7:].double(), angle[8].double()
    latent = row[:VALUE] * norm.double() / (row[:VALUE] ** 2).mean().sqrt()
    assert torch.allclose(pools[0][5, 0, :VALUE].double(), latent, atol=apart)
    first = row[VALUE] * turn[0].cos() - row[VALUE + 4] * turn[0].sin()
    assert float(pools[0][5, 0, VALUE]) == pytest.approx(float(first), abs=apart)
    x, y = queries[0, 2, 5].double(), queries[0, 2, 9].double()
    assert float(outs[0][0, 2, 9]) == pytest.approx(float(y * turn[0].cos() + x * turn[0].sin()), abs=0.02)
    assert torch.equal(outs[0][:, :, :5], queries[:, :, :5])


def test_rows_and_queries_that_do_not_fit_together_are_refused(either: Kernels) -> None:
    rows, queries, angle = torch.zeros(2, WIDTH), torch.zeros(2, HEADS, WIDTH), torch.zeros(9, 4)
    whole, pool = torch.zeros(2, dtype=torch.int64), torch.zeros((12, 1, WIDTH))
    given = rows, torch.ones(VALUE), 1e-6, queries, angle, angle, whole, pool, whole
    for place, other, said in (
        (7, torch.zeros((12, 1, WIDTH + 1)), r"pool \(1, 25\), not \(1, 24\)"),
        (3, queries[:1], r"queries \(1,\), not \(2,\)"),
        (1, torch.ones(VALUE - 1), r"cos \(4,\), not \(4,\)|what rotates"),
        (6, whole.int(), r"expected one dtype \(the pool may be FP8\), torch.int64"),
        (7, torch.zeros((12, 1, WIDTH), dtype=torch.bfloat16), "queries and pool of .*bfloat16.*float32"),
        (0, torch.zeros(WIDTH, 2).T, "strided"),
    ):
        with pytest.raises(ValueError, match=said):
            either.latent_rope_store(*given[:place], other, *given[place + 1 :])
