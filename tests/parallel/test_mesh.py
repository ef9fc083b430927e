"""What each rank holds: every layer, head, column and row once, and every mesh that does not fit refused with its
reason."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serinus.core.errors import ConfigError
from serinus.parallel import Mesh, Shard, shards_of


def _shards(mesh: Mesh, partition: tuple[int, ...] = (), **sizes: int) -> tuple[Shard, ...]:
    numbers = {"layer_count": 7, "head_count": 12, "kv_head_count": 6, "mlp_size": 50, "vocab_size": 101, **sizes}
    return shards_of(mesh, partition=partition, **numbers)


def test_ranks_count_through_the_slices_of_a_stage_and_then_through_the_stages() -> None:
    mesh = Mesh(tp=2, pp=3)
    places = [(mesh.tp_rank(rank), mesh.pp_rank(rank), mesh.name(rank)) for rank in range(mesh.size)]
    assert places == [
        (0, 0, "TP0 PP0"), (1, 0, "TP1 PP0"), (0, 1, "TP0 PP1"),
        (1, 1, "TP1 PP1"), (0, 2, "TP0 PP2"), (1, 2, "TP1 PP2"),
    ]  # fmt: skip
    assert [mesh.rank_of(tp_rank=tp, pp_rank=pp) for tp, pp, _ in places] == list(range(6))
    assert mesh.name(mesh.result_rank) == "TP0 PP2"


def test_layers_that_do_not_divide_go_to_the_first_stages() -> None:
    assert Mesh(pp=3).stage_layers(7) == (range(3), range(3, 5), range(5, 7))
    assert Mesh(pp=3).stage_layers(7, (1, 4, 2)) == (range(1), range(1, 5), range(5, 7))


@given(
    tp=st.integers(1, 4),
    pp=st.integers(1, 5),
    layers=st.integers(5, 20),
    group=st.integers(1, 3),
    kv_heads=st.integers(1, 3),
    mlp=st.integers(4, 40),
    vocab=st.integers(16, 60),
)
def test_every_layer_head_column_and_row_is_held_once(
    tp: int, pp: int, layers: int, group: int, kv_heads: int, mlp: int, vocab: int
) -> None:
    mesh = Mesh(tp=tp, pp=pp)
    shards = _shards(
        mesh, layer_count=layers, kv_head_count=kv_heads * tp, head_count=kv_heads * tp * group, mlp_size=mlp,
        vocab_size=vocab,
    )  # fmt: skip
    assert [shard.rank for shard in shards] == list(range(mesh.size))
    assert [shard.name for shard in shards] == [mesh.name(rank) for rank in range(mesh.size)]
    assert [i for shard in shards if shard.tp_rank == 0 for i in shard.layers] == list(range(layers))
    assert all(shard.layers for shard in shards)
    for stage in range(pp):
        slices = [shard for shard in shards if shard.pp_rank == stage]
        for of, count in (
            ("kv_heads", kv_heads * tp),
            ("heads", kv_heads * tp * group),
            ("mlp", mlp),
            ("vocab", vocab),
        ):
            assert [i for shard in slices for i in getattr(shard, of)] == list(range(count)), of
        assert len({shard.layers for shard in slices}) == 1
        assert all(0 < len(shard.vocab) <= shard.vocab_share for shard in slices)
        readers = [(q // group, q) for shard in slices for q in shard.heads if q // group not in shard.kv_heads]
        assert readers == [], "query heads away from the KV head that they read"


@pytest.mark.parametrize(
    ("tp", "pp", "partition", "reason"),
    [
        (4, 1, (), "tp_size is 4, expected a divisor of 6, the model's KV heads"),
        (5, 1, (), "tp_size is 5, expected a divisor of 6, the model's KV heads"),
        (1, 8, (), "pp_size is 8, expected at most 7, the model's layers"),
        (1, 2, (7,), "pp_layer_partition is 7, expected 2 numbers"),
        (1, 2, (3, 3), "pp_layer_partition is 3,3, expected 2 numbers .* with the sum 7"),
        (1, 2, (0, 7), "pp_layer_partition is 0,7, expected 2 numbers .* from 1 on"),
        (0, 1, (), "tp_size is 0, expected at least 1"),
        (1, -1, (), "pp_size is -1, expected at least 1"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused_with_its_reason(
    tp: int, pp: int, partition: tuple[int, ...], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        _shards(Mesh(tp=tp, pp=pp), partition)


def test_more_slices_than_columns_or_rows_are_refused() -> None:
    with pytest.raises(ConfigError, match="an MLP of 1 columns"):
        _shards(Mesh(tp=2), mlp_size=1)
    with pytest.raises(ConfigError, match="a vocabulary of 9"):
        _shards(Mesh(tp=6), vocab_size=9)  # two rows each would leave the last rank none
    with pytest.raises(ConfigError, match="a divisor of 9, the model's query heads"):
        _shards(Mesh(tp=2), head_count=9)
