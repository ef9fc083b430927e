"""The routed experts of a mixture: the specification. T = tokens, K = experts of a token, X = experts, E = width of the
stream, F = width inside an expert (of this rank)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from serinus.kernels.checks import Expert, check_experts, check_fused_moe
from serinus.kernels.contracts import ExpertGate
from serinus.kernels.packed import PackedExperts

__all__ = ["SWIGLU_ALPHA", "SWIGLU_LIMIT", "expert_gate", "fused_moe", "pack_experts"]

SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0
"""gpt-oss: slope of the sigmoid, and what gate and up are held to."""


def pack_experts(experts: Iterable[Expert], gate_up_bias: Tensor | None, down_bias: Tensor | None) -> PackedExperts:
    """Take quantized experts into the form that `fused_moe` reads. Here: as they are.

    Args:
        experts: of each gate and up as one, and down; taken one at a time. At least one.
        gate_up_bias: [X, 2F], or None; down_bias: [X, E], likewise. Kept in fp32.
    Raises:
        ValueError: experts of several shapes, bits or groups.
    """
    kept = tuple(check_experts(experts))
    gate_up, down = kept[0]
    return PackedExperts(
        gate_up=gate_up.values_OI,
        down=down.values_OI,
        gate_up_bias=None if gate_up_bias is None else gate_up_bias.float(),
        down_bias=None if down_bias is None else down_bias.float(),
        sizes=(len(kept), down.in_size, down.out_size),
        quantized=kept,
    )


def fused_moe(
    x_TE: Tensor, weights_TK: Tensor, ids_TK: Tensor, packed: PackedExperts, gate: ExpertGate
) -> Tensor:  # fmt: skip
    """Of each token the sum over its experts: weight * down(gate(gate_up(x))), in fp32, rounded once.

    Args:
        x_TE: fp32, bf16 or fp16.
        weights_TK: fp32, of each token's experts.
        ids_TK: int64, their numbers, and X for each that is none of these (`is_part`); else those of a token differ.
        packed: the experts' projections, in the dtype of x, or quantized: those are multiplied with as they are, with
            sums in fp32, and only what goes into the down projection is rounded.
        gate: silu(gate) * up; or `swiglu_oai`: (up + 1) * gate * sigmoid(1.702 gate), gate at most 7 and up from -7
            to 7.
    Returns: [T, E], dtype of x.
    Raises:
        ValueError: shapes or dtypes disagree, or the experts were packed by another column.
    Cost: reads the weights of the experts that are hit. Here with host waits.
    """
    check_fused_moe(x_TE, weights_TK, ids_TK, packed)
    if packed.rows is not None:
        raise ValueError("kernels: fused_moe of column ref got integers of another order, expected those of column ref")
    out_TE = torch.zeros_like(x_TE, dtype=torch.float32)
    for expert in sorted(set(ids_TK.flatten().tolist()) - {packed.shape[0]}):
        tokens, places = torch.where(ids_TK == expert)
        rows = x_TE[tokens]
        if packed.quantized:
            gate_up, down = (each.dequantized() for each in packed.quantized[expert])
            rows = rows.float()
        else:
            gate_up, down = packed.gate_up[expert], packed.down[expert]
        bias = None if packed.gate_up_bias is None else packed.gate_up_bias[expert]
        inner = expert_gate(F.linear(rows, gate_up, bias), gate).to(x_TE.dtype)
        bias = None if packed.down_bias is None else packed.down_bias[expert]
        added = F.linear(inner.to(down.dtype), down, bias)
        out_TE.index_add_(0, tokens, added.float() * weights_TK[tokens, places, None])
    return out_TE.to(x_TE.dtype)


def expert_gate(gate_up_T2F: Tensor, gate: ExpertGate) -> Tensor:
    """The activation between the projections, in fp32, rounded once, [T, F]."""
    gates, ups = gate_up_T2F.float().chunk(2, dim=-1)
    if gate == "silu":
        return (F.silu(gates) * ups).to(gate_up_T2F.dtype)
    gates, ups = gates.clamp(max=SWIGLU_LIMIT), ups.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
    return ((ups + 1.0) * gates * torch.sigmoid(gates * SWIGLU_ALPHA)).to(gate_up_T2F.dtype)
