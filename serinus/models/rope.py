"""Rotary embedding tables: one cos and one sin table for all layers, computed once at load.

D = head size, P = positions. Kernels turn element i of a head with element i + D/2. Where a model turns other elements
together, or not all of them, the rows of its query and key projections are put in that order when they are loaded
(`head_order`): scores do not change, as queries and keys are in the same order.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from serinus.models.rope_fields import RopeSpec


def frequencies(rope: RopeSpec, size: int, context: int) -> tuple[torch.Tensor, float]:
    """Radians per position of each pair of elements that turn, fp32 [size/2], longest wavelength last; and what cosines
    and sines are multiplied by.

    llama3 (Llama 3.1): wavelengths longer than original_context / low_freq_factor are stretched by `factor`, those
    shorter than original_context / high_freq_factor stay, and between the two the stretch is blended in linearly in
    the number of turns the pair makes over the original context. longrope: the long factors where `context` is longer
    than the original one, for every position: KV of short and of long sequences is the same.
    """
    if rope.given:
        return _of_transformers(rope, size, context)
    exponent = torch.arange(0, size, 2, dtype=torch.float32) / size
    plain = 1.0 / (rope.theta**exponent)
    if rope.kind == "default":
        return plain, 1.0
    if rope.kind == "linear":
        return plain / rope.factor, 1.0
    turns = rope.original_context * plain / (2 * math.pi)
    keep = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0.0, 1.0)
    return plain * keep + plain / rope.factor * (1.0 - keep), 1.0


def rope_tables(rope: RopeSpec, head_size: int, positions: int, context: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, fp32 [P, D/2] each; `context`: the model's. Cost: P * D * 4 bytes, resident."""
    size = _rotated(rope, head_size)
    radians, scale = frequencies(rope, size, context)
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * radians[None, :]
    still = (positions, (head_size - size) // 2)
    return (
        torch.cat([angles.cos() * scale, torch.ones(still)], dim=1),
        torch.cat([angles.sin() * scale, torch.zeros(still)], dim=1),
    )


def head_order(rope: RopeSpec, head_size: int) -> torch.Tensor | None:
    """Where each element of a query or key head comes from, int64 [D]; None: as it is stored."""
    size = _rotated(rope, head_size)
    if size == head_size and not rope.interleaved:
        return None
    turning, still = torch.arange(size), torch.arange(size, head_size)
    firsts, seconds = (turning[0::2], turning[1::2]) if rope.interleaved else turning.chunk(2)
    return torch.cat([firsts, still[: len(still) // 2], seconds, still[len(still) // 2 :]])


def _rotated(rope: RopeSpec, head_size: int) -> int:
    return int(head_size * rope.rotated)


def _of_transformers(rope: RopeSpec, size: int, context: int) -> tuple[torch.Tensor, float]:
    """By transformers' own functions."""
    from transformers import PreTrainedConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config: Any = PreTrainedConfig()
    config.hidden_size = config.head_dim = size
    config.num_attention_heads = 1
    config.max_position_embeddings = context
    config.rope_parameters = {
        "rope_type": rope.kind,
        "rope_theta": rope.theta,
        "original_max_position_embeddings": rope.original_context,
        **{name: list(value) if isinstance(value, tuple) else value for name, value in rope.given},
    }
    radians, scale = ROPE_INIT_FUNCTIONS[rope.kind](config, torch.device("cpu"), seq_len=context)
    return radians.float(), float(scale)
