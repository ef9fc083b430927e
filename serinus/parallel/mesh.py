"""The ranks of one engine as a grid of stages and slices, and what each of them holds of a model. Pure.

Rank numbers: pp_rank * tp + tp_rank. Stages follow one another through the layers; the tp ranks of a stage hold the
same layers and share heads, MLP columns and vocabulary rows. Knows numbers, not models, tensors or processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from serinus.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """How many ranks, and how they are arranged. Raises ConfigError for a size below 1."""

    tp: int = 1
    """Slices of every layer."""
    pp: int = 1
    """Stages, each with some of the layers."""
    ep: int = 1
    """Among how many slices of a stage whole experts are shared: 1 (each slice has a part of every expert) or tp."""

    def __post_init__(self) -> None:
        for name in ("tp", "pp"):
            if getattr(self, name) < 1:
                raise ConfigError(f"parallel: {name}_size is {getattr(self, name)}, expected at least 1")
        if self.ep not in (1, self.tp):
            raise ConfigError(f"parallel: ep_size is {self.ep}, expected 1 or tp_size = {self.tp}")

    @property
    def size(self) -> int:
        """Ranks in all; rank 0 leads."""
        return self.tp * self.pp

    def rank_of(self, *, tp_rank: int, pp_rank: int) -> int:
        """The rank at a place of the grid."""
        return pp_rank * self.tp + tp_rank

    def tp_rank(self, rank: int) -> int:
        """Which slice of its stage a rank is."""
        return rank % self.tp

    def pp_rank(self, rank: int) -> int:
        """Which stage a rank belongs to."""
        return rank // self.tp

    def name(self, rank: int) -> str:
        """As logs and errors call it: `TP0 PP1`."""
        return f"TP{self.tp_rank(rank)} PP{self.pp_rank(rank)}"

    @property
    def result_rank(self) -> int:
        """The rank that samples: slice 0 of the last stage."""
        return self.rank_of(tp_rank=0, pp_rank=self.pp - 1)

    def stage_layers(self, layer_count: int, partition: Sequence[int] = ()) -> tuple[range, ...]:
        """The layers of each stage: as `partition` counts them, else even, the first stages having one more.

        Raises ConfigError where a stage would have no layer, or the partition does not fit.
        """
        if partition:
            counts = tuple(partition)
            if len(counts) != self.pp or sum(counts) != layer_count or min(counts) < 1:
                raise ConfigError(
                    f"parallel: pp_layer_partition is {','.join(map(str, counts))}, expected {self.pp} numbers (one for"
                    f" each stage) from 1 on, with the sum {layer_count} (the model's layers)"
                )
        elif self.pp > layer_count:
            raise ConfigError(f"parallel: pp_size is {self.pp}, expected at most {layer_count}, the model's layers")
        else:
            counts = tuple(len(share(layer_count, self.pp, stage)) for stage in range(self.pp))
        return tuple(range(first, end) for first, end in pairwise(accumulate(counts, initial=0)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """What one rank holds of a model. Ranges count within the whole model."""

    rank: int
    tp_rank: int
    pp_rank: int
    tp: int
    pp: int
    layers: range
    """The layers of its stage."""
    heads: range
    """Query heads of each of these layers."""
    kv_heads: range
    """Key (and value) heads; those its query heads read."""
    mlp: range
    """Columns inside the MLP."""
    vocab: range
    """Rows of the embedding and of the output head, in the first and the last stage."""
    ep: int = 1
    """As of the mesh."""
    vocab_share: int
    """Rows of the largest such range: every rank computes so many logits, what lies beyond its rows being padding."""

    @property
    def is_first(self) -> bool:
        """Whether its stage begins with the embedding."""
        return self.pp_rank == 0

    @property
    def is_last(self) -> bool:
        """Whether its stage ends with the output head."""
        return self.pp_rank == self.pp - 1

    @property
    def name(self) -> str:
        """As logs and errors call it."""
        return f"TP{self.tp_rank} PP{self.pp_rank}"

    def experts(self, count: int) -> range:
        """Of so many experts of a layer those of which this rank has anything."""
        return share(count, self.tp, self.tp_rank) if self.ep > 1 else range(count)

    def expert_columns(self, size: int) -> range:
        """What it has of the inner width of each of these."""
        return range(size) if self.ep > 1 else share(size, self.tp, self.tp_rank)


def share(total: int, parts: int, index: int) -> range:
    """The index-th of `parts` stretches of `total`, as even as can be: the first ones have one more."""
    size, more = divmod(total, parts)
    first = index * size + min(index, more)
    return range(first, first + size + (index < more))


def shards_of(
    mesh: Mesh,
    *,
    layer_count: int,
    head_count: int,
    kv_head_count: int,
    mlp_size: int,
    vocab_size: int,
    partition: Sequence[int] = (),
    is_latent: bool = False,
) -> tuple[Shard, ...]:
    """What each rank holds, by rank.

    Heads are never split or kept twice, so their numbers must divide, but for the one KV head of latent rows
    (`is_latent`), which every rank has; layers, MLP columns and vocabulary need not.
    Raises ConfigError, with the reason, for a mesh that the model does not fit.
    """
    stages = mesh.stage_layers(layer_count, partition)
    cut = (("query heads", head_count),) if is_latent else (("KV heads", kv_head_count), ("query heads", head_count))
    for what, count in cut:
        if count % mesh.tp:
            raise ConfigError(f"parallel: tp_size is {mesh.tp}, expected a divisor of {count}, the model's {what}")
    vocab_share = -(-vocab_size // mesh.tp)
    if mlp_size < mesh.tp or vocab_share * (mesh.tp - 1) >= vocab_size:
        raise ConfigError(
            f"parallel: tp_size is {mesh.tp} for an MLP of {mlp_size} columns and a vocabulary of {vocab_size},"
            " expected some of both on every rank"
        )
    heads, kv_heads = head_count // mesh.tp, kv_head_count if is_latent else kv_head_count // mesh.tp
    return tuple(
        Shard(
            rank=mesh.rank_of(tp_rank=i, pp_rank=stage),
            tp_rank=i,
            pp_rank=stage,
            tp=mesh.tp,
            pp=mesh.pp,
            ep=mesh.ep,
            layers=layers,
            heads=range(i * heads, (i + 1) * heads),
            kv_heads=range(kv_heads) if is_latent else range(i * kv_heads, (i + 1) * kv_heads),
            mlp=share(mlp_size, mesh.tp, i),
            vocab=range(i * vocab_share, min((i + 1) * vocab_share, vocab_size)),
            vocab_share=vocab_share,
        )
        for stage, layers in enumerate(stages)
        for i in range(mesh.tp)
    )
