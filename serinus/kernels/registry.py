"""Kernels: one callable per op, chosen once at start. Knows the columns, not what calls them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from serinus.core.errors import ConfigError
from serinus.kernels.batch import AttentionBatch
from serinus.kernels.packed import PackedLinear
from serinus.kernels.ref import (
    counter_gumbel,
    gelu_mul,
    hashed_pages,
    linear,
    paged_attention,
    pages,
    qk_rope_store,
    rms_norm,
    silu_mul,
)

__all__ = ["COLUMNS", "Kernels", "load", "warm"]

COLUMNS = ("auto", "ref", "cpu")
"""What `load` accepts as a column."""

LayersKv = Sequence[tuple[Tensor, Tensor]]


class MovePages(Protocol):
    """gather_pages and scatter_pages."""

    def __call__(
        self, layers_kv: LayersKv, pages_G: Tensor, page_size: int, bytes_RY: Tensor, rows_G: Tensor | None = None, /
    ) -> None: ...


class HashedPages(Protocol):
    """Pages between pools and a buffer, and a hash of each."""

    def __call__(
        self, lanes: Sequence[Tensor], pages_G: NDArray[np.int64], rows_GY: NDArray[np.uint8] | None, seed: int,
        inward: bool = False, /,
    ) -> NDArray[np.uint64]: ...  # fmt: skip


class PagedAttention(Protocol):
    """Attention over paged KV."""

    def __call__(
        self,
        q_TND: Tensor,
        k_pool_SHD: Tensor,
        v_pool_SHD: Tensor,
        req_to_token_RC: Tensor,
        batch: AttentionBatch,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """[T, N, D]; see the reference."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """The ops that a device offers. Each means what the file of the same name in `kernels/ref` says."""

    device: str
    """Device type they run on."""
    columns: dict[str, str]
    """Op -> the column that serves it."""
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    """(x_TE, weight_E, eps) -> out_TE"""
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    """(x_TE, residual_TE, weight_E, eps) -> out_TE; residual += x in place"""
    silu_mul: Callable[[Tensor], Tensor]
    """(gate_up_T2F) -> out_TF"""
    gelu_mul: Callable[[Tensor], Tensor]
    """(gate_up_T2F) -> out_TF"""
    qk_rope_store: Callable[
        [Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None, float, Tensor, Tensor, Tensor, Tensor], None
    ]
    """(qkv_TX, cos_PF, sin_PF, positions_T, q_norm_D, k_norm_D, eps, k_pool_SHD, v_pool_SHD, slots_T, q_out_TND)"""
    paged_attention: PagedAttention
    """(q_TND, k_pool_SHD, v_pool_SHD, req_to_token_RC, batch, scale, window=None, softcap=None) -> out_TND"""
    pack_linear: Callable[[Tensor, Tensor | None], PackedLinear]
    """(weight_OI, bias_O) -> packed; the weight itself is no longer needed"""
    linear: Callable[[Tensor, PackedLinear], Tensor]
    """(x_TI, packed) -> out_TO"""
    gather_pages: MovePages
    """(layers_kv, pages_G, page_size, out_RY, rows_G=None)"""
    scatter_pages: MovePages
    """(layers_kv, pages_G, page_size, bytes_RY, rows_G=None)"""
    hashed_pages: HashedPages
    """(lanes, pages_G, rows_GY, seed, inward=False) -> hashes_G"""
    counter_gumbel: Callable[[Tensor, Tensor, int], Tensor]
    """(seeds_B, positions_B, vocab) -> noise_BV fp32"""
    warmer: Callable[[int, int, torch.dtype], None] | None = None
    """(head size, query heads per KV head, dtype): makes the machine code of all ops ready; None: there is none."""


def load(device: str, column: str = "auto") -> Kernels:
    """The ops for a device.

    Args:
        device: a torch device type, such as "cpu"; an index ("cuda:0") is ignored.
        column: "auto" takes the fastest column of the device and `ref` where it lacks an op; "ref" and "cpu" ask
            for that column.
    Raises:
        ConfigError: no such column, or not on this device.
    """
    kind = device.split(":")[0]
    if column not in COLUMNS:
        raise ConfigError(f"kernels: column {column!r}, expected one of {', '.join(COLUMNS)}")
    if column == "cpu" and kind != "cpu":
        raise ConfigError(f"kernels: column 'cpu' on device {device!r}, expected 'auto' or 'ref'")
    if kind == "cpu" and column != "ref":
        return _load_cpu()
    return _load_ref(kind)


def warm(
    kernels: Kernels, *, head_size: int | None = None, group: int | None = None, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Make the machine code ready: compiled once, from the disk ever after. Idempotent.

    Args:
        kernels: from `load`.
        head_size, group: of one model, group being its query heads per KV head; None takes the usual ones.
        dtype: torch.bfloat16 or torch.float32.
    Cost: half a second from the disk; the first time about 15 s, or 3 s for one model. What was not warmed is
    compiled at first use.
    """
    if kernels.warmer is None:
        return
    if (head_size is None) != (group is None):
        raise ConfigError(f"kernels: warm got head_size {head_size}, group {group}; expected both or none")
    shapes = _USUAL_SHAPES if head_size is None or group is None else ((head_size, group),)
    for size, heads in shapes:
        kernels.warmer(size, heads, dtype)


_USUAL_SHAPES = ((64, 4), (64, 7), (64, 8), (128, 1), (128, 2), (128, 4), (128, 5), (128, 7), (128, 8))
"""(head size, group) of the dense Llama, Qwen and Mistral checkpoints that fit a CPU."""


def _load_cpu() -> Kernels:
    # Imported here: numba takes a quarter of a second, which other devices and `--help` need not pay.
    from serinus.kernels.cpu import column

    return Kernels(device="cpu", columns=dict.fromkeys(_OPS, "cpu"), warmer=column.warm, **column.ops())


def _load_ref(kind: str) -> Kernels:
    return Kernels(
        device=kind,
        columns=dict.fromkeys(_OPS, "ref"),
        rms_norm=rms_norm.rms_norm,
        add_rms_norm=rms_norm.add_rms_norm,
        silu_mul=silu_mul.silu_mul,
        gelu_mul=gelu_mul.gelu_mul,
        qk_rope_store=qk_rope_store.qk_rope_store,
        paged_attention=paged_attention.paged_attention,
        pack_linear=linear.pack_linear,
        linear=linear.linear,
        gather_pages=pages.gather_pages,
        scatter_pages=pages.scatter_pages,
        hashed_pages=hashed_pages.hashed_pages,
        counter_gumbel=counter_gumbel.counter_gumbel,
    )


_OPS = tuple(name for name in Kernels.__dataclass_fields__ if name not in ("device", "columns", "warmer"))
