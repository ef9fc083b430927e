"""Linear layers and page bytes."""

from __future__ import annotations

import gc
import math

import numpy as np
import pytest
import torch

from serinus.kernels import Kernels
from tests.kernels.conftest import DTYPES, assert_close


def test_a_linear_layer_by_hand(either: Kernels) -> None:
    packed = either.pack_linear(torch.tensor([[1.0, 2.0], [0.0, -1.0], [3.0, 0.5]]), torch.tensor([0.0, 10.0, 0.0]))
    assert either.linear(torch.tensor([[1.0, 4.0]]), packed).tolist() == [[9.0, 6.0, 5.0]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("tokens", "width", "out"), [(1, 64, 96), (16, 17, 5), (100, 128, 64), (3, 1, 1)])
def test_both_columns_agree_on_linears(
    ref: Kernels, cpu: Kernels, tokens: int, width: int, out: int, has_bias: bool, dtype: torch.dtype
) -> None:
    rng = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, width, generator=rng).to(dtype)
    weight = (torch.randn(out, width, generator=rng) / math.sqrt(width)).to(dtype)
    bias = torch.randn(out, generator=rng).to(dtype) if has_bias else None
    expected = ref.linear(x, ref.pack_linear(weight, bias))
    assert_close(cpu.linear(x, cpu.pack_linear(weight, bias)), expected, ulps=2)


def test_a_packed_weight_shares_no_memory_with_the_plain_one(cpu: Kernels) -> None:
    weight, bias = torch.ones(4, 4), torch.ones(4)
    packed = cpu.pack_linear(weight, bias)
    weight.zero_()
    bias.zero_()
    gc.collect()
    assert cpu.linear(torch.ones(1, 4), packed).tolist() == [[5.0] * 4]


def test_linears_of_one_column_refuse_weights_of_the_other(ref: Kernels, cpu: Kernels) -> None:
    weight = torch.ones(4, 4)
    with pytest.raises(ValueError, match="column ref"):
        ref.linear(torch.ones(1, 4), cpu.pack_linear(weight, None))
    with pytest.raises(ValueError, match="column cpu"):
        cpu.linear(torch.ones(1, 4), ref.pack_linear(weight, None))


def test_weights_and_biases_of_wrong_shape_are_refused(either: Kernels) -> None:
    with pytest.raises(ValueError, match="linear weight"):
        either.pack_linear(torch.ones(4), None)
    with pytest.raises(ValueError, match="bias"):
        either.pack_linear(torch.ones(4, 3), torch.ones(3))


def pools(layers: int, slots: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """bf16 [slots, 2, 4] pools; element = number of its lane * 64 + slot."""
    lanes = [torch.full((slots, 2, 4), i * 64.0).add(torch.arange(slots)[:, None, None]) for i in range(layers * 2)]
    return [(lanes[2 * i].bfloat16(), lanes[2 * i + 1].bfloat16()) for i in range(layers)]


def test_page_bytes_are_page_first_then_layer_then_k_and_v(either: Kernels) -> None:
    layers = pools(2, 12)
    out = torch.zeros(2, 4 * 3 * 16, dtype=torch.uint8)
    either.gather_pages(layers, np.array([3, 1]), 3, out)
    got = out.view(torch.bfloat16).view(2, 4, 3, 8)[..., 0]
    assert got[0].tolist() == [[lane * 64.0 + slot for slot in (9, 10, 11)] for lane in range(4)]
    assert got[1].tolist() == [[lane * 64.0 + slot for slot in (3, 4, 5)] for lane in range(4)]


@pytest.mark.parametrize("page_size", [1, 4, 128])
def test_pages_come_back_as_they_left_and_disturb_no_other(either: Kernels, page_size: int) -> None:
    rng = torch.Generator().manual_seed(page_size)
    layers = [(torch.randn(8 * page_size, 2, 4, generator=rng), torch.randn(8 * page_size, 2, 4)) for _ in range(3)]
    buffer = torch.zeros(3, page_size * 2 * 4 * 4 * 6, dtype=torch.uint8)
    either.gather_pages(layers, np.array([6, 2, 5]), page_size, buffer)
    other = [(torch.zeros_like(k), torch.zeros_like(v)) for k, v in layers]
    either.scatter_pages(other, np.array([1, 7, 3]), page_size, buffer)
    for mine, theirs in zip(layers, other, strict=True):
        for source, target in zip(mine, theirs, strict=True):
            from_pages, to_pages = source.view(8, page_size, 2, 4), target.view(8, page_size, 2, 4)
            assert torch.equal(to_pages[[1, 7, 3]], from_pages[[6, 2, 5]])
            assert to_pages[[0, 2, 4, 5, 6]].abs().max() == 0


def test_page_moves_that_do_not_fit_are_refused(either: Kernels) -> None:
    layers = pools(1, 8)
    buffer = torch.zeros(1, 4 * 16 * 2, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"pages 2 \.\. 2"):
        either.gather_pages(layers, np.array([2]), 4, buffer)
    with pytest.raises(ValueError, match="pages -1"):
        either.scatter_pages(layers, np.array([-1]), 4, buffer)
    with pytest.raises(ValueError, match="page buffer"):
        either.gather_pages(layers, np.array([0, 1]), 4, buffer)
    with pytest.raises(ValueError, match="no whole number of pages"):
        either.gather_pages(layers, np.array([0]), 3, torch.zeros(1, 3 * 16 * 2, dtype=torch.uint8))
    turned = [tuple(half.transpose(1, 2) for half in pair) for pair in layers]
    with pytest.raises(ValueError, match="strided"):
        either.scatter_pages(turned, np.array([1]), 4, buffer)


def test_pages_go_to_rows_that_lie_apart_and_a_layer_at_a_time(either: Kernels) -> None:
    layers = pools(3, 12)
    wide = torch.zeros(5, 3 * 3 * 32 + 7, dtype=torch.uint8)
    everything = wide[:, : 3 * 3 * 32]
    either.gather_pages(layers, np.array([3, 1]), 3, everything, np.array([4, 0]))
    plain = torch.zeros(2, 3 * 3 * 32, dtype=torch.uint8)
    either.gather_pages(layers, np.array([3, 1]), 3, plain)
    assert torch.equal(wide[[4, 0], : 3 * 3 * 32], plain)
    assert wide[1:4].max() == 0
    assert wide[:, 3 * 3 * 32 :].max() == 0
    other = [(torch.zeros_like(k), torch.zeros_like(v)) for k, v in layers]
    either.scatter_pages(other[1:2], np.array([2, 0]), 3, wide[:, 96:192], np.array([0, 4]))
    assert torch.equal(other[1][0].view(4, 3, 2, 4)[[2, 0]], layers[1][0].view(4, 3, 2, 4)[[1, 3]])
    assert torch.equal(other[1][1].view(4, 3, 2, 4)[[2, 0]], layers[1][1].view(4, 3, 2, 4)[[1, 3]])
    assert all(lane.abs().max() == 0 for pair in (other[0], other[2]) for lane in pair)
    assert other[1][0].view(4, 24)[[1, 3]].abs().max() == 0


def test_rows_outside_of_the_buffer_are_refused(either: Kernels) -> None:
    layers, buffer = pools(1, 8), torch.zeros(3, 4 * 16 * 2, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"rows 3 \.\. 3"):
        either.gather_pages(layers, np.array([1]), 4, buffer, np.array([3]))
    with pytest.raises(ValueError, match="2 rows for 1 pages"):
        either.scatter_pages(layers, np.array([1]), 4, buffer, np.array([0, 1]))
