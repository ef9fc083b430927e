"""ForwardBatch: the tensors of one forward pass, as the runner builds them and models and hooks read them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from serinus.kernels.batch import AttentionBatch

__all__ = ["ForwardBatch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBatch:
    """T tokens of B sequences, packed one sequence after the other. W = rows whose hidden state is wanted.

    All index tensors are int64 on the model's device.
    """

    tokens_T: torch.Tensor
    """Token ids."""
    positions_T: torch.Tensor
    """Position of each token in its sequence."""
    slots_T: torch.Tensor
    """Where each token's KV goes; slot 0 for padding rows."""
    attention: AttentionBatch
    """Which tokens belong to which row of req_to_token."""
    wanted_W: torch.Tensor | None = None
    """Rows of T whose hidden state the caller reads, ascending; None = all. Set only if each is its sequence's last."""
    wanted_attention: AttentionBatch | None = None
    """With wanted_W: the same W queries as an attention batch of one query per sequence."""
