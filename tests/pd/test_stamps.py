"""Stamps of KV that is cut anew: each lands exactly once, holds for the bytes it landed with, and for no others."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from serinus.core.errors import LayoutMismatch
from serinus.core.parts import Part
from serinus.core.stamps import digest_coefficients
from serinus.pd import RankLayout, cut, difference, recut, target_range
from serinus.pd.stamps import StampIntake
from serinus.wire.messages import LayoutSignature

from .test_layout import signatures

HEAD_BYTES = 4
HASHES = np.random.default_rng(3).integers(1, 1 << 62, 400)


def stamped(signature: LayoutSignature, data: str) -> LayoutSignature:
    return msgspec.structs.replace(signature, stamp_bytes=128, stamp_data=data)


def whole_kv(signature: LayoutSignature, part: Part, tokens: int) -> NDArray[np.uint8]:
    """[token, layer of the part, k or v, head, bytes of a head]."""
    layers = list(signature.layer_parts or bytes(signature.layer_count)).count(part)
    shape = (tokens, layers, 2, signature.kv_head_count, HEAD_BYTES)
    return np.random.default_rng(int(part)).integers(0, 256, shape, dtype=np.uint8)


@lru_cache(maxsize=1024)
def factors_of(layer: int, head: int, half: int, which: int) -> NDArray[np.uint32]:
    """Those of one head of one layer."""
    return digest_coefficients([layer], [head], 2, 2, partial=False)[0, half, which].view(np.uint32)


def digest_at(layout: RankLayout, rank: int, part: Part, kv: NDArray[np.uint8], token: int, half: int) -> int:
    """What the stamp of a token says of its k or v on a rank, word by word."""
    shard, data = layout.shards[rank], layout.signature.stamp_data
    if data == "none":
        return 0
    sums = [0, 0]
    ids = layout.layer_ids(rank, part)
    for which in range(2):
        for layer, name in zip(shard.part_layers[part], ids, strict=True):
            heads = shard.heads if data == "all" else [head for head in shard.heads if head == 0]
            for head in heads:
                factors = factors_of(name, head, half, which)
                words = kv[token, layer, half, head].view(np.uint16)
                sums[which] += sum(int(word) * int(factor) for word, factor in zip(words, factors, strict=True))
    return sums[0] % (1 << 32) | sums[1] % (1 << 32) << 32


def stamps_of(layout: RankLayout, rank: int, part: Part, kv: NDArray[np.uint8], token: int) -> NDArray[np.uint64]:
    """[lane, field] of a token."""
    digests = [0, 0, *(digest_at(layout, rank, part, kv, token, half) for half in range(2))]
    return np.array([[token * 7 + 5, token, int(HASHES[token]), digest] for digest in digests], np.uint64)


def pages_of(
    layout: RankLayout, rank: int, part: Part, kv: NDArray[np.uint8], first: int, end: int
) -> NDArray[np.uint8]:
    """Pages [first, end) of a prompt as a rank holds them, with stamps; zeros behind the prompt."""
    shard, size = layout.shards[rank], layout.page_size
    rows = []
    for page in range(first, end):
        tokens = range(page * size, (page + 1) * size)
        strips = [
            kv[token, layer, half, head] if token < len(kv) else np.zeros(HEAD_BYTES, np.uint8)
            for layer in shard.part_layers[part]
            for half in range(2)
            for token in tokens
            for head in shard.heads
        ]
        none = np.zeros((4, 4), np.uint64)
        mine = [stamps_of(layout, rank, part, kv, token) if token < len(kv) else none for token in tokens]
        strips.append(np.ascontiguousarray(np.stack(mine, axis=1)).view(np.uint8).reshape(-1))
        rows.append(np.concatenate(strips))
    return np.stack(rows)


def land(
    source: RankLayout, target: RankLayout, part: Part, pages: dict[int, NDArray[np.uint8]], tokens: int, step: int
) -> dict[int, NDArray[np.uint8]]:
    """All pieces of all source ranks into all target ranks, over what an earlier prompt left in these pages."""
    intakes = [StampIntake(source, target) for _ in target.shards]
    end = -(-tokens // target.page_size)
    landed = {
        rank: np.random.default_rng(rank).integers(0, 256, (end, target.page_bytes(rank, part)), dtype=np.uint8)
        for rank in target.senders(part)
    }
    for item in (item for item in cut(source, target) if item.part is part):
        rows = pages[item.source_rank]
        for first in range(0, len(rows), step):
            piece = rows[first : first + step]
            into = target_range(source, target, first, len(piece))
            out = landed[item.target_rank][into.start : min(into.stop, end)]
            recut(item, source, target, piece, first, out, into.start)
            intakes[item.target_rank].land("x", item, piece, first, out, into.start)
    for intake in intakes:
        intake.forget("x")
        assert intake._begun == {}
    return landed


def wrong_slots(
    target: RankLayout, part: Part, landed: dict[int, NDArray[np.uint8]], kv: NDArray[np.uint8]
) -> set[tuple[int, int]]:
    """(rank, token) whose stamp is not what a check of the bytes that landed there would want."""
    found = set()
    for rank, rows in landed.items():
        view = target.view(rank, part, rows)
        there = np.zeros_like(kv)
        shard, size = target.shards[rank], target.page_size
        heads, layers = slice(shard.heads.start, shard.heads.stop), shard.part_layers[part]
        for token in range(len(kv)):
            there[token, layers.start : layers.stop, :, heads] = view[token // size, :, :, token % size]
            wanted = stamps_of(target, rank, part, there, token)
            words = rows[token // size, -128 * size :].reshape(4, size, 32)[:, token % size]
            if not np.array_equal(np.ascontiguousarray(words).view(np.uint64), wanted):
                found.add((rank, token))
    return found


@pytest.mark.slow
@settings(max_examples=25)
@given(signatures(), st.integers(1, 20), st.integers(1, 3), st.sampled_from(("none", "partial", "all")), st.data())
def test_every_stamp_lands_once_and_a_byte_that_changed_before_shows_at_its_slot_alone(
    pair: tuple[LayoutSignature, LayoutSignature], tokens: int, step: int, data: str, draw: st.DataObject
) -> None:
    source, target = (RankLayout(stamped(signature, data)) for signature in pair)
    assert difference(target.signature, source.signature) == ""
    for part in source.parts:
        kv = whole_kv(source.signature, part, tokens)
        end = -(-tokens // source.page_size)
        pages = {rank: pages_of(source, rank, part, kv, 0, end) for rank in source.senders(part)}
        assert wrong_slots(target, part, land(source, target, part, pages, tokens, step), kv) == set()
        if data != "all":
            continue
        rank = draw.draw(st.sampled_from(sorted(pages)))
        token = draw.draw(st.integers(0, tokens - 1))
        view = source.view(rank, part, pages[rank])[token // source.page_size, :, :, token % source.page_size]
        at = tuple(draw.draw(st.integers(0, size - 1)) for size in view.shape)
        view[at] ^= 0x5A
        wrong = wrong_slots(target, part, land(source, target, part, pages, tokens, step), kv)
        assert {at_token for _, at_token in wrong} == {token}, "the slot that was damaged, and no other"


@pytest.mark.parametrize("field", range(4))
@pytest.mark.parametrize(
    ("ours", "theirs"), [({"tp": 2}, {"tp": 1}), ({"tp": 1}, {"tp": 4}), ({"pp": 2}, {"tp": 2, "page_size": 8})]
)
def test_a_stamp_of_one_source_rank_that_was_damaged_is_not_made_good_by_the_others(
    ours: dict[str, Any], theirs: dict[str, Any], field: int
) -> None:
    base = LayoutSignature(model="m", kv_dtype="float16", page_size=4, layer_count=2, kv_head_count=4, head_size=2)
    source, target = (
        RankLayout(stamped(msgspec.structs.replace(base, **changes), "all")) for changes in (ours, theirs)
    )
    kv = whole_kv(source.signature, Part.FULL, 10)
    for rank in source.senders(Part.FULL):
        pages = {each: pages_of(source, each, Part.FULL, kv, 0, 3) for each in source.senders(Part.FULL)}
        words = pages[rank][1, -128 * 4 :].reshape(4, 4, 32)[2, 3]  # TAIL_K of token 7
        words[8 * field] ^= 1
        wrong = wrong_slots(target, Part.FULL, land(source, target, Part.FULL, pages, 10, 2), kv)
        assert {token for _, token in wrong} == {7}


def test_engines_that_digest_other_bytes_refuse_each_others_stamps_and_stamps_of_another_size_are_refused() -> None:
    base = LayoutSignature(model="m", kv_dtype="float16", page_size=4, layer_count=2, kv_head_count=4, head_size=2)
    ours = stamped(base, "all")
    assert "stamp_data: 'all' here, 'partial' there" in difference(ours, stamped(base, "partial"))
    assert "stamp_bytes: 128 here, 0 there" in difference(ours, base)
    assert difference(ours, msgspec.structs.replace(ours, tp=2)) == ""
    assert "layout differs in tp" in difference(ours, msgspec.structs.replace(ours, tp=2), can_recut=False)
    with pytest.raises(LayoutMismatch, match="stamp_bytes is 64"):
        RankLayout(msgspec.structs.replace(ours, stamp_bytes=64))
    with pytest.raises(LayoutMismatch, match="expected 0 and nothing"):
        RankLayout(msgspec.structs.replace(base, stamp_data="all"))
