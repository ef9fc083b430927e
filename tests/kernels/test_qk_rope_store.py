"""The pass between projection and attention: by hand, both columns, refused inputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from serinus.core.stamps import digest_coefficients
from serinus.kernels import Kernels, WrittenRows
from serinus.kernels.ref.canary import add_digests
from tests.kernels.conftest import DTYPES


def inputs(
    *, tokens: int, heads: int, kv_heads: int, size: int, dtype: torch.dtype, norms: bool, seed: int = 0
) -> dict[str, Any]:
    rng = torch.Generator().manual_seed(seed)
    slot_count = tokens * 2 + 8
    angle = torch.rand(50, size // 2, generator=rng) * 6
    norm = torch.randn(2, size, generator=rng).to(dtype)
    return {
        "qkv_TX": torch.randn(tokens, (heads + 2 * kv_heads) * size, generator=rng).to(dtype),
        "cos_PF": angle.cos(),
        "sin_PF": angle.sin(),
        "positions_T": torch.randint(0, 50, (tokens,), generator=rng),
        "q_norm_D": norm[0].contiguous() if norms else None,
        "k_norm_D": norm[1].contiguous() if norms else None,
        "eps": 1e-6,
        "k_pool_SHD": torch.zeros(slot_count, kv_heads, size, dtype=dtype),
        "v_pool_SHD": torch.zeros(slot_count, kv_heads, size, dtype=dtype),
        "slots_T": torch.randperm(slot_count - 1, generator=rng)[:tokens] + 1,
        "q_out_TND": torch.empty(tokens, heads, size, dtype=dtype),
    }


def run(kernels: Kernels, given: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """q, k pool, v pool after the op, on copies."""
    mine = {name: value.clone() if isinstance(value, Tensor) else value for name, value in given.items()}
    kernels.qk_rope_store(*mine.values())
    return mine["q_out_TND"], mine["k_pool_SHD"], mine["v_pool_SHD"]


def assert_rotations_close(got: Tensor, expected: Tensor) -> None:
    """Equal within two roundings of a pair's length: a normed bf16 head is rounded before its pairs are rotated, so an
    element near zero inherits the rounding of the larger ones it was made of."""
    assert got.dtype == expected.dtype
    low, high = expected.float().chunk(2, dim=-1)
    length = torch.hypot(low, high).repeat(*[1] * (expected.dim() - 1), 2)
    allowed = 2 * length * (2.0**-7 if got.dtype == torch.bfloat16 else 2.0**-20) + 1e-6
    excess = (got.float() - expected.float()).abs() - allowed
    assert excess.max() <= 0, f"beyond two roundings of its pair by {excess.max():.2e}"


def test_a_quarter_turn_swaps_the_halves(either: Kernels) -> None:
    given = inputs(tokens=1, heads=1, kv_heads=1, size=4, dtype=torch.float32, norms=False)
    given["qkv_TX"] = torch.arange(1.0, 13.0).view(1, 12)
    given["cos_PF"], given["sin_PF"] = torch.zeros(3, 2), torch.ones(3, 2)
    given["positions_T"], given["slots_T"] = torch.tensor([2]), torch.tensor([5])
    q, k, v = run(either, given)
    assert q.tolist() == [[[-3.0, -4.0, 1.0, 2.0]]]
    assert k[5].tolist() == [[-7.0, -8.0, 5.0, 6.0]]
    assert v[5].tolist() == [[9.0, 10.0, 11.0, 12.0]]


def test_only_the_named_slots_are_written(either: Kernels) -> None:
    given = inputs(tokens=5, heads=2, kv_heads=1, size=16, dtype=torch.bfloat16, norms=True)
    _, k, v = run(either, given)
    untouched = torch.ones(k.shape[0], dtype=torch.bool)
    untouched[given["slots_T"]] = False
    assert k[untouched].abs().max() == 0
    assert v[untouched].abs().max() == 0
    assert k[given["slots_T"]].abs().amax(dim=(1, 2)).min() > 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "size"), [(1, 16, 8, 128), (33, 4, 4, 64), (300, 7, 1, 16), (9, 6, 2, 10)]
)
def test_both_columns_agree(
    ref: Kernels, cpu: Kernels, tokens: int, heads: int, kv_heads: int, size: int, norms: bool, dtype: torch.dtype
) -> None:
    given = inputs(tokens=tokens, heads=heads, kv_heads=kv_heads, size=size, dtype=dtype, norms=norms)
    for ours, theirs in zip(run(cpu, given), run(ref, given), strict=True):
        assert_rotations_close(ours, theirs)


@pytest.mark.parametrize("size", [128, 10])
def test_both_columns_agree_on_fp32_norms_of_bf16_heads(ref: Kernels, cpu: Kernels, size: int) -> None:
    given = inputs(tokens=9, heads=6, kv_heads=2, size=size, dtype=torch.bfloat16, norms=True)
    q_norm_D, k_norm_D = 1 + torch.rand(2, size, generator=torch.Generator().manual_seed(1)) * 1e-2
    wide = {**given, "q_norm_D": q_norm_D, "k_norm_D": k_norm_D}
    for ours, theirs in zip(run(cpu, wide), run(ref, wide), strict=True):
        assert_rotations_close(ours, theirs)
    for column in (cpu, ref):
        with pytest.raises(ValueError, match="head norms"):
            run(column, {**wide, "k_norm_D": given["k_norm_D"]})


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize(("tokens", "kv_heads", "size"), [(1, 8, 128), (33, 2, 64), (7, 3, 16), (9, 1, 6)])
def test_what_is_stored_is_digested_as_the_reference_digests_it_in_the_pool(
    ref: Kernels, cpu: Kernels, tokens: int, kv_heads: int, size: int, partial: bool, dtype: torch.dtype
) -> None:
    lanes = size * dtype.itemsize // 2
    factors = torch.from_numpy(digest_coefficients([0, 3], range(kv_heads), lanes, 2, partial=partial))
    for column in (ref,) if dtype is torch.float16 else (ref, cpu):
        sums_T2, expected = torch.zeros((tokens, 2), dtype=torch.int64), torch.zeros((tokens, 2), dtype=torch.int64)
        for layer in range(2):
            given = inputs(tokens=tokens, heads=4 * kv_heads, kv_heads=kv_heads, size=size, dtype=dtype, norms=True)
            run(column, {**given, "written": WrittenRows(coefficients_22W=factors[layer], sums_T2=sums_T2)})
            _, k, v = run(column, given)
            found = ref.canary_digest([(k, v)], given["slots_T"], factors[layer : layer + 1])
            expected = add_digests(expected, found)
        assert torch.equal(sums_T2, expected)


@pytest.mark.parametrize(
    ("sums", "lanes", "message"),
    [
        (torch.zeros(3, 2, dtype=torch.int64), 16, r"sums torch.int64 \(3, 2\) of 4 rows"),
        (torch.zeros(4, 2, dtype=torch.int32), 16, r"sums torch.int32 \(4, 2\) of 4 rows"),
        (torch.zeros(4, 2, dtype=torch.int64), 12, r"digest coefficients torch.int32 \(2, 2, 12\)"),
    ],
)
def test_digests_that_are_not_of_these_rows_are_refused(
    either: Kernels, sums: Tensor, lanes: int, message: str
) -> None:
    given = inputs(tokens=4, heads=2, kv_heads=1, size=16, dtype=torch.bfloat16, norms=False)
    factors = torch.ones((2, 2, lanes), dtype=torch.int32)
    with pytest.raises(ValueError, match=message):
        run(either, {**given, "written": WrittenRows(coefficients_22W=factors, sums_T2=sums)})


def test_padding_tokens_may_share_slot_0(either: Kernels) -> None:
    given = inputs(tokens=6, heads=2, kv_heads=1, size=16, dtype=torch.float32, norms=False)
    given["slots_T"] = torch.tensor([3, 0, 0, 0, 7, 0])
    _, _, v = run(either, given)
    assert torch.equal(v[3, 0], given["qkv_TX"][0, 48:])
    assert torch.equal(v[7, 0], given["qkv_TX"][4, 48:])


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("qkv_TX", torch.zeros(4, 60), "does not hold"),
        ("positions_T", torch.zeros(3, dtype=torch.int64), "3 positions"),
        ("positions_T", torch.zeros(4, dtype=torch.int32), "expected torch.int64"),
        ("cos_PF", torch.zeros(50, 5), "rope tables"),
        ("v_pool_SHD", torch.zeros(5, 1, 16), "pools differ"),
        ("q_out_TND", torch.zeros(4, 2, 16, dtype=torch.bfloat16), "one dtype"),
        ("qkv_TX", torch.zeros(64, 4).t(), "strided"),
    ],
)
def test_inputs_that_disagree_are_refused(either: Kernels, field: str, value: Tensor, message: str) -> None:
    given = inputs(tokens=4, heads=2, kv_heads=1, size=16, dtype=torch.float32, norms=False)
    with pytest.raises(ValueError, match=message):
        run(either, {**given, field: value})


@pytest.mark.parametrize(("field", "value"), [("positions_T", 50), ("positions_T", -1), ("slots_T", 16)])
def test_a_position_or_slot_out_of_range_is_refused_not_written(cpu: Kernels, field: str, value: int) -> None:
    given = inputs(tokens=4, heads=2, kv_heads=1, size=16, dtype=torch.float32, norms=False)
    given[field][2] = value
    with pytest.raises(ValueError, match="token 2 is out of range"):
        run(cpu, given)
