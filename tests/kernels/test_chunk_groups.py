"""Which chunks of a step a GPU lays side by side, and of which it makes keys and values of latent rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from serinus.kernels import AttentionBatch, LatentHeads, find_chunks
from serinus.kernels.batch import HostChunk
from serinus.kernels.triton.contiguous_attention import ChunkGroup
from serinus.kernels.triton.latent_attention import expanded_groups


def batch_of(*sequences: tuple[int, int]) -> AttentionBatch:
    """Of (tokens, context) each."""
    counts, contexts = np.array(sequences, np.int64).T
    starts = np.concatenate(([0], counts.cumsum()))
    return AttentionBatch(
        rows_B=torch.arange(len(sequences)) + 1, q_starts_B1=torch.from_numpy(starts),
        context_B=torch.from_numpy(contexts.copy()), chunks=find_chunks(starts, contexts, torch.from_numpy),
    )  # fmt: skip


def groups_of(batch: AttentionBatch, heads: int, columns: int = 40960) -> list[ChunkGroup]:
    """At the sizes of DeepSeek V2 and V3."""
    key, value = (torch.empty((heads, *size), device="meta") for size in ((128, 512), (512, 128)))
    return expanded_groups(batch, 576, columns, LatentHeads(key_NPR=key, value_NRV=value))


def test_contexts_of_chunks_begin_at_multiples_of_128_rows_and_decodes_have_none() -> None:
    batch = batch_of((1, 900), (5, 130), (1, 7), (128, 128), (2, 2))
    assert batch.chunks is not None
    assert batch.chunks.places_B.tolist() == [0, 0, 256, 256, 384]
    assert batch.chunks.each == (
        HostChunk(sequence=1, first=1, count=5, context=130, place=0),
        HostChunk(sequence=3, first=7, count=128, context=128, place=256),
        HostChunk(sequence=4, first=135, count=2, context=2, place=384),
    )
    assert batch_of((1, 900), (1, 7)).chunks is None


def test_a_part_of_a_batch_begins_at_its_own_first_token() -> None:
    batch = batch_of((4, 4), (1, 7), (3, 9), (2, 2))
    part = batch.part(1, 3)
    assert (part.rows_B.tolist(), part.context_B.tolist()) == ([2, 3], [7, 9])
    assert part.q_starts_B1.tolist() == [0, 1, 4]
    assert part.chunks is None
    assert batch.part(0, 4) is batch


@pytest.mark.parametrize(
    ("sequences", "heads", "made"),
    [
        ([(16, 8192)], 16, 1),  # alone they leave most of the GPU idle over rows
        ([(2, 8192)], 16, 0),
        ([(64, 8192)] * 4, 16, 4),
        ([(64, 8192)] * 8, 16, 0),
        ([(128, 8192)] * 8, 16, 8),
        ([(64, 8192)], 128, 0),
        ([(1, 8192)] * 3, 16, 0),
        ([(64, 8192)] * 8 + [(2048, 2048)], 16, 1),
    ],
)
def test_keys_are_made_where_that_takes_a_gpu_less_time(
    sequences: list[tuple[int, int]], heads: int, made: int
) -> None:
    assert sum(len(group.chunks) for group in groups_of(batch_of(*sequences), heads)) == made


def test_groups_are_of_neighbours_and_no_larger_than_the_longest_context() -> None:
    batch = batch_of((500, 500), (300, 1000), (1, 9), (200, 4000), (900, 900), (800, 4200))
    groups = groups_of(batch, 16, columns=4900)
    assert [(group.sequences, group.tokens, group.rows) for group in groups] == [
        (slice(0, 2), slice(0, 800), 512 + 1024),
        (slice(3, 4), slice(801, 1001), 4096),
        (slice(4, 5), slice(1001, 1901), 1024),
        (slice(5, 6), slice(1901, 2701), 4224),
    ]
