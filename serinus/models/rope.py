"""Rotary embedding tables: one cos and one sin table for all layers, computed once at load.

D = head size, P = positions.
"""

from __future__ import annotations

import math

import torch

from serinus.models.spec import RopeSpec

__all__ = ["frequencies", "rope_tables"]


def frequencies(rope: RopeSpec, head_size: int) -> torch.Tensor:
    """Radians per position of each pair of elements, fp32 [D/2], longest wavelength last.

    llama3 (Llama 3.1): wavelengths longer than original_context / low_freq_factor are stretched by `factor`, those
    shorter than original_context / high_freq_factor stay, and between the two the stretch is blended in linearly in
    the number of turns the pair makes over the original context.
    """
    exponent = torch.arange(0, head_size, 2, dtype=torch.float32) / head_size
    plain = 1.0 / (rope.theta**exponent)
    if rope.kind == "default":
        return plain
    if rope.kind == "linear":
        return plain / rope.factor
    turns = rope.original_context * plain / (2 * math.pi)
    keep = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0.0, 1.0)
    return plain * keep + plain / rope.factor * (1.0 - keep)


def rope_tables(rope: RopeSpec, head_size: int, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, fp32 [P, D/2] each. Cost: P * D * 4 bytes, resident."""
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * frequencies(rope, head_size)[None, :]
    return angles.cos(), angles.sin()
