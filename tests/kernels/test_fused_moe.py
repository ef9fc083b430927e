"""The routed experts of column cpu: the sums of the reference, of the experts that are hit and of nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from serinus.kernels import ExpertGate, PackedExperts, load
from serinus.kernels.cpu.fused_moe import ROWS_MAX

COUNT, WIDTH, INNER = 6, 72, 40
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


def experts(dtype: torch.dtype, *, biased: bool) -> PackedExperts:
    """Random projections of six experts."""
    generator = torch.Generator().manual_seed(3)

    def drawn(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * 0.3).to(dtype)

    return PackedExperts(
        gate_up=drawn(COUNT, 2 * INNER, WIDTH), down=drawn(COUNT, WIDTH, INNER),
        gate_up_bias=drawn(COUNT, 2 * INNER) if biased else None, down_bias=drawn(COUNT, WIDTH) if biased else None,
    )  # fmt: skip


def choices(tokens: int, chosen: int = 2, count: int = COUNT) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, the weights of their experts, and the experts."""
    generator = torch.Generator().manual_seed(tokens)
    ids = [torch.randperm(count, generator=generator)[:chosen] for _ in range(tokens)]
    stacked = torch.stack(ids) if ids else torch.zeros((0, chosen), dtype=torch.int64)
    return torch.randn((tokens, WIDTH), generator=generator), torch.rand((tokens, chosen), generator=generator), stacked


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("gate", ["silu", "swiglu_oai"])
@pytest.mark.parametrize("tokens", [0, 1, 2, 3, 9, 20, 20 * ROWS_MAX])
def test_the_sums_are_those_of_the_reference(dtype: torch.dtype, biased: bool, gate: ExpertGate, tokens: int) -> None:
    x_TE, weights_TK, ids_TK = choices(tokens)
    inputs = x_TE.to(dtype), weights_TK, ids_TK, experts(dtype, biased=biased), gate
    found, expected = load("cpu").fused_moe(*inputs), load("cpu", "ref").fused_moe(*inputs)
    assert (found.dtype, found.shape) == (dtype, x_TE.shape)
    if tokens:
        assert float((found - expected).abs().max()) <= TOLERANCE[dtype] * float(expected.abs().max())


@pytest.mark.parametrize("column", ["ref", "cpu"])
@pytest.mark.parametrize("tokens", [1, 9, 20 * ROWS_MAX])
def test_two_halves_of_the_experts_add_up_to_what_all_of_them_add(column: str, tokens: int) -> None:
    x_TE, weights_TK, ids_TK = choices(tokens)
    packed, total, half = experts(torch.float32, biased=True), torch.zeros_like(x_TE), COUNT // 2
    for first in (0, half):
        stacks = {name: getattr(packed, name)[first : first + half] for name in ("gate_up", "down")}
        biases = {name: getattr(packed, name)[first : first + half] for name in ("gate_up_bias", "down_bias")}
        own_TK = torch.where((ids_TK >= first) & (ids_TK < first + half), ids_TK - first, half)
        part = PackedExperts(**stacks, **biases, is_part=True)
        total += load("cpu", column).fused_moe(x_TE, weights_TK, own_TK, part, "silu")
    expected = load("cpu", column).fused_moe(x_TE, weights_TK, ids_TK, packed, "silu")
    assert torch.allclose(total, expected, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("column", ["ref", "cpu"])
@pytest.mark.parametrize("tokens", [4, 4 * ROWS_MAX])
def test_experts_that_no_token_chose_are_not_read(column: str, tokens: int) -> None:
    packed = experts(torch.float32, biased=False)
    x_TE, weights_TK, ids_TK = choices(tokens, count=COUNT - 1)
    before = load("cpu", column).fused_moe(x_TE, weights_TK, ids_TK, packed, "silu")
    packed.gate_up[-1], packed.down[-1] = torch.nan, torch.nan
    assert torch.equal(load("cpu", column).fused_moe(x_TE, weights_TK, ids_TK, packed, "silu"), before)
    assert load("cpu", column).fused_moe(x_TE, weights_TK, ids_TK + 1, packed, "silu").isnan().any()


def test_what_does_not_fit_is_refused() -> None:
    packed, (x_TE, weights_TK, ids_TK) = experts(torch.float32, biased=True), choices(3)
    ops = load("cpu")
    for bad in (
        (x_TE[:2], weights_TK, ids_TK, packed),
        (x_TE, weights_TK.double(), ids_TK, packed),
        (x_TE, weights_TK, ids_TK.int(), packed),
        (x_TE.bfloat16(), weights_TK, ids_TK, packed),
        (x_TE, weights_TK, ids_TK, replace(packed, down=packed.down.mT)),
        (x_TE, weights_TK, ids_TK, replace(packed, down_bias=torch.zeros(COUNT, 3))),
    ):
        with pytest.raises(ValueError, match="fused_moe got"):
            ops.fused_moe(*bad, "silu")


def test_the_limits_of_the_clamped_activation_hold() -> None:
    """Far above them, gate and up count as 7; far below, up counts as -7 and the gate lets nothing through."""
    packed = PackedExperts(gate_up=torch.tensor([[[100.0], [50.0]]]), down=torch.ones(1, 1, 1))
    one, zero = torch.ones(1, 1), torch.zeros((1, 1), dtype=torch.int64)
    for column in ("ref", "cpu"):
        ops = load("cpu", column)
        assert float(ops.fused_moe(one, one, zero, packed, "swiglu_oai")) == pytest.approx(8 * 7, rel=1e-3)
        assert float(ops.fused_moe(-one, one, zero, packed, "swiglu_oai")) == pytest.approx(0.0, abs=1e-3)
