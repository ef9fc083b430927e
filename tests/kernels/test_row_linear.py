"""The linear of few rows: right, equal to oneDNN's to the bit, and refused where the bytes are not as it reads them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from serinus.kernels import Gate, Kernels
from serinus.kernels.cpu.row_linear import find_blocks, find_part
from serinus.kernels.cpu.scalar import host_has
from serinus.kernels.packed import PackedLinear, RowBlocks
from tests.kernels.conftest import assert_close

BF16 = torch.bfloat16
ONEDNN_HAS_BF16: bool = torch.ops.mkldnn._is_mkldnn_bf16_supported()
"""Not on processors without AVX512: column cpu widens bf16 there."""
SHAPES = [(64, 64), (128, 64), (64, 192), (192, 576), (320, 1024), (256, 1088), (128, 3072), (64, 4864), (1152, 128)]
ROWS = [*range(1, 18), 31, 32, 33, 50]


def assert_readable_here(blocks: RowBlocks | None) -> None:
    """Whole blocks are read where the processor has the instruction. With AMX oneDNN may sum otherwise: then not."""
    if not host_has("avx512bf16"):
        assert blocks is None
    elif not host_has("amx-bf16"):
        assert blocks is not None


def reorder(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, 16)
    return packed


def multiply_by_onednn(x: Tensor, packed: PackedLinear) -> Tensor:
    rows = x.float() if packed.widened else x
    out: Tensor = torch.ops.mkldnn._linear_pointwise(rows, packed.weight, packed.bias_O, "none", [], "")
    return out.to(x.dtype)


def make(out: int, width: int, *, has_bias: bool, rows: int = 64) -> tuple[Tensor, Tensor, Tensor | None]:
    """Random x [rows, width], weight [out, width] and bias."""
    rng = torch.Generator().manual_seed(out * 10007 + width)
    weight = (torch.randn(out, width, generator=rng) / math.sqrt(width)).to(BF16)
    bias = torch.randn(out, generator=rng).to(BF16) if has_bias else None
    return torch.randn(rows, width, generator=rng).to(BF16), weight, bias


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("out", "width"), SHAPES)
def test_few_rows_are_right_within_one_rounding_of_float64(cpu: Kernels, out: int, width: int, has_bias: bool) -> None:
    x, weight, bias = make(out, width, has_bias=has_bias)
    packed = cpu.pack_linear(weight, bias)
    assert_readable_here(packed.rows)
    exact = x.double() @ weight.double().T + (0.0 if bias is None else bias.double())
    for rows in ROWS:
        got = cpu.linear(x[:rows], packed)
        assert got.dtype == BF16
        torch.testing.assert_close(got.double(), exact[:rows], rtol=2.0**-8, atol=1e-5)


def same(found: Tensor, expected: Tensor) -> bool:
    """Equal to the bit; on a processor with AMX, where oneDNN's own sums depend on the number of rows, nearly."""
    if host_has("amx-bf16"):
        return torch.allclose(found.float(), expected.float(), rtol=2.0**-6, atol=1e-3)
    return torch.equal(found, expected)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("out", "width"), [*SHAPES, (100, 1500), (2048, 2048), (7, 33)])
def test_a_row_is_the_same_to_the_bit_whatever_else_is_in_the_batch(
    cpu: Kernels, out: int, width: int, has_bias: bool
) -> None:
    x, weight, bias = make(out, width, has_bias=has_bias)
    packed = cpu.pack_linear(weight, bias)
    together = cpu.linear(x, packed)  # 64 rows: oneDNN
    for rows in ROWS:
        assert same(cpu.linear(x[:rows], packed), together[:rows]), rows
        assert same(cpu.linear(x[64 - rows :], packed), together[64 - rows :]), rows


@pytest.mark.parametrize("width", [64, 1024, 1088, 3072])
def test_sums_are_taken_in_the_order_of_onednn(cpu: Kernels, width: int) -> None:
    """Terms that cancel leave what rounding did on the way: another order gives another number, far above bf16's."""
    x, weight, _ = make(128, width, has_bias=False)
    weight[:, width // 2 :] = -weight[:, : width // 2].flip(1)
    x[:, width // 2 :] = x[:, : width // 2].flip(1)
    packed = cpu.pack_linear(weight, None)
    by_onednn = multiply_by_onednn(x, packed)
    assert same(cpu.linear(x[:9], packed), by_onednn[:9])
    assert same(cpu.linear(x[:1], packed), by_onednn[:1])


def test_the_number_of_threads_changes_no_bit(cpu: Kernels) -> None:
    x, weight, bias = make(1152, 128, has_bias=True)
    packed = cpu.pack_linear(weight, bias)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = cpu.linear(x[:5], packed)
        torch.set_num_threads(2)
        assert torch.equal(cpu.linear(x[:5], packed), alone)
    finally:
        torch.set_num_threads(before)


def test_bytes_in_another_layout_are_not_read(cpu: Kernels) -> None:
    _, weight, _ = make(128, 256, has_bias=False)
    if not ONEDNN_HAS_BF16:
        packed = cpu.pack_linear(weight, None)
        assert (packed.rows, packed.widened, packed.weight.dtype) == (None, True, torch.float32)
        return
    assert_readable_here(find_blocks(weight, reorder(weight)))
    assert find_blocks(weight, reorder(weight.flip(0))) is None
    assert find_blocks(weight, reorder(weight.view(128, 128, 2).flip(2).reshape(128, 256))) is None
    one_bit = weight.view(torch.int16).clone()
    one_bit[127, 255] ^= 1
    assert find_blocks(weight, reorder(one_bit.view(BF16))) is None


def test_weights_that_onednn_pads_or_keeps_in_fp32_are_left_to_it(cpu: Kernels) -> None:
    for out, width in ((96, 64), (64, 96), (1, 64), (64, 1)):
        assert cpu.pack_linear(torch.ones(out, width, dtype=BF16), None).rows is None
    assert cpu.pack_linear(torch.ones(64, 64), None).rows is None


def test_fp32_is_computed_by_onednn_as_before(cpu: Kernels) -> None:
    rng = torch.Generator().manual_seed(5)
    x, weight = torch.randn(20, 1088, generator=rng), torch.randn(128, 1088, generator=rng)
    packed = cpu.pack_linear(weight, None)
    for rows in (2, 16):
        assert torch.equal(cpu.linear(x[:rows], packed), multiply_by_onednn(x[:rows], packed))


def test_a_single_fp32_row_is_the_same_to_the_bit_in_company_too(cpu: Kernels) -> None:
    rng = torch.Generator().manual_seed(6)
    x, weight = torch.randn(16, 3072, generator=rng), torch.randn(128, 3072, generator=rng)
    packed = cpu.pack_linear(weight, None)
    together = cpu.linear(x, packed)
    for row in range(16):
        assert torch.equal(cpu.linear(x[row : row + 1], packed)[0], together[row])


def test_every_part_but_the_last_is_as_long_as_the_first(cpu: Kernels) -> None:
    """One output per pair: 1, then 2**30 and -2**30. Only the 1 before the start of a part survives."""
    for width in (576, 1088, 3072):
        weight = torch.zeros(width // 2, width // 2, 2)
        pairs = torch.arange(1, width // 2 - 1)
        weight[pairs, pairs - 1, 0], weight[pairs, pairs, 0], weight[pairs, pairs + 1, 0] = 1.0, 2.0**30, -(2.0**30)
        packed = cpu.pack_linear(weight.view(-1, width).to(BF16), None)
        out = multiply_by_onednn(torch.ones(3, width, dtype=BF16), packed)[0, 1:-1]
        begins = (out.nonzero()[:, 0] + 1).tolist()
        if packed.rows is not None:
            part = find_part(width)
            assert part is not None
            assert begins == list(range(part, width // 2, part))
        assert torch.equal(cpu.linear(torch.ones(1, width, dtype=BF16), packed)[0, 1:-1], out)


def test_nan_and_infinity_come_through(cpu: Kernels) -> None:
    _, weight, _ = make(64, 64, has_bias=False)
    x = torch.zeros(3, 64, dtype=BF16)
    x[0, 5], x[1, 5] = math.nan, math.inf
    out = cpu.linear(x, cpu.pack_linear(weight.abs() + 1, None))
    assert out[0].isnan().all()
    assert (out[1] == math.inf).all()
    assert (out[2] == 0).all()


def test_rows_of_another_width_or_type_are_refused(cpu: Kernels) -> None:
    packed = cpu.pack_linear(torch.ones(64, 64, dtype=BF16), None)
    with pytest.raises((ValueError, RuntimeError)):
        cpu.linear(torch.ones(2, 128, dtype=BF16), packed)
    with pytest.raises((ValueError, RuntimeError)):
        cpu.linear(torch.ones(2, 64), packed)
    with pytest.raises((ValueError, RuntimeError)):
        cpu.linear(torch.ones(2, 64, dtype=BF16), cpu.pack_linear(torch.ones(64, 64), None))


def test_rows_that_lie_apart_in_memory_and_no_rows_at_all(cpu: Kernels) -> None:
    x, weight, bias = make(64, 128, has_bias=True)
    packed = cpu.pack_linear(weight, bias)
    assert torch.equal(cpu.linear(x[::3][:5], packed), cpu.linear(x[::3][:5].contiguous(), packed))
    assert cpu.linear(x[:0], packed).shape == (0, 64)


@pytest.mark.parametrize("gate", [None, "silu", "gelu"])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(("out", "width"), [(128, 64), (256, 1088), (1152, 128), (100, 70)])
def test_norm_linear_and_gate_at_once_give_the_bits_of_one_after_the_other(
    cpu: Kernels, out: int, width: int, wide: bool, gate: Gate | None
) -> None:
    x, weight, bias = make(out, width, has_bias=True)
    packed = cpu.pack_linear(weight, bias)
    norm = torch.rand(width) + 0.5 if wide else (torch.rand(width) + 0.5).to(BF16)
    added = torch.randn(len(x), width).to(BF16)
    for rows in ROWS:
        for addend in (None, added[:rows]):
            ours, theirs = x[:rows].clone(), x[:rows].clone()
            if addend is None:
                normed = cpu.rms_norm(theirs, norm, 1e-6)
            else:
                normed = cpu.add_rms_norm(addend, theirs, norm, 1e-6)
            expected = cpu.linear(normed, packed)
            if gate is not None:
                expected = (cpu.silu_mul if gate == "silu" else cpu.gelu_mul)(expected)
            assert torch.equal(cpu.norm_linear(addend, ours, norm, 1e-6, packed, gate), expected), rows
            assert torch.equal(ours, theirs)


def test_norm_and_linear_at_once_refuse_what_each_refuses(either: Kernels) -> None:
    x, weight, _ = make(128, 64, has_bias=False)
    packed = either.pack_linear(weight, None)
    norm = torch.ones(64, dtype=BF16)
    with pytest.raises(ValueError, match="norm weight"):
        either.norm_linear(None, x[:2], norm[:32], 1e-6, packed)
    with pytest.raises(ValueError, match="residual"):
        either.norm_linear(x[:2], x[:3].clone(), norm, 1e-6, packed)


def test_norm_and_linear_at_once_are_what_the_reference_says(ref: Kernels, cpu: Kernels) -> None:
    x, weight, bias = make(256, 128, has_bias=True)
    norm = torch.rand(128).to(BF16) + 0.5
    found, stream = [], []
    for kernels in (ref, cpu):
        residual = x[:5].clone()
        found.append(kernels.norm_linear(x[5:10], residual, norm, 1e-6, kernels.pack_linear(weight, bias), "silu"))
        stream.append(residual)
    assert torch.equal(*stream)
    assert_close(found[1], found[0], ulps=2.0, bf16_atol=2e-2)
