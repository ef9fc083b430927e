"""The registry of kernels: one callable per op, chosen once at start from three columns of files.

An op is a function; `FILES` names the file that holds it, and each column (`ref`, `cpu`, `triton`) is a folder that may
have such a file. Every op is in `ref`, which specifies it; where another column has no such file, or no such function
in it, `ref` serves. So a new kernel is one new file: nothing is registered. Knows the columns, not what calls them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from types import MappingProxyType, ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from serinus.core.errors import ConfigError
from serinus.kernels.canary import DuePages
from serinus.kernels.checks import Expert
from serinus.kernels.contracts import (
    AddLinear,
    ChooseTokens,
    FusedMoe,
    HashedPages,
    LatentAttention,
    MakeWatch,
    MovePages,
    NormLinear,
    PagedAttention,
    TopTokens,
    WatchedAttention,
)
from serinus.kernels.layers import MakeDecodeLayers
from serinus.kernels.packed import PackedExperts, PackedFactors, PackedLinear
from serinus.kernels.quantized import QuantizedWeight

COLUMNS = ("auto", "ref", "cpu", "triton")
"""What `load` accepts as a column."""

FILES: Mapping[str, str] = MappingProxyType(
    {
        "rms_norm": "rms_norm",
        "add_rms_norm": "rms_norm",
        "silu_mul": "silu_mul",
        "gelu_mul": "gelu_mul",
        "qk_rope_store": "qk_rope_store",
        "paged_attention": "paged_attention",
        "pack_factors": "watched_attention",
        "watched_attention": "watched_attention",
        "latent_attention": "latent_attention",
        "latent_rope_store": "latent_rope_store",
        "pack_linear": "linear",
        "linear": "linear",
        "add_linear": "add_linear",
        "norm_linear": "norm_linear",
        "pack_experts": "fused_moe",
        "fused_moe": "fused_moe",
        "gather_pages": "pages",
        "scatter_pages": "pages",
        "hashed_pages": "hashed_pages",
        "page_digests": "page_digests",
        "mask_logits": "mask_logits",
        "choose_tokens": "sampling",
        "top_tokens": "sampling",
        "canary_digest": "canary",
        "canary_due": "canary",
        "canary_plan": "canary",
        "canary_verify": "canary",
        "canary_bind": "canary_bind",
        "canary_write": "canary",
        "chain_hashes": "canary_bind",
        "canary_watch": "canary_watch",
    }
)
"""Op -> the file of each column that may hold it."""

_WATCHED = frozenset(("watched_attention", "pack_factors"))
"""Ops that stand in for `paged_attention`, and so are of the same column, except where one is asked for by name."""
_ON_HOST = frozenset(("canary_due", "chain_hashes", "page_digests"))
"""Ops of arrays of the host: whatever the device is, column cpu serves them."""
_MADE_OF_OPS = ("norm_linear", "add_linear")
"""Ops that call others: their files hold `make_<op>(ops)`, which is given those that were found."""
_COLUMN_OF = {"cpu": "cpu", "cuda": "triton"}
"""Device type -> the column made for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """The ops that a device offers. Each means what the function of the same name in `kernels/ref` says."""

    device: str
    """Device type they run on."""
    columns: Mapping[str, str]
    """Op -> the column that serves it."""
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    """(x_TE, weight_E, eps) -> out_TE"""
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    """(x_TE, residual_TE, weight_E, eps) -> out_TE; residual += x in place"""
    silu_mul: Callable[[Tensor], Tensor]
    """(gate_up_T2F) -> silu(gate) * up, out_TF"""
    gelu_mul: Callable[[Tensor], Tensor]
    """(gate_up_T2F) -> gelu(gate) * up, out_TF"""
    qk_rope_store: Callable[..., None]
    """(qkv_TX, cos_PF, sin_PF, positions_T, q_norm_D, k_norm_D, eps, k_pool_SHD, v_pool_SHD, slots_T, q_out_TND,
    written=None)"""
    paged_attention: PagedAttention
    """(q_TND, k_pool_SHD, v_pool_SHD, req_to_token_RC, batch, scale, window=None, softcap=None,
    sinks_N=None) -> out_TND"""
    pack_factors: Callable[[Tensor, int], PackedFactors]
    """(coefficients_22W, kv_heads) -> packed"""
    watched_attention: WatchedAttention
    """(q_BND, k_pool_SHD, v_pool_SHD, req_to_token_RC, batch, scale, digest=None, tiling=None, window=None,
    softcap=None, sinks_N=None) -> out_BND"""
    latent_attention: LatentAttention
    """(q_TNW, pool_S1W, value_size, req_to_token_RC, batch, scale, digest=None) -> out_TNV"""
    latent_rope_store: Callable[..., None]
    """(rows_TW, norm_R, eps, queries_TNQ, cos_PF, sin_PF, positions_T, pool_S1W, slots_T, q_out_TNW, written=None)"""
    pack_linear: Callable[[Tensor | QuantizedWeight, Tensor | None], PackedLinear]
    """(weight_OI, bias_O) -> packed; the weight itself is no longer needed"""
    linear: Callable[[Tensor, PackedLinear], Tensor]
    """(x_TI, packed) -> out_TO"""
    add_linear: AddLinear
    """(x_TI, packed, residual_TO) -> out_TO to be added, or None: residual += out in place"""
    norm_linear: NormLinear
    """(x_TI or None, residual_TI, weight_I, eps, packed, gate=None) -> out_TO; residual += x in place"""
    pack_experts: Callable[[Iterable[Expert], Tensor | None, Tensor | None], PackedExperts]
    """(of each expert gate_up_2FE and down_EF, quantized, gate_up_bias, down_bias) -> packed"""
    fused_moe: FusedMoe
    """(x_TE, weights_TK, ids_TK, packed, gate) -> out_TE, of the experts that are hit"""
    gather_pages: MovePages
    """(layers_kv, pages_G, page_size, out_RY, rows_G=None)"""
    scatter_pages: MovePages
    """(layers_kv, pages_G, page_size, bytes_RY, rows_G=None)"""
    hashed_pages: HashedPages
    """(lanes, pages_G, rows_GY, seed, inward=False) -> hashes_G"""
    page_digests: Callable[[NDArray[np.uint8], NDArray[np.int64], int, int, Tensor], NDArray[np.int64]]
    """(data_PY, pages_G, page_size, row_bytes, coefficients_L22W) -> digests_GS2; on the host"""
    mask_logits: Callable[[Tensor, Sequence[int], NDArray[np.int32]], None]
    """(logits_BV, rows, words_RW): tokens whose bit is 0 become -inf in place"""
    choose_tokens: ChooseTokens
    """(logits_BV, rows, masks=None) -> B ids"""
    top_tokens: Callable[[Tensor, Sequence[int], Sequence[int]], list[TopTokens]]
    """(logits_BV, chosen, counts) -> B log-probabilities, and lists of them"""
    canary_digest: Callable[..., Tensor]
    """(layers_kv, slots_E, coefficients_L22W) -> digests_E2"""
    canary_due: Callable[[NDArray[np.int64], int], DuePages]
    """(reads_6B, page_size) -> DuePages; on the host"""
    canary_plan: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]
    """(table_RC, due_7B, entry_count, page_size=) -> slots_E, positions_E, previous_E, names_E"""
    canary_verify: Callable[..., None]
    """(stamps_LS4, lane, slots_E, positions_E, previous_E, tokens_E, digests_E2, sequences_E, ring, count, checked,
    by_sequence=None)"""
    canary_bind: Callable[..., None]
    """(stamps_LS4, lane, slots_B, positions_B, chains_B, sequences_B, ring, count, checked, by_sequence=None)"""
    canary_write: Callable[..., None]
    """(stamps_LS4, lane, slots_T, positions_T, tokens_T, q_starts_B1, table_RC, rows_B, digests_T2)"""
    chain_hashes: Callable[[NDArray[np.int32], int, int], NDArray[np.int64]]
    """(tokens_N, position, chain) -> hashes_N; on the host"""
    canary_watch: MakeWatch
    """(ops, table_RC, stamps_LS4, layers_kv, coefficients_L22W, ring, stored, page_size) -> Watch"""
    decode_layers: MakeDecodeLayers | None = None
    """(layers, heads, eps, scale, softcap, gate, total) -> the layers of decode steps by few calls, the bits of the ops
    one by one; None: the column has none"""
    warmer: Warmer | None = None
    """([(head size, query heads per KV head)], dtype, watched): makes the machine code of all ops ready; None: there is
    none."""

    def summary(self) -> str:
        """Which ops run on which column, in words: for the log at start and for `serinus doctor`."""
        most, *others = (column for column, _ in Counter(self.columns.values()).most_common())
        served = "; ".join(
            f"{name}: {', '.join(op for op in self.columns if self.columns[op] == name)}" for name in others
        )
        return f"all ops on column {most}" + (f", but {served}" if served else "")


def load(device: str, column: str = "auto", *, own: Collection[str] = ()) -> Kernels:
    """The ops for a device, the canary's included.

    Args:
        device: a torch device type, such as "cpu"; an index ("cuda:0") is ignored.
        column: "auto" takes the column made for the device ("cpu" for a CPU; "triton" for CUDA, where Triton is
            installed; of arrays of the host "cpu") and `ref` for each op that it lacks; another name asks for that
            column. "triton" on a CPU runs in Triton's interpreter only.
        own: ops for which `ref` may not stand in: what is measured, or held against `ref`.
    Raises:
        ConfigError: no such column, or not on this device, or it lacks one of its `own`.
    Cost: imports the column: numba about 0.3 s, Triton about 0.5 s, the first time.
    """
    kind = device.split(":")[0]
    if column not in COLUMNS:
        raise ConfigError(f"kernels: column {column!r}, expected one of {', '.join(COLUMNS)}")
    if column == "cpu" and kind != "cpu":
        raise ConfigError(f"kernels: column 'cpu' on device {device!r}, expected 'auto' or 'ref'")
    if column == "triton" and kind not in ("cpu", "cuda"):
        raise ConfigError(f"kernels: column 'triton' on device {device!r}, expected 'auto' or 'ref'")
    if column == "auto":
        column = _COLUMN_OF.get(kind, "ref")
        if column == "triton" and find_spec("triton") is None:
            column = "ref"
    found = {op: _find(op, "cpu" if column == "triton" and op in _ON_HOST else column) for op in FILES}
    if found["paged_attention"][1] == "ref" and not _WATCHED.intersection(own):
        found |= {op: _find(op, "ref") for op in _WATCHED}
    ops = {op: make for op, (make, _) in found.items()}
    ops |= {op: ops[op](ops) for op in _MADE_OF_OPS}
    found |= {op: (ops[op], found["linear"][1]) for op in _MADE_OF_OPS}  # whatever file they are of
    columns = {op: name for op, (_, name) in found.items()}
    lacking = [op for op in own if columns.get(op) != column]
    if lacking:
        raise ConfigError(f"kernels: column {column!r} has no {', '.join(lacking)}, expected a kernel of its own")
    return Kernels(device=kind, columns=columns, decode_layers=_decode_layers(column), warmer=_warmer(column), **ops)


Warmer = Callable[[Sequence[tuple[int, int]], torch.dtype, bool, Sequence[bool], bool, torch.dtype], None]
"""What `warm` calls of a column."""
_USUAL_SHAPES = ((64, 4), (64, 7), (64, 8), (128, 1), (128, 2), (128, 4), (128, 5), (128, 7), (128, 8))
"""(head size, group) of the dense Llama, Qwen and Mistral checkpoints that fit a CPU."""


def warm(
    kernels: Kernels, *, shapes: Sequence[tuple[int, int]] = _USUAL_SHAPES, dtype: torch.dtype = torch.bfloat16,
    watched: bool = False, windows: Sequence[bool] = (False,), capped: bool = False,
    kv_dtype: torch.dtype | None = None,
) -> None:  # fmt: skip
    """Make the machine code ready: compiled once, from the disk ever after. Idempotent.

    Args:
        kernels: from `load`.
        shapes: (head size, query heads per KV head) of models; none = only what does not depend on the model.
        dtype: torch.bfloat16 or torch.float32.
        watched: of these shapes nothing but attention that digests what it reads, for the canary: of layers without a
            window, of those with one (`windows`), with capped scores or without (`capped`).
        kv_dtype: of the pools; None = `dtype`.
    Raises:
        ConfigError: there is no place to keep compiled kernels.
    Cost: half a second from the disk; the first time about 20 s, 10 s of them for what does not depend on the model.
    What was not warmed is compiled at first use.
    """
    if kernels.warmer is not None:
        kernels.warmer(shapes, dtype, watched, windows, capped, kv_dtype or dtype)


def _find(op: str, column: str) -> tuple[Any, str]:
    """The op, and the column that has it. An op that keeps something between calls is made afresh for each `load`, by
    `new_<op>()` of its file."""
    for name in dict.fromkeys((column, "ref")):
        module = _module(name, FILES[op])
        if hasattr(module, f"new_{op}"):
            return getattr(module, f"new_{op}")(), name
        own = f"make_{op}" if op in _MADE_OF_OPS else op
        if hasattr(module, own):
            return getattr(module, own), name
    raise AssertionError(f"kernels: op {op} is not in ref/{FILES[op]}.py")


def _module(column: str, file: str) -> ModuleType | None:
    # Imported here: numba takes a quarter of a second, Triton half of one, which other devices need not pay.
    name = f"{__package__}.{column}.{file}"
    return import_module(name) if find_spec(name) is not None else None


def _decode_layers(column: str) -> MakeDecodeLayers | None:
    module = _module(column, "decode_layers")
    found: MakeDecodeLayers | None = getattr(module, "decode_layers", None)
    return found


def _warmer(column: str) -> Warmer | None:
    module = _module(column, "warm")
    found: Warmer | None = getattr(module, "warm", None)
    return found
