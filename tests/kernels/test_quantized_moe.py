"""Quantized experts: the cpu column adds what the reference says that their integers stand for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from serinus.kernels import ExpertGate, Kernels, PackedExperts, QuantizedWeight
from serinus.kernels.cpu import quantized_moe
from serinus.kernels.cpu.scalar import host_has
from tests.kernels.conftest import DTYPES
from tests.kernels.test_quantized_linear import FORMS, made

COUNT, CHOSEN = 6, 2
SHAPES = [(64, 64, 64), (72, 40, 8), (128, 100, 128), (200, 136, 32)]
"""Widths of the stream and inside an expert, and inputs of a group."""
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}
Experts = list[tuple[QuantizedWeight, QuantizedWeight]]


def experts(width: int, inner: int, group: int, bits: int, *, has_zeros: bool) -> Experts:
    """Random integers; the zero points of the second one are all 0, and not written out."""
    found = []
    for number in range(COUNT):
        pair = [made(*shape, group, bits, has_zeros=has_zeros) for shape in ((2 * inner, width), (width, inner))]
        turned = [each.rows((torch.arange(each.out_size) + 3 * number) % each.out_size) for each in pair]
        turned = [each.scaled(8.0) for each in turned]
        found.append((turned[0], turned[1]))
    if has_zeros:
        found[1] = replace(found[1][0], zeros_OG=None), replace(found[1][1], zeros_OG=None)
    return found


def choices(tokens: int, width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, the weights of their experts, and the experts."""
    rng = torch.Generator().manual_seed(tokens)
    ids = torch.rand((tokens, COUNT), generator=rng).argsort(1)[:, :CHOSEN]
    return torch.randn((tokens, width), generator=rng), torch.rand((tokens, CHOSEN), generator=rng), ids.contiguous()


def biases(width: int, inner: int) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(width)
    return torch.randn((COUNT, 2 * inner), generator=rng), torch.randn((COUNT, width), generator=rng)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gate", ["silu", "swiglu_oai"])
@pytest.mark.parametrize(("bits", "has_zeros"), FORMS)
def test_the_sums_are_those_of_the_reference_and_a_row_hangs_on_no_other(
    ref: Kernels, cpu: Kernels, bits: int, has_zeros: bool, gate: ExpertGate, dtype: torch.dtype
) -> None:
    for width, inner, group in SHAPES:
        both = experts(width, inner, group, bits, has_zeros=has_zeros)
        added = biases(width, inner) if gate == "swiglu_oai" else (None, None)
        fast, plain = cpu.pack_experts(both, *added), ref.pack_experts(both, *added)
        x_TE, weights_TK, ids_TK = choices(150, width)
        x_TE = x_TE.to(dtype)
        together = cpu.fused_moe(x_TE, weights_TK, ids_TK, fast, gate)
        expected = ref.fused_moe(x_TE, weights_TK, ids_TK, plain, gate)
        assert (together.dtype, together.shape) == (dtype, x_TE.shape)
        assert float((together - expected).abs().max()) <= TOLERANCE[dtype] * float(expected.abs().max())
        for count in (0, 1, 2, 5, 33):
            some = cpu.fused_moe(x_TE[:count], weights_TK[:count], ids_TK[:count], fast, gate)
            assert torch.equal(some, together[:count]), (width, count)


@pytest.mark.parametrize(("bits", "has_zeros"), FORMS)
def test_the_reference_adds_what_the_dequantized_experts_add(ref: Kernels, bits: int, has_zeros: bool) -> None:
    width, inner, group = SHAPES[1]
    both = experts(width, inner, group, bits, has_zeros=has_zeros)
    gate_up_bias, down_bias = biases(width, inner)
    plain = PackedExperts(
        gate_up=torch.stack([gate_up.dequantized() for gate_up, _ in both]),
        down=torch.stack([down.dequantized() for _, down in both]), gate_up_bias=gate_up_bias, down_bias=down_bias,
    )  # fmt: skip
    inputs = choices(9, width)
    found = ref.fused_moe(*inputs, ref.pack_experts(iter(both), gate_up_bias, down_bias), "silu")
    assert torch.allclose(found, ref.fused_moe(*inputs, plain, "silu"), rtol=1e-5, atol=1e-5)


def test_more_tokens_than_are_sorted_at_once_give_the_bits_of_fewer(
    cpu: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    width, inner, group = SHAPES[0]
    packed = cpu.pack_experts(experts(width, inner, group, 4, has_zeros=False), None, None)
    inputs = choices(150, width)
    expected = cpu.fused_moe(*inputs, packed, "silu")
    monkeypatch.setattr(quantized_moe, "_TOKENS_MAX", 40)
    assert torch.equal(cpu.fused_moe(*inputs, packed, "silu"), expected)


@pytest.mark.parametrize(("bits", "has_zeros"), FORMS)
def test_without_bf16_products_rows_of_bf16_are_computed_in_fp32(
    ref: Kernels, cpu: Kernels, bits: int, has_zeros: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A processor with them is told that it has none; on one without them this is what all other tests run."""
    monkeypatch.setattr(quantized_moe, "host_has", lambda feature: feature != "avx512bf16" and host_has(feature))
    width, inner, group = SHAPES[3]
    both = experts(width, inner, group, bits, has_zeros=has_zeros)
    x_TE, *chosen = choices(40, width)
    inputs = x_TE.bfloat16(), *chosen
    expected = ref.fused_moe(*inputs, ref.pack_experts(both, None, None), "silu")
    found = cpu.fused_moe(*inputs, cpu.pack_experts(both, None, None), "silu")
    assert float((found - expected).abs().max()) <= 3e-2 * float(expected.abs().max())


@pytest.mark.parametrize("column", ["ref", "cpu"])
@pytest.mark.parametrize("tokens", [1, 9, 150])
def test_two_halves_of_the_experts_add_up_to_what_all_of_them_add(
    request: pytest.FixtureRequest, column: str, tokens: int
) -> None:
    """Experts of others are neither read nor counted, whether a rank has some of a token's or none."""
    ops: Kernels = request.getfixturevalue(column)
    width, inner, group = SHAPES[1]
    both, half = experts(width, inner, group, 8, has_zeros=False), COUNT // 2
    x_TE, weights_TK, ids_TK = choices(tokens, width)
    total = torch.zeros_like(x_TE)
    for first in (0, half):
        own_TK = torch.where((ids_TK >= first) & (ids_TK < first + half), ids_TK - first, half)
        part = replace(ops.pack_experts(both[first : first + half], None, None), is_part=True)
        total += ops.fused_moe(x_TE, weights_TK, own_TK, part, "silu")
    expected = ops.fused_moe(x_TE, weights_TK, ids_TK, ops.pack_experts(both, None, None), "silu")
    assert torch.allclose(total, expected, atol=1e-5 * float(expected.abs().max()))


def test_what_does_not_fit_is_refused(ref: Kernels, cpu: Kernels) -> None:
    width, inner, group = SHAPES[1]
    both = experts(width, inner, group, 4, has_zeros=False)
    unlike = experts(width, inner, group, 8, has_zeros=False)
    for ops in (ref, cpu):
        with pytest.raises(ValueError, match="expert 1 has gate and up, and down"):
            ops.pack_experts([both[0], unlike[1]], None, None)
        with pytest.raises(ValueError, match="expert 0 has gate and up, and down"):
            ops.pack_experts([(both[0][1], both[0][0])], None, None)
        packed = ops.pack_experts(both, torch.zeros(COUNT, 2 * inner), None)
        x_TE, weights_TK, ids_TK = choices(3, width)
        for bad in (
            (x_TE[:2], weights_TK, ids_TK, packed),
            (x_TE[:, :8], weights_TK, ids_TK, packed),
            (x_TE, weights_TK, ids_TK, replace(packed, gate_up_bias=torch.zeros(COUNT, 3))),
            (x_TE, weights_TK, ids_TK, replace(packed, gate_up_bias=torch.zeros(COUNT, 2 * inner).bfloat16())),
        ):
            with pytest.raises(ValueError, match="fused_moe got"):
                ops.fused_moe(*bad, "silu")
    for ours, theirs in ((ref, cpu), (cpu, ref)):
        with pytest.raises(ValueError, match=r"expected those of"):
            ours.fused_moe(*choices(3, width), theirs.pack_experts(both, None, None), "silu")
