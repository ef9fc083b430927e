"""Causal attention of chunks by FlashAttention 3, where the optional package fa3-fwd is installed, on a Hopper: over
the keys and values that `chunk_attention` copies out of their pages, in place of `attend_contiguous`.

Of bfloat16, heads of 64 and 128 elements, without windows, caps and sinks. One split, so equal inputs give equal bits.
The package's wheels have no paged KV (0.0.3); its op is called by its place in the list of arguments, which other
versions may change: a call that is refused at start ends the start with what torch says.

T = tokens, N = query heads, H = heads of keys, L = rows of a group, D = elements of a head, B = sequences.
"""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, TypeAlias

import torch
from torch import Tensor

from serinus.core.log import get_logger
from serinus.kernels.batch import AttentionBatch
from serinus.kernels.triton.contiguous_attention import ChunkGroup

_PACKAGE = "fa3_fwd"
_HOPPER = 9
_Starts: TypeAlias = tuple[Tensor, Tensor, Tensor, int, int]
_log = get_logger("kernels")


class FlashAttention:
    """The op of the package, and where the sequences of the groups of one batch begin, for all layers of a step."""

    def __init__(self, forward: Any) -> None:
        self._forward = forward
        self._latest: tuple[AttentionBatch | None, dict[int, _Starts]] = None, {}

    def attend(
        self, q_TND: Tensor, k_HLD: Tensor, v_HLD: Tensor, batch: AttentionBatch, group: ChunkGroup, scale: float,
        out_TND: Tensor, *, queries: int, head: int,
    ) -> None:  # fmt: skip
        """Attention of the sequences of a group into `out_TND`, as `attend_contiguous` does it."""
        own = slice(head, head + queries * len(k_HLD))
        q_starts, k_starts, contexts, *longest = self._starts_of(batch, group)
        self._forward(
            q_TND[group.tokens, own], k_HLD.transpose(0, 1), v_HLD.transpose(0, 1), None, None, None,
            out_TND[group.tokens, own], q_starts, k_starts, None, None, contexts, *longest, None, None, None, None,
            None, None, None, None, None, scale, True, -1, -1, 0, 0.0, True, None, 1, None, 0,
        )  # fmt: skip

    def _starts_of(self, batch: AttentionBatch, group: ChunkGroup) -> _Starts:
        """int32: B + 1 offsets of the group's queries, as many of their contexts, and how long these are; the most
        queries, and the longest context."""
        of, starts = self._latest
        if of is not batch:
            self._latest = _, starts = batch, {}
        first, end = group.sequences.start, group.sequences.stop
        if first not in starts:
            assert batch.chunks is not None, "kernels: a group of a batch whose chunks nobody knows"
            places = batch.chunks.places_B[first:end] - group.chunks[0].place
            starts[first] = (
                (batch.q_starts_B1[first : end + 1] - group.tokens.start).int(),
                torch.nn.functional.pad(places, (0, 1), value=group.rows).int(),
                batch.context_B[first:end].int(),
                max(each.count for each in group.chunks),
                max(each.context for each in group.chunks),
            )
        return starts[first]


@lru_cache
def flash_attention(device: torch.device) -> FlashAttention | None:
    """FlashAttention 3 on this device; None: there is no such package, or it does not load here, which is logged."""
    if device.type != "cuda" or find_spec(_PACKAGE) is None:
        return None
    if torch.cuda.get_device_capability(device)[0] != _HOPPER:
        _log.warning("package fa3-fwd is for Hopper, not for %s: own kernels serve", torch.cuda.get_device_name(device))
        return None
    try:
        import_module(f"{_PACKAGE}._C")
        return FlashAttention(torch.ops.fa3_fwd.fwd)
    except (ImportError, OSError, AttributeError) as error:
        _log.warning("package fa3-fwd does not load: %s; own kernels serve", error)
        return None
