"""The types of the canary's watch, and of the ops that have defaults or names in their signature.

What each op computes is said in `ref/`. Shapes: T = tokens, N = query heads, H = KV heads, D = head size, S = slots,
R, C = rows and columns of req_to_token, G = pages, Y = bytes of one page, B = sequences, L = layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from serinus.core.history import TokenHistory
from serinus.kernels.batch import AttentionBatch
from serinus.kernels.canary import DuePages
from serinus.kernels.packed import PackedExperts, PackedFactors, PackedLinear

LayersKv = Sequence[tuple[Tensor, ...]]
"""Pools [S, H, D] of the layers of one part: (k, v) of each, or one of latent rows, which are both."""


Gate = Literal["silu", "gelu"]
"""The activation of a gated MLP."""


class NormLinear(Protocol):
    """The signature of norm_linear."""

    def __call__(
        self, x_TI: Tensor | None, residual_TI: Tensor, weight_I: Tensor, eps: float, packed: PackedLinear,
        gate: Gate | None = None, /,
    ) -> Tensor: ...  # fmt: skip


class AddLinear(Protocol):
    """The signature of add_linear."""

    def __call__(self, x_TI: Tensor, packed: PackedLinear, residual_TO: Tensor, /) -> Tensor | None: ...


ExpertGate = Literal["silu", "swiglu_oai"]
"""The activation of an expert; the second is gpt-oss's."""


class FusedMoe(Protocol):
    """The signature of fused_moe."""

    def __call__(
        self, x_TE: Tensor, weights_TK: Tensor, ids_TK: Tensor, packed: PackedExperts, gate: ExpertGate, /
    ) -> Tensor: ...


Kept = dict[tuple[object, ...], tuple[int, ...]]
"""What kernels keep with arguments that come again: that they were checked for a shape, and words made of them."""


class MovePages(Protocol):
    """The signature of gather_pages and scatter_pages."""

    def __call__(
        self, layers_kv: LayersKv, pages_G: NDArray[np.integer[Any]], page_size: int, bytes_RY: Tensor,
        rows_G: NDArray[np.integer[Any]] | None = None, /,
    ) -> None: ...  # fmt: skip


class HashedPages(Protocol):
    """The signature of hashed_pages."""

    def __call__(
        self, lanes: Sequence[Tensor], pages_G: NDArray[np.int64], rows_GY: NDArray[np.uint8] | None, seed: int,
        inward: bool = False, /,
    ) -> NDArray[np.uint64]: ...  # fmt: skip


class PoolLane(NamedTuple):
    """Where bytes of every page of a pool lie, uint8 [P, ..., W]; P pages, rows of W bytes."""

    address: int
    sizes: tuple[int, ...]
    steps: tuple[int, ...]
    """Bytes from one to the next, for each size."""

    @classmethod
    def of(cls, bytes_PW: Tensor) -> PoolLane:
        """That of a tensor of bytes."""
        return cls(bytes_PW.data_ptr(), tuple(bytes_PW.shape), bytes_PW.stride())


class PagedAttention(Protocol):
    """The signature of paged_attention."""

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
        sinks_N: Tensor | None = None,
    ) -> Tensor: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerDigest:
    """What `watched_attention` digests of one layer, and where the sums go."""

    factors: PackedFactors
    """The coefficients of this layer."""
    due_7B: Tensor
    """As `canary_plan` takes it; one column for every sequence of the batch, in its order, of positions before its
    first query (low = high: none), or two sets of such columns one after the other, which name no position twice."""
    sums_P22E: Tensor
    """int32 [P, half, sum, E], of the slots that `canary_plan` names (E: so many at least); zeros before the first
    layer, each adds its own modulo 2**32. P >= 1: a kernel that cuts the heads over threads uses all P, others the
    first; the digest is the sum over P. `packed_sums` makes digests of it. What becomes of entries whose slot is 0 is
    not defined."""
    page_size: int
    """Positions of a page, or of as many pages as are due together."""
    canary_digest: Callable[..., Tensor] | None = None
    """What digests rows that were gathered; None: that of the column."""
    kept: Kept = field(default_factory=dict, compare=False, init=False)
    """A watch hands out the same digest in many passes: what is checked and made of it once, addresses too. So one that
    `dataclasses.replace` makes begins with none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenRows:
    """What one layer digests of the rows that it stores, made of the values on their way into the pool."""

    coefficients_22W: Tensor
    """Those of this layer, contiguous; W is less than a row's lanes where its first ones alone are digested."""
    sums_T2: Tensor
    """int64 [T, 2], digests of K and V of the step's tokens as `canary_digest` gives them, contiguous: zeros before the
    first layer, each adds its own."""
    kept: Kept = field(default_factory=dict, compare=False, init=False)
    """As that of `LayerDigest`."""


LayerDigests = tuple[WrittenRows | None, LayerDigest | None]
"""What one layer digests of what it stores, and of what it reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """How a GPU cuts decode attention."""

    block: int
    """Positions at a time."""
    warps: int
    """Warps of one program."""
    stages: int
    """Blocks that are loaded ahead."""
    stretches: int
    """Programs that share a sequence and a KV head."""


@dataclass(slots=True, kw_only=True)
class RowSampling:
    """How the token of one row is chosen; the defaults change nothing. Not frozen, for the cost: one a row and step."""

    seed: int
    """Seed of the sequence, any 64-bit word."""
    position: int
    """Position that the token will have."""
    temperature: float = 1.0
    """0 = greedy; otherwise scores are divided by it."""
    top_k: int = 0
    """Tokens that are kept, with those as likely as the last one; all where it is below 1 or not below V."""
    top_p: float = 1.0
    """Probability that is kept, at least, of what top_k kept."""
    min_p: float = 0.0
    """Tokens less likely than this times the likeliest one are dropped."""
    bias: tuple[NDArray[np.int32], NDArray[np.float32]] | None = None
    """Ids, rising, and what is added to their logits."""
    history: TokenHistory | None = None
    """What the penalties look at."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies other scores of the tokens that were seen."""
    frequency_penalty: float = 0.0
    """Subtracted for each time that a token was generated."""
    presence_penalty: float = 0.0
    """Subtracted from tokens that were generated."""
    forbidden: tuple[int, ...] = ()
    """Ids that are chosen only where all are forbidden."""


RowMasks = tuple[Sequence[int], NDArray[np.int32]]
"""Rows, and the words of their masks, as `mask_logits` takes them."""


class ChooseTokens(Protocol):
    """The signature of choose_tokens."""

    def __call__(self, logits_BV: Tensor, rows: Sequence[RowSampling], masks: RowMasks | None = None) -> Tensor: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TopTokens:
    """Log-probabilities of one row."""

    logprob: float
    """Of the chosen token."""
    ids: tuple[int, ...]
    """The likeliest tokens, the likeliest first."""
    logprobs: tuple[float, ...]
    """The log-probabilities of these."""


class WatchedAttention(Protocol):
    """The signature of watched_attention."""

    def __call__(
        self,
        q_BND: Tensor,
        k_pool_SHD: Tensor,
        v_pool_SHD: Tensor,
        req_to_token_RC: Tensor,
        batch: AttentionBatch,
        scale: float,
        digest: LayerDigest | None = None,
        tiling: Tiling | None = None,
        window: int | None = None,
        softcap: float | None = None,
        sinks_N: Tensor | None = None,
    ) -> Tensor: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentHeads:
    """What heads make of latents, R elements each, in latent attention. N = heads, P and V = elements of a head's plain
    key (the part that is not rotated) and value, O = elements of its key that are rotated, the same for all heads and
    the last of a row of W = R + O."""

    key_NPR: Tensor
    """What makes plain keys of a latent."""
    value_NRV: Tensor
    """What makes values of a latent."""

    def absorb(self, q_TNX: Tensor, out_TNR: Tensor) -> None:
        """Bring the plain part of queries, X = P + O, into the space of latents."""
        plain_TNP = q_TNX[:, :, : self.key_NPR.shape[1]]
        torch.bmm(plain_TNP.transpose(0, 1), self.key_NPR, out=out_TNR.transpose(0, 1))

    def in_rows(self, q_TNX: Tensor) -> Tensor:
        """Queries in the space of rows, [T, N, W]."""
        _, plain, rank = self.key_NPR.shape
        out_TNW = q_TNX.new_empty((*q_TNX.shape[:2], rank + q_TNX.shape[2] - plain))
        self.absorb(q_TNX, out_TNW[:, :, :rank])
        out_TNW[:, :, rank:] = q_TNX[:, :, plain:]
        return out_TNW

    def values(self, mixed_TNR: Tensor, out_TNV: Tensor) -> None:
        """Make values of the latents that heads have summed up."""
        torch.bmm(mixed_TNR.transpose(0, 1), self.value_NRV, out=out_TNV.transpose(0, 1))

    def pays(self, count: int, row: int) -> bool:
        """Whether keys and values are made for a chunk of `count` queries over rows of `row` elements: what that takes
        for a row is less than what `count` scores of it are shorter by."""
        _, plain, rank = self.key_NPR.shape
        value = self.value_NRV.shape[2]
        return 2 * count * (row - max(plain + row - rank, value)) > rank * (plain + value)


class LatentAttention(Protocol):
    """The signature of latent_attention."""

    def __call__(
        self,
        q_TNX: Tensor,
        pool_S1W: Tensor,
        value_size: int,
        req_to_token_RC: Tensor,
        batch: AttentionBatch,
        scale: float,
        digest: LayerDigest | None = None,
        heads: LatentHeads | None = None,
    ) -> Tensor: ...


RingTensors = tuple[Tensor, ...]
"""The last arguments of `canary_verify`: rows, violations and checked of a ring, and behind them, where slots are
counted by sequence, those counts."""


class CanaryOps(Protocol):
    """The ops that a watch is made of; `Kernels` has them."""

    @property
    def canary_digest(self) -> Callable[..., Tensor]: ...

    @property
    def canary_due(self) -> Callable[..., DuePages]: ...

    @property
    def canary_plan(self) -> Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]: ...

    @property
    def canary_verify(self) -> Callable[..., None]: ...

    @property
    def canary_bind(self) -> Callable[..., None]: ...

    @property
    def canary_write(self) -> Callable[..., None]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchPlan:
    """What the host knows of a pass that is to be watched; P = pieces, B = sequences."""

    due: Sequence[tuple[NDArray[np.int64], int]]
    """The pieces of a plan, as `Watch.expand` takes them."""
    bound_5B: NDArray[np.int64]
    """As `Watch.expand` takes it."""
    rows_B: NDArray[np.int64]
    """The row of each sequence of the batch, in its order, without padding."""
    counts_B: NDArray[np.int64]
    """The number of its tokens."""
    first_name: int
    """As `Watch.stand` takes it."""
    chosen_W: NDArray[np.int64] | None
    """The sequences of the second batch that attention reads, where there is one."""
    room: int | None
    """Sequences that the batch has with its padding, of one token each, where the pass is one that is recorded and
    replayed; None = it is not."""
    sets: int
    """Columns that a sequence may have in the plan."""


class Watch(Protocol):
    """The canary's checks of one part around forward passes. The calls of one pass, in order:

        watch.due(reads, page_size)        what is to be verified in this pass
        watch.stage(plan, put)             on the host, before any work of the pass is queued
        watch.expand(due, bound)           which slots are verified in this pass
        watch.stand(slots, ...)            the tokens that this pass computes
        watch.verify(StampLane.HEAD_K)     stamps of the slots, without digests; of which request the last ones are
        watch.write(StampLane.HEAD_K)      stamps of the tokens
        watch.writes(layer)                layer by layer, in order, before it stores their rows
        watch.reads(layer, batch)          layer by layer, in order, before attention reads those bytes, by models whose
                                           attention digests what it reads
        watch.layer_digests(batch)         in place of both, for all layers before any of them runs
        watch.look_again()                 rows may name other slots than at the beginning
        watch.verify(StampLane.TAIL_K)     with the digests of all layers; what is not digested yet is digested now
        watch.write(StampLane.TAIL_K)      with the digests of what the layers stored; the rows are read back
        watch.verify_and_write(lane)       in place of both

    It knows no requests and waits for no device. Where a pass is recorded and replayed, all calls but `stage` are made
    while it is recorded, and `stage` before every replay.
    """

    entry_count: int
    """Slots expanded for this pass."""
    is_staged: bool
    """Whether it has a use for `stage`."""

    def due(self, reads_6B: NDArray[np.int64], page_size: int) -> DuePages:
        """`canary_due`; the arrays may be of the watch, and mean nothing any more at the next call."""
        ...

    def has_room(self, room: int, entry_count: int) -> bool:
        """Whether a recorded pass of so many sequences verifies so many slots."""

    def stage(self, plan: WatchPlan, put: Callable[[NDArray[np.int64]], Tensor]) -> None:
        """What the next pass is to verify. A column whose kernels run on the host has no use for it: `expand` says all
        that it needs."""

    def expand(self, due: Sequence[tuple[NDArray[np.int64], int]], bound_5B: NDArray[np.int64]) -> None:
        """Take the pieces of a plan: columns due_7B of `canary_plan`, and the number of their entries; and of each
        sequence that reads anything its name, its row, the first and the last position that it reads and the chain
        hash of its tokens up to there (`canary_bind`). All entries of its row between these two must be those that the
        leader wrote, whatever is due: the first that is not is noted in place of the last slot. Those of the pass
        before are forgotten."""

    def reads(self, layer: int, batch: AttentionBatch) -> LayerDigest | None:
        """Attention is about to read a layer, for these queries. What it gets it must hand to `watched_attention`: that
        digests what it reads, and no pass reads it a second time. What this batch does not read is digested by
        `verify`: it is not used in this layer. None: nothing is due."""

    def layer_digests(self, batch: AttentionBatch) -> Sequence[LayerDigests]:
        """What `writes` and `reads` return for all layers, in one call: for a decode step.
        The same object as in the last pass where all of it is the same. Empty: no KV is digested."""
        ...

    def look_again(self) -> None:
        """Look up again what rows name, and hold it against what the leader wrote: an entry that changed meanwhile led
        attention to another slot. All others name what was verified before the pass."""

    def drop_digests(self) -> None:
        """Forget the digests of this pass: attention may have ended in the middle of one. All are made anew."""

    def verify(self, lane: int) -> None:
        """Verify the stamps of HEAD_K or TAIL_K, and those of the lane of V beside it."""

    def stand(
        self, slots_T: Tensor, positions_T: Tensor, tokens_T: Tensor, q_starts_B1: Tensor, rows_B: Tensor,
        first_name: int,
    ) -> None:  # fmt: skip
        """Name the tokens that this pass computes; arguments as `canary_write` takes them. Sequences are called
        `first_name` and the numbers that follow."""

    def writes(self, layer: int) -> WrittenRows | None:
        """A layer is about to store the rows of these tokens. What this returns it must hand to `qk_rope_store`, or to
        `digest_values`: the digests of TAIL are made of the values themselves. None: no KV is digested."""

    def write(self, lane: int) -> None:
        """Stamp these tokens in HEAD_K or TAIL_K and in the lane of V beside it. TAIL gets the digests that were made
        as the rows were stored; then the rows are read back and held against them, and what differs goes to the ring
        `stored`."""

    def verify_and_write(self, lane: int) -> None:
        """Both, in this order, by one call where the column can."""


class MakeWatch(Protocol):
    """The signature of canary_watch."""

    def __call__(
        self,
        ops: CanaryOps,
        table_RC: Tensor,
        written_RC: Tensor,
        stamps_LS4: Tensor,
        layers_kv: LayersKv,
        coefficients_L22W: Tensor | None,
        ring: RingTensors,
        stored: RingTensors,
        page_size: int,
        /,
    ) -> Watch: ...
