"""Attention over scattered pages: by hand, both columns, torch's own attention, refused inputs."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from serinus.kernels import AttentionBatch, Kernels, load
from tests.kernels.conftest import DTYPES, Paged, assert_close, make_paged

SHARES_ROUNDED = 2.0**-7
"""Chunks round the shares of the softmax to bf16 before they weigh values of about 1."""
MIXED = [(1, 1), (1, 40), (17, 17), (5, 77), (64, 200), (1, 300), (2, 2), (9, 130)]


def run(kernels: Kernels, paged: Paged, scale: float | None = None) -> torch.Tensor:
    scale = paged.q.shape[2] ** -0.5 if scale is None else scale
    return kernels.paged_attention(paged.q, paged.k_pool, paged.v_pool, paged.table, paged.batch, scale)


def one_sequence(queries: int, keys: list[list[float]], values: list[list[float]]) -> Paged:
    """Sequence in row 1, one head of size 2, slots 1, 2, ...; every query is (1, 0)."""
    paged = make_paged(
        seed=0, sequences=[(queries, len(keys))], heads=1, kv_heads=1, head_size=2, page_size=1, dtype=torch.float32
    )
    slots = paged.table[paged.batch.rows_B[0], : len(keys)].long()
    paged.k_pool[slots, 0] = torch.tensor(keys)
    paged.v_pool[slots, 0] = torch.tensor(values)
    paged.q[:, 0] = torch.tensor([1.0, 0.0])
    return paged


def test_a_single_token_attends_to_itself(either: Kernels) -> None:
    paged = one_sequence(1, [[3.0, 1.0]], [[5.0, 7.0]])
    assert run(either, paged).tolist() == [[[5.0, 7.0]]]


def test_two_equal_keys_share_evenly(either: Kernels) -> None:
    paged = one_sequence(1, [[1.0, 9.0], [1.0, -9.0]], [[2.0, 0.0], [4.0, 8.0]])
    torch.testing.assert_close(run(either, paged), torch.tensor([[[3.0, 4.0]]]))


def test_no_query_sees_what_comes_after_it(either: Kernels) -> None:
    values = [[float(i), 0.0] for i in range(12)]
    out = run(either, one_sequence(12, [[0.0, 0.0]] * 12, values))
    torch.testing.assert_close(out[:, 0, 0], torch.arange(12) / 2)


def test_scores_too_large_for_exp_do_not_overflow(either: Kernels) -> None:
    paged = one_sequence(1, [[500.0, 0.0], [400.0, 0.0], [-500.0, 0.0]], [[1.0, 2.0], [8.0, 8.0], [9.0, 9.0]])
    torch.testing.assert_close(run(either, paged, 1.0), torch.tensor([[[1.0, 2.0]]]))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size", [1, 16, 128])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(16, 8, 128), (7, 1, 64), (4, 1, 16), (3, 3, 10)])
def test_both_columns_agree_on_mixed_batches(
    ref: Kernels, cpu: Kernels, heads: int, kv_heads: int, size: int, page_size: int, dtype: torch.dtype
) -> None:
    paged = make_paged(
        seed=page_size,
        sequences=MIXED,
        heads=heads,
        kv_heads=kv_heads,
        head_size=size,
        page_size=page_size,
        dtype=dtype,
    )
    assert_close(run(cpu, paged), run(ref, paged), ulps=2, bf16_atol=SHARES_ROUNDED)


@pytest.mark.slow
@pytest.mark.parametrize("sequences", [[(1, 5000)], [(1, 5000), (1, 3), (1, 700)], [(300, 900)], [(8, 8)], [(9, 9)]])
def test_both_columns_agree_on_uneven_batches(ref: Kernels, cpu: Kernels, sequences: list[tuple[int, int]]) -> None:
    paged = make_paged(
        seed=5, sequences=sequences, heads=4, kv_heads=2, head_size=64, page_size=16, dtype=torch.bfloat16
    )
    assert_close(run(cpu, paged), run(ref, paged), ulps=2, bf16_atol=SHARES_ROUNDED)


@pytest.mark.slow
@settings(max_examples=40)
@given(
    seed=st.integers(0, 10**6),
    page_size=st.integers(1, 128),
    lengths=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 150)), min_size=1, max_size=6),
    heads=st.sampled_from([(2, 1), (4, 2), (2, 2)]),
    head_size=st.sampled_from([16, 64]),
    dtype=st.sampled_from(DTYPES),
)
def test_both_columns_agree_on_any_batch(
    seed: int,
    page_size: int,
    lengths: list[tuple[int, int]],
    heads: tuple[int, int],
    head_size: int,
    dtype: torch.dtype,
) -> None:
    paged = make_paged(
        seed=seed,
        sequences=[(count, count + before) for count, before in lengths],
        heads=heads[0],
        kv_heads=heads[1],
        head_size=head_size,
        page_size=page_size,
        dtype=dtype,
    )
    assert_close(run(load("cpu"), paged), run(load("cpu", "ref"), paged), ulps=2, bf16_atol=SHARES_ROUNDED)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("group", "size"),
    [
        *((2, 128), (7, 32), (3, 96), (9, 64)),
        *(pytest.param(*each, marks=pytest.mark.proof) for each in ((1, 128), (4, 64), (8, 128), (2, 256))),
    ],
)
def test_decode_agrees_with_the_reference_where_blocks_and_groups_end(
    ref: Kernels, cpu: Kernels, group: int, size: int
) -> None:
    """About 16 and 64 positions, the steps of the decode kernel for bf16; a group of 9 is more than it takes."""
    contexts = (1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 79, 81, 127, 128, 129, 290)
    paged = make_paged(
        seed=group,
        sequences=[(1, context) for context in contexts],
        heads=3 * group,
        kv_heads=3,
        head_size=size,
        page_size=16,
        dtype=torch.bfloat16,
    )
    assert_close(run(cpu, paged), run(ref, paged))
    assert_close(run(cpu, paged, -0.5), run(ref, paged, -0.5))


def test_a_decode_step_with_scores_that_rise_by_hundreds_keeps_only_the_last_value(either: Kernels) -> None:
    paged = make_paged(
        seed=9, sequences=[(1, 150)], heads=2, kv_heads=1, head_size=32, page_size=16, dtype=torch.bfloat16
    )
    slots = paged.table[paged.batch.rows_B[0], :150].long()
    paged.q[:] = 1.0
    paged.k_pool[slots] = torch.arange(150).to(torch.bfloat16)[:, None, None]
    out = run(either, paged, 8.0)
    assert torch.equal(out[0, 1], paged.v_pool[slots[149], 0])


def test_attention_equals_torch_on_one_contiguous_sequence(either: Kernels) -> None:
    paged = make_paged(
        seed=3, sequences=[(50, 50)], heads=4, kv_heads=2, head_size=16, page_size=4, dtype=torch.float32
    )
    slots = paged.table[paged.batch.rows_B[0], :50].long()
    expected = F.scaled_dot_product_attention(
        paged.q.transpose(0, 1),
        paged.k_pool[slots].repeat_interleave(2, 1).transpose(0, 1),
        paged.v_pool[slots].repeat_interleave(2, 1).transpose(0, 1),
        is_causal=True,
    ).transpose(0, 1)
    torch.testing.assert_close(run(either, paged), expected, rtol=0, atol=2e-6)


def test_a_prompt_in_chunks_gives_the_rows_of_a_prompt_in_one_piece(cpu: Kernels) -> None:
    whole = make_paged(
        seed=4, sequences=[(60, 60)], heads=4, kv_heads=2, head_size=16, page_size=8, dtype=torch.float32
    )
    rows = []
    for first, end in ((0, 13), (13, 14), (14, 40), (40, 44), (44, 60)):
        batch = AttentionBatch(
            rows_B=whole.batch.rows_B,
            q_starts_B1=torch.tensor([0, end - first]),
            context_B=torch.tensor([end]),
        )
        rows.append(run(cpu, dataclasses.replace(whole, q=whole.q[first:end], batch=batch)))
    torch.testing.assert_close(torch.cat(rows), run(cpu, whole), rtol=0, atol=2e-6)


@pytest.mark.parametrize("head_size", [16, 64])
def test_a_row_of_a_batch_does_not_depend_on_the_others(cpu: Kernels, head_size: int) -> None:
    paged = make_paged(
        seed=6,
        sequences=[(1, 90), (1, 33), (1, 700)],
        heads=4,
        kv_heads=2,
        head_size=head_size,
        page_size=8,
        dtype=torch.bfloat16,
    )
    together = run(cpu, paged)
    for b in range(3):
        batch = AttentionBatch(
            rows_B=paged.batch.rows_B[b : b + 1],
            q_starts_B1=torch.tensor([0, 1]),
            context_B=paged.batch.context_B[b : b + 1],
        )
        alone = run(cpu, dataclasses.replace(paged, q=paged.q[b : b + 1], batch=batch))
        assert torch.equal(alone, together[b : b + 1])


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_decode_step_gives_the_same_bytes_however_its_heads_are_shared_out(threads: int) -> None:
    paged = make_paged(
        seed=10, sequences=[(1, 400)], heads=6, kv_heads=3, head_size=64, page_size=16, dtype=torch.bfloat16
    )
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = run(load("cpu"), paged)
        torch.set_num_threads(threads)
        assert torch.equal(run(load("cpu"), paged), alone)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("head_size", [16, 64])
def test_nan_in_a_key_is_not_hidden(either: Kernels, head_size: int) -> None:
    paged = make_paged(
        seed=7, sequences=[(1, 20)], heads=2, kv_heads=1, head_size=head_size, page_size=4, dtype=torch.bfloat16
    )
    paged.k_pool[paged.table[paged.batch.rows_B[0], 7].long()] = float("nan")
    assert run(either, paged).isnan().any()


def small() -> Paged:
    return make_paged(
        seed=8, sequences=[(1, 6), (12, 20)], heads=4, kv_heads=2, head_size=16, page_size=4, dtype=torch.float32
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(13, 3, 16)}, "expected a multiple"),
        ({"q": torch.zeros(13, 4, 8)}, "heads of 8"),
        ({"q": torch.zeros(13, 4, 16, dtype=torch.bfloat16)}, "one dtype"),
        ({"table": torch.zeros(4, 30, dtype=torch.int64)}, r"torch\.int32"),
        ({"table": torch.zeros(30, 4, dtype=torch.int32).t()}, "strided"),
    ],
)
def test_inputs_that_disagree_are_refused(either: Kernels, change: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(either, dataclasses.replace(small(), **change))


@pytest.mark.parametrize(
    ("rows", "starts", "contexts", "message"),
    [
        ([1, 2], [0, 1, 12], [6, 20], "expected 0 to 13"),
        ([1, 9], [0, 1, 13], [6, 20], "row 9"),
        ([1, 2], [0, 1, 13], [6, 11], "context 11"),
        ([1, 2], [0, 1, 13], [6, 24], "context 24"),
        ([1, 2], [0, 0, 13], [6, 20], "0 tokens"),
        ([1, 2], [0, 13], [6, 20], "expected B, B [+] 1, B"),
    ],
)
def test_a_batch_that_does_not_fit_its_tokens_is_refused(
    cpu: Kernels, rows: list[int], starts: list[int], contexts: list[int], message: str
) -> None:
    batch = AttentionBatch(
        rows_B=torch.tensor(rows), q_starts_B1=torch.tensor(starts), context_B=torch.tensor(contexts)
    )
    with pytest.raises(ValueError, match=message):
        run(cpu, dataclasses.replace(small(), batch=batch))


@pytest.mark.parametrize("sequence", [0, 1])
def test_a_slot_outside_of_the_pool_is_refused(cpu: Kernels, sequence: int) -> None:
    paged = small()
    paged.table[paged.batch.rows_B[sequence], 3] = paged.k_pool.shape[0]
    with pytest.raises((ValueError, IndexError), match="out of"):
        run(cpu, paged)


@pytest.mark.parametrize(("size", "dtype"), [(16, torch.float32), (64, torch.bfloat16)])
@pytest.mark.parametrize("sequence", [0, 1])
def test_a_slot_outside_of_the_pool_is_read_as_slot_0_where_a_canary_looks_rows_up_again(
    either: Kernels, sequence: int, size: int, dtype: torch.dtype
) -> None:
    shape = {"heads": 4, "kv_heads": 2, "head_size": size, "page_size": 4, "dtype": dtype}
    paged = make_paged(seed=8, sequences=[(1, 6), (12, 20)], **shape)
    paged.k_pool[0], paged.v_pool[0] = 0.5, 0.25
    row, batch = paged.batch.rows_B[sequence], dataclasses.replace(paged.batch, is_watched=True)
    paged.table[row, 3] = 0
    expected = run(either, paged)
    for wild in (-1, paged.k_pool.shape[0], 1 << 30):
        paged.table[row, 3] = wild
        assert torch.equal(run(either, dataclasses.replace(paged, batch=batch)), expected)
