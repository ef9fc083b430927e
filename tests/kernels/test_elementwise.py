"""Norms, activation, rope and store: hand-computed rows, both columns against each other, refused inputs."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from serinus.kernels import Kernels, load
from tests.kernels.conftest import DTYPES, assert_close

SHAPES = [(1, 8), (1, 1024), (3, 7), (16, 1024), (257, 320), (1100, 64)]


def test_a_row_of_equal_numbers_is_normed_to_its_weight(either: Kernels) -> None:
    x = torch.full((2, 4), 3.0)
    weight = torch.tensor([1.0, 2.0, -1.0, 0.5])
    torch.testing.assert_close(either.rms_norm(x, weight, 0.0), weight.expand(2, 4), rtol=0, atol=1e-6)


def test_a_norm_by_hand(either: Kernels) -> None:
    x = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    expected = x / math.sqrt(30 / 4 + 0.5)
    torch.testing.assert_close(either.rms_norm(x, torch.ones(4), 0.5), expected, rtol=0, atol=1e-6)


def test_the_sum_stays_in_the_residual_and_its_norm_comes_back(either: Kernels) -> None:
    x, residual = torch.tensor([[1.0, 1.0]]), torch.tensor([[2.0, 3.0]])
    out = either.add_rms_norm(x, residual, torch.ones(2), 0.0)
    assert residual.tolist() == [[3.0, 4.0]]
    assert x.tolist() == [[1.0, 1.0]]
    torch.testing.assert_close(out, torch.tensor([[3.0, 4.0]]) / math.sqrt(12.5), rtol=0, atol=1e-6)


def test_the_gated_activation_by_hand(either: Kernels) -> None:
    gate_up = torch.tensor([[0.0, 1.0, -2.0, 5.0, 3.0, 4.0]])
    expected = torch.tensor([[0.0, 3.0 / (1 + math.exp(-1.0)), 4.0 * -2.0 / (1 + math.exp(2.0))]])
    torch.testing.assert_close(either.silu_mul(gate_up), expected, rtol=0, atol=1e-6)


def test_the_activation_survives_extreme_gates(either: Kernels) -> None:
    gate_up = torch.tensor([[-1e30, -200.0, 200.0, 1e30, 1.0, 1.0, 1.0, 1.0]])
    torch.testing.assert_close(either.silu_mul(gate_up), torch.tensor([[0.0, 0.0, 200.0, 1e30]]))


def test_nan_stays_nan_in_every_op(either: Kernels) -> None:
    for dtype in DTYPES:
        x = torch.ones(1, 32, dtype=dtype)
        x[0, 3] = float("nan")
        assert either.rms_norm(x, torch.ones(32, dtype=dtype), 1e-6).isnan().all()
        assert either.silu_mul(x).isnan().any()
        assert either.gelu_mul(x).isnan().any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_both_columns_agree_on_norms(ref: Kernels, cpu: Kernels, shape: tuple[int, int], dtype: torch.dtype) -> None:
    rng = torch.Generator().manual_seed(shape[0] * 1000 + shape[1])
    x, residual = torch.randn(2, *shape, generator=rng).to(dtype) * 3
    weight = torch.randn(shape[1], generator=rng).to(dtype)
    assert_close(cpu.rms_norm(x, weight, 1e-6), ref.rms_norm(x, weight, 1e-6))
    ours, theirs = residual.clone(), residual.clone()
    assert_close(cpu.add_rms_norm(x, ours, weight, 1e-5), ref.add_rms_norm(x, theirs, weight, 1e-5))
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(rows, width * 2) for rows, width in SHAPES])
def test_both_columns_agree_on_the_activation(
    ref: Kernels, cpu: Kernels, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    gate_up = (torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 6).to(dtype)
    assert_close(cpu.silu_mul(gate_up), ref.silu_mul(gate_up))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(rows, width * 2) for rows, width in SHAPES])
def test_both_columns_agree_on_gelu(ref: Kernels, cpu: Kernels, shape: tuple[int, int], dtype: torch.dtype) -> None:
    gate_up = (torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 6).to(dtype)
    assert_close(cpu.gelu_mul(gate_up), ref.gelu_mul(gate_up))


def test_gelu_by_hand(either: Kernels) -> None:
    inner = math.sqrt(2 / math.pi) * (1.5 + 0.044715 * 1.5**3)
    expected = 0.5 * 1.5 * (1 + math.tanh(inner)) * 4
    out = either.gelu_mul(torch.tensor([[1.5, -40.0, 0.0, 40.0, 4.0, 2.0, 9.0, 2.0]]))
    torch.testing.assert_close(out, torch.tensor([[expected, 0.0, 0.0, 80.0]]), rtol=0, atol=2e-6)


@pytest.mark.parametrize("shape", SHAPES)
def test_an_fp32_weight_is_multiplied_before_the_only_rounding(
    ref: Kernels, cpu: Kernels, shape: tuple[int, int]
) -> None:
    rng = torch.Generator().manual_seed(shape[1])
    x, residual = torch.randn(2, *shape, generator=rng).to(torch.bfloat16) * 3
    weight = 1 + torch.randn(shape[1], generator=rng) * 1e-2
    x32 = x.float()
    expected = (x32 / (x32.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight).to(torch.bfloat16)
    for column in (ref, cpu):
        assert_close(column.rms_norm(x, weight, 1e-6), expected)
    ours, theirs = residual.clone(), residual.clone()
    assert_close(cpu.add_rms_norm(x, ours, weight, 1e-5), ref.add_rms_norm(x, theirs, weight, 1e-5))
    assert torch.equal(ours, theirs)


def test_strided_rows_are_read_as_they_are(ref: Kernels, cpu: Kernels) -> None:
    x = torch.randn(6, 64)[::2]
    weight = torch.randn(64)
    assert_close(cpu.rms_norm(x, weight, 1e-6), ref.rms_norm(x, weight, 1e-6))


@settings(max_examples=60)
@given(words=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=64))
def test_narrowing_rounds_like_torch_for_any_bits(words: list[int]) -> None:
    bits = torch.tensor(words, dtype=torch.int64).to(torch.uint32).view(torch.float32)
    residual = torch.zeros(1, len(words), dtype=torch.bfloat16)
    x = bits.to(torch.bfloat16).unsqueeze(0)
    load("cpu").add_rms_norm(x, residual, torch.ones(len(words), dtype=torch.bfloat16), 1e-6)
    assert torch.equal(residual.isnan(), x.isnan())
    assert torch.equal(residual.nan_to_num(0.0), x.nan_to_num(0.0))


def test_wrong_shapes_are_refused(either: Kernels) -> None:
    with pytest.raises(ValueError, match="norm weight"):
        either.rms_norm(torch.ones(2, 4), torch.ones(5), 1e-6)
    with pytest.raises(ValueError, match="norm weight"):
        either.rms_norm(torch.ones(2, 4), torch.ones(4, dtype=torch.bfloat16), 1e-6)
    with pytest.raises(ValueError, match="residual"):
        either.add_rms_norm(torch.ones(2, 4), torch.ones(3, 4), torch.ones(4), 1e-6)
    with pytest.raises(ValueError, match="width 5"):
        either.silu_mul(torch.ones(2, 5))
    with pytest.raises(ValueError, match="gelu_mul got width 5"):
        either.gelu_mul(torch.ones(2, 5))


def test_no_rows_give_no_rows(either: Kernels) -> None:
    assert either.rms_norm(torch.ones(0, 8), torch.ones(8), 1e-6).shape == (0, 8)
    assert either.silu_mul(torch.ones(0, 8)).shape == (0, 4)
