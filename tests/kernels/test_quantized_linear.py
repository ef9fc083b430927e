"""The linear of integers: the cpu column multiplies by exactly what the reference says that they stand for."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from serinus.kernels import Gate, Kernels, QuantizedWeight
from serinus.kernels.cpu import linear as cpu_linear
from serinus.kernels.cpu import quantized
from serinus.kernels.cpu.row_linear import fused_rows
from serinus.kernels.cpu.scalar import host_has
from serinus.models.quantized import to_fp8
from tests.kernels.conftest import DTYPES, assert_close

SHAPES = [(64, 64, 64), (128, 256, 128), (100, 70, 32), (7, 33, 64), (192, 384, 8), (320, 1088, 128), (64, 520, 520)]
"""Outputs, inputs, and the inputs of a group."""
E2M1 = 0
"""In place of bits: values of the 4-bit float."""
FORMS = [(8, False), (8, True), (4, False), (4, True), (E2M1, False)]
ROWS = (*range(1, 9), 31, 33, 70)


def made(out: int, width: int, group: int, bits: int, *, has_zeros: bool) -> QuantizedWeight:
    """Random integers, all of their range, scales of both signs."""
    rng = torch.Generator().manual_seed(out * 10007 + width + bits)
    e2m1 = bits == E2M1
    half, groups = 12 if e2m1 else 1 << bits - 1, -(-width // group)
    values = torch.randint(-7 if e2m1 else -half, 8 if e2m1 else half, (out, width), generator=rng)
    if e2m1:
        values = values.sign() * torch.tensor([0, 1, 2, 3, 4, 6, 8, 12])[values.abs()]
    return QuantizedWeight(
        bits=8 if e2m1 else bits,
        group=group,
        e2m1=e2m1,
        values_OI=values.to(torch.int8),
        scales_OG=torch.randn(out, groups, generator=rng) / half / math.sqrt(width),
        zeros_OG=torch.randint(-8, 9, (out, groups), generator=rng).to(torch.int8) if has_zeros else None,
    )


def rows_of(width: int, dtype: torch.dtype, count: int = 70) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(width)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("bits", "has_zeros"), FORMS)
def test_any_number_of_rows_is_what_the_reference_says_and_a_row_hangs_on_no_other(
    ref: Kernels, cpu: Kernels, bits: int, has_zeros: bool, dtype: torch.dtype
) -> None:
    for out, width, group in SHAPES:
        weight = made(out, width, group, bits, has_zeros=has_zeros)
        bias = torch.randn(out).to(dtype) if out != 64 else None
        x = rows_of(width, dtype)
        fast, plain = cpu.pack_linear(weight, bias), ref.pack_linear(weight, bias)
        together = cpu.linear(x, fast)
        assert_close(together, ref.linear(x, plain))
        for count in ROWS:
            assert torch.equal(cpu.linear(x[:count], fast), together[:count]), (out, width, count)
            assert torch.equal(cpu.linear(x[70 - count :], fast), together[70 - count :]), (out, width, count)
        assert cpu.linear(x[:0], fast).shape == (0, out)


@pytest.mark.parametrize(("bits", "has_zeros"), FORMS)
def test_the_reference_multiplies_by_the_integers_less_zero_times_the_scale(
    ref: Kernels, bits: int, has_zeros: bool
) -> None:
    weight = made(7, 33, 8, bits, has_zeros=has_zeros)
    by_hand = torch.empty(7, 33, dtype=torch.float64)
    for o in range(7):
        for i in range(33):
            zero = 0 if weight.zeros_OG is None else int(weight.zeros_OG[o, i // 8])
            by_hand[o, i] = (int(weight.values_OI[o, i]) - zero) * float(weight.scales_OG[o, i // 8])
    x = rows_of(33, torch.float32, 5)
    assert_close(ref.linear(x, ref.pack_linear(weight, None)), (x.double() @ by_hand.T).float())


def test_floats_of_8_bits_are_multiplied_as_such_and_cut_and_joined(ref: Kernels) -> None:
    weight = torch.randn(40, 128, generator=torch.Generator().manual_seed(3))
    made = to_fp8(weight)
    assert float((made.dequantized() - weight).abs().max() / weight.abs().max()) < 1 / 16
    x = rows_of(128, torch.float32, 5)
    assert_close(ref.linear(x, ref.pack_linear(made, None)), (x.double() @ made.dequantized().double().T).float())
    assert torch.equal(made.columns(range(32, 96)).dequantized(), made.dequantized()[:, 32:96])
    assert torch.equal(made.rows(range(8, 24)).dequantized(), made.dequantized()[8:24])
    assert torch.equal(made.padded(3).dequantized()[40:], torch.zeros(3, 128))
    both = QuantizedWeight.joined([made, replace(made, rounds_rows=False)])
    assert both.e4m3
    assert not both.rounds_rows
    assert torch.equal(both.dequantized(), torch.cat([made.dequantized()] * 2))


@pytest.mark.parametrize("gate", [None, "silu", "gelu"])
@pytest.mark.parametrize(("bits", "has_zeros"), FORMS)
def test_norm_linear_and_gate_at_once_give_the_bits_of_one_after_the_other(
    cpu: Kernels, bits: int, has_zeros: bool, gate: Gate | None
) -> None:
    packed = cpu.pack_linear(made(256, 1088, 128, bits, has_zeros=has_zeros), torch.randn(256).bfloat16())
    x, norm = rows_of(1088, torch.bfloat16), torch.rand(1088).bfloat16() + 0.5
    for count in (1, 4, 5, 32, 33):
        ours, theirs = x[:count].clone(), x[:count].clone()
        expected = cpu.linear(cpu.add_rms_norm(x[:count], theirs, norm, 1e-6), packed)
        if gate is not None:
            expected = (cpu.silu_mul if gate == "silu" else cpu.gelu_mul)(expected)
        assert torch.equal(cpu.norm_linear(x[:count], ours, norm, 1e-6, packed, gate), expected), count
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(("bits", "has_zeros"), FORMS)
def test_without_bf16_products_rows_of_bf16_are_computed_in_fp32(
    ref: Kernels, cpu: Kernels, bits: int, has_zeros: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A processor with them is told that it has none; on one without them this is what all other tests run."""
    monkeypatch.setattr(cpu_linear, "host_has", lambda feature: feature != "avx512bf16" and host_has(feature))
    weight, bias = made(100, 136, 32, bits, has_zeros=has_zeros), torch.randn(100).bfloat16()
    x, fast = rows_of(136, torch.bfloat16), cpu.pack_linear(weight, bias)
    assert_close(cpu.linear(x, fast), ref.linear(x, ref.pack_linear(weight, bias)))
    assert torch.equal(cpu.linear(x[:3], fast), cpu.linear(x, fast)[:3])


def test_a_processor_without_tables_makes_numbers_of_e2m1_by_shifts(
    ref: Kernels, cpu: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, x = made(100, 136, 32, E2M1, has_zeros=False), rows_of(136, torch.float32)
    with_tables = cpu.pack_linear(weight, None)
    monkeypatch.setattr(quantized, "host_has", lambda feature: feature != "avx2" and host_has(feature))
    by_shifts = cpu.pack_linear(weight, None)
    assert with_tables.rows is not None
    assert by_shifts.rows is not None
    assert by_shifts.rows.bits == 4
    assert by_shifts.rows.levels != with_tables.rows.levels or not host_has("avx2")
    for count in (1, 3, 4, 5, 70):  # in registers, and a chunk at a time
        assert torch.equal(cpu.linear(x[:count], by_shifts), cpu.linear(x[:count], with_tables))
    assert_close(cpu.linear(x, by_shifts), ref.linear(x, ref.pack_linear(weight, None)))


def test_only_whole_blocks_are_multiplied_within_other_kernels(cpu: Kernels) -> None:
    has = host_has("avx512bf16")
    for shape, is_whole in (((128, 64, 64), True), ((100, 64, 64), False), ((128, 70, 70), False)):
        packed = cpu.pack_linear(made(*shape, 4, has_zeros=False), None)
        assert (fused_rows(packed) is not None) == (is_whole and has)


@pytest.mark.parametrize(("bits", "has_zeros"), FORMS)
def test_parts_of_a_quantized_weight_stand_for_parts_of_what_it_stands_for(bits: int, has_zeros: bool) -> None:
    weight = made(40, 256, 64, bits, has_zeros=has_zeros)
    whole = weight.dequantized()
    for span in (range(64, 192), range(16, 80), range(200, 256), range(256)):
        assert torch.equal(weight.columns(span).dequantized(), whole[:, span.start : span.stop]), span
    order = torch.randperm(40)
    assert torch.equal(weight.rows(order).dequantized(), whole[order])
    assert torch.equal(weight.rows(range(8, 24)).dequantized(), whole[8:24])
    assert torch.equal(weight.scaled(0.5).dequantized(), whole * 0.5)
    assert torch.equal(weight.padded(3).dequantized(), torch.cat([whole, torch.zeros(3, 256)]))
    other = made(8, 256, 64, bits or 8, has_zeros=not has_zeros)
    assert torch.equal(QuantizedWeight.joined([weight, other]).dequantized(), torch.cat([whole, other.dequantized()]))
    one_scale = made(8, 96, 96, bits, has_zeros=has_zeros)
    assert torch.equal(one_scale.columns(range(5, 31)).dequantized(), one_scale.dequantized()[:, 5:31])


def test_weights_that_are_none_are_refused(cpu: Kernels) -> None:
    weight = made(8, 64, 32, 4, has_zeros=False)
    with pytest.raises(ValueError, match="expected 4 or 8 bits"):
        QuantizedWeight(bits=4, group=16, values_OI=weight.values_OI, scales_OG=weight.scales_OG)
    with pytest.raises(ValueError, match="expected 4 or 8 bits"):
        QuantizedWeight(bits=3, group=32, values_OI=weight.values_OI, scales_OG=weight.scales_OG)
    with pytest.raises(ValueError, match="multiple of 8"):
        weight.columns(range(4, 20))
    with pytest.raises(ValueError, match="E2M1 with 4 bits, zeros: none, expected 8 and none"):
        replace(weight, e2m1=True)
    with pytest.raises(ValueError, match="E4M3 with 4 bits, zeros or E2M1, expected 8 bits alone"):
        replace(weight, e4m3=True)
    with pytest.raises(ValueError, match="quantized weight of E2M1, expected values of"):
        cpu.pack_linear(replace(made(8, 64, 32, 8, has_zeros=False), e2m1=True), None)
    packed = cpu.pack_linear(weight, None)
    with pytest.raises(ValueError, match="linear got"):
        cpu.linear(torch.ones(2, 32), packed)
    with pytest.raises(ValueError, match="linear got"):
        cpu.linear(torch.ones(2, 64, dtype=torch.float64), packed)
