"""Layouts: which engines can exchange KV, and that a re-cut puts every byte exactly where its meaning says."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from serinus.core.errors import LayoutMismatch
from serinus.core.parts import Part
from serinus.pd import Cut, Intake, Mode, RankLayout, Routes, TakeIn, cut, difference, recut, target_range
from serinus.wire.messages import LayoutSignature
from tests.pd.tiny import Store

BASE = LayoutSignature(model="m", kv_dtype="float16", page_size=4, layer_count=6, kv_head_count=4, head_size=2)


def changed(**changes: Any) -> LayoutSignature:
    return msgspec.structs.replace(BASE, **changes)


def whole_kv(signature: LayoutSignature, part: Part, tokens: int) -> NDArray[np.uint8]:
    """[token, layer of the part, lane, head, bytes of a head], all bytes at random (seeded)."""
    layers = len([value for value in signature.layer_parts or bytes(signature.layer_count) if value == part])
    shape = (tokens, layers, 2, signature.kv_head_count, signature.head_size * 2)
    return np.random.default_rng(int(part)).integers(0, 256, shape, dtype=np.uint8)


def pages_of(
    layout: RankLayout, rank: int, part: Part, kv: NDArray[np.uint8], first: int, end: int
) -> NDArray[np.uint8]:
    """Pages [first, end) of a prompt as a rank holds them, written down element by element."""
    shard, size = layout.shards[rank], layout.page_size
    rows = np.zeros((end - first, layout.page_bytes(rank, part)), dtype=np.uint8)
    for page in range(first, end):
        strips = []
        for layer in shard.part_layers[part]:
            for lane in range(2):
                for token in range(page * size, (page + 1) * size):
                    for head in shard.heads:
                        strips.append(kv[token, layer, lane, head] if token < len(kv) else np.zeros(4, np.uint8))
        rows[page - first] = np.concatenate(strips)
    return rows


@st.composite
def signatures(draw: st.DrawFn) -> tuple[LayoutSignature, LayoutSignature]:
    """Two engines of one model, shaped differently."""
    layers = draw(st.integers(1, 5))
    parts = bytes(draw(st.lists(st.sampled_from([0, 1]), min_size=layers, max_size=layers)))
    model = {"layer_count": layers, "layer_parts": parts, "window": 7 if 1 in parts else 0, "head_size": 2}

    def engine() -> LayoutSignature:
        pp = draw(st.integers(1, min(3, layers)))
        cuts = sorted(draw(st.permutations(range(1, layers)))[: pp - 1])
        counts = tuple(b - a for a, b in zip([0, *cuts], [*cuts, layers], strict=True)) if draw(st.booleans()) else ()
        return changed(
            **model, tp=draw(st.sampled_from([1, 2, 4])), pp=pp, stage_layers=counts,
            page_size=draw(st.sampled_from([2, 4, 8])),
        )  # fmt: skip

    source, target = engine(), engine()
    if 1 in parts and target.page_size > source.page_size:  # these refuse each other
        source, target = target, source
    return source, target


@pytest.mark.slow
@given(signatures(), st.integers(1, 40), st.integers(0, 4), st.integers(1, 3))
def test_every_byte_of_a_prompt_lands_exactly_once_where_it_belongs(
    pair: tuple[LayoutSignature, LayoutSignature], tokens: int, held_pages: int, step: int
) -> None:
    source, target = RankLayout(pair[0]), RankLayout(pair[1])
    held = min(held_pages * target.page_size, (tokens - 1) // target.page_size * target.page_size)
    first, end = held // source.page_size, -(-tokens // source.page_size)
    target_first, target_end = held // target.page_size, -(-tokens // target.page_size)
    for part in source.parts:
        kv = whole_kv(pair[0], part, tokens)
        landed = {}
        times = {}
        for rank in target.senders(part):
            shape = (target_end - target_first, target.page_bytes(rank, part))
            landed[rank], times[rank] = np.zeros(shape, np.uint8), np.zeros(shape, np.uint8)
        for item in (item for item in cut(source, target) if item.part is part):
            for start in range(first, end, step):
                count = min(step, end - start)
                rows = pages_of(source, item.source_rank, part, kv, start, start + count)
                into = target_range(source, target, start, count)
                low, high = max(into.start, target_first), min(into.stop, target_end)
                window = slice(low - target_first, high - target_first)
                recut(item, source, target, rows, start, landed[item.target_rank][window], low)
                mark = np.zeros_like(times[item.target_rank][window])
                recut(item, source, target, np.ones_like(rows), start, mark, low)
                times[item.target_rank][window] += mark
        for rank, found in landed.items():
            wanted = pages_of(target, rank, part, kv, target_first, target_end)
            meant = pages_of(target, rank, part, np.ones_like(kv), target_first, target_end)
            assert np.array_equal(found * meant, wanted)
            assert (times[rank] * meant == meant).all(), "each byte of a token once"
            assert times[rank].max() <= 1, "and what is behind the prompt at most once"


@pytest.mark.parametrize(
    ("source", "target"),
    [({}, {}), ({"tp": 2, "pp": 2}, {"tp": 4}), ({"tp": 4}, {"pp": 3}), ({"page_size": 2}, {"page_size": 8, "tp": 2}),
     ({"page_size": 8, "pp": 2}, {"page_size": 2})],
    ids=str,
)  # fmt: skip
def test_pieces_of_all_ranks_together_fill_scattered_pages_of_all_ranks(
    source: dict[str, Any], target: dict[str, Any]
) -> None:
    ours, theirs = RankLayout(changed(**target)), RankLayout(changed(**source))
    memories = [{Part.FULL: Store(ours.page_bytes(rank, Part.FULL))} for rank in range(len(ours.shards))]
    intakes = [Intake(theirs, ours, rank, stores) for rank, stores in enumerate(memories)]
    routes = Routes(theirs, ours)
    kv = whole_kv(BASE, Part.FULL, 24)
    pages = np.random.default_rng(5).permutation(np.arange(1, 64, dtype=np.int32))[: 24 // ours.page_size]
    end = 24 // theirs.page_size
    for start in range(0, end, 3):
        for rank in range(len(theirs.shards)):
            rows = pages_of(theirs, rank, Part.FULL, kv, start, min(start + 3, end))
            into = target_range(theirs, ours, start, len(rows))
            order = TakeIn(
                peer="p", xid="x", piece=0, source=rank, rank=0, mode=Mode.RECEIVER_CHECKED, part=Part.FULL,
                first=start, digests=b"", digest_seed=0, pages=pages[into.start : into.stop], target_first=into.start,
                byte_count=rows.nbytes,
            )  # fmt: skip
            takers = routes.takers(rank, Part.FULL)
            assert takers, "bytes of every rank go somewhere"
            for taker in takers:
                intakes[taker].fill(order, intakes[taker].rows_of(order, rows.reshape(-1)))
    for rank, memory in enumerate(memories):
        wanted = pages_of(ours, rank, Part.FULL, kv, 0, 24 // ours.page_size)
        assert np.array_equal(memory[Part.FULL].data[pages], wanted)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kv_dtype": "float32"}, "kv_dtype: 'float16' here, 'float32' there"),
        ({"kv_head_count": 8}, "kv_head_count"),
        ({"page_size": 6}, "neither divides the other"),
        ({"tp": 8}, "would be replicated"),
        ({"tp": 3}, "expected a divisor"),
        ({"pp": 7}, "at least one layer per stage"),
        ({"pp": 2, "stage_layers": (1, 2)}, "stage_layers"),
        ({"window": 5}, "window"),
        ({"stamp_bytes": 16}, "stamp_bytes"),
        ({"lanes": ("k", "v", "more")}, "lanes"),
    ],
)
def test_what_cannot_be_exchanged_is_refused_in_words(changes: dict[str, Any], words: str) -> None:
    assert words in difference(BASE, changed(**changes))
    with pytest.raises(LayoutMismatch, match="layout"):
        cut(RankLayout(changed(**changes)), RankLayout(BASE))


def test_a_different_layout_that_can_be_recut_is_refused_only_by_engines_that_cannot_recut() -> None:
    for changes in ({"tp": 2}, {"pp": 3}, {"page_size": 16}, {"pp": 2, "stage_layers": (1, 5)}):
        assert difference(BASE, changed(**changes)) == ""
        assert next(iter(changes)) in difference(BASE, changed(**changes), can_recut=False)


def test_latent_rows_on_several_slices_go_by_engines_that_can_recut() -> None:
    """One slice sends them to all: a backend that goes from rank to rank would leave the others without."""
    latent = changed(layer_parts=bytes([Part.LATENT] * 6), kv_head_count=1, lanes=("latent",), tp=2)
    assert difference(latent, latent) == ""
    assert "tp is 2 with latent rows" in difference(latent, latent, can_recut=False)


def test_windows_are_cut_into_smaller_pages_and_never_put_together_from_them() -> None:
    """What lies before the window in its first page is gone at the sender."""
    small, large = (changed(layer_parts=bytes([0, 1] * 3), window=7, page_size=size) for size in (4, 8))
    assert difference(small, large) == ""  # to the smaller pages
    assert difference(large, small, we_send=True) == ""
    assert "never put together" in difference(large, small)
    assert "never put together" in difference(small, large, we_send=True)
    with pytest.raises(LayoutMismatch, match="never put together"):
        cut(RankLayout(small), RankLayout(large))


def test_equal_layouts_are_cut_into_one_copy_per_rank() -> None:
    layout = RankLayout(changed(tp=2, pp=3))
    assert [(item.source_rank, item.target_rank) for item in cut(layout, layout)] == [(rank, rank) for rank in range(6)]
    item = cut(layout, layout)[0]
    assert item == Cut(
        part=Part.FULL, source_rank=0, target_rank=0, layer_count=2, source_layer=0, target_layer=0, head_count=2,
        source_head=0, target_head=0,
    )  # fmt: skip
